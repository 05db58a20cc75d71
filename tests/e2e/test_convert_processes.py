"""`convert` as processes: workers, nodes, a full disk, kill -9. What is left is whole, or nothing."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from helpers.tiny import write_model
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
# Kills itself with SIGKILL in the middle of the fifth chunk or tensor: no clean-up can run.
KILLED = """
import os, signal, sys
from mcore_qwen3.cli.convert import run
from mcore_qwen3.converters import hf_writer, torch_dist_writer
calls = []
def deadly(inner):
    def call(*args):
        calls.append(1)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(*args)
    return call
torch_dist_writer.torch.save = deadly(torch_dist_writer.torch.save)
hf_writer._ShardWriter.append = deadly(hf_writer._ShardWriter.append)
sys.exit(run(sys.argv[1:]))
"""


def environ(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("NNODES", "NODE_RANK", "MASTER_ADDR")}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more


def start(*words: object, code: str | None = None, limit: int | None = None, **more: str) -> subprocess.Popen[str]:
    """A conversion as a process; `limit` is the largest file it may write, in bytes."""
    program = ["-c", code] if code else ["-m", "mcore_qwen3", "convert"]

    def restrict() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.Popen(
        [sys.executable, *program, *map(str, words)],
        env=environ(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=restrict,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=150)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("convert") / "model"
    write_model(directory, moe=True)
    return directory


def weights(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


@pytest.mark.timeout(200)
def test_nodes_and_workers_give_the_same_bytes(model: Path, tmp_path: Path) -> None:
    """Two nodes on one disk to mcore, two workers back: every file by one process, every tensor bit-equal."""
    nodes = [
        start("hf2mcore", model, tmp_path / "mcore", NNODES="2", NODE_RANK=str(rank), MASTER_ADDR="x")
        for rank in (1, 0)
    ]
    ends = [finish(node) for node in nodes]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert {path.name for path in (tmp_path / "mcore/release").glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
    code, out, err = finish(
        start("mcore2hf", tmp_path / "mcore", tmp_path / "back", "--workers", 2, "--max_shard_size", "60KB")
    )
    assert code == 0, err
    assert "targets written once: 69 tensors in " in out
    back, source = weights(tmp_path / "back"), weights(model)
    assert back.keys() == source.keys() and all(torch.equal(back[name], source[name]) for name in source)
    assert {path.name for path in tmp_path.iterdir()} == {"mcore", "back"}


@pytest.mark.timeout(200)
def test_kill_9_leaves_nothing_that_looks_complete(model: Path, tmp_path: Path) -> None:
    """The half directory has a name of its own, which no reader takes; the next run removes it and succeeds."""
    for command, source, target in (("hf2mcore", model, "mcore"), ("mcore2hf", tmp_path / "mcore", "back")):
        code, _, _ = finish(start(command, source, tmp_path / target, code=KILLED))
        assert code == -9
        assert not (tmp_path / target).exists() and (tmp_path / f".{target}.new").is_dir()
        code, _, err = finish(start(command, source, tmp_path / target))
        assert code == 0, err
        assert not (tmp_path / f".{target}.new").exists()
    assert weights(tmp_path / "back").keys() == weights(model).keys()


def converted(model: Path, tmp_path: Path, command: str) -> Path:
    """The source of a conversion in this direction."""
    if command == "hf2mcore":
        return model
    code, _, err = finish(start("hf2mcore", model, tmp_path / "source"))
    assert code == 0, err
    return tmp_path / "source"


@pytest.mark.timeout(200)
@pytest.mark.parametrize("command", ["hf2mcore", "mcore2hf"])
def test_a_file_that_cannot_grow(model: Path, tmp_path: Path, command: str) -> None:
    """B16: the write fails in the middle; one line says so, the exit code too, and no half directory is left."""
    source = converted(model, tmp_path, command)
    before = sorted(tmp_path.iterdir())
    code, _, err = finish(start(command, source, tmp_path / "target", "--workers", 2, limit=40_000))
    assert code == 2 and err.count("\n") == 1, err
    assert err.startswith(f"convert {command}: error: the output must be writable and have room; seen: ")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.timeout(200)
@pytest.mark.parametrize("command", ["hf2mcore", "mcore2hf"])
def test_a_disk_that_fills_up(model: Path, tmp_path: Path, command: str) -> None:
    """B16 on a small disk of its own: too small for the weights, it is refused before the first byte; with room for the
    weights and nothing else, the write fails in the middle. What is left on it is listed before it goes away."""
    if not can_mount():
        # The test above has filled a file; there is no second way to say it, and a machine like this has to be known.
        warnings.warn(
            "this machine lets nobody mount a tmpfs: a full disk was tested by a limit on files alone", stacklevel=1
        )
        return
    source = converted(model, tmp_path, command)
    disk = tmp_path / "disk"
    disk.mkdir()
    nbytes = sum(tensor.nbytes for tensor in weights(model).values())
    for size, message in ((nbytes // 2, "the disk must have room for the result"), (nbytes + 8192, "No space left")):
        script = f'mount -t tmpfs -o size={size} none {disk} && {{ "$@"; code=$?; ls -A {disk}; exit $code; }}'
        words = [sys.executable, "-m", "mcore_qwen3", "convert", command, str(source), str(disk / "target")]
        done = subprocess.run(
            [*OWN_MOUNTS, "sh", "-c", script, "sh", *words], env=environ(), capture_output=True, text=True, timeout=150
        )
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and message in done.stderr, done.stderr
        assert done.stdout == "", done.stdout


# A name space of mounts of the process's own, as a user of its own who may mount there.
OWN_MOUNTS = ["unshare", "--user", "--map-root-user", "--mount"]


def can_mount() -> bool:
    """Whether the kernel and this machine's rules let a process have mounts of its own."""
    probe = [*OWN_MOUNTS, "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(probe, capture_output=True).returncode == 0
