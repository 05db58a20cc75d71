"""A calibration from the log of one's own run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_qwen3.arch import resolve_layout
from mcore_qwen3.errors import DataError
from mcore_qwen3.planner.calibrate import calibrate, run_of_log, step_seconds
from mcore_qwen3.planner.calibration import load_calibration
from mcore_qwen3.planner.gpus import GPUS
from mcore_qwen3.planner.measured import MeasuredRun
from mcore_qwen3.planner.models import find_model
from mcore_qwen3.planner.settings import Settings

SETTINGS = Settings(row_length=8192, effective_length=8192.0, global_batch_size=64)


def write_log(path: Path, seconds: list[float], *, wait: float = 0.0, tail: str = "") -> Path:
    records = [{"event": "start", "iteration": 0}]
    for number, value in enumerate(seconds, 1):
        records.append({"iteration": number, "step_seconds": value + wait, "data_wait_seconds": wait, "tokens": 5})
    records.append({"event": "eval", "iteration": len(seconds), "eval_loss": 2.0})
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail, encoding="utf-8")
    return path


def own_run(tmp_path: Path, model: str, seconds: float, **sizes: int) -> MeasuredRun:
    shape = find_model(model)
    layout = resolve_layout(8, shape=shape, **sizes)
    log = write_log(tmp_path / "train_log.jsonl", [100.0] * 5 + [seconds] * 20)
    return run_of_log(log, shape=shape, layout=layout, settings=SETTINGS, gpu=GPUS["h100-80"])


def test_the_median_step_without_warm_up_and_wait_for_data(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log", [90, 80, 70, 60, 50, 4.0, 5.0, 30.0], wait=2.0, tail='{"iteration": 9, "st')
    assert step_seconds(log) == pytest.approx(5.0)


def test_a_log_without_enough_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="more than 5 steps"):
        step_seconds(write_log(tmp_path / "log", [1.0] * 5))
    with pytest.raises(DataError, match="readable"):
        step_seconds(tmp_path / "missing")


def test_speed_of_a_log_counts_padding_too(tmp_path: Path) -> None:
    run = own_run(tmp_path, "Qwen3-8B", 16.0)
    assert run.tokens_per_second_per_gpu == pytest.approx(64 * 8192 / 16.0 / 8)


@pytest.mark.parametrize("factor", [0.75, 1.4])
def test_the_estimate_meets_the_run_it_was_calibrated_with(tmp_path: Path, factor: float) -> None:
    run = own_run(tmp_path, "Qwen3-30B-A3B", 1.0, expert=8)
    seconds = run.estimate(load_calibration()).seconds * factor
    run = own_run(tmp_path, "Qwen3-30B-A3B", seconds, expert=8)
    assert run.estimate(calibrate([run])).seconds == pytest.approx(seconds, rel=0.03)


def test_what_a_run_does_not_tell_stays(tmp_path: Path) -> None:
    packaged = load_calibration()
    run = own_run(tmp_path, "Qwen3-8B", 1.0)
    slower = own_run(tmp_path, "Qwen3-8B", run.estimate(packaged).seconds * 1.3)
    found = calibrate([slower])
    assert found.gemm_share < 0.9 * packaged.gemm_share
    kept = {name: getattr(packaged, name) for name in ("grouped_share", "expert_launch", "natural_imbalance")}
    assert {name: getattr(found, name) for name in kept} == pytest.approx(kept)
    assert replace(found, gemm_share=1.0) != replace(
        packaged, gemm_share=1.0
    )  # a dense run tells of memory traffic too
