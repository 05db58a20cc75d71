"""Out of memory, said in terms of what a user can change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mcore_qwen3.data.batches import StepBatch
from mcore_qwen3.errors import McoreQwen3Error

# What torch's CPU allocator and CUDA's libraries say where they raise no exception of their own for it.
_SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")


class OutOfMemoryError(McoreQwen3Error):
    """A forward or backward pass that does not fit in the memory of a rank."""


@contextmanager
def names_what_to_lower(batch: StepBatch, recompute_granularity: str | None) -> Iterator[None]:
    """Around passes over `batch`: out of memory says its shape and the flags that make it smaller.

    Raises:
        OutOfMemoryError: in place of the allocator's error.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and not any(s in str(error) for s in _SIGNS):
            raise
        rows = batch.rows.shape[1]
        ways = [f"a lower --max_length (rows of {batch.row_length:,} tokens)"]
        if rows > 1:
            ways.insert(0, f"a lower --micro_batch_size (now {rows})")
        if recompute_granularity != "full":
            ways.append("--recompute_granularity full")
        ways.append("a larger --tensor_model_parallel_size, --context_parallel_size or --pipeline_model_parallel_size")
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise OutOfMemoryError(
            "a micro-batch must fit in the memory of every rank",
            seen=f"{rows} x {batch.row_length:,} tokens: {reason}",
            fix=", or ".join(ways),
        ) from error
