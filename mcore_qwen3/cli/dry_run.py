"""``--dry_run true``: what a run would be, exactly where it can be exact. Starts nothing and imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from mcore_qwen3.arch import ParallelLayout
from mcore_qwen3.cli.estimate import expected_modules, memory_lines, run_settings
from mcore_qwen3.cli.resolve import ResolvedRun
from mcore_qwen3.cli.run_lines import plan_lines
from mcore_qwen3.config import RunConfig, to_flat_dict
from mcore_qwen3.planner.memory import GIB
from mcore_qwen3.planner.state import StateBytes, state_bytes


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
        *memory_lines(run),
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
    """Parameters and exact bytes of each stage; neighbours that hold the same stand together."""
    settings = run_settings(run, expected_modules(run.config))
    yield "state per rank, the padding of gradient buffers included:"
    stages = range(run.layout.pipeline)
    states = ((sum(run.layout.stages[stage]), state_bytes(run.shape, run.layout, settings, stage)) for stage in stages)
    for (layers, state), same in itertools.groupby(zip(stages, states, strict=True), key=lambda pair: pair[1]):
        numbers = [stage for stage, _ in same]
        name = f"stage {numbers[0]}" if len(numbers) == 1 else f"stages {numbers[0]} to {numbers[-1]}"
        yield (
            f"  {name}: {layers} layers, {state.parameters:,} parameters "
            f"({state.dense:,} dense, {state.experts:,} in experts)"
        )
        yield from (f"    {name:<15} {size:>18,} bytes = {size / GIB:.2f} GiB" for name, size in _bytes(state))


def _bytes(state: StateBytes) -> list[tuple[str, int]]:
    parts = [
        ("weights", state.weights),
        ("gradients", state.gradients),
        ("master weights", state.master_weights),
        ("moments", state.moments),
        ("sum", state.total),
    ]
    return [(name, size) for name, size in parts if size]
