"""Functions about training steps, optimizer, schedule and stops that run inside a rank."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import torch
from helpers.log_checks import run_facts
from helpers.tiny import Sample
from helpers.training import Cut, Layout, build, step_batch


def new_trainer(model_dir: str, layout: Layout, *, weight_decay: float = 0.1, **options: Any) -> tuple[Any, Any]:
    """(chunks of the wrapped model, optimizer) on this rank."""
    from mcore_qwen3.train.optimizer import OptimizerSettings, build_optimizer, wrap_for_data_parallel

    _, models = build(model_dir, layout, **options)
    chunks = wrap_for_data_parallel(models)
    return chunks, build_optimizer(chunks, OptimizerSettings(weight_decay=weight_decay))


def batch_of(rows: list[Sample], cut: Cut, layout: Layout) -> Any:
    """This rank's part of a global batch."""
    from megatron.core import parallel_state

    rank = parallel_state.get_data_parallel_rank()
    return step_batch(rows, cut, layout.data, rank, layout.context, layout.tensor)


def copies(chunks: Any) -> dict[str, torch.Tensor]:
    """The weights as they are now."""
    return {name: parameter.detach().clone() for chunk in chunks for name, parameter in chunk.named_parameters()}


def changed(chunks: Any, before: dict[str, torch.Tensor]) -> list[str]:
    """Names of the parameters that are not bit for bit what they were; NaN equals NaN."""
    now = copies(chunks)
    return [name for name, old in before.items() if not torch.equal(old.nan_to_num(7e7), now[name].nan_to_num(7e7))]


def adam_steps(optimizer: Any) -> set[float]:
    """The numbers of updates that Adam has counted."""
    states = [state for part in optimizer.chained_optimizers for state in part.optimizer.state.values()]
    return {float(state["step"]) for state in states}


def moments(optimizer: Any) -> list[torch.Tensor]:
    """All moments of this rank."""
    states = [state for part in optimizer.chained_optimizers for state in part.optimizer.state.values()]
    return [state[name].clone() for state in states for name in ("exp_avg", "exp_avg_sq")]


def scheduler_curve(
    style: str,
    lr: float,
    min_lr: float,
    warmup: int,
    decay: int,
    steps: int,
    *,
    init_lr: float = 0.0,
    weight_decay: tuple[float, float, str] = (0.1, 0.1, "constant"),
    wsd: tuple[int, str] | None = None,
) -> list[tuple[float, float]]:
    """(learning rate, weight decay) of megatron's scheduler after 0, 1, ... finished steps."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    group: dict[str, Any] = {"lr": 0.0}
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),  # type: ignore[arg-type]
        init_lr=init_lr,
        max_lr=lr,
        min_lr=min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=style,
        start_wd=weight_decay[0],
        end_wd=weight_decay[1],
        wd_incr_steps=decay,
        wd_incr_style=weight_decay[2],
        wsd_decay_steps=wsd and wsd[0],
        lr_wsd_decay_style=wsd and wsd[1],
    )
    curve = []
    for _ in range(steps):
        curve.append((group["lr"], group["weight_decay"]))
        scheduler.step(1)
    return curve


def stop_requests(signals_by_rank: list[int], late_rank: int | None = None) -> str:
    """What the ranks agree on when each got the signal of its place (0 = none), and one is past its time limit."""
    import torch.distributed as dist

    from mcore_qwen3.train.loop import StopRequest

    now = time.monotonic()
    stop = StopRequest(now if dist.get_rank() == late_rank else now + 3600)
    signum = signals_by_rank[dist.get_rank()]
    if not signum:
        return stop.agreed()
    earlier = signal.signal(signum, lambda number, frame: stop.set(number))
    try:
        signal.raise_signal(signum)
        return stop.agreed()
    finally:
        signal.signal(signum, earlier)


def tracker_writes(directory: str, texts: list[str], *, full_disk: bool) -> str:
    """Write the tracker several times; with `full_disk` the move into place fails. Returns the error, or ""."""
    from pathlib import Path
    from unittest import mock

    from mcore_qwen3.train import checkpoint

    def refuse(source: Any, target: Any) -> None:
        raise OSError("no space left on device")

    real = checkpoint.os.replace
    with mock.patch.object(checkpoint.os, "replace", refuse if full_disk else real):
        try:
            for text in texts:
                checkpoint.write_tracker(Path(directory), text)
        except OSError as error:
            return str(error)
    return ""


def non_finite_gradient(model_dir: str, rows: list[Sample], layout: Layout, bad: float, on_rank: int) -> dict[str, Any]:
    """One good step, then one whose reduced gradient has one bad value on one rank; what happened to the weights."""
    from unittest import mock

    import torch.distributed as dist

    from mcore_qwen3.train import step as step_module
    from mcore_qwen3.train.step import train_step

    chunks, optimizer = new_trainer(model_dir, layout)
    batch = batch_of(rows, Cut(), layout)
    before = copies(chunks)
    train_step(chunks, optimizer, batch, 1e-3)
    moved = changed(chunks, before)
    weights, state = copies(chunks), moments(optimizer)
    real = step_module.run_schedule

    def plant(*args: Any, **options: Any) -> Any:
        results = real(*args, **options)
        if dist.get_rank() == on_rank:
            bucket = chunks[0].buffers[0].buckets[0].grad_data
            bucket[dist.get_rank() * (bucket.numel() // layout.data)] = bad  # in the part that this rank updates
        return results

    with mock.patch.object(step_module, "run_schedule", plant):
        result = train_step(chunks, optimizer, batch, 1e-3)
    return {
        "skipped": result.skipped,
        "moved by the good step": len(moved) / len(before),
        "changed": changed(chunks, weights),
        "moments kept": all(map(torch.equal, state, moments(optimizer))),
        "steps": adam_steps(optimizer),
    }


def zero_gradient_step(model_dir: str, lr: float, weight_decay: float, **options: Any) -> dict[str, tuple[int, float]]:
    """A step without any gradient; name -> (axes, largest |new - old * (1 - lr * decay)| where decayed, else |new - old|)."""
    from mcore_qwen3.train.optimizer import gradient_norm, update, zero_gradients

    chunks, optimizer = new_trainer(model_dir, Layout(), weight_decay=weight_decay, **options)
    before = copies(chunks)
    zero_gradients(chunks, optimizer)
    assert gradient_norm(optimizer) == 0.0
    update(optimizer, lr)
    found = {}
    for name, new in copies(chunks).items():
        wanted = before[name] * (1 - lr * weight_decay) if new.dim() > 1 else before[name]
        found[name] = (new.dim(), float((new - wanted).abs().max() / before[name].abs().max()))
    return found


def allocated_state(model_dir: str, rows: list[Sample], **options: Any) -> dict[str, Any]:
    """What allocating the moments of a fresh optimizer does, and whether the first step is as without it."""
    from mcore_qwen3.train.optimizer_state import ensure_state, set_step
    from mcore_qwen3.train.step import train_step

    after = []
    facts: dict[str, Any] = {}
    for allocate in (True, False):
        chunks, optimizer = new_trainer(model_dir, Layout(), **options)
        if allocate:
            before = copies(chunks)
            ensure_state(optimizer)
            facts["changed"] = changed(chunks, before)
            facts["moments"] = float(max(tensor.abs().max() for tensor in moments(optimizer)))
            facts["steps at first"] = adam_steps(optimizer)
        train_step(chunks, optimizer, batch_of(rows, Cut(), Layout()), 1e-3)
        facts["steps then"] = adam_steps(optimizer)
        after.append(copies(chunks))
        if allocate:
            kept = moments(optimizer)
            ensure_state(optimizer)  # has nothing to do any more
            facts["moments kept"] = all(map(torch.equal, kept, moments(optimizer)))
    facts["same first step"] = all(torch.equal(after[0][name], after[1][name]) for name in after[0])
    set_step(optimizer, 7)
    facts["steps when set"] = adam_steps(optimizer)
    return facts


def steps_with_cuts(model_dir: str, rows: list[Sample], cuts: list[Cut]) -> list[dict[str, float]]:
    """Evaluation loss, training loss and grad norm of the first step, by how the batch is cut."""
    from mcore_qwen3.train.evaluation import evaluate_step
    from mcore_qwen3.train.step import train_step

    found = []
    for cut in cuts:
        chunks, optimizer = new_trainer(model_dir, Layout())
        batch = batch_of(rows, cut, Layout())
        sums = evaluate_step(chunks, batch)
        result = train_step(chunks, optimizer, batch, 1e-3)
        found.append(
            {
                "eval": sums.loss / sums.trained_tokens,
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "trained": result.trained_tokens,
            }
        )
    return found


def bad_step(model_dir: str, rows: list[Sample], fault: str) -> dict[str, Any]:
    """One step with a fault: "wrong count" or "nothing trained"; its result, error and changed weights."""
    from mcore_qwen3.train.step import train_step

    chunks, optimizer = new_trainer(model_dir, Layout())
    batch = batch_of(rows, Cut(), Layout())
    if fault == "wrong count":
        batch = replace(batch, global_trained_tokens=batch.global_trained_tokens + 1)
    before = copies(chunks)
    fields, message = None, ""
    try:
        fields = asdict(train_step(chunks, optimizer, batch, 1e-3))
    except RuntimeError as error:
        message = f"{type(error).__name__}: {error}"
    return {"result": fields, "error": message, "changed": changed(chunks, before)}


class _NotingSaver:
    """Notes what it is asked for; a signal comes during one save."""

    def __init__(self, story: list[str], stop: Any, stop_in_save: int) -> None:
        self._story, self._stop, self._stop_in_save = story, stop, stop_in_save

    def save(self, state: Any, chunks: Any, optimizer: Any) -> Any:
        moments = "with" if optimizer else "without"
        self._story.append(
            f"save {state.iteration} {state.consumed_samples} {state.stopped_by or '-'} {moments} moments"
        )
        if state.iteration == self._stop_in_save:
            self._stop.set(signal.SIGUSR1)
        return state

    def mark_stopped(self, state: Any) -> None:
        self._story.append(f"mark {state.iteration} {state.stopped_by}")

    def poll(self) -> None:
        self._story.append("poll")

    def wait(self) -> None:
        self._story.append("wait")


def loop_story(
    directory: str,
    train_iters: int,
    eval_interval: int,
    save_interval: int,
    stop_at: int,
    *,
    eval_on_start: bool = False,
    bad_at: int = 0,
    stop_in_save: int = 0,
    time_limit: float | None = None,
    watched: bool = False,
    **state_before: Any,
) -> list[str]:
    """What the loop does in which order, with steps, evaluation and saving replaced by notes; `watched`: phases too.

    `stop_at`: a signal comes in that step. `stop_in_save`: it comes during that step's save. `bad_at`: that step fails.
    """
    from pathlib import Path
    from unittest import mock

    from mcore_qwen3.runtime.device import cpu
    from mcore_qwen3.train import loop
    from mcore_qwen3.train.evaluation import EvalSums
    from mcore_qwen3.train.finite import NonFiniteError
    from mcore_qwen3.train.log import TrainLog
    from mcore_qwen3.train.schedule import LearningRate, WeightDecay
    from mcore_qwen3.train.state import TrainState
    from mcore_qwen3.train.step import StepResult

    story: list[str] = []
    stop = loop.StopRequest(time_limit)
    batch = SimpleNamespace(global_tokens=10, global_squared_lengths=100, row_length=8)

    def enter(phase: str, iteration: int) -> None:
        if watched:
            story.append(f"{phase} after {iteration}")

    def step(model: Any, optimizer: Any, batch: Any, lr: float, weight_decay: float) -> StepResult:
        story.append(f"step lr {lr:.1f}")
        assert lr + weight_decay == 10.0, "one falls as the other rises"
        number = len([line for line in story if line.startswith("step")])
        if number == stop_at:
            stop.set(signal.SIGTERM)
        if number == bad_at:
            raise NonFiniteError("the loss must be finite")
        return StepResult(1.0, 5, {}, 0.5)

    parts: Any = loop.Parts(
        device=cpu(),
        chunks=None,  # type: ignore[arg-type]
        optimizer=object(),  # type: ignore[arg-type]
        schedule=LearningRate(lr=10.0, min_lr=0.0, style="linear", warmup_iters=0, decay_iters=10),
        weight_decay=WeightDecay(start=0.0, end=10.0, style="linear", iters=10),
        batches=iter([batch] * train_iters),  # type: ignore[list-item]
        evaluation=lambda: iter([batch, batch]),  # type: ignore[list-item]
        saver=_NotingSaver(story, stop, stop_in_save),  # type: ignore[arg-type]
        enter=enter,
        log=TrainLog(Path(directory), run_facts(train_iters), 1, active=False, start_iteration=0),
    )
    plan = loop.Plan(
        train_iters=train_iters, global_batch_size=4, eval_interval=eval_interval, save_interval=save_interval,
        save_optimizer=stop_at > 0, eval_on_start=eval_on_start, max_skipped_iters=0, metric_for_best_model="",
        greater_is_better=False,
    )  # fmt: skip
    whole: list[bool] = []  # gathered weights, which are looked at and saved
    replaced: dict[str, Callable] = {"train_step": step, "gather_parameters": lambda chunks: whole.append(True)}
    replaced["check_weights"] = lambda chunks, fix: whole.pop()
    replaced["evaluate_step"] = lambda chunks, batch: story.append("evaluate") or EvalSums(3.0, 2, 1)
    with mock.patch.multiple(loop, **replaced):
        try:
            state = loop.train(plan, parts, TrainState(**state_before), stop)
        except NonFiniteError as error:
            return [*story, str(error)]
    story.append(f"stopped by {state.stopped_by} after {state.iteration}, {state.trained_tokens} trained")
    return story
