"""Learning rate and weight decay of a step: pure functions of the number of finished steps, so resume needs no state."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRate:
    """Warm-up, then decay, as Megatron's OptimizerParamScheduler.

    Attributes:
        lr: the maximum.
        min_lr: the value after `decay_iters`.
        style: cosine, linear, constant, inverse-square-root or WSD (warm-up, stable, decay: Hu et al. 2024).
        warmup_iters: steps from `warmup_init` up to `lr`, linear.
        decay_iters: step at which the decay ends, warm-up included.
        warmup_init: rate of the first step of a warm-up.
        wsd_decay_iters: with WSD: the last steps before `decay_iters`, in which the rate falls.
        wsd_decay_style: with WSD: exponential (halves, then shifted to end at `min_lr`), linear, cosine or minus_sqrt.
    """

    lr: float
    min_lr: float
    style: str
    warmup_iters: int
    decay_iters: int
    warmup_init: float = 0.0
    wsd_decay_iters: int = 0
    wsd_decay_style: str = "exponential"

    def at(self, finished: int) -> float:
        """The rate of the step that follows `finished` finished steps."""
        if finished < self.warmup_iters:
            return self.warmup_init + (self.lr - self.warmup_init) * finished / self.warmup_iters
        if self.style == "constant":
            return self.lr
        if finished > self.decay_iters:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.lr * math.sqrt(max(self.warmup_iters, 1) / max(finished, 1)))
        return self.min_lr + (self.lr - self.min_lr) * self._share(finished)

    def _share(self, finished: int) -> float:
        """How far the rate is above `min_lr`, 1 at the top."""
        if self.style != "WSD":
            progress = (finished - self.warmup_iters) / (self.decay_iters - self.warmup_iters)
            return 1.0 - progress if self.style == "linear" else _half_cosine(progress)
        falling = finished - (self.decay_iters - self.wsd_decay_iters)
        if falling <= 0:
            return 1.0
        progress = falling / self.wsd_decay_iters
        return {
            "exponential": 2.0 * 0.5**progress - 1.0,
            "linear": 1.0 - progress,
            "cosine": _half_cosine(progress),
            "minus_sqrt": 1.0 - math.sqrt(progress),
        }[self.wsd_decay_style]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightDecay:
    """From `start` to `end` over the run's steps, as Megatron's OptimizerParamScheduler.

    Attributes:
        start, end: at the first step and from the last one on.
        style: constant, linear or cosine.
        iters: steps over which it rises.
    """

    start: float
    end: float
    style: str = "constant"
    iters: int = 1

    def at(self, finished: int) -> float:
        """The decay of the step that follows `finished` finished steps."""
        if self.style == "constant" or finished > self.iters:
            return self.end
        progress = finished / self.iters
        share = progress if self.style == "linear" else 1.0 - _half_cosine(progress)
        return self.start + (self.end - self.start) * share


def _half_cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))
