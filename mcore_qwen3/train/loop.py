"""The training loop: steps, evaluations, saves, and a stop when asked."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer

from mcore_qwen3.data.batches import StepBatch
from mcore_qwen3.runtime.device import Device, current_device, memory_gib
from mcore_qwen3.train.evaluation import EvalSums, evaluate_step
from mcore_qwen3.train.finite import NonFiniteError, check_weights
from mcore_qwen3.train.guards import LOST, Guards, SkippedStepsError
from mcore_qwen3.train.log import TrainLog
from mcore_qwen3.train.optimizer import Chunks, gather_parameters
from mcore_qwen3.train.profile import StepProfiler
from mcore_qwen3.train.record import StepFacts
from mcore_qwen3.train.saving import CheckpointSaver
from mcore_qwen3.train.schedule import LearningRate, WeightDecay
from mcore_qwen3.train.state import TrainState
from mcore_qwen3.train.step import train_step


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """When to do what; names as the flags.

    Attributes:
        train_iters: steps of the whole run.
        global_batch_size: rows a step.
        save_optimizer: False with `--no_save_optim`.
        eval_on_start: evaluate before the first step too.
        max_skipped_iters: steps in a row that may be skipped.
        metric_for_best_model: loss, ppl or token_acc: of the evaluation at a checkpoint's step; "": nothing is compared.
        greater_is_better: how the metric is compared.
    """

    train_iters: int
    global_batch_size: int
    eval_interval: int
    save_interval: int
    save_optimizer: bool
    eval_on_start: bool
    max_skipped_iters: int
    metric_for_best_model: str
    greater_is_better: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What the loop works with, built by the command line.

    Attributes:
        batches: the steps of this rank from `state.consumed_samples` on.
        evaluation: gives the fixed evaluation batches, None without validation data.
        saver: writes the checkpoints.
        enter: tells what begins now, and the last finished step, to whoever watches for hangs.
        profiler: traces steps of this rank, None where none are asked for.
    """

    device: Device
    chunks: Chunks
    optimizer: ChainedOptimizer
    schedule: LearningRate
    weight_decay: WeightDecay
    batches: Iterator[StepBatch]
    evaluation: Callable[[], Iterator[StepBatch]] | None
    saver: CheckpointSaver
    enter: Callable[[str, int], None]
    log: TrainLog
    profiler: StepProfiler | None = None


class StopRequest:
    """A wish to save and stop, agreed on by all ranks: signals and time limits reach them at different steps.

    Args:
        time_limit: time.monotonic() on this machine after which the run has to end; None: no limit.
    """

    _NAMES = ("", "exit_duration_in_mins", "SIGUSR1", "SIGINT", "SIGTERM")  # the later ones overrule the earlier ones

    def __init__(self, time_limit: float | None = None) -> None:
        self._signal, self._time_limit = "", time_limit

    def set(self, signum: int) -> None:
        """Remember the signal; called from a signal handler."""
        self._signal = signal.Signals(signum).name

    def agreed(self) -> str:
        """Why some rank wants to stop: a signal's name or "exit_duration_in_mins"; else "". Collective."""
        late = self._time_limit is not None and time.monotonic() > self._time_limit
        mine = self._signal or ("exit_duration_in_mins" if late else "")
        place = torch.tensor(self._NAMES.index(mine), dtype=torch.int32, device=current_device())
        dist.all_reduce(place, op=dist.ReduceOp.MAX)
        return self._NAMES[int(place)]


def train(plan: Plan, parts: Parts, state: TrainState, stop: StopRequest) -> TrainState:
    """Run steps from `state` to the end or to a stop request, then save.

    Returns:
        The state at the end; `stopped_by` says why it is the end.

    Raises:
        NonFiniteError: a weight is not finite; the last checkpoint is untouched.
        SkippedStepsError: too many steps in a row gave nothing to learn from.
        SaveError: a checkpoint could not be written.
    """
    try:
        state = _steps(plan, parts, state, stop)
    except (NonFiniteError, SkippedStepsError):
        parts.saver.wait()  # raised on every rank, and what is still being written is of an earlier, good step
        raise
    finally:
        if parts.profiler is not None:
            parts.profiler.close()
    parts.saver.wait()
    return state


def _steps(plan: Plan, parts: Parts, state: TrainState, stop: StopRequest) -> TrainState:
    # Why an earlier run ended does not end this one, unless it had done all: a rank may die after the last save.
    state = replace(state, stopped_by="end" if state.iteration >= plan.train_iters else "")
    state = state.compared_by(plan.metric_for_best_model)
    guards = Guards(parts.chunks, parts.log, plan.max_skipped_iters)
    if plan.eval_on_start and parts.evaluation is not None and not state.stopped_by:
        evaluate(parts, state.iteration)
    while not state.stopped_by:
        parts.enter("waiting for data", state.iteration)
        state = _one_step(plan, parts, state, guards)
        parts.saver.poll()
        at_end = state.iteration == plan.train_iters
        metrics: dict[str, float] = {}
        if parts.evaluation is not None and (at_end or state.iteration % plan.eval_interval == 0):
            metrics = evaluate(parts, state.iteration)
        state = replace(state, stopped_by="end" if at_end else stop.agreed())
        if state.stopped_by or state.iteration % plan.save_interval == 0:
            parts.enter("save", state.iteration)
            gather_parameters(parts.chunks)
            check_weights(parts.chunks, LOST)  # a weight that no token met since it went bad
            state = _save(plan, parts, state, metrics)
            if not state.stopped_by and (late := stop.agreed()):  # it came during the save, which need not be repeated
                state = replace(state, stopped_by=late)
                parts.saver.mark_stopped(state)
    return state


def _one_step(plan: Plan, parts: Parts, state: TrainState, guards: Guards) -> TrainState:
    if parts.profiler is not None:
        parts.profiler.before_step(state.iteration + 1)
    began = time.monotonic()
    batch = next(parts.batches)
    wait = time.monotonic() - began
    lr = parts.schedule.at(state.iteration)
    result = train_step(parts.chunks, parts.optimizer, batch, lr, parts.weight_decay.at(state.iteration))
    state = state.after_step(
        samples=plan.global_batch_size,
        tokens=batch.global_tokens,
        trained_tokens=result.trained_tokens,
        updated=not result.skipped,
    )
    facts = StepFacts(
        lr=lr,
        tokens=batch.global_tokens,
        slots=plan.global_batch_size * batch.row_length,
        squared_lengths=batch.global_squared_lengths,
        seconds=time.monotonic() - began,
        wait=wait,
        memory=largest_memory(parts.device),
    )
    parts.log.step(state, result, facts)
    if parts.profiler is not None:
        parts.profiler.after_step(state.iteration)
    if result.skipped:  # the guards run it again, piece by piece
        parts.enter("looking for a fault", state.iteration)
    guards.after_step(state.iteration, batch, result)
    return state


def largest_memory(device: Device, above: float = 0.0) -> float:
    """Peak GiB of the rank that uses most, above what each held at some time. Collective.

    Args:
        device: this rank's.
        above: GiB of this rank that do not count.
    """
    memory = torch.tensor(memory_gib(device) - above, device=current_device())
    dist.all_reduce(memory, op=dist.ReduceOp.MAX)
    return float(memory)


def evaluate(parts: Parts, iteration: int) -> dict[str, float]:
    """eval_loss, eval_ppl and eval_token_acc over all trained tokens of the evaluation set, logged too. Collective.

    Raises:
        NonFiniteError: a weight is not finite; looked for where the loss is not.
    """
    assert parts.evaluation is not None
    with parts.log.paused():
        sums = sum((evaluate_step(parts.chunks, batch) for batch in parts.evaluation()), start=EvalSums())
    metrics = sums.metrics()
    if not math.isfinite(metrics["eval_loss"]):
        check_weights(parts.chunks, LOST)
    parts.log.evaluation(iteration, metrics, sums.trained_tokens)
    return metrics


def _save(plan: Plan, parts: Parts, state: TrainState, metrics: dict[str, float]) -> TrainState:
    """Save; the evaluation of this step, if there was one, says whether it is the best checkpoint."""
    name = f"eval_{plan.metric_for_best_model}"
    if name in metrics:
        state = state.judged(metrics[name], greater_is_better=plan.greater_is_better)
        parts.log.say(f"best checkpoint by {name}: {state.best_metric} at step {state.best_iteration}")
    optimizer = parts.optimizer if plan.save_optimizer else None
    with parts.log.paused():
        return parts.saver.save(state, parts.chunks, optimizer)
