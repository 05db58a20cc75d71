"""On a GPU: fp32 gives the CPU's losses, bf16 trains, and transformer-engine's modules (where installed) agree with torch's.

Run with `make gpu-check`. Not run yet on any GPU: what is written here is the check, not a result.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.tiny import write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory, qwen3_tokenizer_dir: Path) -> Path:
    """A tiny MoE with the real tokenizer; widths fit the GPU kernels' 16-byte rows and flash attention's head sizes."""
    directory = tmp_path_factory.mktemp("gpu_model")
    write_model(directory, moe=True, vocab_size=151936, hidden_size=64, head_dim=32, moe_intermediate_size=32)
    for file in qwen3_tokenizer_dir.iterdir():
        shutil.copy(file, directory)
    return directory


def losses(model_dir: Path, save: Path, rows: Path, *flags: str) -> list[float]:
    """Losses of five steps of `megatron sft` on one rank."""
    command = [sys.executable, "-m", "mcore_qwen3", "sft", "--load", str(model_dir), "--dataset", str(rows)]
    command += ["--save", str(save), "--max_length", "256", "--packing", "true", "--global_batch_size", "4"]
    command += ["--train_iters", "5", "--lr", "1e-3", "--no_save_optim", "true", *flags]
    environment = {**os.environ, "NPROC_PER_NODE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (save / "train_log.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


@pytest.fixture(scope="module")
def rows(material_dir: Path) -> Path:
    return material_dir / "data" / "alpaca_en_demo.json"


def test_fp32_equals_the_cpu(model_dir: Path, rows: Path, tmp_path: Path) -> None:
    cpu = losses(model_dir, tmp_path / "cpu", rows, "--device", "cpu")
    for grouped in ("true", "false"):
        gpu = losses(
            model_dir, tmp_path / f"gpu_{grouped}", rows, "--device", "cuda", "--bf16", "false",
            "--transformer_impl", "torch", "--moe_grouped_gemm", grouped,
        )  # fmt: skip
        assert gpu == pytest.approx(cpu, rel=1e-4)


def test_bf16_stays_near_fp32(model_dir: Path, rows: Path, tmp_path: Path) -> None:
    cpu = losses(model_dir, tmp_path / "cpu", rows, "--device", "cpu")
    gpu = losses(model_dir, tmp_path / "bf16", rows, "--device", "cuda", "--transformer_impl", "torch")
    assert gpu == pytest.approx(cpu, rel=2e-2)


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="transformer-engine is not installed"
)
def test_transformer_engine_agrees(model_dir: Path, rows: Path, tmp_path: Path) -> None:
    ours = losses(model_dir, tmp_path / "torch", rows, "--device", "cuda", "--transformer_impl", "torch")
    theirs = losses(model_dir, tmp_path / "te", rows, "--device", "cuda", "--transformer_impl", "transformer_engine")
    assert theirs == pytest.approx(ours, rel=2e-2)
