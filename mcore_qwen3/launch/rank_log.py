"""One log file a rank: what the rank and its libraries print, in the order in which they do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from mcore_qwen3.errors import ConfigError

_TEE_SECONDS = 1.0  # to write what it has got
_open: list[tuple[Path, subprocess.Popen[bytes] | None]] = []  # the file of this rank and its tee, once there are


def log_to(folder: Path, rank: int, start: int) -> None:
    """From now on all output of this process, and of those below it, goes to the end of FOLDER/rank_N.log.

    Rank 0's is still seen on the screen, through `tee`: a thread of this process could not copy it while other code holds the
    interpreter's lock.

    Args:
        folder: made where it is missing; of one node or shared by all.
        rank: N.
        start: how often the ranks were started before.

    Raises:
        ConfigError: the file cannot be written.
    """
    file = folder / f"rank_{rank}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as log:
            began = time.strftime("%Y-%m-%d %H:%M:%S")
            log.write(f"---- rank {rank} on {socket.gethostname()}, pid {os.getpid()}, start {start}, {began}\n")
    except OSError as error:
        raise ConfigError("--log_dir must be a folder that every rank can write to", seen=error) from error
    tee = None
    if rank == 0:
        tee = subprocess.Popen(["tee", "-a", str(file)], stdin=subprocess.PIPE)
        assert tee.stdin is not None
        _print_to(tee.stdin.fileno())
        tee.stdin.close()
    else:
        _print_to_end_of(file)
    _open[:] = [(file, tee)]


def note_error(text: str) -> None:
    """The error that ends this rank, into its log alone: the launcher shows the first one of all ranks on the screen."""
    for file, tee in _open:
        _print_to_end_of(file)
        if tee is not None:  # what was printed before comes before
            with suppress(subprocess.TimeoutExpired):
                tee.wait(_TEE_SECONDS)
        with file.open("a", encoding="utf-8") as log:
            log.write(text.rstrip() + "\n")


def _print_to_end_of(file: Path) -> None:
    target = os.open(file, os.O_WRONLY | os.O_APPEND)
    _print_to(target)
    os.close(target)


def _print_to(target: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    for stream in (1, 2):
        os.dup2(target, stream)
