"""A forward and backward pass of the largest shape before step 1, so that out of memory shows at once."""

from __future__ import annotations

from megatron.core.optimizer import ChainedOptimizer

from mcore_qwen3.arch import BatchPlan, ParallelLayout
from mcore_qwen3.data.batches import StepBatch
from mcore_qwen3.train.optimizer import Chunks, zero_gradients
from mcore_qwen3.train.optimizer_state import ensure_state
from mcore_qwen3.train.step import forward_backward


def dry_microbatches(plan: BatchPlan, layout: ParallelLayout) -> int:
    """Micro-batches after which memory grows no more.

    A pipeline of P stages keeps the activations of P micro-batches, the interleaved schedule those of 2 x P at most.
    """
    return min(plan.num_microbatches, 2 * layout.pipeline if layout.pipeline > 1 else 1)


def run_dry_batch(chunks: Chunks, optimizer: ChainedOptimizer, batch: StepBatch) -> None:
    """Run `batch` and forget it: the first step starts as without, bit for bit. Collective.

    The optimizer's moments are allocated first (all zero where the run is new), since they are there in every later
    step. What the rows do to the experts' loads is theirs: a later batch may send more tokens to one rank's experts.

    Raises:
        OutOfMemoryError: with what to lower.
    """
    ensure_state(optimizer)
    zero_gradients(chunks, optimizer)
    forward_backward(chunks, batch)
    zero_gradients(chunks, optimizer)
