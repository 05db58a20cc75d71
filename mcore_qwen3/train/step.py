"""One optimizer step: the only place that speaks to megatron's pipeline schedules.

Shapes: T tokens of a micro-batch, its rows laid end to end in one packed row; the batch axis is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from mcore_qwen3.data.batches import MicroBatch, StepBatch
from mcore_qwen3.model.build import Qwen3Model, unwrapped
from mcore_qwen3.model.context_parallel import PackedRow, own_tokens, plan_keys
from mcore_qwen3.model.router import Step, largest_load, reduce_expert_tokens, reduce_metrics, start_step
from mcore_qwen3.runtime.device import current_device
from mcore_qwen3.train.losses import token_loss
from mcore_qwen3.train.memory import names_what_to_lower
from mcore_qwen3.train.optimizer import Chunks, gradient_norm, update, zero_gradients

# What megatron's schedules call: (micro-batches, model) -> (its output, how the output becomes the loss).
ForwardStep = Callable[[Iterator[MicroBatch], torch.nn.Module], tuple[torch.Tensor, Callable]]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did, the same on every rank.

    Attributes:
        loss: sum of token losses / trained tokens, over the global batch; 0 where no token is trained.
        trained_tokens: tokens with a loss in the global batch.
        router: "balance_loss", "z_loss", "dropped_share" (`router.reduce_metrics`) and "expert_load"
            (`router.largest_load`) as far as the run has them.
        grad_norm: before clipping; None where no token is trained.
        skipped: why no weight was changed, "" if they were.
        dataset_losses: loss of each data set with a trained token, where the batch tells them apart.
        expert_tokens: int64 [layers, E], tokens that chose each expert; None for a dense model.
    """

    loss: float
    trained_tokens: int
    router: dict[str, float]
    grad_norm: float | None
    skipped: str = ""
    expert_tokens: torch.Tensor | None = None
    dataset_losses: dict[str, float] = field(default_factory=dict)


def packed_row(batch: MicroBatch, device: torch.device) -> PackedRow:
    """Describe the samples of a packed row to attention and rotary embedding."""
    ends = batch.cu_seqlens.to(device)
    plan = None
    if (ranks := parallel_state.get_context_parallel_world_size()) > 1:
        plan = plan_keys(batch.cu_seqlens, ranks, parallel_state.get_context_parallel_rank())
        plan = replace(plan, key_index=plan.key_index.to(device))
    return PackedRow(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
        key_plan=plan,
    )


def _own_part(padding_mask: torch.Tensor, model: Qwen3Model) -> torch.Tensor:
    """The padding mask as the model's router wants it: megatron splits it over the sequence on the first stage only."""
    if model.pre_process or not model.config.sequence_parallel:
        return padding_mask
    ranks, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    return padding_mask.chunk(ranks, dim=1)[rank].contiguous()


def _own_tokens(batch: MicroBatch) -> Callable[[torch.Tensor], torch.Tensor]:
    """What cuts this rank's part out of a tensor [1, T] of a micro-batch and brings it to the rank's device."""
    device, own = current_device(), None
    if (ranks := parallel_state.get_context_parallel_world_size()) > 1:
        own = own_tokens(batch.cu_seqlens, ranks, parallel_state.get_context_parallel_rank())
    return lambda tensor_1T: (tensor_1T if own is None else tensor_1T[:, own]).to(device, non_blocking=True)


def model_inputs(batch: MicroBatch, model: torch.nn.Module) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """This rank's part of a micro-batch, on its device: (arguments of the model, labels [1, T], loss mask [1, T])."""
    mine, inner = _own_tokens(batch), unwrapped(model)
    padding_mask = _own_part(mine(batch.padding_mask), inner) if inner.config.num_moe_experts is not None else None
    arguments = {
        "input_ids": mine(batch.tokens),
        "position_ids": mine(batch.position_ids),
        "attention_mask": None,
        "packed_seq_params": packed_row(batch, current_device()),
        "padding_mask": padding_mask,
    }
    return arguments, mine(batch.labels), mine(batch.loss_mask)


def forward_step(
    batches: Iterator[MicroBatch], model: torch.nn.Module, return_schedule_plan: bool = False, *, num_datasets: int = 0
) -> tuple[Any, Callable]:
    """Megatron's forward-step function: run one micro-batch and say how its output becomes the loss.

    With `return_schedule_plan` the micro-batch is not run: megatron interleaves the parts of two of them, so that one
    computes while the other's tokens travel to their experts.
    """
    batch = next(batches)
    arguments, labels, loss_mask = model_inputs(batch, model)
    loss = partial(token_loss, loss_mask)
    if num_datasets and batch.datasets is not None:
        loss = partial(loss, datasets=_own_tokens(batch)(batch.datasets), num_datasets=num_datasets)
    if return_schedule_plan:
        return unwrapped(model).build_schedule_plan(**arguments, labels=labels), loss
    return model(**arguments, labels=labels), loss


def run_schedule(
    chunks: Chunks, batches: Sequence[MicroBatch], forward: ForwardStep = forward_step, *, forward_only: bool
) -> list[torch.Tensor]:
    """Forward (and backward) over the micro-batches in megatron's schedule for this layout.

    Returns:
        What the loss function reported of each micro-batch, in order; empty on all but the last pipeline stage.
    """
    results = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(batches) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(batches),
        seq_length=batches[0].tokens.shape[1],
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return [result["loss"] for result in results] if parallel_state.is_pipeline_last_stage() else []


def sum_over_ranks(results: Sequence[torch.Tensor], length: int) -> list[float]:
    """The sums of what all micro-batches of all data-parallel ranks reported, on every rank. Collective.

    Args:
        results: from `run_schedule`.
        length: numbers in each of them; a rank that has none must know it too.
    """
    total = torch.zeros(length, dtype=torch.float64, device=current_device())
    # Tensor-parallel ranks of the last stage hold the same loss: one of them speaks.
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        for result in results:
            total += result.double()
    dist.all_reduce(total)
    return total.tolist()


def start_routers(batch: StepBatch) -> None:
    """Tell the routers what the coming step is."""
    replicas, count = parallel_state.get_data_parallel_world_size(), len(batch.micro_batches)
    start_step(
        Step(
            scale=batch.global_trained_tokens / (count * replicas),
            replicas=replicas,
            row_length=batch.row_length,
            rows=batch.rows.shape[1],
        )
    )


def train_step(
    chunks: Chunks, optimizer: ChainedOptimizer, batch: StepBatch, lr: float, weight_decay: float | None = None
) -> StepResult:
    """Forward, backward, clip and update on one global batch; learning rate and weight decay as `optimizer.update`.

    Where `reason_to_skip` has one, no weight, moment or count of the optimizer is touched, on any rank: the numbers it
    looks at are sums over all ranks.
    """
    zero_gradients(chunks, optimizer)
    total, count, *by_dataset = forward_backward(chunks, batch)
    trained = round(count)
    router, expert_tokens = _router_numbers(chunks, len(batch.micro_batches))
    if trained != batch.global_trained_tokens:
        raise RuntimeError(f"the ranks trained {trained} tokens, the data holds {batch.global_trained_tokens}")
    loss = total / trained if trained else 0.0
    norm = gradient_norm(optimizer)
    skipped = reason_to_skip(loss, trained, norm)
    if not skipped:
        update(optimizer, lr, weight_decay)
    datasets = _dataset_losses(batch.datasets, by_dataset)
    return StepResult(loss, trained, router, norm if trained else None, skipped, expert_tokens, datasets)


def _dataset_losses(names: Sequence[str], sums: Sequence[float]) -> dict[str, float]:
    """The loss of each data set, from the sums of all and then the counts of all; one without a trained token has none."""
    found = zip(names, sums[: len(names)], sums[len(names) :], strict=True)
    return {name: total / count for name, total, count in found if count}


def forward_backward(chunks: Chunks, batch: StepBatch) -> list[float]:
    """Add the gradients of one global batch. Collective.

    Returns:
        Over all ranks: the sum of token losses and the number of trained tokens; behind them, where the batch tells data
        sets apart, each one's sum and then each one's number.

    Raises:
        OutOfMemoryError: with what to lower.
    """
    for chunk in chunks:
        chunk.train()
    start_routers(batch)
    with names_what_to_lower(batch, chunks[0].config.recompute_granularity):
        forward = partial(forward_step, num_datasets=len(batch.datasets))
        results = run_schedule(chunks, batch.micro_batches, forward, forward_only=False)
    return sum_over_ranks(results, 2 + 2 * len(batch.datasets))


def reason_to_skip(loss: float, trained_tokens: int, grad_norm: float) -> str:
    """Why a step must not change the weights, "" if it may.

    A cross entropy of exactly 0 is no answer that a model gives: its softmax would have to be exactly 1 at every
    trained token. What computed it is broken, and so is its gradient.
    """
    if trained_tokens == 0:
        return "no trained token"
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if not math.isfinite(grad_norm):
        return f"the gradient norm is {grad_norm}"
    return f"the loss is exactly 0, with gradient norm {grad_norm:.4f}" if loss == 0 else ""


def _router_numbers(chunks: Chunks, num_microbatches: int) -> tuple[dict[str, float], torch.Tensor | None]:
    model = unwrapped(chunks[0])
    if not model.moe_layers:
        return {}, None
    assert model.config.num_moe_experts is not None
    tokens_LE = reduce_expert_tokens(model.config.num_layers, model.config.num_moe_experts)
    numbers = reduce_metrics(num_microbatches, model.moe_layers)
    return {**numbers, "expert_load": largest_load(tokens_LE)}, tokens_LE
