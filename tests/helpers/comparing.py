"""`megatron compare` without its processes: the ranks' part runs in a pool, with a fault planted where asked for."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from helpers.prepared import prepared_data
from helpers.tiny import samples
from helpers.training import start_groups

LENGTH = 64


def rows(folder: Path, *, packing: bool = True, multiple: int = 1) -> Any:
    """40 samples of 6 to 39 tokens, each with its own number of trained ones, in rows and samples of such multiples."""
    made = [(sample.ids, sample.mask) for sample in samples(40, seed=5)]
    place = folder / f"rows-{packing}-{multiple}"
    place.mkdir(exist_ok=True)
    return prepared_data(
        place, made, packing=packing, row_multiple=multiple, sample_multiple=multiple, max_length=LENGTH
    )


def resolved(world: int, *words: str) -> tuple[Any, Any]:
    """(the command's own flags, the run that it trains) of `megatron compare <words>` on so many ranks."""
    from mcore_qwen3.cli.compare import training_run
    from mcore_qwen3.cli.resolve import resolve
    from mcore_qwen3.config import COMPARE, parse_command

    parsed = parse_command([*words, "--dataset", "rows.jsonl", "--device", "cpu", "--num_workers", "0"], COMPARE)
    return parsed.config.plain, resolve(training_run(parsed), world, {})


def our_part(run: Any, prepared: Any, steps: int, fault: str = "") -> Any:
    """What a rank of `megatron compare` leaves for its parent."""
    from mcore_qwen3.cli.compare_rank import our_steps
    from mcore_qwen3.runtime.device import cpu

    start_groups(run.layout)
    with FAULTS[fault]():
        return our_steps(run, prepared, cpu(), steps, lambda text: None)


def our_part_stopped_after(run: Any, prepared: Any, steps: int) -> Any:
    """The same, where rank 0 gets a SIGTERM in some step of 20: what the ranks say."""
    import os
    import signal

    from mcore_qwen3.cli.compare_rank import our_steps
    from mcore_qwen3.runtime.device import cpu
    from mcore_qwen3.train.loop import StopRequest

    stop, told = StopRequest(), []

    def say(text: str) -> None:
        if text.startswith("megatron step"):
            told.append(text)
        if len(told) == steps and os.environ["RANK"] == "0":
            stop.set(signal.SIGTERM)

    start_groups(run.layout)
    found = our_steps(run, prepared, cpu(), 20, say, stop.agreed)
    assert len(told) == steps
    return found


def _heads_out_of_order() -> Any:
    """Query head g + i * groups goes to group g, instead of the next ones in order."""
    from mcore_qwen3.converters import table

    def by_group(shape: Any) -> tuple[Any, ...]:
        size, groups = shape.head_dim, shape.num_query_groups
        blocks = []
        for group in range(groups):
            heads = range(group, shape.num_attention_heads, groups)
            blocks += [table.Block(0, head * size, (head + 1) * size) for head in heads]
            blocks += [table.Block(part, group * size, (group + 1) * size) for part in (1, 2)]
        return tuple(blocks)

    return mock.patch.object(table, "_qkv_by_group", by_group)


def _attention(change: Any) -> Any:
    """Change what goes into attention, or what comes out."""
    from mcore_qwen3.model.attention import PackedAttention

    forward = PackedAttention.forward

    def changed(self: Any, query: Any, key: Any, value: Any, mask: Any, *, packed_seq_params: Any, **named: Any) -> Any:
        return change(
            lambda packed: forward(self, query, key, value, mask, packed_seq_params=packed, **named),
            packed_seq_params,
            query.shape,
        )

    return mock.patch.object(PackedAttention, "forward", changed)


def _documents_see_each_other() -> Any:
    def one_segment(attend: Any, packed: Any, shape: Any) -> Any:
        ends = packed.cu_seqlens_q[[0, -1]]
        return attend(replace(packed, cu_seqlens_q=ends, cu_seqlens_kv=ends))

    return _attention(one_segment)


def _heads_of_the_result_turned() -> Any:
    def turned(attend: Any, packed: Any, shape: Any) -> Any:
        return attend(packed).view(shape).roll(1, dims=1).flatten(1)

    return _attention(turned)


def _no_sum_over_data_parallel_ranks() -> Any:
    from mcore_qwen3.train.optimizer import DistributedDataParallel

    nothing = {name: lambda self, *args, **kwargs: None for name in ("finish_grad_sync", "start_grad_sync")}
    return mock.patch.multiple(DistributedDataParallel, **nothing)


def _no_weight_decay() -> Any:
    from mcore_qwen3.train import step

    update = step.update
    return mock.patch.object(step, "update", lambda optimizer, lr, weight_decay=None: update(optimizer, lr, 0.0))


FAULTS = {
    "": nullcontext,
    "head order": _heads_out_of_order,
    "mask": _documents_see_each_other,
    "heads of the result": _heads_of_the_result_turned,
    "no sum": _no_sum_over_data_parallel_ranks,
    "no decay": _no_weight_decay,
}


def compared(flags: Any, run: Any, prepared: Any, hf: Path, ranks: list[Any]) -> Any:
    """The comparison of what the ranks have left with a plain loop on the model in `hf`."""
    from mcore_qwen3.cli.compare_loops import run_comparison
    from mcore_qwen3.cli.plain_loop import load_plain_model

    return run_comparison(flags, run, prepared, load_plain_model(hf, torch.device("cpu")), ranks)
