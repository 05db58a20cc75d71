"""The process table, read without extra packages: /proc on Linux, `ps` elsewhere."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Process:
    """One row of the process table.

    Attributes:
        pid, parent, group: its number, its parent's, and the number of its process group.
        started: start time in the table's own unit; with the pid it names a process for good, as pids are reused.
        zombie: it has ended, but its parent has not asked for its exit status yet.
        wait_status: for a zombie on Linux, the status as os.waitstatus_to_exitcode takes it; else None.
    """

    pid: int
    parent: int
    group: int
    started: str
    zombie: bool
    wait_status: int | None


def read_processes(pids: Collection[int] | None = None) -> dict[int, Process]:
    """The processes with these numbers that exist, or all of them, by number."""
    if Path("/proc/self/stat").exists():
        if pids is None:
            pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
        rows = [row for row in map(_read_proc, pids) if row is not None]
    else:
        rows = _read_ps(pids)
    return {row.pid: row for row in rows}


def _read_proc(pid: int) -> Process | None:
    """One process by /proc/PID/stat, whose fields proc(5) lists; None when it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field, the name, is in parentheses and may hold anything; here field 3 (state) becomes number 0.
    fields = text[text.rindex(")") + 1 :].split()
    zombie = fields[0] in "ZX"
    return Process(pid, int(fields[1]), int(fields[2]), fields[19], zombie, int(fields[49]) if zombie else None)


def _read_ps(pids: Collection[int] | None) -> list[Process]:
    if pids is not None and not pids:
        return []
    which = ["-A"] if pids is None else ["-p", ",".join(map(str, pids))]
    columns = ["-o", "pid=", "-o", "ppid=", "-o", "pgid=", "-o", "stat=", "-o", "lstart="]
    table = subprocess.run(["ps", *which, *columns], stdout=subprocess.PIPE, text=True, check=False).stdout
    rows = []
    for line in table.splitlines():
        pid, parent, group, state, started = line.split(None, 4)
        rows.append(Process(int(pid), int(parent), int(group), started.strip(), state.startswith("Z"), None))
    return rows


def descendants(roots: Collection[int]) -> set[int]:
    """The numbers of all processes below `roots`, without `roots`."""
    children: dict[int, list[int]] = {}
    for process in read_processes().values():
        children.setdefault(process.parent, []).append(process.pid)
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        below = children.get(waiting.pop(), [])
        waiting += below
        found.update(below)
    return found - set(roots)


def send_signal(pid: int, signum: int) -> None:
    """Send a signal to a process that may have ended already."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def kill_group(group: int) -> None:
    """SIGKILL to all of a process group that may have ended already."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def wait_until_gone(groups: Collection[int], seconds: float) -> bool:
    """Wait until nothing runs in these process groups; False when something still does after `seconds`.

    Zombies do not count: in a container whose first process buries no orphans they stay for ever.
    """
    end = time.monotonic() + seconds
    while any(row.group in groups and not row.zombie for row in read_processes().values()):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, whatever ends it. Linux only; elsewhere without effect.

    Args:
        parent: the pid of the parent; when it has ended already, this process ends at once.
    """
    if not sys.platform.startswith("linux"):
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended before the call above, so no signal will come
        os.kill(os.getpid(), signal.SIGKILL)
