"""What watches every step: skipped ones, loss spikes, experts that get no token."""

from __future__ import annotations

import math
import statistics
from collections import deque

import torch

from mcore_qwen3.data.batches import StepBatch
from mcore_qwen3.errors import McoreQwen3Error
from mcore_qwen3.train.diagnosis import where_it_began
from mcore_qwen3.train.finite import check_weights
from mcore_qwen3.train.log import TrainLog
from mcore_qwen3.train.optimizer import Chunks
from mcore_qwen3.train.step import StepResult

LOST = "the same command goes on from the last checkpoint; lower --lr, lengthen --lr_warmup_iters or lower --clip_grad"
_SHOWN = 8  # experts named on the screen; the log holds all


class SkippedStepsError(McoreQwen3Error):
    """Too many steps in a row that could not change the weights."""


class LossSpikes:
    """Sees a loss above mean + 6 standard deviations of the last 50 steps' (at least 20), and above 1.1 x their mean.

    A spike is told once: the next one must follow a step without. Losses of a spike count in the mean like all others,
    so a run that stays at a higher level is not told of for ever.
    """

    def __init__(self, window: int = 50, least: int = 20, deviations: float = 6.0, share: float = 0.1) -> None:
        self._losses: deque[float] = deque(maxlen=window)
        self._least, self._deviations, self._share = least, deviations, share
        self._above = False

    def new(self, loss: float) -> float | None:
        """The bound, if this step's loss is the first above it."""
        bound = None
        if len(self._losses) >= self._least:
            mean = statistics.fmean(self._losses)
            bound = mean + max(self._deviations * statistics.pstdev(self._losses), self._share * mean)
        self._losses.append(loss)
        was_above, self._above = self._above, bound is not None and loss > bound
        return bound if self._above and not was_above else None


class DeadExperts:
    """Sees an expert that no token of the last `after` steps chose; each is told once until it gets a token again."""

    def __init__(self, after: int = 100) -> None:
        self.after = after
        self._idle_LE: torch.Tensor | None = None

    def new(self, tokens_LE: torch.Tensor) -> list[tuple[int, int]]:
        """(layer, expert), both from 0, of those that have now been without a token for `after` steps."""
        if self._idle_LE is None:
            self._idle_LE = torch.zeros_like(tokens_LE)
        has_experts_L1 = tokens_LE.sum(dim=1, keepdim=True) > 0
        self._idle_LE = torch.where((tokens_LE == 0) & has_experts_L1, self._idle_LE + 1, 0)
        return [(layer, expert) for layer, expert in (self._idle_LE == self.after).nonzero().tolist()]


class Guards:
    """All of them. Their answers are the same on every rank, as the numbers of a step are.

    Args:
        chunks: the wrapped model.
        log: where they speak.
        max_skipped_iters: steps in a row that may be skipped.
    """

    def __init__(self, chunks: Chunks, log: TrainLog, max_skipped_iters: int) -> None:
        self._chunks, self._log, self._max_skipped = chunks, log, max_skipped_iters
        self._in_a_row = 0
        self._spikes, self._dead = LossSpikes(), DeadExperts()

    def after_step(self, iteration: int, batch: StepBatch, result: StepResult) -> None:
        """Look at the step that has just finished as number `iteration`. Collective.

        Raises:
            NonFiniteError: a weight is not finite.
            SkippedStepsError: one step more than `max_skipped_iters` in a row was skipped.
        """
        if result.skipped:
            self._skipped(iteration, batch, result)
            return
        self._in_a_row = 0
        bound = self._spikes.new(result.loss)
        if bound is not None:
            text = f"loss {result.loss:.4f} is a spike: above {bound:.4f}, by the steps before"
            self._log.event(iteration, "loss_spike", text, value=result.loss, bound=bound)
        if result.expert_tokens is not None:
            self._name_dead(iteration, self._dead.new(result.expert_tokens))

    def _skipped(self, iteration: int, batch: StepBatch, result: StepResult) -> None:
        self._in_a_row += 1
        reason, fix = result.skipped, "look at what is trained: megatron data shows it, --loss_scale decides it"
        if result.grad_norm is not None and not math.isfinite(result.loss + result.grad_norm):
            check_weights(self._chunks, LOST)
            reason += f"; {where_it_began(self._chunks, batch)}"
            fix = "look at those rows; lower --lr or lengthen --lr_warmup_iters; the weights are good, no step changed them"
        elif result.trained_tokens:
            fix = "compare --load and its config.json with the model's own; try --attention_backend and other layouts"
        self._log.event(iteration, "skipped", f"skipped, no weight was changed: {reason}", reason=reason)
        if self._in_a_row > self._max_skipped:
            raise SkippedStepsError(
                "no more steps in a row than --max_skipped_iters may be skipped",
                seen=f"{self._in_a_row} of at most {self._max_skipped}, the last is step {iteration}: {reason}",
                fix=fix,
            )

    def _name_dead(self, iteration: int, dead: list[tuple[int, int]]) -> None:
        if not dead:
            return
        names = [f"layer {layer} expert {expert}" for layer, expert in dead]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        text = f"no token in {self._dead.after} steps for {', '.join(names[:_SHOWN])}{more} (from 0)"
        self._log.event(iteration, "dead_experts", text, experts=dead)
