"""``megatron doctor``: what is here, and what of it would make a run fail. This process imports no torch; its ranks do.

Every node prints what one process can find out, then starts its ranks as a run would, and rank 0 prints what they found
together.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from mcore_qwen3.cli import doctor_checks as checks
from mcore_qwen3.cli.doctor_checks import Finding, fails, note, ok
from mcore_qwen3.config import DOCTOR, DoctorConfig, parse_command
from mcore_qwen3.errors import LaunchError
from mcore_qwen3.launch import (
    Company,
    LaunchPlan,
    Limits,
    StopSignals,
    check_in,
    count_gpus,
    is_rank,
    resolve_environment,
    started_now,
    visible_gpus,
)
from mcore_qwen3.launch import run as run_ranks

EXIT_WILL_FAIL = 2
EXIT_RANKS_FOUND = 3  # of a rank, which has printed what would make a run fail
_GRACE_SECONDS = 5.0


def run(argv: list[str]) -> int:
    """The words after ``megatron doctor`` -> exit code: 2 where something would make a run fail."""
    config = parse_command(argv, DOCTOR).config
    if config.patient.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything imports torch, here and in the ranks
    if is_rank(os.environ):
        from mcore_qwen3.cli.doctor_rank import run_rank

        return run_rank(config)
    plan, launch = _launch(config)
    findings = [
        *checks.versions(),
        *checks.gpus(config.patient.device, os.environ),
        *checks.accelerators(count_gpus(os.environ) > 0),
        *checks.commands(os.environ),
        *launch,
        *([] if plan is None else checks.network(plan, os.environ)),
        *checks.shared_memory(),
        *checks.save_folder(config),
    ]
    where = "" if plan is None or plan.nnodes == 1 else f", node {plan.node_rank} of {plan.nnodes}"
    print(
        "\n".join([f"{socket.gethostname()}{where}", *(line for each in findings for line in each.lines())]), flush=True
    )
    if plan is None or not checks.can_start_ranks(findings):
        print("the ranks were not started", flush=True)
        joined = EXIT_WILL_FAIL
    else:
        joined = _ranks(argv, config, plan)
    code = EXIT_WILL_FAIL if joined or any(each.level == "FAILS" for each in findings) else 0
    print(
        "nothing was found that would make a run fail" if code == 0 else "a run would fail: see FAILS above", flush=True
    )
    return code


def _launch(config: DoctorConfig) -> tuple[LaunchPlan | None, list[Finding]]:
    """Who starts what, as for a run; on CPU at least two ranks, so that something is sent."""
    on_cpu = config.patient.device == "cpu" or not count_gpus(os.environ)
    gpus = None if on_cpu else count_gpus(os.environ)
    try:
        plan = resolve_environment(os.environ, gpus=gpus, platform=config.patient.platform)
    except LaunchError as error:
        return None, [fails("launch", str(error))]
    found = [ok("launch", "\n".join(plan.table())), *(note("launch", text) for text in plan.notes)]
    if plan.world_size == 1 and on_cpu:
        plan = replace(plan, nproc_per_node=2)
        found.append(ok("launch", "one rank; here two are started, so that something is sent"))
    return plan, found


def _ranks(argv: list[str], config: DoctorConfig, plan: LaunchPlan) -> int:
    """Meet the launchers of the other nodes, and let the ranks do their part; 0 where all is well."""
    seconds = config.trials.meeting_seconds
    gpus = () if config.patient.device == "cpu" else visible_gpus(os.environ)
    try:
        company = check_in(plan, {}, gpus, seconds)
        code = _start_ranks(argv, plan, company, seconds)
    except LaunchError as error:
        print("\n".join(fails("nodes", str(error)).lines()), flush=True)
        return EXIT_WILL_FAIL
    if code not in (0, EXIT_RANKS_FOUND):
        text = f"they ended with exit code {code}; the launcher's last lines say why"
        print("\n".join(fails("ranks", text).lines()), flush=True)
    return code


def _start_ranks(argv: list[str], plan: LaunchPlan, company: Company, seconds: float) -> int:
    """The exit code of the ranks, which are ended when they take too long."""
    limits = Limits(exit_grace=_GRACE_SECONDS, exit_code_on_signal=EXIT_WILL_FAIL, meeting_seconds=seconds)
    words = ["-m", "mcore_qwen3", "doctor", *argv]
    with StopSignals() as signals, _deadline(2 * seconds):  # to start, and for an operation that waits for others
        return run_ranks(plan, words, limits, signals, extra_env=started_now(), company=company)


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Ask this process to stop after so many seconds, as a scheduler would."""

    def end() -> None:
        text = f"the ranks have not all answered after {seconds:g} s (twice meeting_seconds): a network that does not "
        print("\n".join(fails("ranks", text + "let them through, or a slow disk").lines()), flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
