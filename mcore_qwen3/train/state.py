"""Where a run stands: everything besides weights and optimizer state that a continued run needs."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

FILE = "train_state.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """Progress of a run.

    The learning rate follows from `iteration`, the data's place from `consumed_samples`; both need no state of their own.
    Nothing in training draws random numbers (no dropout; the data's order comes from the seed), so none are kept.

    Attributes:
        iteration: finished steps, skipped ones included.
        optimizer_steps: updates that Adam has made; its bias correction counts them.
        skipped_steps: steps of the run that changed no weight.
        consumed_samples: rows (packs) taken from the data.
        consumed_tokens: tokens of those rows without padding.
        trained_tokens: tokens that had a loss.
        has_optimizer: the checkpoint holds the moments.
        stopped_by: why the run ended here: "" = it went on, "end", or a signal's name.
        checkpoints: iterations of the run's checkpoints in its save directory, oldest first, this one last.
        metric_for_best_model: what checkpoints are compared by, "" = nothing.
        best_metric: the best value that a checkpoint had, None before the first evaluated one.
        best_iteration: the checkpoint that had it.
    """

    iteration: int = 0
    optimizer_steps: int = 0
    skipped_steps: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    trained_tokens: int = 0
    has_optimizer: bool = True
    stopped_by: str = ""
    checkpoints: tuple[int, ...] = ()
    metric_for_best_model: str = ""
    best_metric: float | None = None
    best_iteration: int | None = None

    def after_step(self, *, samples: int, tokens: int, trained_tokens: int, updated: bool) -> TrainState:
        """The state after one more step."""
        return replace(
            self,
            iteration=self.iteration + 1,
            optimizer_steps=self.optimizer_steps + updated,
            skipped_steps=self.skipped_steps + (not updated),
            consumed_samples=self.consumed_samples + samples,
            consumed_tokens=self.consumed_tokens + tokens,
            trained_tokens=self.trained_tokens + trained_tokens,
        )

    def compared_by(self, metric: str) -> TrainState:
        """The state of a run that compares checkpoints by a metric; what was best by another one is forgotten."""
        if metric == self.metric_for_best_model:
            return self
        return replace(self, metric_for_best_model=metric, best_metric=None, best_iteration=None)

    def judged(self, value: float, *, greater_is_better: bool) -> TrainState:
        """The state after the evaluation of the checkpoint that is about to be written; no number is never the best."""
        best = self.best_metric
        if math.isnan(value) or (best is not None and (value <= best if greater_is_better else value >= best)):
            return self
        return replace(self, best_metric=value, best_iteration=self.iteration)

    def write(self, directory: Path) -> None:
        """Write `train_state.json` in one move: a finished checkpoint always has one."""
        temporary = directory / f".{FILE}.partial"
        with open(temporary, "w") as handle:
            handle.write(json.dumps(asdict(self), indent=2) + "\n")
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, directory / FILE)

    @staticmethod
    def read(directory: Path) -> TrainState:
        """Read `train_state.json`; fields that this version does not know are errors."""
        fields = json.loads((directory / FILE).read_text())
        return TrainState(**fields | {"checkpoints": tuple(fields.get("checkpoints", ()))})
