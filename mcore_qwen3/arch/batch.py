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


def resolve_batch(micro: int, global_: int, data: int, *, pipeline: int = 1, virtual_pipeline: int = 1) -> BatchPlan:
    """The number of micro-batches that each data-parallel rank runs in one step.

    The interleaved schedule sends micro-batches through a chunk in groups of PP, and refuses a last group that is
    smaller (megatron-core 0.19.2, `forward_backward_pipelining_with_interleaving`): with it their number is a multiple
    of PP.

    Args:
        micro: rows of one micro-batch on one rank.
        global_: rows of one optimizer step over all ranks.
        data: data-parallel size.
        pipeline: PP size.
        virtual_pipeline: model chunks of each pipeline rank; above 1 the schedule is the interleaved one.

    Raises:
        ConfigError: a size is below 1, global_ is not micro x data x a whole number, or that number does not suit the
            interleaved schedule.
    """
    for flag, value in (("micro_batch_size", micro), ("global_batch_size", global_)):
        if value < 1:
            raise ConfigError(f"{flag} must be at least 1", seen=value, fix=f"--{flag} 1 or more")
    group = pipeline if virtual_pipeline > 1 else 1

    def fits(micro: int, global_: int, group: int = group) -> bool:
        return global_ % (micro * data * group) == 0

    if not fits(micro, global_):
        globals_ = nearest_legal(global_, global_ + micro * data * group, lambda value: fits(micro, value))
        micros = nearest_legal(micro, global_, lambda value: fits(value, global_))
        rule = "global_batch_size must be micro_batch_size x DP x a whole number"
        seen = f"global_batch_size {global_}, micro_batch_size {micro} x DP {data} = {micro * data}"
        fix = f"--global_batch_size {globals_}" + (f", or --micro_batch_size {micros}" if micros else "")
        if group > 1:
            rule += " of micro-batches, with virtual pipeline stages a multiple of PP"
            seen += f", PP {pipeline}, {virtual_pipeline} virtual stages"
            if fits(micro, global_, 1):
                seen += f": {global_ // (micro * data)} micro-batches"
                fix += ", or no --virtual_pipeline_model_parallel_size"
        raise ConfigError(rule, seen=seen, fix=fix)
    return BatchPlan(
        micro_batch_size=micro, global_batch_size=global_, data=data, num_microbatches=global_ // (micro * data)
    )
