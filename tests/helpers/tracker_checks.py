"""Trackers and traces, run inside a rank: their modules import torch's distributed parts."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

STEPS = [{"loss": 2.0, "balance_loss": 1.5, "dataset_losses": {"a.jsonl": 2.5}}, {"loss": 1.0, "eval_loss": 0.75}]

AT_THE_END = -1


def _fake(name: str, told: list[Any], fails_at: int) -> ModuleType:
    """A package of wandb's or swanlab's form that notes what it is told."""

    def log(values: dict[str, float], step: int) -> None:
        if step == fails_at:
            raise ConnectionError("no route to the server")
        told.append(["log", step, values])

    def finish() -> None:
        told.append(["finish"])
        if fails_at == AT_THE_END:
            raise ConnectionError("no route to the server")

    def init(**settings: Any) -> Any:
        told.append(["init", {key: value for key, value in settings.items() if key != "config"}, settings["config"]])
        return SimpleNamespace(log=log, finish=finish)

    module = ModuleType(name)
    module.init, module.finish = init, finish  # type: ignore[attr-defined]
    return module


def tracked(directory: str, names: list[str], words: list[str], fails_at: int = 0) -> dict[str, Any]:
    """Log two steps and an evaluation with the trackers that a command line opens; what each was told, and the screen."""
    from helpers.log_checks import write_log

    from mcore_qwen3.cli import rank_parts
    from mcore_qwen3.config import parse_args

    argv = ["--load", "m", "--dataset", "a.jsonl", "--train_iters", "10", "--save", directory, "--report_to", *names]
    run: Any = SimpleNamespace(config=parse_args([*argv, *words], "sft").config)
    told: dict[str, list[Any]] = {name: [] for name in ("wandb", "swanlab")}
    fakes = {name: _fake(name, told[name], fails_at) for name in told}
    with mock.patch.dict(sys.modules, fakes):
        screen = write_log(
            directory,
            [dict(step) for step in STEPS],
            trackers=lambda: rank_parts.open_trackers(run, 0),
        )
    return {**told, "screen": screen}


def tensorboard_scalars(directory: str) -> dict[str, list[tuple[int, float]]]:
    """What is in tensorboard's files: name -> (step, value)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(directory)
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def profiled_loop(directory: str, words: list[str], train_iters: int, start: int) -> dict[str, Any]:
    """Steps `start` + 1 to `train_iters` of the loop's own kind with a small product each; the traces on this rank."""
    import torch

    from mcore_qwen3.cli import rank_parts
    from mcore_qwen3.config import parse_args
    from mcore_qwen3.runtime.device import cpu

    argv = ["--load", "m", "--dataset", "a.jsonl", "--train_iters", "10", "--save", directory]
    run: Any = SimpleNamespace(config=parse_args([*argv, *words], "sft").config)
    profiler = rank_parts.profiler(run, cpu())
    for number in range(start + 1, train_iters + 1):
        if profiler is not None:
            profiler.before_step(number)
        torch.ones(number, 3) @ torch.ones(3, 2)  # its shape tells the step
        if profiler is not None:
            profiler.after_step(number)
    if profiler is not None:
        profiler.close()
    found = {}
    for path in sorted(Path(directory, "profile").glob("*")):
        with gzip.open(path, "rt") as handle:
            events = json.load(handle)["traceEvents"]
        products = [event["args"]["Input Dims"][0] for event in events if event.get("name") == "aten::mm"]
        found[path.name] = [dims[0] for dims in products]
    return found
