"""Where a step went wrong whose loss or gradient is not finite, although every weight is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mcore_qwen3.data.batches import StepBatch
from mcore_qwen3.train.finite import BadTensor, own_bad_tensors
from mcore_qwen3.train.optimizer import Chunks
from mcore_qwen3.train.step import run_schedule, start_routers

NOT_AGAIN = "it did not happen again when each micro-batch ran alone: a fault of the hardware, or in communication"
_SHOWN = 8  # samples named of a row


@dataclass(frozen=True, slots=True)
class _Finding:
    """What one rank saw of one micro-batch: where its rows come from, a bad loss, the first bad gradient."""

    rank: int
    rows: str
    bad_loss: float | None
    gradient: BadTensor | None


def where_it_began(chunks: Chunks, batch: StepBatch) -> str:
    """Run the step's micro-batches again, each alone, and name the first that gives a bad number. Collective.

    Gradients are left in the buffers and nothing is updated. Costs about one more step, without its update; with an
    interleaved pipeline, whose schedule takes micro-batches in groups of PP, PP steps.

    Returns:
        Rank, micro-batch (from 0), its rows with the files and lines of their samples, the loss, and the gradient that
        turned bad first: the backward pass goes through the model from its end, so it is the last in the model's order.
        With expert parallelism a bad token reaches the experts of other ranks: the rank is then that of the gradient.
    """
    with _gradients_stay_local(chunks):
        for number in range(len(batch.micro_batches)):
            found = [one for one in _look_at(chunks, batch, number) if one.bad_loss is not None or one.gradient]
            if found:
                return _text(number, found)
    return NOT_AGAIN


@contextmanager
def _gradients_stay_local(chunks: Chunks) -> Iterator[None]:
    """No sum over ranks: it would hide which one the bad value came from."""
    config = chunks[0].config
    finalize, config.finalize_model_grads_func = config.finalize_model_grads_func, None
    try:
        yield
    finally:
        config.finalize_model_grads_func = finalize


def _look_at(chunks: Chunks, batch: StepBatch, number: int) -> list[_Finding]:
    for chunk in chunks:
        chunk.zero_grad_buffer()
    start_routers(batch)
    copies = parallel_state.get_pipeline_model_parallel_world_size() if len(chunks) > 1 else 1
    results = run_schedule(chunks, [batch.micro_batches[number]] * copies, forward_only=False)
    losses = [float(result[0]) for result in results]
    gradient = own_bad_tensors(chunks, _gradient, last=True)
    bad_loss = next((loss for loss in losses if not math.isfinite(loss)), None)
    bad = bad_loss is not None or gradient is not None
    mine = _Finding(dist.get_rank(), _rows_text(batch, number) if bad else "", bad_loss, gradient)
    everyone: list[_Finding] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _rows_text(batch: StepBatch, number: int) -> str:
    """The rows of a micro-batch and the places of their samples, as many as a line holds."""
    parts = []
    for row in batch.rows[number].tolist():
        places = batch.places(row)
        more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
        parts.append(f"row {row} ({', '.join(places[:_SHOWN])}{more})")
    return ", ".join(parts)


def _gradient(parameter: Any) -> torch.Tensor:
    gradient: torch.Tensor = parameter.main_grad
    return gradient


def _text(number: int, found: list[_Finding]) -> str:
    """The finding that is nearest to the cause, of those of one micro-batch: a bad loss, else the first bad gradient."""
    gradients = [one.gradient for one in found if one.gradient is not None]
    first = max(gradients, key=lambda bad: bad.place, default=None)
    cause = next((one for one in found if one.bad_loss is not None), None) or next(
        one for one in found if one.gradient == first
    )
    parts = [f"rank {cause.rank}, micro-batch {number}, {cause.rows}"]
    if cause.bad_loss is not None:
        parts.append(f"loss {cause.bad_loss}")
    if first is not None:
        parts.append(f"first bad gradient {first.name} on rank {first.rank}")
    return "; ".join(parts)
