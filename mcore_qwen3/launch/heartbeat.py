"""What each rank is doing, so that the supervisor sees a step that never ends, and gets the stacks of the ranks.

    rank_3.beat     the rank's phase, the last finished step, and since when
    rank_3.stacks   where the rank writes the stacks of all its threads when it gets SIGUSR2

A rank whose main thread is stuck in a collective or in other C code runs no Python, not even that of a watchdog thread
when the interpreter's lock is held. So the supervisor holds the clock, and the stacks are written by a signal handler
in C (faulthandler).
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from mcore_qwen3.launch.processes import send_signal
from mcore_qwen3.launch.rank_report import RUN_DIR, write_whole

DUMP_SIGNAL = signal.SIGUSR2
# How many times step_timeout a phase may take; what is not here, such as the start, is not watched.
_ALLOWANCE = {"waiting for data": 1, "step": 1, "evaluation": 1, "save": 10, "looking for a fault": 10}
_FIRST = 10  # the first step of a process sets up communicators, kernels and memory
_DUMP_SECONDS = 5.0  # for all ranks to write their stacks
_QUIET_SECONDS = 0.3  # a dump that has not grown for so long is complete


@dataclass(frozen=True, slots=True)
class Beat:
    """One rank's word about itself.

    Attributes:
        rank, pid: which one.
        phase: a key of the allowances, or another for what is not watched.
        iteration: the last finished step.
        first: no step has been finished by this process yet.
        since: time.monotonic() when the phase began; all processes of a machine share that clock.
    """

    rank: int
    pid: int
    phase: str
    iteration: int
    first: bool
    since: float

    def overdue(self, step_timeout: float, now: float) -> bool:
        """Whether the phase takes longer than it may."""
        if self.phase not in _ALLOWANCE:
            return False
        factor = max(_ALLOWANCE[self.phase], _FIRST if self.first else 1)
        return now - self.since > factor * step_timeout

    def describe(self, now: float) -> str:
        """Where the rank is, in words."""
        return f"rank {self.rank}: step {self.iteration} finished, then {now - self.since:.0f} s in {self.phase}"


class Heartbeat:
    """This rank's side. Does nothing without a supervisor.

    Args:
        enabled: whether steps are watched at all; a beat writes a small file.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._folder = Path(os.environ[RUN_DIR]) if enabled and RUN_DIR in os.environ else None
        self._rank = int(os.environ["RANK"])
        self._first: int | None = None
        self._iteration = 0
        if self._folder is not None:
            self._stacks = (self._folder / f"rank_{self._rank}.stacks").open("w")
            faulthandler.register(DUMP_SIGNAL, file=self._stacks, all_threads=True)

    def enter(self, phase: str, iteration: int | None = None) -> None:
        """A phase begins now.

        Args:
            phase: "waiting for data", "step", "evaluation", "save" or "looking for a fault"; any other is not watched.
            iteration: the last finished step, where it has changed.
        """
        if self._folder is None:
            return
        if iteration is not None:
            self._iteration = iteration
            self._first = iteration if self._first is None else self._first
        first = self._first is None or self._iteration == self._first
        beat = Beat(self._rank, os.getpid(), phase, self._iteration, first, time.monotonic())
        write_whole(self._folder, f"rank_{self._rank}.beat", json.dumps(asdict(beat)))

    def around[Batch](self, phase: str, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches; with each one the phase begins anew."""
        for batch in batches:
            self.enter(phase)
            yield batch


def read_beats(run_dir: Path) -> list[Beat]:
    """Supervisor: the last word of each rank of this node, by rank."""
    beats = [Beat(**json.loads(path.read_text())) for path in run_dir.glob("rank_*.beat")]
    return sorted(beats, key=lambda beat: beat.rank)


def dump_stacks(run_dir: Path, pids: Mapping[int, int]) -> str:
    """Supervisor: let ranks write the stacks of all their threads, and return them in rank order.

    Args:
        run_dir: the folder of the files above.
        pids: rank -> pid, of ranks that have beaten: the others cannot take the signal and would die.
    """
    files = {rank: run_dir / f"rank_{rank}.stacks" for rank in sorted(pids)}
    for pid in pids.values():
        send_signal(pid, DUMP_SIGNAL)
    end = time.monotonic() + _DUMP_SECONDS
    sizes: list[int] = []
    while time.monotonic() < end:
        time.sleep(_QUIET_SECONDS)
        before, sizes = sizes, [path.stat().st_size for path in files.values()]
        if all(sizes) and sizes == before:
            break
    parts = []
    for rank, path in files.items():
        stacks = path.read_text(errors="replace").rstrip() or "none: the process does not answer"
        parts.append(f"stacks of rank {rank} (pid {pids[rank]}):\n{stacks}")
    return "\n".join(parts)
