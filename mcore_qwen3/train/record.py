"""The record of one step in `train_log.jsonl`: what it holds, and how its speeds are counted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mcore_qwen3.arch.flops import flops_per_token
from mcore_qwen3.arch.shape import ModelShape
from mcore_qwen3.train.state import TrainState
from mcore_qwen3.train.step import StepResult


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What the log must know of a run to put a step's numbers in proportion.

    Attributes:
        shape: the model, for its operations a token.
        train_iters: steps of the whole run.
        epoch_rows: rows of an epoch.
        world_size: ranks, one device each.
        peak_tflops: dense bf16 peak of one device in TFLOP/s; None where there is none to compare with.
        no_peak_because: the reason, "" where there is one.
    """

    shape: ModelShape
    train_iters: int
    epoch_rows: int
    world_size: int
    peak_tflops: float | None = None
    no_peak_because: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts:
    """What the loop saw of a step beside what the step computed.

    Attributes:
        lr: its learning rate, before any group's factor.
        tokens: of the global batch, without padding.
        slots: places of the global batch, padding included.
        squared_lengths: sum of the squared lengths of its samples: attention costs that much.
        seconds: its duration, waiting for data included; no evaluation and no save.
        wait: seconds of it spent waiting for data.
        memory: peak GiB since the start, the largest rank's.
    """

    lr: float
    tokens: int
    slots: int
    squared_lengths: int
    seconds: float
    wait: float
    memory: float


def step_record(
    run: RunFacts, state: TrainState, result: StepResult, step: StepFacts, seconds_left: float
) -> dict[str, Any]:
    """The record of a finished step; docs/log.md says what every key means.

    TFLOP/s and MFU count what the tokens without padding need: active experts, causal attention inside each sample
    (`arch.flops`); nothing for padding, dropped tokens' savings, the router, or activations computed again.

    Args:
        run: of the whole run.
        state: after the step.
        result: what it computed.
        step: what else was seen.
        seconds_left: until the end of the run.
    """
    rate = step.tokens / step.seconds
    effective = step.squared_lengths / step.tokens
    tflops = flops_per_token(run.shape, effective) * rate / run.world_size / 1e12
    norm = result.grad_norm
    record: dict[str, Any] = {
        "iteration": state.iteration,
        "grad_norm": norm if math.isfinite(norm or 0.0) else None,
        "lr": step.lr,
        "epoch": state.consumed_samples / run.epoch_rows,
        "consumed_samples": state.consumed_samples,
        "consumed_tokens": state.consumed_tokens,
        "tokens": step.tokens,
        "trained_tokens": result.trained_tokens,
        "packing_fill": step.tokens / step.slots,
        "effective_length": effective,
        "tokens_per_second": rate,
        "tokens_per_second_per_device": rate / run.world_size,
        "tflops_per_device": tflops,
        "step_seconds": step.seconds,
        "data_wait_seconds": step.wait,
        "memory_gib": step.memory,
        "skipped_steps": state.skipped_steps,
        "seconds_left": seconds_left,
    }
    if run.peak_tflops is not None:
        record["mfu"] = tflops / run.peak_tflops
    if result.skipped:  # it has no loss that anyone should draw
        record["skipped"] = result.skipped
    else:
        record["loss"] = result.loss
        if result.dataset_losses:
            record["dataset_loss"] = result.dataset_losses
    return {**record, **result.router, **_expert_loads(result)}


def _expert_loads(result: StepResult) -> dict[str, list[float]]:
    """By layer with experts, from the first: tokens of its busiest expert / the mean of the layer."""
    if result.expert_tokens is None:
        return {}
    layers = [tokens_E for tokens_E in result.expert_tokens.tolist() if sum(tokens_E)]
    return {"expert_loads": [round(max(each) * len(each) / sum(each), 3) for each in layers]}
