"""A calibration from the user's own runs: the log of a run, and the packaged numbers moved to agree with it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from mcore_qwen3.arch import ModelShape, ParallelLayout
from mcore_qwen3.errors import DataError
from mcore_qwen3.planner.calibration import Calibration, load_calibration
from mcore_qwen3.planner.fit import fit
from mcore_qwen3.planner.gpus import Gpu
from mcore_qwen3.planner.measured import MeasuredRun
from mcore_qwen3.planner.settings import Settings

# Steps in which kernels are chosen, communicators open and memory grows.
WARM_UP_STEPS = 5
# Of one's own machine a run tells far more than published runs of others do.
OWN_NOISE = 0.02


def step_seconds(log: Path) -> float:
    """Median seconds of a step without the wait for data, after the first steps.

    Args:
        log: `train_log.jsonl` of a run. Half a record that a killed run has left is passed over.

    Raises:
        DataError: the file cannot be read, or has too few steps.
    """
    seconds = [
        record["step_seconds"] - record["data_wait_seconds"]
        for record in _records(log)
        if "step_seconds" in record and record["iteration"] > WARM_UP_STEPS
    ]
    if not seconds:
        raise DataError(
            f"the log of a run must hold more than {WARM_UP_STEPS} steps",
            seen=f"{log}: none after step {WARM_UP_STEPS}",
            fix=f"let the run go further; {WARM_UP_STEPS * 4} steps are enough",
        )
    return statistics.median(seconds)


def world_size(log: Path) -> int:
    """Ranks of a run, as the last start mark of its log says.

    Raises:
        DataError: the file cannot be read, or has no such mark.
    """
    sizes = [record["world_size"] for record in _records(log) if "world_size" in record]
    if not sizes:
        raise DataError(
            "the log of a run must say how many ranks it had", seen=f"{log}: no start mark", fix="a newer run"
        )
    return int(sizes[-1])


def _records(log: Path) -> list[dict[str, float]]:
    try:
        lines = log.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError("the log of a run must be a readable UTF-8 file", seen=f"{log}: {error}") from error
    return [_record(line) for line in lines]


def _record(line: str) -> dict[str, float]:
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def run_of_log(log: Path, *, shape: ModelShape, layout: ParallelLayout, settings: Settings, gpu: Gpu) -> MeasuredRun:
    """The run that a log tells of.

    Args:
        log: its `train_log.jsonl`.
        shape, layout, settings, gpu: what was run, as its `run_config.yaml` says.

    Raises:
        DataError: see `step_seconds`.
    """
    tokens = settings.global_batch_size * settings.row_length
    return MeasuredRun(
        name=str(log),
        source="own",
        shape=shape,
        layout=layout,
        settings=settings,
        gpu=gpu,
        tokens_per_second_per_gpu=tokens / step_seconds(log) / layout.world_size,
    )


def calibrate(runs: Sequence[MeasuredRun]) -> Calibration:
    """The packaged calibration, moved no further than needed for the user's runs.

    One run cannot tell a slow network from a slow kernel: every number that matters to it moves a little. Runs of several
    layouts tell more.
    """
    return fit(runs, load_calibration(), noise=OWN_NOISE)
