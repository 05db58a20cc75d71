"""The learning rate of each step, by known numbers and by megatron's own scheduler."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.ranks import pool
from helpers.train_checks import scheduler_curve

from mcore_qwen3.train.schedule import LearningRate

COSINE = LearningRate(lr=1e-5, min_lr=1e-6, style="cosine", warmup_iters=10, decay_iters=100)


@pytest.mark.parametrize(
    ("finished", "lr"),
    [(0, 0.0), (5, 5e-6), (10, 1e-5), (50, 6.281417e-06), (55, 5.5e-06), (100, 1e-6), (110, 1e-6), (5000, 1e-6)],
)
def test_known_values(finished: int, lr: float) -> None:
    # Known fault B51: the value after n finished steps; a schedule stepped twice is at 1e-6 for n = 50.
    assert COSINE.at(finished) == pytest.approx(lr, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("style", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(("warmup", "decay"), [(10, 100), (0, 50), (1, 40), (39, 40)])
def test_whole_curve_is_megatrons(style: str, warmup: int, decay: int) -> None:
    schedule = LearningRate(lr=3e-4, min_lr=2e-5, style=style, warmup_iters=warmup, decay_iters=decay)
    args = {"lr": 3e-4, "min_lr": 2e-5, "warmup": warmup, "decay": decay, "steps": 130}
    curve = pool(1).run(scheduler_curve, style=style, **args)[0]
    assert [schedule.at(finished) for finished in range(130)] == pytest.approx(curve, rel=1e-12, abs=1e-20)


def test_a_constant_rate_ignores_min_lr_and_the_end() -> None:
    schedule = replace(COSINE, style="constant")
    assert [schedule.at(finished) for finished in (10, 99, 100, 101)] == [1e-5] * 4
