"""The calibration: that the fit finds a known answer, that the packaged one is the fit, and how far it is off."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from helpers.scripts import load_script

from mcore_qwen3.arch import flops_per_token
from mcore_qwen3.planner.calibration import Calibration, fitted_names, load_calibration
from mcore_qwen3.planner.fit import START, as_record, fit, log_errors
from mcore_qwen3.planner.measured import MeasuredRun

# Published seconds a step, with rows a step, tokens a row and GPUs: what the tokens of the file were worked out from.
SECONDS = {
    "30B SFT seed": (9.6, 16, 8192, 16),
    "30B SFT Adam on CPU": (28, 16, 8192, 4),
    "30B HybridEP overlap": (20.147, 1024, 4096, 16),
    "30B packed SFT": (1.206, 32, 2048, 16),
    "30B SFT 32k": (142.66, 32, 32768, 16),
    "8B LoRA": (7.77, 32, 2048, 1),
    "30B PP2": (10.361, 128, 8192, 16),
    "235B EP32": (19.7, 2048, 4096, 256),
    "235B MBS 4 full": (42.537, 4096, 4096, 256),
    "235B TP2 MBS 4 no VPP": (92.652, 8192, 4096, 256),
    "235B capacity 5": (66.337, 2048, 4096, 256),
}
# TFLOP/s that the same sources print beside them.
TFLOPS = {"30B HybridEP": 244.04, "235B GB300": 907, "8B pre-training": 512.7, "235B EP32 overlap": 276}


@pytest.fixture(scope="module")
def script(repo_root: Path) -> ModuleType:
    return load_script(repo_root / "benchmarks" / "planner_time.py")


@pytest.fixture(scope="module")
def runs(script: ModuleType) -> list[MeasuredRun]:
    return script.read_runs()


@pytest.fixture(scope="module")
def foretold(script: ModuleType, runs: list[MeasuredRun]) -> np.ndarray:
    return script.foretold_errors(runs)


def test_tokens_are_those_of_the_published_seconds(runs: list[MeasuredRun]) -> None:
    by_name = {run.name: run for run in runs}
    assert len(by_name) == len(runs) >= 30
    for name, (seconds, rows, length, gpus) in SECONDS.items():
        run = by_name[name]
        assert (run.settings.global_batch_size, run.settings.row_length, run.layout.world_size) == (rows, length, gpus)
        assert run.tokens_per_second_per_gpu == pytest.approx(rows * length / gpus / seconds, rel=0.01)


def test_tokens_and_tflops_of_a_source_agree(runs: list[MeasuredRun]) -> None:
    by_name = {run.name: run for run in runs}
    for name, tflops in TFLOPS.items():
        run = by_name[name]
        operations = flops_per_token(run.shape, run.settings.effective_length)
        assert run.tokens_per_second_per_gpu * operations / 1e12 == pytest.approx(tflops, rel=0.01)


def test_the_fit_finds_the_numbers_that_made_the_runs(runs: list[MeasuredRun]) -> None:
    made = {
        "gemm_share": 0.55, "grouped_share": 0.4, "memory_share": 0.7, "intra_share": 0.5, "inter_share": 0.7,
        "dense_launch": 5e-3, "expert_launch": 1e-2, "natural_imbalance": 1.8,
    }  # fmt: skip
    truth = Calibration(**made)
    invented = [
        replace(run, tokens_per_second_per_gpu=run.estimate(truth).tokens_per_second_per_gpu, fitted=True)
        for run in runs
    ]
    found = fit(invented, noise=0.005)
    assert {name: getattr(found, name) for name in made} == pytest.approx(made, rel=0.02)


def test_one_wild_run_bends_the_fit_little(runs: list[MeasuredRun]) -> None:
    truth = replace(START, gemm_share=0.6)
    invented = [replace(run, tokens_per_second_per_gpu=run.estimate(truth).tokens_per_second_per_gpu) for run in runs]
    wild = [replace(invented[0], tokens_per_second_per_gpu=invented[0].tokens_per_second_per_gpu / 10), *invented[1:]]
    before, after = fit(invented), fit(wild)
    for name in fitted_names():
        assert abs(math.log(getattr(after, name) / getattr(before, name))) < 0.15


def test_a_run_that_is_not_fitted_changes_nothing(runs: list[MeasuredRun]) -> None:
    few = runs[:6]
    assert fit([*few, replace(runs[7], tokens_per_second_per_gpu=1.0, fitted=False)]) == fit(few)


def test_the_packaged_calibration_is_the_fit_to_the_published_runs(runs: list[MeasuredRun]) -> None:
    packaged = as_record(load_calibration())
    assert as_record(fit(runs)) == pytest.approx(packaged, rel=5e-3)


def test_shares_are_shares(runs: list[MeasuredRun]) -> None:
    calibration = load_calibration()
    for name in ("gemm_share", "grouped_share", "memory_share", "intra_share", "inter_share"):
        assert 0.3 < getattr(calibration, name) < 1
    assert 1 < calibration.natural_imbalance < 3


def test_other_sources_foretell_a_run_within_the_range_mostly(script: ModuleType, foretold: np.ndarray) -> None:
    assert np.exp(np.median(np.abs(foretold))) - 1 < 0.25
    assert np.mean(np.abs(foretold) <= math.log(1.5)) > 0.8
    assert abs(np.median(foretold)) < 0.1


def test_the_docs_print_these_errors(script: ModuleType, foretold: np.ndarray, repo_root: Path) -> None:
    page = (repo_root / "docs" / "planner.md").read_text(encoding="utf-8")
    assert script.summary(foretold) in page
    runs = script.read_runs()
    for run, error in zip(runs, foretold, strict=True):
        if abs(error) > math.log(1.5):
            assert any(f"| {run.name} |" in line and "(!)" in line for line in page.splitlines()), run.name
    assert page.count("(!) |") == int(np.sum(np.abs(foretold) > math.log(1.5)))


def test_the_file_says_how_it_was_made(repo_root: Path, script: ModuleType, runs: list[MeasuredRun]) -> None:
    record = json.loads((repo_root / "mcore_qwen3" / "planner" / "calibration.json").read_text(encoding="utf-8"))
    assert record["made_by"] == script.COMMAND
    assert record["runs"] == sum(run.fitted for run in runs)
    assert len(log_errors(runs, load_calibration())) == len(runs)
