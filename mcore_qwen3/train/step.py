"""One optimizer step or one evaluation pass: the only place that speaks to megatron's pipeline schedules.

Shapes: T tokens of a micro-batch, its rows laid end to end in one packed row; the batch axis is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from mcore_qwen3.data.batches import MicroBatch, StepBatch
from mcore_qwen3.model.build import Qwen3Model, unwrapped
from mcore_qwen3.model.context_parallel import PackedRow, own_tokens, plan_keys
from mcore_qwen3.model.router import Step, reduce_metrics, start_step
from mcore_qwen3.runtime.device import current_device
from mcore_qwen3.train.losses import token_loss
from mcore_qwen3.train.optimizer import Chunks, NonFiniteError, update, zero_gradients


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did, the same on every rank.

    Attributes:
        loss: sum of token losses / trained tokens, over the global batch.
        trained_tokens: tokens with a loss in the global batch.
        router: "balance_loss", "z_loss" and "dropped_share" as far as the run has them (`router.reduce_metrics`).
        grad_norm: before clipping; None if the step was skipped because no token is trained.
    """

    loss: float
    trained_tokens: int
    router: dict[str, float]
    grad_norm: float | None


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


def forward_step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
    """Megatron's forward-step function: run one micro-batch and say how its output becomes the loss."""
    batch, device, inner = next(batches), current_device(), unwrapped(model)
    own = None
    if (ranks := parallel_state.get_context_parallel_world_size()) > 1:
        own = own_tokens(batch.cu_seqlens, ranks, parallel_state.get_context_parallel_rank())

    def mine(tensor_1T: torch.Tensor) -> torch.Tensor:
        return (tensor_1T if own is None else tensor_1T[:, own]).to(device, non_blocking=True)

    padding_mask = _own_part(mine(batch.padding_mask), inner) if inner.config.num_moe_experts is not None else None
    output = model(
        input_ids=mine(batch.tokens),
        position_ids=mine(batch.position_ids),
        attention_mask=None,
        labels=mine(batch.labels),
        packed_seq_params=packed_row(batch, device),
        padding_mask=padding_mask,
    )
    return output, partial(token_loss, mine(batch.loss_mask))


def run_schedule(chunks: Chunks, batches: Sequence[MicroBatch], *, forward_only: bool) -> tuple[float, int]:
    """Forward (and backward) over the micro-batches in megatron's schedule for this layout.

    Returns:
        (sum of token losses, trained tokens) over all micro-batches of all data-parallel ranks, on every rank.
    """
    results = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks],
        model=list(chunks),
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


def train_step(chunks: Chunks, optimizer: ChainedOptimizer, batch: StepBatch, lr: float) -> StepResult:
    """Forward, backward, clip and update on one global batch.

    Raises:
        NonFiniteError: loss or gradient norm is not finite; raised on every rank before any weight changes.
    """
    zero_gradients(chunks, optimizer)
    for chunk in chunks:
        chunk.train()
    start_routers(batch)
    total, trained = run_schedule(chunks, batch.micro_batches, forward_only=False)
    moe_layers = unwrapped(chunks[0]).moe_layers
    router = reduce_metrics(len(batch.micro_batches), moe_layers) if moe_layers else {}
    if trained != batch.global_trained_tokens:
        raise RuntimeError(f"the ranks trained {trained} tokens, the data holds {batch.global_trained_tokens}")
    if trained == 0:
        return StepResult(0.0, 0, router, None)
    loss = total / trained
    if not math.isfinite(loss):
        raise NonFiniteError(
            "the loss must be finite",
            seen=f"{loss}; the first rows of the step: {batch.rows.flatten()[:8].tolist()}",
            fix="look at those rows and at the weights that were loaded; the weights were not changed",
        )
    return StepResult(loss, trained, router, update(optimizer, lr))


@torch.no_grad()
def evaluate_step(chunks: Chunks, batch: StepBatch) -> tuple[float, int]:
    """(sum of token losses, trained tokens) of one evaluation batch over all ranks; no gradients, no balance loss."""
    for chunk in chunks:
        chunk.eval()
    return run_schedule(chunks, batch.micro_batches, forward_only=True)
