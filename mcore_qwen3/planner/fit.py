"""Fits a calibration to measured runs: least squares on the logarithm of the speed, held to a plausible start.

Each number is positive and works by a factor, so the unknowns are logarithms. A run counts less the further it is off
(Huber): a fault of one setup must not bend the rest. Numbers that the runs say nothing of stay where they start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mcore_qwen3.planner.calibration import Calibration, fitted_names
from mcore_qwen3.planner.measured import MeasuredRun

# Before any run is seen: what products, memory and collectives reach in practice, and a few tens of kernels a layer.
START = Calibration(
    gemm_share=0.65,
    grouped_share=0.45,
    memory_share=0.6,
    intra_share=0.6,
    inter_share=0.6,
    dense_launch=4e-3,
    expert_launch=8e-3,
    natural_imbalance=1.5,
)
# How far, as a logarithm, a number may lie from its start before that counts as much as a run that is off by NOISE.
FREEDOM = 0.4
# The error of a run that is as good as the others: containers alone move a recipe by so much.
NOISE = 0.2
ROUNDS = 15
STEP = 1e-4


def log_errors(runs: Sequence[MeasuredRun], calibration: Calibration) -> np.ndarray:
    """log(measured / estimated tokens a second) of each run; above 0: faster than estimated."""
    return np.array(
        [math.log(run.tokens_per_second_per_gpu / run.estimate(calibration).tokens_per_second_per_gpu) for run in runs]
    )


def fit(
    runs: Sequence[MeasuredRun], start: Calibration = START, *, noise: float = NOISE, freedom: float = FREEDOM
) -> Calibration:
    """The calibration that explains the runs best.

    Gauss-Newton on the numbers' logarithms with reweighted residuals; the same runs give the same answer.

    Args:
        runs: the measured runs; one is enough. Those that are not `fitted` are passed over.
        start: where the numbers are expected.
        noise: logarithmic error of a good run. Smaller: the runs count more against the start.
        freedom: logarithmic distance from the start that counts as much as an error of `noise`.
    """
    runs = [run for run in runs if run.fitted]
    names = fitted_names()
    origin = np.log([getattr(start, name) for name in names])
    point = origin.copy()

    def at(logarithms: np.ndarray) -> Calibration:
        return replace(start, **dict(zip(names, np.exp(logarithms).tolist(), strict=True)))

    for number in range(ROUNDS):
        errors = log_errors(runs, at(point))
        slopes = np.stack(
            [(log_errors(runs, at(point + step)) - errors) / STEP for step in STEP * np.eye(len(names))], axis=1
        )
        weights = np.minimum(1, noise / np.maximum(np.abs(errors), 1e-12)) / noise**2
        normal = slopes.T @ (weights[:, None] * slopes) + np.eye(len(names)) / freedom**2
        gradient = slopes.T @ (weights * errors) + (point - origin) / freedom**2
        # Launches start and stop to count at a kink, where full steps could swing; later steps are shorter.
        point = point - np.clip(np.linalg.solve(normal, gradient), -0.5, 0.5) / (1 + number / 4)
    return at(point)


def fit_without(runs: Sequence[MeasuredRun], source: str) -> Calibration:
    """The calibration from every other source's runs: how well it foretells this one's is the honest error."""
    return fit([run for run in runs if run.source != source])


def as_record(calibration: Calibration) -> dict[str, float]:
    """The numbers, rounded to four digits, as the packaged file holds them."""
    return {name: float(f"{getattr(calibration, name):.4g}") for name in fitted_names()}
