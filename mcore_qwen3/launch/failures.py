"""Which rank failed first, and how to say it."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass

from mcore_qwen3.launch.rank_report import EXIT_FAULT, EXIT_USER_ERROR, RankError

# The other ranks see a killed rank's connections close milliseconds before the process itself has ended, and may have
# reported that by the time the supervisor looks.
_CLOSING_SECONDS = 1.0


@dataclass(frozen=True)
class SilentDeath:
    """A rank that ended without reporting that it was done, or why not.

    Attributes:
        rank, pid: which one.
        exit_code: as subprocess has it (-9: killed by signal 9), or None when it could not be seen.
        alive_at: seconds since the epoch when it was last seen alive.
    """

    rank: int
    pid: int
    exit_code: int | None
    alive_at: float

    @property
    def came_from_outside(self) -> bool:
        """Whether something else ended it: no rank sends SIGKILL to another, so it is a cause, never a consequence."""
        return self.exit_code in (None, -signal.SIGKILL)


def first_failure(error: RankError | None, deaths: list[SilentDeath]) -> RankError | SilentDeath | None:
    """The failure that caused the others, of the earliest reported error and all silent deaths."""
    death = min(deaths, key=lambda death: death.alive_at, default=None)
    if error is None or death is None:
        return error or death
    margin = _CLOSING_SECONDS if death.came_from_outside else 0.0
    return death if error.time > death.alive_at - margin else error


def failure_text(failure: RankError | SilentDeath) -> str:
    """What the user reads last: who failed first, and why."""
    if isinstance(failure, RankError):
        where = f"rank {failure.rank} on {failure.host} failed first:"
        return f"{where} {failure.message}" if failure.traceback is None else f"{where}\n{failure.traceback.rstrip()}"
    where = f"rank {failure.rank} on {socket.gethostname()} (pid {failure.pid}) failed first:"
    return f"{where} it ended without an error message: {_exit_text(failure.exit_code)}"


def failure_line(failure: RankError | SilentDeath) -> str:
    """The same in one line."""
    if isinstance(failure, SilentDeath) or failure.traceback is None:
        return failure_text(failure)
    return f"rank {failure.rank} on {failure.host} failed first: {' '.join(failure.message.split())}"


def failure_exit_code(failure: RankError | SilentDeath) -> int:
    """2 for what the user can mend, else 1."""
    return EXIT_USER_ERROR if isinstance(failure, RankError) and failure.clean else EXIT_FAULT


def _exit_text(exit_code: int | None) -> str:
    if exit_code is None:
        return "its exit status was not seen (killed? out of memory?)"
    if exit_code == -signal.SIGKILL:
        return "killed by SIGKILL (out of memory? the kernel's log, dmesg, names what it killed)"
    if exit_code < 0:
        return f"killed by signal {-exit_code} ({signal.strsignal(-exit_code)})"
    return f"exit code {exit_code} before its work was done; what it printed itself is above"


def exit_code_of(wait_status: int | None) -> int | None:
    """A wait status as subprocess's return code."""
    return None if wait_status is None else os.waitstatus_to_exitcode(wait_status)
