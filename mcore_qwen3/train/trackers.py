"""Who is told of every step besides `train_log.jsonl`: tensorboard, wandb, swanlab (`--report_to`)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Tracker:
    """One of them, open.

    Attributes:
        name: as `--report_to` has it.
        write: (name -> value, step) -> None.
        close: end it.
    """

    name: str
    write: Callable[[dict[str, float], int], None]
    close: Callable[[], None]

    def log(self, part: str, record: dict[str, Any]) -> None:
        """Tell the numbers of a record as `<part>/<key>`; texts and lists are left to `train_log.jsonl`."""
        self.write({f"{part}/{name}": value for name, value in _numbers(record)}, record["iteration"])


def _numbers(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and key != "iteration":
            yield prefix + key.removeprefix("eval_"), value


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackerSettings:
    """Names as the flags.

    Attributes:
        save: the run's directory: files go below it where nothing else is named.
        config: the run's settings, shown beside its curves.
        start_iteration: finished steps at the start.
    """

    save: Path
    config: dict[str, Any]
    start_iteration: int
    tensorboard_dir: str | None = None
    wandb_project: str = ""
    wandb_exp_name: str | None = None
    swanlab_project: str = ""
    swanlab_exp_name: str | None = None


def open_tracker(name: str, settings: TrackerSettings) -> Tracker:
    """Open the tracker of that name; its package is imported here and nowhere else. Rank 0 alone calls this."""
    return {"tensorboard": _tensorboard, "wandb": _wandb, "swanlab": _swanlab}[name](settings)


def _tensorboard(settings: TrackerSettings) -> Tracker:
    module: Any = importlib.import_module("torch.utils.tensorboard")
    directory = settings.tensorboard_dir or str(settings.save / "runs")
    # What an earlier start wrote of steps that are done again is hidden.
    writer = module.SummaryWriter(directory, purge_step=settings.start_iteration + 1)

    def write(values: dict[str, float], step: int) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, step)

    return Tracker("tensorboard", write, writer.close)


def _wandb(settings: TrackerSettings) -> Tracker:
    module: Any = importlib.import_module("wandb")
    run = module.init(
        project=settings.wandb_project,
        name=settings.wandb_exp_name or settings.save.name,
        dir=str(settings.save),
        config=settings.config,
    )
    return Tracker("wandb", lambda values, step: run.log(values, step=step), run.finish)


def _swanlab(settings: TrackerSettings) -> Tracker:
    module: Any = importlib.import_module("swanlab")
    run = module.init(
        project=settings.swanlab_project,
        experiment_name=settings.swanlab_exp_name or settings.save.name,
        logdir=str(settings.save / "swanlog"),
        config=settings.config,
    )
    return Tracker("swanlab", lambda values, step: run.log(values, step=step), module.finish)
