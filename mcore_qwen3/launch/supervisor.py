"""Start the ranks, and start them again after a fault as often as the user allows.

torchrun has restarts of its own. They are not used, because its agent does not see what makes a start worth repeating: it
counts a full disk and a wrong flag like a lost GPU, restarts after a stop request, waits 30 s for ranks that hang, and
leaves their helpers running. Here every start is a new torchrun, on a machine where nothing of the last one is left.
"""

from __future__ import annotations

import itertools
import os
import shlex
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from mcore_qwen3.launch.attempt import Attempt, Limits, Outcome, say
from mcore_qwen3.launch.check_in import NOTICE_SECONDS, Company, ready
from mcore_qwen3.launch.environment import LaunchPlan
from mcore_qwen3.launch.meeting import Word, meet
from mcore_qwen3.launch.rank_report import RESTART_REASON, RESTARTS
from mcore_qwen3.launch.signals import StopSignals
from mcore_qwen3.launch.torchrun import child_environment, torchrun_command

_REASON_LETTERS = 500
_READY_SECONDS = 3600.0  # at least: one node may take longer than another to prepare its data


def run(
    plan: LaunchPlan,
    module_argv: Sequence[str],
    limits: Limits,
    signals: StopSignals,
    *,
    extra_env: Mapping[str, str],
    company: Company,
) -> int:
    """Run this node's ranks to their end and return the exit code of the job.

    SIGTERM, SIGINT and SIGUSR1 ask the ranks to save and stop; within 5 s they count as one request. A later SIGINT
    kills everything at once. When a rank fails, the others have 3 s, then they are killed; the first failure is printed
    last. When this process is killed, the kernel kills torchrun and the ranks (Linux).

    After a fault, and only then, the same command starts again, on all nodes or on none: not after a request to stop, and
    not after an error that the user has to mend.

    Args:
        plan: from `resolve_environment`.
        module_argv: what each rank runs, see `torchrun_command`. It must call `rank_main`.
        limits: how long the ranks get, and how often.
        signals: entered already; requests to stop come through it.
        extra_env: added to the environment of the ranks.
        company: the other nodes, from `check_in`.

    Returns:
        The highest code that a rank gave to `rank_main`; `exit_code_on_signal` after a request that came before any rank
        had started; 2 after an error that the user can mend; 1 after any other failure.

    Raises:
        LaunchError: another node does not start its ranks.
    """
    ready(plan, company, max(limits.meeting_seconds, _READY_SECONDS), lambda: signals.pending)
    first = outcome = _start(plan, module_argv, limits, signals, extra_env, company)
    missing = ""
    for number in itertools.count(1):
        goes_on, missing = _all_nodes_go_on(plan, limits, outcome, number, signals, company)
        if not goes_on:
            break
        say(outcome.text)
        say(f"restart {number} of {limits.max_restarts} (max_restarts), from the last complete checkpoint")
        again = {RESTARTS: str(number), RESTART_REASON: _short(outcome.reason)}
        outcome = _start(plan, module_argv, limits, signals, {**extra_env, **again}, company)
    if limits.max_restarts and outcome.is_fault and number > limits.max_restarts:
        say(f"restart {limits.max_restarts} was the last one (max_restarts); at first {_short(first.reason)}")
    for text in (outcome.text, missing):
        if text:
            say(text)
    return outcome.exit_code


def _start(
    plan: LaunchPlan,
    module_argv: Sequence[str],
    limits: Limits,
    signals: StopSignals,
    extra_env: Mapping[str, str],
    company: Company,
) -> Outcome:
    """Start the ranks once, in a folder for their reports, and watch them to their end."""
    command = torchrun_command(plan, module_argv)
    with tempfile.TemporaryDirectory(prefix="mcore_qwen3_run_") as folder:
        environment, lines = child_environment(plan, os.environ, Path(folder), extra_env, company.interface)
        for line in [*lines, f"starting {shlex.join(command)}"]:
            say(line)
        return Attempt(plan, Path(folder), limits, signals).run(command, environment)


def _all_nodes_go_on(
    plan: LaunchPlan, limits: Limits, outcome: Outcome, number: int, signals: StopSignals, company: Company
) -> tuple[bool, str]:
    """Whether the ranks are started again, which all nodes do or none, and who could not be asked.

    A node whose ranks ended in order is done. All others meet, also when no restart is left: what happened on the other
    nodes may be the cause of what is seen here.
    """
    if not outcome.reason:
        return False, ""
    goes_on = outcome.is_fault and number <= limits.max_restarts and not signals.take()
    if plan.nnodes == 1:
        return goes_on, ""
    seconds = limits.meeting_seconds if goes_on else min(limits.meeting_seconds, NOTICE_SECONDS)
    say(f"meeting the other nodes, for up to {seconds:g} s: {outcome.reason}")
    mine = Word(plan.node_rank, f"meeting after start {number} of the ranks", goes_on, _short(outcome.reason))
    answer = meet(plan, mine, seconds, lambda: signals.pending, company.hosts)
    for name, reason in answer.reasons.items():
        say(f"{name}: {reason}")
    if answer.refusal is None:
        return True, ""
    refusal = f"the ranks are not started again: {answer.refusal}" if goes_on else answer.refusal
    if answer.missing:
        return False, refusal
    if goes_on:
        say(refusal)
    return False, ""


def _short(reason: str) -> str:
    return textwrap.shorten(reason, _REASON_LETTERS, placeholder=" ...")
