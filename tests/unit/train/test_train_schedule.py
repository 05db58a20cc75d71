"""The learning rate of each step, by known numbers and by megatron's own scheduler."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.ranks import pool
from helpers.train_checks import scheduler_curve

from mcore_qwen3.train.schedule import LearningRate, WeightDecay

COSINE = LearningRate(lr=1e-5, min_lr=1e-6, style="cosine", warmup_iters=10, decay_iters=100)


@pytest.mark.parametrize(
    ("finished", "lr"),
    [(0, 0.0), (5, 5e-6), (10, 1e-5), (50, 6.281417e-06), (55, 5.5e-06), (100, 1e-6), (110, 1e-6), (5000, 1e-6)],
)
def test_known_values(finished: int, lr: float) -> None:
    # Known fault B51: the value after n finished steps; a schedule stepped twice is at 1e-6 for n = 50.
    assert COSINE.at(finished) == pytest.approx(lr, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("style", ["cosine", "linear", "constant", "inverse-square-root"])
@pytest.mark.parametrize(("warmup", "decay"), [(10, 100), (0, 50), (1, 40), (39, 40)])
def test_whole_curve_is_megatrons(style: str, warmup: int, decay: int) -> None:
    schedule = LearningRate(
        lr=3e-4, min_lr=2e-5, style=style, warmup_iters=warmup, decay_iters=decay, warmup_init=1e-6 if warmup else 0.0
    )
    args = {"lr": 3e-4, "min_lr": 2e-5, "warmup": warmup, "decay": decay, "steps": 130}
    curve = pool(1).run(scheduler_curve, style=style, init_lr=schedule.warmup_init, **args)[0]
    rates = [rate for rate, _ in curve]
    assert [schedule.at(finished) for finished in range(130)] == pytest.approx(rates, rel=1e-12, abs=1e-20)


@pytest.mark.parametrize("style", ["exponential", "linear", "cosine", "minus_sqrt"])
def test_warm_up_stable_decay_is_megatrons(style: str) -> None:
    schedule = LearningRate(
        lr=3e-4, min_lr=2e-5, style="WSD", warmup_iters=5, decay_iters=50, wsd_decay_iters=20, wsd_decay_style=style
    )
    args = {"lr": 3e-4, "min_lr": 2e-5, "warmup": 5, "decay": 50, "steps": 60, "wsd": (20, style)}
    rates = [rate for rate, _ in pool(1).run(scheduler_curve, style="WSD", **args)[0]]
    assert [schedule.at(finished) for finished in range(60)] == pytest.approx(rates, rel=1e-12, abs=1e-20)
    # Half way down, by hand: 2 / sqrt(2) - 1, 1 / 2, 1 / 2, 1 - sqrt(1 / 2).
    left = {"exponential": 2**0.5 - 1, "linear": 0.5, "cosine": 0.5, "minus_sqrt": 1 - 0.5**0.5}[style]
    assert schedule.at(40) == pytest.approx(2e-5 + 2.8e-4 * left, rel=1e-12)
    assert {schedule.at(finished) for finished in range(5, 31)} == {3e-4}


def test_inverse_square_root_by_hand() -> None:
    schedule = replace(COSINE, style="inverse-square-root")
    assert [schedule.at(finished) for finished in (10, 40, 90, 101)] == pytest.approx([1e-5, 5e-6, 1e-5 / 3, 1e-6])


@pytest.mark.parametrize(
    ("start", "end", "style"), [(0.1, 0.1, "constant"), (0.0, 0.2, "linear"), (0.1, 0.3, "cosine")]
)
def test_weight_decay_is_megatrons(start: float, end: float, style: str) -> None:
    schedule = WeightDecay(start=start, end=end, style=style, iters=40)
    args = {"lr": 1.0, "min_lr": 0.0, "warmup": 0, "decay": 40, "steps": 50, "weight_decay": (start, end, style)}
    decays = [decay for _, decay in pool(1).run(scheduler_curve, style="constant", **args)[0]]
    assert [schedule.at(finished) for finished in range(50)] == pytest.approx(decays, rel=1e-12)
    assert [schedule.at(0), schedule.at(20), schedule.at(40)] == pytest.approx([start, (start + end) / 2, end])


def test_a_constant_rate_ignores_min_lr_and_the_end() -> None:
    schedule = replace(COSINE, style="constant")
    assert [schedule.at(finished) for finished in (10, 99, 100, 101)] == [1e-5] * 4
