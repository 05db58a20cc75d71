"""Where a rank's output goes with --log_dir."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RANK = """
import os, subprocess, sys
from pathlib import Path
from mcore_qwen3.launch import log_to, rank_main
def work():
    log_to(Path(sys.argv[1]), int(os.environ["RANK"]), 1)
    print("to stdout", flush=True)
    print("to stderr", file=sys.stderr, flush=True)
    subprocess.run(["echo", "from a child"])
    os.write(2, b"from a library\\n")
    raise ZeroDivisionError("the cause")
sys.exit(rank_main(work))
"""
PRINTED = ["to stdout", "to stderr", "from a child", "from a library"]


@pytest.mark.parametrize("rank", [0, 3])
def test_everything_is_in_the_file_and_rank_0_is_on_the_screen_too(tmp_path: Path, rank: int) -> None:
    run_dir, folder = tmp_path / "run", tmp_path / "new" / "logs"
    run_dir.mkdir()
    environ = os.environ | {"RANK": str(rank), "PYTHONPATH": str(ROOT), "MCORE_QWEN3_RUN_DIR": str(run_dir)}
    for _ in range(2):
        command = [sys.executable, "-c", RANK, str(folder)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=50)
        # Under a launcher the error is the launcher's to show.
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines() == (PRINTED if rank == 0 else [])
    first, *rest = (folder / f"rank_{rank}.log").read_text().splitlines()
    assert first.startswith(f"---- rank {rank} on ") and ", start 1, " in first
    assert [line for line in rest if line in PRINTED] == PRINTED * 2, "the second start goes to the end"
    assert rest[-1] == "ZeroDivisionError: the cause" and rest.count("ZeroDivisionError: the cause") == 2
    assert (run_dir / f"rank_{rank}.error").exists()


def test_a_folder_that_cannot_be_made_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environ = {name: value for name, value in os.environ.items() if name != "MCORE_QWEN3_RUN_DIR"}
    environ |= {"RANK": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RANK, str(tmp_path / "file" / "logs")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=50)
    assert done.returncode == 2 and "--log_dir must be a folder that every rank can write to; seen: " in done.stderr
