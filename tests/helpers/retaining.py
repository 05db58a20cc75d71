"""A run of saves without a model, inside a rank: what stays on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock


def saves(
    root: str,
    iterations: Sequence[int],
    *,
    limit: int | None,
    metrics: Sequence[float] = (),
    fail_at: int = 0,
    before: dict[str, Any] | None = None,
    asynchronous: bool = False,
) -> str:
    """Save at each iteration, with a `-hf` folder beside; the one at `fail_at` cannot be completed. The error, or ""."""
    from mcore_qwen3.train import saving
    from mcore_qwen3.train.checkpoint import CheckpointWriter, SaveError
    from mcore_qwen3.train.state import TrainState

    def complete(directory: Path, parts: Any, iteration: int) -> None:
        if iteration == fail_at:
            raise OSError("no space left on device")

    writer = CheckpointWriter(
        write_part=lambda directory, tensors, rank: None,
        complete=complete,
        sync=lambda directory: None,
        after=lambda directory: directory.with_name(f"{directory.name}-hf").mkdir(exist_ok=True),
    )
    model: Any = SimpleNamespace(config=SimpleNamespace(bf16=False))
    state = TrainState(**(before or {})).compared_by("loss" if metrics else "")
    saver = saving.CheckpointSaver(
        Path(root), writer, total_limit=limit, asynchronous=asynchronous, say=lambda text: None
    )
    with (
        mock.patch.object(saving, "unwrapped", lambda model: model),
        mock.patch.object(saving, "weights_held", lambda models: []),
    ):
        try:
            for number, iteration in enumerate(iterations):
                state = saving.replace(state, iteration=iteration)
                if metrics:
                    state = state.judged(metrics[number], greater_is_better=False)
                state = saver.save(state, [model], None)
            saver.wait()
        except SaveError as error:
            return str(error)
    return ""
