"""Functions about a run's log and a save that fails, run inside a rank: both modules import megatron."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        """It is one."""
        return True


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
) -> str:
    """Log the steps (fields of StepResult and "tokens", or "eval_loss"); returns what was printed.

    Each step takes half a second and waits 0.1 of it.
    """
    from mcore_qwen3.train.log import TrainLog
    from mcore_qwen3.train.step import StepResult

    screen = Terminal() if terminal else io.StringIO()
    with mock.patch.object(sys, "stdout", screen):
        log = TrainLog(Path(directory), train_iters, log_interval, active=active, start_iteration=start)
        for number, fields in enumerate(steps, start + 1):
            tokens = fields.pop("tokens", 100)
            evaluation = fields.pop("eval_loss", None)
            event = fields.pop("event", None)
            router = {"balance_loss": fields.pop("balance_loss")} if "balance_loss" in fields else {}
            result = StepResult(**{"loss": 1.0, "trained_tokens": 50, "grad_norm": 0.5, **fields}, router=router)
            log.step(number, result, lr=1e-3, tokens=tokens, seconds=0.5, wait=0.1, memory=1.25)
            if evaluation is not None:
                with log.paused():
                    log.evaluation(number, {"eval_loss": evaluation, "eval_ppl": 2.5, "eval_token_acc": 0.125}, 7)
            if event is not None:
                log.event(number, "warning", event, bound=2.0)
        if close:
            log.close()
    return screen.getvalue()


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


def save_with_fault(root: str, iteration: int, fault: str, on_rank: int) -> str:
    """Save a run of no tensors; one rank fails at "create", "tensors" or "sides". Returns the error, or ""."""
    import torch.distributed as dist

    from mcore_qwen3.train import checkpoint
    from mcore_qwen3.train.state import TrainState

    def fail_at(place: str) -> None:
        if fault == place and dist.get_rank() == on_rank:
            raise OSError("no space left on device")

    def write_tensors(directory: Path, tensors: Any) -> None:
        (directory / f"rank_{dist.get_rank()}").write_text("tensors")
        dist.barrier()
        fail_at("tensors")

    def write_sides(directory: Path, number: int) -> None:
        fail_at("sides")
        (directory / "sides").write_text(str(number))

    def clear(path: Path, ignore_errors: bool) -> None:
        fail_at("create")
        real_rmtree(path, ignore_errors=ignore_errors)

    real_rmtree = checkpoint.shutil.rmtree
    writer = checkpoint.CheckpointWriter(write_tensors, write_sides, lambda directory: None)
    model: Any = SimpleNamespace(config=SimpleNamespace(bf16=False))
    state = TrainState(iteration=iteration, optimizer_steps=iteration)
    with (
        mock.patch.object(checkpoint, "unwrapped", lambda model: model),
        mock.patch.object(checkpoint, "tensors_to_save", lambda *args, **options: []),
        mock.patch.object(checkpoint.shutil, "rmtree", clear),
    ):
        try:
            checkpoint.save_checkpoint(Path(root), state, [model], None, writer)
        except checkpoint.SaveError as error:
            return str(error)
    return ""
