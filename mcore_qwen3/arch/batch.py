"""How many sequences a step takes, and how it is cut into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_qwen3.arch.nearest import nearest_legal
from mcore_qwen3.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """global_batch_size = micro_batch_size x data x num_microbatches, in sequences (rows of a batch)."""

    micro_batch_size: int
    global_batch_size: int
    data: int
    num_microbatches: int


def resolve_batch(micro: int, global_: int, data: int) -> BatchPlan:
    """The number of micro-batches that each data-parallel rank runs in one step.

    Args:
        micro: rows of one micro-batch on one rank.
        global_: rows of one optimizer step over all ranks.
        data: data-parallel size.

    Raises:
        ConfigError: a size is below 1, or global_ is not micro x data x a whole number.
    """
    for flag, value in (("micro_batch_size", micro), ("global_batch_size", global_)):
        if value < 1:
            raise ConfigError(f"{flag} must be at least 1", seen=value, fix=f"--{flag} 1 or more")
    if global_ % (micro * data):
        globals_ = nearest_legal(global_, global_ + micro * data, lambda value: value % (micro * data) == 0)
        micros = nearest_legal(micro, global_, lambda value: global_ % (value * data) == 0)
        raise ConfigError(
            "global_batch_size must be micro_batch_size x DP x a whole number",
            seen=f"global_batch_size {global_}, micro_batch_size {micro} x DP {data} = {micro * data}",
            fix=f"--global_batch_size {globals_}" + (f", or --micro_batch_size {micros}" if micros else ""),
        )
    return BatchPlan(
        micro_batch_size=micro, global_batch_size=global_, data=data, num_microbatches=global_ // (micro * data)
    )
