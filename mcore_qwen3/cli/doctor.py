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
from mcore_qwen3.cli.doctor_checks import Finding, fails, ok
from mcore_qwen3.config import DOCTOR, DoctorConfig, parse_command
from mcore_qwen3.errors import LaunchError
from mcore_qwen3.launch import LaunchPlan, Limits, StopSignals, count_gpus, is_rank, resolve_environment, started_now
from mcore_qwen3.launch import run as run_ranks

EXIT_WILL_FAIL = 2
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
    code = EXIT_WILL_FAIL if any(each.level == "FAILS" for each in findings) else 0
    if plan is not None and checks.can_start_ranks():
        code = max(code, _start_ranks(argv, config, plan))
    elif plan is not None:
        print("the ranks were not started: a package that they need is missing", flush=True)
    print(
        "nothing was found that would make a run fail" if code == 0 else "a run would fail here: see FAILS above",
        flush=True,
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
    found = [ok("launch", "\n".join(plan.table()))]
    if plan.world_size == 1 and on_cpu:
        plan = replace(plan, nproc_per_node=2)
        found.append(ok("launch", "one rank; here two are started, so that something is sent"))
    return plan, found


def _start_ranks(argv: list[str], config: DoctorConfig, plan: LaunchPlan) -> int:
    """The ranks' part, ended when it takes too long: the ranks of other nodes may never come."""
    seconds = config.trials.meeting_seconds
    limits = Limits(exit_grace=_GRACE_SECONDS, exit_code_on_signal=EXIT_WILL_FAIL)
    with StopSignals() as signals, _deadline(seconds):
        code = run_ranks(plan, ["-m", "mcore_qwen3", "doctor", *argv], limits, signals, extra_env=started_now())
    return EXIT_WILL_FAIL if code else 0


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Ask this process to stop after so many seconds, as a scheduler would."""

    def end() -> None:
        text = (
            f"the ranks have not all answered after {seconds:g} s (meeting_seconds): a node that was not started, an "
        )
        print(f"  FAILS  meeting         {text}address or port that cannot be reached, or a slow disk", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
