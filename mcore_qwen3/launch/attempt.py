"""One start of the ranks, watched to its end: signals reach them, one failed rank ends all, and nothing is left behind.

torchrun alone cannot do this: it kills its ranks 30 s after SIGTERM, whether they have saved or not; a signal that it
does not handle kills it and leaves the ranks running; and after a rank has failed it waits 30 s for ranks that hang in
a collective. So torchrun and the ranks start with these signals ignored, and the supervisor decides.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mcore_qwen3.launch.environment import LaunchPlan
from mcore_qwen3.launch.failures import (
    SilentDeath,
    exit_code_of,
    failure_exit_code,
    failure_line,
    failure_text,
    first_failure,
)
from mcore_qwen3.launch.heartbeat import dump_stacks, read_beats
from mcore_qwen3.launch.processes import (
    Process,
    descendants,
    kill_group,
    read_processes,
    send_signal,
    wait_until_gone,
)
from mcore_qwen3.launch.rank_report import (
    EXIT_FAULT,
    first_error,
    read_done,
    read_errors,
    read_started,
    request_stop,
)
from mcore_qwen3.launch.signals import StopSignals

_SEARCH_SECONDS = 0.2  # between two readings of the whole process table, until all ranks are found
_POLL_SECONDS = 0.05  # short against torchrun's second, to see how a rank ended before torchrun buries it
_ONE_REQUEST_SECONDS = 5.0  # SLURM signals every process, and people press Ctrl-C twice: one request
_AFTER_FAILURE_SECONDS = 3.0  # for the other ranks to report and end by themselves
_KILLED_TOGETHER_SECONDS = 0.3  # between the end of ranks whose torchrun was killed and the news of torchrun's end
_LEFTOVER_SECONDS = 2.0  # for helper processes of ranks that have ended in order
_KILLED_SECONDS = 10.0  # for the kernel to free what killed processes held
_BEAT_SECONDS = 0.5  # between two looks at what the ranks are doing


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How long the ranks get, and how often; names as the flags.

    Attributes:
        exit_grace: seconds that the ranks have to save and stop after a request.
        exit_code_on_signal: exit code where a request came before any rank had started.
        step_timeout: seconds without a finished step after which the ranks are killed; 0: no limit.
        max_restarts: how often the ranks are started again after a fault.
        meeting_seconds: how long the nodes wait for each other before they do.
    """

    exit_grace: float
    exit_code_on_signal: int
    step_timeout: float = 0.0
    max_restarts: int = 0
    meeting_seconds: float = 1800.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a start has ended.

    Attributes:
        exit_code: for the job, if this was the last start.
        text: what the user reads last; "" when there is nothing to add.
        reason: the same in one line.
        is_fault: nothing that the user asked for or can mend has ended it, so that another start may go well.
    """

    exit_code: int
    text: str = ""
    reason: str = ""
    is_fault: bool = False


def say(text: str) -> None:
    """A line of the launcher, on stderr."""
    print(f"launcher: {text}", file=sys.stderr, flush=True)


class Attempt:
    """The state of one start. Times are time.monotonic(), but `_seen_at`, which is compared with the ranks' reports."""

    def __init__(self, plan: LaunchPlan, run_dir: Path, limits: Limits, signals: StopSignals) -> None:
        self._plan, self._run_dir, self._limits, self._signals = plan, run_dir, limits, signals
        self._torchrun: subprocess.Popen[bytes]
        self._ranks: list[Process] = []  # of this node, in rank order, complete once torchrun has started all
        self._ended: set[int] = set()  # pids of ranks whose end has been seen
        self._deaths: list[SilentDeath] = []
        self._seen_at = time.time()  # when the ranks were last looked at
        self._stop: tuple[str, float] | None = None  # the signal that asked the ranks to stop, and when
        self._failed_at: float | None = None
        self._kill_now = False
        self._verdict: Outcome | None = None  # of a start that was cut short
        self._beats_read_at = time.monotonic()

    def run(self, command: list[str], environment: Mapping[str, str]) -> Outcome:
        """Start torchrun, watch it to its end, and say how it ended."""
        shield = [command[0], "-m", "mcore_qwen3.launch.shielded_exec", str(os.getpid()), *command]
        self._torchrun = subprocess.Popen(shield, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            self._watch()
        finally:
            self._leave_nothing()
        return self._conclude()

    def _watch(self) -> None:
        """Return when torchrun has ended, or when everything is to be killed."""
        while self._torchrun.poll() is None:
            searching = len(self._ranks) < self._plan.nproc_per_node
            if searching:
                self._find_ranks()
            self._look_at_ranks()
            self._look_at_signals()
            self._look_at_clock()
            self._look_at_steps()
            if self._kill_now:
                return
            time.sleep(_SEARCH_SECONDS if searching else _POLL_SECONDS)
        self._look_at_ranks()

    def _find_ranks(self) -> None:
        """torchrun starts each rank as the leader of a new session, in rank order; other children it has are not."""
        parent = self._torchrun.pid
        children = [row for row in read_processes().values() if row.parent == parent and row.group == row.pid]
        self._ranks = sorted(children, key=lambda row: (row.started.zfill(20), row.pid))

    def _look_at_ranks(self) -> None:
        """Notice ranks that have failed: by their report, or by having ended without one."""
        now = time.time()
        table = read_processes([rank.pid for rank in self._ranks])
        # Read after the table: a rank that was seen to have ended wrote its report before.
        reported = {done.pid for done in read_done(self._run_dir)}
        reported |= {error.pid for error in read_errors(self._run_dir)}
        for rank, process in zip(self._plan.node_ranks, self._ranks, strict=False):
            row = table.get(process.pid)
            running = row is not None and row.started == process.started and not row.zombie
            if running or process.pid in self._ended:
                continue
            if process.pid not in reported and self._torchrun_was_killed():
                return
            self._ended.add(process.pid)
            if process.pid not in reported:
                status = row.wait_status if row is not None and row.zombie else None
                self._deaths.append(SilentDeath(rank, process.pid, exit_code_of(status), self._seen_at))
        self._seen_at = now
        failure = first_failure(first_error(self._run_dir), self._deaths)
        if failure is not None and self._failed_at is None:
            self._failed_at = time.monotonic()
            say(f"rank {failure.rank} failed; the other ranks have {_AFTER_FAILURE_SECONDS:g} s to end")

    def _torchrun_was_killed(self) -> bool:
        """Whether ranks died because torchrun was killed. The kernel ends them a moment before it reports torchrun's end."""
        with suppress(subprocess.TimeoutExpired):
            self._torchrun.wait(_KILLED_TOGETHER_SECONDS)
        return (self._torchrun.returncode or 0) < 0

    def _look_at_signals(self) -> None:
        """Pass the first signal on; a Ctrl-C more than 5 s later kills."""
        for signum, received_at in self._signals.take():
            if self._stop is None:
                self._ask_to_stop(signum, received_at)
            elif signum == signal.SIGINT and received_at - self._stop[1] > _ONE_REQUEST_SECONDS:
                self._cut_short("second Ctrl-C: the ranks were killed before they had ended by themselves", EXIT_FAULT)

    def _ask_to_stop(self, signum: int, received_at: float) -> None:
        name = signal.Signals(signum).name
        self._stop = (name, received_at)
        if not self._ranks:  # nothing to save
            self._cut_short(f"{name} before any rank had started: stopped", self._limits.exit_code_on_signal)
            return
        request_stop(self._run_dir, signum)
        for process in self._ranks:
            if process.pid not in self._ended:
                send_signal(process.pid, signum)
        say(
            f"{name}: the ranks are asked to save and stop, and have {self._limits.exit_grace:g} s; "
            f"Ctrl-C after more than {_ONE_REQUEST_SECONDS:g} s kills them at once"
        )

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        if self._failed_at is not None:
            # Also at once when no rank is left: torchrun would only add its long table to the one error that matters.
            none_left = len(self._ended) == len(self._ranks)
            self._kill_now = none_left or now - self._failed_at > _AFTER_FAILURE_SECONDS
        elif self._stop is not None and now - self._stop[1] > self._limits.exit_grace:
            limit = f"within {self._limits.exit_grace:g} s after {self._stop[0]} (exit_grace)"
            self._cut_short(f"the ranks did not end {limit}: they were killed", EXIT_FAULT)

    def _look_at_steps(self) -> None:
        """Without a finished step for too long: show where every rank is, and end it."""
        limit, now = self._limits.step_timeout, time.monotonic()
        if not limit or self._kill_now or self._failed_at is not None or now - self._beats_read_at < _BEAT_SECONDS:
            return
        self._beats_read_at = now
        beats = read_beats(self._run_dir)
        if any(beat.overdue(limit, now) for beat in beats):
            where = "; ".join(beat.describe(now) for beat in beats)
            say(dump_stacks(self._run_dir, {beat.rank: beat.pid for beat in beats}))
            self._cut_short(f"no step was finished for {limit:g} s (step_timeout): {where}", EXIT_FAULT, is_fault=True)

    def _cut_short(self, text: str, exit_code: int, *, is_fault: bool = False) -> None:
        self._kill_now = True
        self._verdict = Outcome(exit_code=exit_code, text=text, reason=text, is_fault=is_fault and self._stop is None)

    def _leave_nothing(self) -> None:
        """End what is left of torchrun, the ranks and their helpers; at once unless all ended in order."""
        # By their own word too: torchrun may have been killed before its children were looked for.
        ranks = dict.fromkeys([*(process.pid for process in self._ranks), *read_started(self._run_dir)])
        groups = [self._torchrun.pid, *ranks]
        if self._torchrun.poll() == 0 and wait_until_gone(groups, _LEFTOVER_SECONDS):
            return
        below = descendants(groups)
        for group in groups:  # torchrun first, so that it does not report the ranks that are killed here
            kill_group(group)
        for pid in below:
            send_signal(pid, signal.SIGKILL)
        self._torchrun.wait()
        if not wait_until_gone(groups, _KILLED_SECONDS):
            say(f"processes of these groups do not end although killed: {groups}; the kernel or a device holds them")

    def _conclude(self) -> Outcome:
        failure = first_failure(first_error(self._run_dir), self._deaths)
        if failure is not None:
            code = failure_exit_code(failure)
            return Outcome(
                exit_code=code,
                text=failure_text(failure),
                reason=failure_line(failure),
                is_fault=code == EXIT_FAULT and self._stop is None,
            )
        if self._verdict is not None:
            return self._verdict
        if self._torchrun.returncode != 0:
            how = f"exit code {self._torchrun.returncode}; its own message is above"
            if self._torchrun.returncode < 0:
                how = f"killed by signal {-self._torchrun.returncode}; the ranks were killed with it"
            text = f"torchrun (pid {self._torchrun.pid}) failed, and no rank reported an error: {how}"
            return Outcome(exit_code=EXIT_FAULT, text=text, reason=text, is_fault=self._stop is None)
        exit_code = max((done.exit_code for done in read_done(self._run_dir)), default=0)
        if self._stop is None:
            return Outcome(exit_code=exit_code)
        return Outcome(exit_code=exit_code, text=f"all ranks ended in order after {self._stop[0]}")
