"""``--dry_run true``: what a run would be, exactly where it can be exact. Starts nothing and imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mcore_qwen3.arch import NOT_COUNTED, ParallelLayout, RankState, heaviest_stage, rank_state
from mcore_qwen3.cli.resolve import ResolvedRun
from mcore_qwen3.cli.run_lines import plan_lines
from mcore_qwen3.config import RunConfig, to_flat_dict

_GIB = 1024**3


def dry_run_lines(run: ResolvedRun, data_files: Sequence[str]) -> list[str]:
    """The whole report.

    Args:
        run: the resolved run.
        data_files: the training and validation files; they exist, and are not read.
    """
    return [
        *plan_lines(run),
        "",
        "flags that differ from their defaults:",
        *(f"  {name}: {value}" for name, value in _changed(run.config)),
        "",
        "groups:",
        *(f"  {name:<10} {size}" for name, size in _groups(run.layout)),
        f"  layers per stage: {run.layout.stages_text()}",
        "",
        *_state_lines(run),
        "",
        "data files (not prepared):",
        *(f"  {name}" for name in data_files),
        "dry run: nothing was started",
    ]


def _changed(config: RunConfig) -> Iterator[tuple[str, object]]:
    defaults = to_flat_dict(RunConfig())
    for name, value in to_flat_dict(config).items():
        if value != defaults[name]:
            yield name, str(value).lower() if isinstance(value, bool) else value


def _groups(layout: ParallelLayout) -> list[tuple[str, int]]:
    """Every group size; each product over its grid is the world size."""
    return [
        ("DP", layout.data),
        ("CP", layout.context),
        ("TP", layout.tensor),
        ("PP", layout.pipeline),
        ("EP", layout.expert),
        ("expert-TP", layout.expert_tensor),
        ("expert-DP", layout.expert_data),
    ]


def _state_lines(run: ResolvedRun) -> Iterator[str]:
    yield f"state per rank ({NOT_COUNTED}):"
    for stage in range(run.layout.pipeline):
        state = rank_state(run.shape, run.layout, stage, bf16=bool(run.config.model.bf16))
        yield (
            f"  stage {stage}: {state.layers} layers, {state.parameters:,} parameters "
            f"({state.dense:,} dense, {state.experts:,} in experts)"
        )
        yield from (f"    {name:<10} {size:>18,} bytes = {size / _GIB:.2f} GiB" for name, size in _bytes(state))
    if run.layout.pipeline > 1:
        number, state = heaviest_stage(run.shape, run.layout, bf16=bool(run.config.model.bf16))
        yield f"  heaviest: stage {number}, {state.parameters:,} parameters, {state.total_bytes / _GIB:.2f} GiB"
    yield "  activations: not estimated"


def _bytes(state: RankState) -> list[tuple[str, int]]:
    return [
        ("weights", state.weight_bytes),
        ("gradients", state.gradient_bytes),
        ("optimizer", state.optimizer_bytes),
        ("sum", state.total_bytes),
    ]
