"""What a rank builds of a run that it continues."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from helpers.ranks import pool
from helpers.resumed_part import resumed_state
from helpers.tiny import write_model

from mcore_qwen3.train.state import TrainState


def test_a_run_continued_without_moments_counts_its_updates_afresh(tmp_path: Path) -> None:
    # Adam's bias correction goes by the number of updates since its moments were zero. That number is saved; were it
    # the old run's, the next restart would correct moments that are a few steps old as if they were a hundred.
    write_model(tmp_path, moe=False)
    stored = TrainState(iteration=100, optimizer_steps=98, consumed_samples=1600, stopped_by="SIGTERM")
    stored.write(tmp_path)
    args = {"model_dir": str(tmp_path), "checkpoint_dir": str(tmp_path)}
    lines, state, steps = pool(1).run(resumed_state, **args)[0]
    assert lines[-1] == "continuing after step 100; the optimizer starts afresh (--no_load_optim true)"
    assert steps == []
    assert state == asdict(replace(stored, optimizer_steps=0))
