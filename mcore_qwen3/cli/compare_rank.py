"""What one rank of `megatron compare` does: the first steps of a training run, and the tensors of its first one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mcore_qwen3.cli.compare import FOLDER_VARIABLE
from mcore_qwen3.cli.prepare import check_same_data
from mcore_qwen3.cli.resolve import ResolvedRun
from mcore_qwen3.cli.sft_rank import meet, say, start_groups
from mcore_qwen3.config import ParsedRun
from mcore_qwen3.data.prepare import Prepared
from mcore_qwen3.launch import on_stop_request, rank_main
from mcore_qwen3.runtime import groups
from mcore_qwen3.runtime.device import Device
from mcore_qwen3.train.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class OurStep:
    """Loss (sum over trained tokens / their number), gradient norm before clipping, learning rate, why it was skipped."""

    loss: float
    grad_norm: float
    lr: float
    skipped: str


def run_rank(parsed: ParsedRun, steps: int) -> int:
    """Run this rank; errors are reported to the launcher. Returns the process's exit code."""
    return rank_main(lambda: _run(parsed, steps))


def _run(parsed: ParsedRun, steps: int) -> int:
    import torch

    run, prepared, device = meet(parsed)
    check_same_data(prepared)
    start_groups(run, device)
    from mcore_qwen3.train.loop import StopRequest

    stop = StopRequest()
    on_stop_request(stop.set)
    result = our_steps(run, prepared, device, steps, say, stop.agreed)
    if isinstance(result, str):
        say(f"stopped by {result}: nothing was compared")
        code = run.config.train.exit_code_on_signal
    else:
        torch.save(result, Path(os.environ[FOLDER_VARIABLE]) / f"rank_{os.environ['RANK']}.pt")
        code = 0
    groups.stop_process_group()
    return code


def our_steps(
    run: ResolvedRun,
    prepared: Prepared,
    device: Device,
    steps: int,
    say: Callable[[str], None],
    stopped: Callable[[], str] = lambda: "",
) -> tuple[list[OurStep], Snapshot] | str:
    """Train the first steps of a run. Collective.

    Args:
        run: with its steps filled in.
        prepared: its data.
        device: of this rank.
        steps: how many.
        say: prints a line on rank 0.
        stopped: asked after each step, on all ranks together: why to stop, or "".

    Returns:
        (the steps, this rank's tensors of the first one), or why it was stopped.
    """
    from mcore_qwen3.cli import rank_parts as parts
    from mcore_qwen3.cli.rank_settings import schedules
    from mcore_qwen3.train.first_step import first_step
    from mcore_qwen3.train.step import train_step

    chunks, optimizer, state = parts.build(run, device, say)
    rate, weight_decay = schedules(run.config)
    first: Snapshot | None = None
    done: list[OurStep] = []
    for batch in parts.training_batches(run, prepared, state.consumed_samples):
        if first is None:
            first = first_step(chunks, optimizer, batch)
        lr = rate.at(len(done))
        result = train_step(chunks, optimizer, batch, lr, weight_decay.at(len(done)))
        done.append(OurStep(result.loss, result.grad_norm or 0.0, lr, result.skipped))
        say(f"megatron step {len(done)}/{steps}: loss {result.loss:.6f}, gradient norm {done[-1].grad_norm:.6f}")
        if why := stopped():
            return why
        if len(done) == steps:
            break
    assert first is not None
    return done, first
