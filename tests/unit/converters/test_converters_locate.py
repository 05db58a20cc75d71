"""Finding what a path holds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from converter_kit import tiny_shape, write_torch_dist

from mcore_qwen3.converters import HFSource, TorchDistSource, hf_side_dir, open_source, resolve_iteration_dir
from mcore_qwen3.errors import ConfigError, ConversionError

TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture
def root(tmp_path: Path, mcore_tensors: dict, hf_dirs: dict[str, Path]) -> Path:
    """A checkpoint directory with a complete iteration 1."""
    root = tmp_path / "out"
    iteration = write_torch_dist(root / "iter_0000001", mcore_tensors["moe"])
    (iteration / "hf").mkdir()
    shutil.copy(hf_dirs["moe"] / "config.json", iteration / "hf")
    (root / TRACKER).write_text("1")
    return root


def test_both_paths_lead_to_the_iteration(root: Path) -> None:
    assert resolve_iteration_dir(root) == root / "iter_0000001"
    assert resolve_iteration_dir(root / "iter_0000001") == root / "iter_0000001"
    assert hf_side_dir(root) == hf_side_dir(root / "iter_0000001") == root / "iter_0000001" / "hf"


def test_release(root: Path) -> None:
    (root / "iter_0000001").rename(root / "release")
    (root / TRACKER).write_text("release\n")
    assert resolve_iteration_dir(root) == root / "release"
    assert hf_side_dir(root) == root / "release" / "hf"


def test_sources_by_looking(root: Path, hf_dirs: dict[str, Path]) -> None:
    shape = tiny_shape("moe")
    assert isinstance(open_source(root, shape), TorchDistSource)
    assert isinstance(open_source(root / "iter_0000001", shape), TorchDistSource)
    assert isinstance(open_source(hf_dirs["moe"], shape), HFSource)
    assert hf_side_dir(hf_dirs["moe"]) == hf_dirs["moe"]


def test_no_tracker(root: Path) -> None:
    """B15: the message names the file that is missing."""
    (root / TRACKER).unlink()
    with pytest.raises(ConversionError, match=TRACKER):
        resolve_iteration_dir(root)


@pytest.mark.parametrize("name", [".metadata", "metadata.json"])
def test_partial_iteration(root: Path, name: str) -> None:
    (root / "iter_0000001" / name).unlink()
    for path in (root, root / "iter_0000001"):
        with pytest.raises(ConversionError, match=rf"written to its end; seen: no {name} in .*iter_0000001"):
            open_source(path, tiny_shape("moe"))


@pytest.mark.parametrize("text", ["2", "latest", ""])
def test_tracker_that_names_nothing(root: Path, text: str) -> None:
    (root / TRACKER).write_text(text)
    with pytest.raises(ConfigError, match="tracker file"):
        resolve_iteration_dir(root)


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="must be a directory"):
        open_source(tmp_path / "nothing", tiny_shape("moe"))
