"""What a rank tells its supervisor, and what it asks it, through small files in one folder.

    rank_3.started  its pid, before anything else
    rank_3.done     the rank's work is done; the exit code it wants for the job
    rank_3.error    the exception that ended it
    stop            written by the supervisor: the number of the signal that asks for a save and a stop

Ranks call `rank_main` (around everything) and `on_stop_request` (when they are able to stop). Both also work in a rank
without a supervisor, where someone started torchrun by hand.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from mcore_qwen3.errors import McoreQwen3Error
from mcore_qwen3.launch.processes import die_with_parent
from mcore_qwen3.launch.rank_log import note_error

RUN_DIR = "MCORE_QWEN3_RUN_DIR"  # the folder of the files above
SUPERVISED = "MCORE_QWEN3_SUPERVISED"  # "1" in processes below a supervisor
EXPECTED_RANKS = "MCORE_QWEN3_EXPECTED_RANKS"  # of the whole job, as the launcher has resolved them
TORCHRUN_PID = "MCORE_QWEN3_TORCHRUN_PID"
RESTARTS = "MCORE_QWEN3_RESTARTS"  # how often the ranks were started again before; not set the first time
RESTART_REASON = "MCORE_QWEN3_RESTART_REASON"  # one line: why the last start failed
STARTED = "MCORE_QWEN3_STARTED"  # time.monotonic() when the job's command was started on this machine
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

EXIT_FAULT = 1  # a rank ended by a fault of the program or the machine
EXIT_USER_ERROR = 2  # a rank ended by a McoreQwen3Error, which the user can mend


@dataclass(frozen=True)
class RankError:
    """The error that ended one rank.

    Attributes:
        rank, pid, host: which rank, as which process, where.
        time: seconds since the epoch when the exception arrived at `rank_main`.
        message: one line for a McoreQwen3Error, else the exception's type and text.
        traceback: None for a McoreQwen3Error, which is complete without.
        clean: it was a McoreQwen3Error.
    """

    rank: int
    pid: int
    host: str
    time: float
    message: str
    traceback: str | None
    clean: bool


@dataclass(frozen=True)
class RankDone:
    """The end of one rank's work, and the exit code it wants for the whole job."""

    rank: int
    pid: int
    exit_code: int


def write_whole(folder: Path, name: str, text: str) -> None:
    """Write a file that a reader sees complete or not at all."""
    temporary = folder / f".{name}.{os.getpid()}"
    temporary.write_text(text)
    temporary.replace(folder / name)


def report_done(rank: int, exit_code: int = 0) -> None:
    """Tell the supervisor that this rank's work is done. Without a supervisor nothing happens."""
    if RUN_DIR in os.environ:
        done = RankDone(rank, os.getpid(), exit_code)
        write_whole(Path(os.environ[RUN_DIR]), f"rank_{rank}.done", json.dumps(asdict(done)))


def report_error(rank: int, exc: BaseException, clean: bool) -> bool:
    """Tell the supervisor why this rank ends; without one, or when the folder cannot be written, tell the user.

    Under a supervisor the rank itself prints nothing: the errors of the other ranks, which only lost their
    connection, would bury the one that matters.

    Returns:
        Whether a supervisor has the report.
    """
    error = RankError(
        rank=rank,
        pid=os.getpid(),
        host=socket.gethostname(),
        time=time.time(),
        message=str(exc) if clean else f"{type(exc).__name__}: {exc}",
        traceback=None if clean else "".join(traceback.format_exception(exc)),
        clean=clean,
    )
    if RUN_DIR in os.environ:
        try:
            write_whole(Path(os.environ[RUN_DIR]), f"rank_{rank}.error", json.dumps(asdict(error)))
            note_error(error.traceback or error.message)
            return True
        except OSError as failure:
            print(f"rank {rank}: could not report to the launcher: {failure}", file=sys.stderr)
    print(f"rank {rank} on {error.host} failed: {error.traceback or error.message}", file=sys.stderr, flush=True)
    return False


def rank_main(fn: Callable[[], int]) -> int:
    """Run one rank's work from its start to its end; returns the exit code of the process.

    Args:
        fn: the work. Returns the exit code it wants for the whole job: 0, or another for an orderly end that the
            platform should see, such as a stop by signal. Exceptions must reach this function before process groups
            are torn down: else the other ranks fail, and report, first.

    Returns:
        0 when a supervisor has the report of an orderly end or an error, and returns the job's exit code itself:
        torchrun takes any other code for a failure, and prints a traceback and a long table about it. Else what `fn`
        returned, 2 after a McoreQwen3Error, 1 after any other exception.
    """
    rank = int(os.environ["RANK"])
    watch_parent()
    with suppress(KeyError, OSError):  # without a supervisor, or its folder: nothing to tell
        write_whole(Path(os.environ[RUN_DIR]), f"rank_{rank}.started", str(os.getpid()))
    try:
        exit_code = fn()
    except BaseException as exc:
        clean = isinstance(exc, McoreQwen3Error)
        if report_error(rank, exc, clean):
            return 0
        return EXIT_USER_ERROR if clean else EXIT_FAULT
    report_done(rank, exit_code)
    return 0 if SUPERVISED in os.environ else exit_code


def watch_parent() -> None:
    """Let this rank die with torchrun, so that nothing outlives a job whose torchrun was killed (Linux)."""
    die_with_parent(int(os.environ.get(TORCHRUN_PID, os.getppid())))


def on_stop_request(callback: Callable[[int], None]) -> None:
    """From now on call `callback(signal number)` when this rank is asked to save and stop.

    Installs handlers for SIGTERM, SIGINT and SIGUSR1, so `callback` should only set a flag; it may be called more than
    once. A request that came before, while the rank was starting and ignored signals, is delivered at once. Must be
    called in the main thread.
    """

    def handle(signum: int, frame: FrameType | None) -> None:
        callback(signum)

    for signum in STOP_SIGNALS:
        signal.signal(signum, handle)
    if RUN_DIR in os.environ:
        request = Path(os.environ[RUN_DIR]) / "stop"
        if request.exists():
            callback(int(request.read_text()))


def started_now() -> dict[str, str]:
    """What tells ranks when the job's command was started: before data was prepared, and before all restarts."""
    return {STARTED: str(time.monotonic())}


def started_at(environ: Mapping[str, str]) -> float:
    """When the job's command was started, by time.monotonic(); now, in a rank that was started by hand."""
    return float(environ.get(STARTED, time.monotonic()))


@dataclass(frozen=True, slots=True)
class Restart:
    """The supervisor has started the ranks again: for which time, and why."""

    number: int
    reason: str


def restarted(environ: Mapping[str, str]) -> Restart | None:
    """What this rank was started again for; None at the first start, and without a supervisor."""
    return Restart(int(environ[RESTARTS]), environ[RESTART_REASON]) if RESTARTS in environ else None


def request_stop(run_dir: Path, signum: int) -> None:
    """Supervisor: leave the request for ranks that cannot take the signal yet. Call before sending it."""
    write_whole(run_dir, "stop", str(signum))


def read_started(run_dir: Path) -> list[int]:
    """Supervisor: pids of the ranks of this node that have begun; each leads the process group of its helpers."""
    return [int(path.read_text()) for path in run_dir.glob("rank_*.started")]


def read_done(run_dir: Path) -> list[RankDone]:
    """Supervisor: the ranks of this node that have done their work."""
    return [RankDone(**json.loads(path.read_text())) for path in run_dir.glob("rank_*.done")]


def first_error(run_dir: Path) -> RankError | None:
    """Supervisor: the earliest error of a rank on this node. Later ones are mostly its consequences."""
    errors = read_errors(run_dir)
    return min(errors, key=lambda error: error.time, default=None)


def read_errors(run_dir: Path) -> list[RankError]:
    """Supervisor: all errors reported on this node, in no order."""
    return [RankError(**json.loads(path.read_text())) for path in run_dir.glob("rank_*.error")]
