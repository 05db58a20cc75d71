"""Functions about a run's log and a save that fails, run inside a rank: both modules import megatron."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        """It is one."""
        return True


def run_facts(train_iters: int, world_size: int = 1, **facts: Any) -> Any:
    """The facts of a run of Qwen3-30B-A3B with 40 rows an epoch."""
    from mcore_qwen3.planner.models import find_model
    from mcore_qwen3.train.record import RunFacts

    values = {"epoch_rows": 40, "no_peak_because": "" if "peak_tflops" in facts else "the device is a CPU", **facts}
    return RunFacts(shape=find_model("Qwen3-30B-A3B"), train_iters=train_iters, world_size=world_size, **values)


def write_log(
    directory: str,
    steps: list[dict[str, Any]],
    *,
    start: int = 0,
    train_iters: int = 10,
    log_interval: int = 2,
    active: bool = True,
    terminal: bool = False,
    close: bool = True,
    peak_tflops: float | None = None,
    trackers: Callable[[], list[Any]] = list,
) -> str:
    """Log the steps (fields of StepResult and "tokens", or "eval_loss"); returns what was printed.

    Each step takes half a second and waits 0.1 of it. A step of n tokens has 2 n places and one sample of n tokens, and
    takes 4 rows.
    """
    import torch

    from mcore_qwen3.train.log import TrainLog
    from mcore_qwen3.train.record import StepFacts
    from mcore_qwen3.train.state import TrainState
    from mcore_qwen3.train.step import StepResult

    state = TrainState(iteration=start, consumed_samples=4 * start, consumed_tokens=100 * start)
    facts = run_facts(train_iters, 2, **({"peak_tflops": peak_tflops} if peak_tflops else {}))
    screen = Terminal() if terminal else io.StringIO()
    with mock.patch.object(sys, "stdout", screen):
        log = TrainLog(Path(directory), facts, log_interval, active=active, start_iteration=start, trackers=trackers())
        for number, fields in enumerate(steps, start + 1):
            tokens = fields.pop("tokens", 100)
            evaluation = fields.pop("eval_loss", None)
            event = fields.pop("event", None)
            router = {"balance_loss": fields.pop("balance_loss")} if "balance_loss" in fields else {}
            if "expert_tokens" in fields:
                fields["expert_tokens"] = torch.tensor(fields["expert_tokens"])
            result = StepResult(**{"loss": 1.0, "trained_tokens": 50, "grad_norm": 0.5, **fields}, router=router)
            state = state.after_step(
                samples=4, tokens=tokens, trained_tokens=result.trained_tokens, updated=not result.skipped
            )
            step = StepFacts(
                lr=1e-3,
                tokens=tokens,
                slots=2 * tokens,
                squared_lengths=tokens * tokens,
                seconds=0.5,
                wait=0.1,
                memory=1.25,
            )
            log.step(state, result, step)
            if evaluation is not None:
                with log.paused():
                    log.evaluation(number, {"eval_loss": evaluation, "eval_ppl": 2.5, "eval_token_acc": 0.125}, 7)
            if event is not None:
                log.event(number, "warning", event, bound=2.0)
        if close:
            log.close()
    return screen.getvalue()


def speed_records(model: str, tokens: int, peak_tflops: float, squared_lengths: list[int]) -> list[dict[str, Any]]:
    """The records of steps of half a second on two devices, by the sum of the squared lengths of their samples."""
    from mcore_qwen3.planner.models import find_model
    from mcore_qwen3.train.record import StepFacts, step_record
    from mcore_qwen3.train.state import TrainState
    from mcore_qwen3.train.step import StepResult

    run = replace(run_facts(10, 2, peak_tflops=peak_tflops), shape=find_model(model))
    state = TrainState().after_step(samples=1, tokens=tokens, trained_tokens=tokens, updated=True)
    step = StepFacts(lr=0, tokens=tokens, slots=tokens, squared_lengths=0, seconds=0.5, wait=0, memory=0)
    result = StepResult(1.0, tokens, {}, 1.0)
    return [step_record(run, state, result, replace(step, squared_lengths=one), 0.0) for one in squared_lengths]


def log_records(directory: str) -> list[dict[str, Any]]:
    """The records that count."""
    from mcore_qwen3.train.log import LOG_FILE, read_log

    return list(read_log(Path(directory) / LOG_FILE))


def plotted_lines(directory: str) -> tuple[bytes, dict[str, list[list[float]]]]:
    """(first bytes of the picture, label -> [x values, y values] of what was drawn)."""
    from matplotlib.axes import Axes

    from mcore_qwen3.train.log import LOG_FILE, plot

    drawn: dict[str, list[list[float]]] = {}
    real = Axes.plot

    def note(self: Axes, x: Any, y: Any, **options: Any) -> Any:
        drawn[options["label"]] = [list(x), list(y)]
        return real(self, x, y, **options)

    with mock.patch.object(Axes, "plot", note):
        picture = plot(Path(directory) / LOG_FILE)
    return picture.read_bytes()[:8], drawn


def save_with_fault(
    root: str, iteration: int, fault: str, on_rank: int, *, asynchronous: bool, stopped_by: str = ""
) -> str:
    """Save a run of no tensors; one rank fails at "create", "tensors" or "sides". Returns the error, or "".

    `stopped_by`: why the run is told to have ended as soon as the save is begun.
    """
    import torch.distributed as dist

    from mcore_qwen3.train import checkpoint, saving
    from mcore_qwen3.train.state import TrainState

    def fail_at(place: str) -> None:
        if fault == place and dist.get_rank() == on_rank:
            raise OSError("no space left on device")

    def write_part(directory: Path, tensors: Any, rank: int) -> str:
        (directory / f"rank_{rank}").write_text("tensors")
        fail_at("tensors")
        return f"part {rank}"

    def complete(directory: Path, parts: Any, number: int) -> None:
        fail_at("sides")
        (directory / "sides").write_text(f"{number} {' '.join(parts)}")

    def clear(path: Path, ignore_errors: bool) -> None:
        fail_at("create")
        real_rmtree(path, ignore_errors=ignore_errors)

    real_rmtree = saving.shutil.rmtree
    done: list[str] = []
    writer = checkpoint.CheckpointWriter(
        write_part, complete, lambda directory: None, lambda directory: done.append(f"after {directory.name}")
    )
    model: Any = SimpleNamespace(config=SimpleNamespace(bf16=False))
    state = TrainState(iteration=iteration, optimizer_steps=iteration)
    saver = saving.CheckpointSaver(Path(root), writer, total_limit=None, asynchronous=asynchronous, say=done.append)
    with (
        mock.patch.object(saving, "unwrapped", lambda model: model),
        mock.patch.object(saving, "weights_held", lambda models: []),
        mock.patch.object(saving.shutil, "rmtree", clear),
    ):
        try:
            saver.save(state, [model], None)
            if stopped_by:
                saver.mark_stopped(replace(state, stopped_by=stopped_by))
            saver.wait()
        except checkpoint.SaveError as error:
            return str(error)
    name = f"iter_{iteration:07d}"
    assert done == [*([f"after {name}"] if dist.get_rank() == 0 else []), f"saved {Path(root) / name}"]
    return ""


def save_beside_steps(root: str, slow_rank: int) -> list[str]:
    """Save at step 2 of 5 with one rank's file written only after step 4; the tracker's text after each step's poll."""
    import threading

    import torch
    import torch.distributed as dist

    from mcore_qwen3.train import checkpoint, saving
    from mcore_qwen3.train.state import TrainState

    gate = threading.Event()
    values = torch.zeros(3)

    def write_part(directory: Path, tensors: Any, rank: int) -> None:
        if rank == slow_rank:
            assert gate.wait(60)
        (directory / f"rank_{rank}").write_text(str(tensors[0].values.tolist()))

    def weights_held(models: Any) -> list[Any]:
        return [checkpoint.SavedTensor(f"weight {dist.get_rank()}", (3,), (0,), (3,), values)]

    writer = checkpoint.CheckpointWriter(
        write_part,
        lambda directory, parts, number: (directory / "sides").write_text(str(number)) and None,
        lambda directory: None,
        lambda directory: None,
    )
    model: Any = SimpleNamespace(config=SimpleNamespace(bf16=False))
    saver = saving.CheckpointSaver(Path(root), writer, total_limit=None, asynchronous=True, say=lambda text: None)
    seen = []
    tracker = Path(root) / "latest_checkpointed_iteration.txt"
    with (
        mock.patch.object(saving, "unwrapped", lambda model: model),
        mock.patch.object(saving, "weights_held", weights_held),
    ):
        for iteration in range(1, 6):
            values += 1
            saver.poll()
            if iteration == 2:
                saver.save(TrainState(iteration=iteration), [model], None)
            dist.barrier()
            seen.append(tracker.read_text() if tracker.exists() else "")
            dist.barrier()
            if iteration == 4:
                gate.set()
        saver.wait()
    dist.barrier()
    return [*seen, tracker.read_text()]
