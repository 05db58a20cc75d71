"""What a rank builds when it continues a run, by the command line's own `rank_parts.build`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from helpers.train_checks import adam_steps
from helpers.training import start_groups


def resumed_state(model_dir: str, checkpoint_dir: str) -> tuple[list[str], dict[str, Any], list[float]]:
    """Continue without the moments; returns (lines said, fields of the state, updates that Adam counts)."""
    from mcore_qwen3.arch.layout import resolve_layout
    from mcore_qwen3.arch.shape import read_model_shape
    from mcore_qwen3.cli import rank_parts
    from mcore_qwen3.config import RunConfig, with_values
    from mcore_qwen3.runtime.device import cpu

    shape = read_model_shape(model_dir)
    layout = resolve_layout(1, tensor=1, pipeline=1, expert=1, shape=shape)
    start_groups(layout)
    run: Any = SimpleNamespace(
        config=with_values(RunConfig(), {"bf16": False, "no_load_optim": True}),
        shape=shape,
        layout=layout,
        weights=Path(model_dir),
        resume=SimpleNamespace(directory=Path(checkpoint_dir)),
    )
    lines: list[str] = []
    _, optimizer, state = rank_parts.build(run, cpu(), lines.append)
    return lines, asdict(state), sorted(adam_steps(optimizer))


def same_point(iterations: list[int | None]) -> str:
    """What `check_same_point` says when each rank continues the step of its place; "" when it agrees."""
    import torch.distributed as dist

    from mcore_qwen3.cli.resume import ResumePoint, check_same_point
    from mcore_qwen3.errors import ConfigError

    step = iterations[dist.get_rank()]
    point = None
    if step is not None:
        point = ResumePoint(directory=Path(f"iter_{step}"), iteration=step, has_optimizer=True, from_load=False)
    try:
        check_same_point(point)
    except ConfigError as error:
        return str(error)
    return ""
