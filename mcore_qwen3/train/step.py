"""One optimizer step or one evaluation pass: the only place that speaks to megatron's pipeline schedules.

Shapes: T tokens of a micro-batch, its rows laid end to end in one packed row; the batch axis is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

from mcore_qwen3.data.batches import MicroBatch, StepBatch
from mcore_qwen3.model.build import unwrapped
from mcore_qwen3.model.router import set_step_scale
from mcore_qwen3.runtime.device import current_device
from mcore_qwen3.train.losses import token_loss
from mcore_qwen3.train.optimizer import NonFiniteError, update, zero_gradients


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did, the same on every rank.

    Attributes:
        loss: sum of token losses / trained tokens, over the global batch.
        trained_tokens: tokens with a loss in the global batch.
        balance_loss: mean over MoE layers and micro-batches, without coefficient; None if there is none.
        grad_norm: before clipping; None if the step was skipped because no token is trained.
    """

    loss: float
    trained_tokens: int
    balance_loss: float | None
    grad_norm: float | None


def packed_params(batch: MicroBatch, device: torch.device) -> PackedSeqParams:
    """Describe the samples of a packed row to attention and rotary embedding."""
    ends = batch.cu_seqlens.to(device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
    )


def _own_part(padding_mask: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
    """The padding mask as the model's router wants it: megatron splits it over the sequence on the first stage only."""
    inner = unwrapped(model)
    if inner.pre_process or not inner.config.sequence_parallel:
        return padding_mask
    ranks, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    return padding_mask.chunk(ranks, dim=1)[rank].contiguous()


def forward_step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
    """Megatron's forward-step function: run one micro-batch and say how its output becomes the loss."""
    batch = next(batches)
    device = current_device()
    loss_mask = batch.loss_mask.to(device, non_blocking=True)
    is_moe = unwrapped(model).config.num_moe_experts is not None
    padding_mask = _own_part(batch.padding_mask.to(device, non_blocking=True), model) if is_moe else None
    output = model(
        input_ids=batch.tokens.to(device, non_blocking=True),
        position_ids=batch.position_ids.to(device, non_blocking=True),
        attention_mask=None,
        labels=batch.labels.to(device, non_blocking=True),
        packed_seq_params=packed_params(batch, device),
        padding_mask=padding_mask,
    )
    return output, partial(token_loss, loss_mask)


def run_schedule(model: torch.nn.Module, batches: Sequence[MicroBatch], *, forward_only: bool) -> tuple[float, int]:
    """Forward (and backward) over the micro-batches in megatron's schedule for this layout.

    Returns:
        (sum of token losses, trained tokens) over all micro-batches of all data-parallel ranks, on every rank.
    """
    results = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=batches[0].tokens.shape[1],
        micro_batch_size=1,
        forward_only=forward_only,
    )
    total = torch.zeros(2, dtype=torch.float64, device=current_device())
    # Tensor-parallel ranks of the last stage hold the same loss: one of them speaks.
    if parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
        for result in results:
            total += result["loss"].double()
    dist.all_reduce(total)
    return float(total[0]), round(float(total[1]))


def train_step(model: DistributedDataParallel, optimizer: ChainedOptimizer, batch: StepBatch, lr: float) -> StepResult:
    """Forward, backward, clip and update on one global batch.

    Raises:
        NonFiniteError: loss or gradient norm is not finite; raised on every rank before any weight changes.
    """
    zero_gradients(model, optimizer)
    config = unwrapped(model).config
    balanced = config.num_moe_experts is not None and config.moe_aux_loss_coeff > 0
    replicas = parallel_state.get_data_parallel_world_size()
    if balanced:
        set_step_scale(batch.global_trained_tokens, len(batch.micro_batches), replicas)
    model.train()
    total, trained = run_schedule(model, batch.micro_batches, forward_only=False)
    balance = reduce_balance_loss(config.num_layers, len(batch.micro_batches)) if balanced else None
    if trained != batch.global_trained_tokens:
        raise RuntimeError(f"the ranks trained {trained} tokens, the data holds {batch.global_trained_tokens}")
    if trained == 0:
        return StepResult(0.0, 0, balance, None)
    loss = total / trained
    if not math.isfinite(loss):
        raise NonFiniteError(
            "the loss must be finite",
            seen=f"{loss}; the first rows of the step: {batch.rows.flatten()[:8].tolist()}",
            fix="look at those rows and at the weights that were loaded; the weights were not changed",
        )
    return StepResult(loss, trained, balance, update(optimizer, lr))


def reduce_balance_loss(num_moe_layers: int, num_microbatches: int) -> float:
    """Mean of the routers' balance loss over MoE layers, micro-batches and data-parallel ranks, on every rank.

    Each rank has recorded the part of its own tokens and layers, so the sum over the world is the sum over everything.
    """
    tracker = get_moe_metrics_tracker()
    total = torch.zeros(1, device=current_device())
    for name, entry in tracker.metrics.items():
        if name == "load_balancing_loss":
            total += entry.values.sum()
    tracker.clear()
    dist.all_reduce(total)
    return float(total) / (num_moe_layers * num_microbatches * parallel_state.get_data_parallel_world_size())


@torch.no_grad()
def evaluate_step(model: torch.nn.Module, batch: StepBatch) -> tuple[float, int]:
    """(sum of token losses, trained tokens) of one evaluation batch over all ranks; no gradients, no balance loss."""
    model.eval()
    try:
        return run_schedule(model, batch.micro_batches, forward_only=True)
    finally:
        model.train()
