"""Where a run stands: counted, written and read back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_qwen3.train.state import FILE, TrainState

STATE = TrainState(
    iteration=7,
    optimizer_steps=6,
    consumed_samples=56,
    consumed_tokens=9000,
    trained_tokens=4000,
    has_optimizer=False,
    stopped_by="SIGTERM",
    checkpoints=(3, 7),
    metric_for_best_model="ppl",
    best_metric=2.5,
    best_iteration=3,
)


def test_written_and_read_back(tmp_path: Path) -> None:
    STATE.write(tmp_path)
    assert TrainState.read(tmp_path) == STATE
    assert json.loads((tmp_path / FILE).read_text())["stopped_by"] == "SIGTERM"


def test_an_unknown_field_is_an_error(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"iteration": 3, "loss_scale": 1.0}')
    with pytest.raises(TypeError, match="loss_scale"):
        TrainState.read(tmp_path)


def test_after_a_step() -> None:
    state = TrainState().after_step(samples=8, tokens=1000, trained_tokens=400, updated=True)
    state = state.after_step(samples=8, tokens=900, trained_tokens=0, updated=False)  # skipped: no trained token
    assert state == TrainState(
        iteration=2, optimizer_steps=1, skipped_steps=1, consumed_samples=16, consumed_tokens=1900, trained_tokens=400
    )
    assert STATE.after_step(samples=8, tokens=1, trained_tokens=1, updated=True).stopped_by == "SIGTERM"


def test_the_best_checkpoint() -> None:
    nan = float("nan")
    for greater, values, expected in (
        (False, [nan, 3.0, 2.0, 2.0, nan, 5.0], [None, 1, 2, 2, 2, 2]),
        (True, [0.25, 0.5, 0.5, 0.1], [0, 1, 1, 1]),
    ):
        state = TrainState().compared_by("loss")
        for iteration, (value, best) in enumerate(zip(values, expected, strict=True)):
            state = replace(state, iteration=iteration).judged(value, greater_is_better=greater)
            assert state.best_iteration == best
            assert state.best_metric == (None if best is None else values[best])


def test_what_was_best_by_another_metric_is_forgotten() -> None:
    assert STATE.compared_by("ppl") == STATE
    for other in ("loss", ""):
        state = STATE.compared_by(other)
        assert (state.metric_for_best_model, state.best_metric, state.best_iteration) == (other, None, None)
        assert state.checkpoints == (3, 7)
