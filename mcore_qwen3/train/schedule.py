"""Learning rate of a step, a pure function of the number of finished steps, so resume needs no state."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRate:
    """Warm-up, then decay, as Megatron's OptimizerParamScheduler.

    Attributes:
        lr: the maximum.
        min_lr: the value at and after `decay_iters`.
        style: cosine, linear or constant.
        warmup_iters: steps from 0 up to `lr`, linear.
        decay_iters: step at which `min_lr` is reached, warm-up included.
    """

    lr: float
    min_lr: float
    style: str
    warmup_iters: int
    decay_iters: int

    def at(self, finished: int) -> float:
        """The rate of the step that follows `finished` finished steps."""
        if finished < self.warmup_iters:
            return self.lr * finished / self.warmup_iters
        if self.style == "constant":
            return self.lr
        if finished >= self.decay_iters:
            return self.min_lr
        progress = (finished - self.warmup_iters) / (self.decay_iters - self.warmup_iters)
        share = 1.0 - progress if self.style == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.min_lr + (self.lr - self.min_lr) * share
