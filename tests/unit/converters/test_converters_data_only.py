"""Nothing in a checkpoint is executed: planted code is refused by name and does not run."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from converter_kit import Planted, saved, tiny_shape, write_torch_dist

from mcore_qwen3.converters import TorchDistSource, check_data_only
from mcore_qwen3.errors import ConversionError

PLAIN = {
    "weight": torch.ones(4, 4),
    "rng_state/shard_0_1": saved([{"torch_rng_state": torch.zeros(8, dtype=torch.uint8), "seed": 3}]),
    "common_state/shard_0_1": saved({"iteration": 3, "args": {"lr": 1e-5, "name": None}}),
}


def test_plain_data_passes(tmp_path: Path) -> None:
    check_data_only(write_torch_dist(tmp_path, PLAIN))
    (tmp_path / "common.pt").unlink()  # megatron-core 0.19 writes none
    check_data_only(tmp_path)


def plant_in_metadata(directory: Path, trace: Path) -> None:
    write_torch_dist(directory, PLAIN)
    metadata = pickle.loads((directory / ".metadata").read_bytes())  # written by this very test
    metadata.planner_data = {"harmless": Planted(trace)}
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def plant_in_place_of_metadata(directory: Path, trace: Path) -> None:
    write_torch_dist(directory, PLAIN)
    (directory / ".metadata").write_bytes(pickle.dumps(Planted(trace), protocol=2))


def plant_in_common(directory: Path, trace: Path) -> None:
    write_torch_dist(directory, PLAIN)
    torch.save({"iteration": 1, "args": Planted(trace)}, directory / "common.pt")


def plant_in_bytes_entry(directory: Path, trace: Path) -> None:
    write_torch_dist(directory, PLAIN | {"scheduler/shard_0_1": saved(Planted(trace))})


def plant_bare_pickle_in_bytes_entry(directory: Path, trace: Path) -> None:
    write_torch_dist(directory, PLAIN | {"scheduler/shard_0_1": io.BytesIO(pickle.dumps(Planted(trace), protocol=2))})


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (plant_in_metadata, r"seen: .*\.metadata asks for pathlib.Path.touch"),
        (plant_in_place_of_metadata, r"seen: .*\.metadata asks for (__builtin__|builtins).getattr"),
        (plant_in_common, r"seen: .*common.pt asks for "),
        (plant_in_bytes_entry, r"seen: .*\.distcp, entry scheduler/shard_0_1 asks for "),
        (plant_bare_pickle_in_bytes_entry, r"seen: .*\.distcp, entry scheduler/shard_0_1 asks for "),
    ],
)
def test_planted_code_is_refused_and_does_not_run(tmp_path: Path, plant: Callable, message: str) -> None:
    directory, trace = tmp_path / "iter_0000001", tmp_path / "trace"
    plant(directory, trace)
    with pytest.raises(ConversionError, match=message):
        check_data_only(directory)
    assert not trace.exists()


def test_the_plant_would_run_where_nothing_stops_it(tmp_path: Path) -> None:
    """The trace file is a true sign: unpickling without limits leaves it."""
    trace = tmp_path / "trace"
    pickle.loads(pickle.dumps(Planted(trace)))
    assert trace.exists()


def test_conversion_does_not_run_planted_metadata(tmp_path: Path) -> None:
    directory, trace = tmp_path / "iter_0000001", tmp_path / "trace"
    plant_in_metadata(directory, trace)
    with pytest.raises(ConversionError, match="plain data"):
        TorchDistSource(directory, tiny_shape("moe"))
    assert not trace.exists()


@pytest.mark.parametrize("name", ["eval", "getattr", "__import__", "torch._C"])
def test_metadata_asking_for_something_else(tmp_path: Path, name: str) -> None:
    module, _, member = name.rpartition(".")
    (tmp_path / ".metadata").write_bytes(f"c{module or 'builtins'}\n{member}\n.".encode())
    with pytest.raises(ConversionError, match=rf"asks for {module or 'builtins'}.{member}"):
        check_data_only(tmp_path)


def test_metadata_naming_files_elsewhere(tmp_path: Path) -> None:
    directory = write_torch_dist(tmp_path / "iter_0000001", PLAIN)
    metadata = pickle.loads((directory / ".metadata").read_bytes())  # written by this very test
    next(iter(metadata.storage_data.values())).relative_path = "../elsewhere.distcp"
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ConversionError, match=r"own directory; seen: '\.\./elsewhere.distcp'"):
        check_data_only(directory)


@pytest.mark.parametrize("content", [b"", b"\x80\x04garbage", pickle.dumps({"no": "metadata"})])
def test_damaged_metadata(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ConversionError, match=r"checkpoint metadata must be .*\.metadata"):
        check_data_only(tmp_path)


def test_missing_metadata(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"holds \.metadata"):
        check_data_only(tmp_path)
