"""A disk that refuses and files that are damaged: an error of its own on every rank, and what was there before is whole."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import pytest
from helpers.ranks import pool
from helpers.resuming import stored_tensors
from helpers.save_faults import load_checkpoint, save_twice
from helpers.tiny import write_model
from helpers.training import Layout
from torch.distributed.checkpoint import FileSystemReader

DP2 = Layout(data=2)
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("moe")
    write_model(directory, moe=True)
    return directory


@pytest.fixture
def open_root(tmp_path: Path) -> Path:
    """A save directory that nobody may look into, under folders that everybody may pass through."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == tmp_path.owner() and "pytest" in folder.name:
            folder.chmod(0o755)
    root = tmp_path / "run"
    root.mkdir()
    return root


def save(model_dir: Path, root: Path, fault: str, on_rank: int, asynchronous: bool) -> list[str]:
    args = {"model_dir": str(model_dir), "root": str(root), "layout": DP2, "fault": fault, "on_rank": on_rank}
    return pool(2).run(save_twice, **args, asynchronous=asynchronous)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("fault", "on_rank", "rule", "reason"),
    [
        ("full", 1, "could not write the tensors of the checkpoint", "OSError: [Errno 27] File too large"),
        ("read-only", 0, "could not create a directory for the checkpoint", "PermissionError: [Errno 13]"),
    ],
    ids=["full disk", "read-only folder"],
)
def test_a_disk_that_refuses(
    model_dir: Path, open_root: Path, fault: str, on_rank: int, rule: str, reason: str, asynchronous: bool
) -> None:
    first, second = save(model_dir, open_root, fault, on_rank, asynchronous)
    assert first == second
    assert first.startswith(f"{rule}; seen: rank {on_rank}, {open_root}/.iter_0000003.partial: {reason}"), first
    assert "change: make room or mend the rights" in first
    assert {path.name for path in open_root.iterdir()} == {TRACKER, "iter_0000002"}
    assert (open_root / TRACKER).read_text() == "2"
    assert len(stored_tensors(open_root / "iter_0000002")) > 10
    (nothing, _) = pool(2).run(
        load_checkpoint, model_dir=str(model_dir), iteration_dir=str(open_root / "iter_0000002"), layout=DP2
    )
    assert nothing == ""


@pytest.fixture(scope="module")
def good(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks."""
    root = tmp_path_factory.mktemp("good")
    assert save(model_dir, root, "", 0, False) == ["", ""]
    return root / "iter_0000003"


def flip(file: Path) -> None:
    """One bit in the middle of the largest stored tensor: small ones are mostly form."""
    stored = FileSystemReader(file.parent).read_metadata().storage_data.values()
    entry = max((info for info in stored if info.relative_path == file.name), key=lambda info: info.length)
    data = bytearray(file.read_bytes())
    data[entry.offset + entry.length // 2] ^= 4
    file.write_bytes(data)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size * 3 // 4)


class Planted:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp"])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (flip, "must be the ones that were saved"),
        (cut, "a checkpoint data file must be whole"),
        (Path.unlink, "a checkpoint data file must be readable"),
    ],
    ids=["bit flip", "cut short", "missing"],
)
def test_a_damaged_shard_is_named(  # type: ignore[no-untyped-def]
    model_dir: Path, good: Path, tmp_path: Path, file: str, damage, said: str
) -> None:
    """At another layout than it was written at: every value of every file is read."""
    directory = Path(shutil.copytree(good, tmp_path / "iter_0000003"))
    damage(directory / file)
    (error,) = pool(1).run(load_checkpoint, model_dir=str(model_dir), iteration_dir=str(directory), layout=Layout())
    assert said in error and str(directory / file) in error, error


def test_a_planted_pickle_is_refused_and_never_run(model_dir: Path, good: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(good, tmp_path / "iter_0000003"))
    mark = tmp_path / "ran"
    (directory / ".metadata").write_bytes(pickle.dumps(Planted(mark)))
    (error,) = pool(1).run(load_checkpoint, model_dir=str(model_dir), iteration_dir=str(directory), layout=Layout())
    assert "checkpoint metadata may only hold plain data" in error and "posix.system" in error
    assert not mark.exists()


def test_a_whole_checkpoint_is_taken(model_dir: Path, good: Path) -> None:
    (error,) = pool(1).run(load_checkpoint, model_dir=str(model_dir), iteration_dir=str(good), layout=Layout())
    assert error == ""
