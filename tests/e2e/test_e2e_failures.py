"""What goes wrong while ranks run: all of them end, nothing is left, and the last line says what it was."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch
from e2e_kit import Job, Site
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.timeout(180)


def command(load: Path, rows: Path, save: str, *more: object) -> list[object]:
    words = f"sft --load {load} --dataset {rows} --max_length 128 --global_batch_size 4 --save {save} --num_workers 1"
    return [*words.split(), "--train_iters", 100000, "--lr_warmup_iters", 2, *more]


def assert_failed(job: Job, code: int) -> None:
    assert job.end() == code, job.screen
    job.assert_nothing_left()


def test_a_killed_rank_ends_all(site: Site, tiny_moe: Path, chat_rows: Path) -> None:
    """Under 10 s on a machine with two free cores (about 4 s); 20 s here, because other tests may take the cores."""
    job = site.start(*command(tiny_moe, chat_rows, "killed", "--pipeline_model_parallel_size", 2), NPROC_PER_NODE="2")
    job.wait_for_step(site.folder / "killed", 1)
    victim = job.rank(1)
    began = time.monotonic()
    victim.kill()
    assert_failed(job, 1)
    took = time.monotonic() - began
    assert job.last_line.startswith("launcher: rank 1 on ") and f"(pid {victim.pid})" in job.last_line
    assert "failed first" in job.last_line
    assert took < 20


def test_weights_that_are_no_numbers_stop_the_first_step(site: Site, tiny_moe: Path, chat_rows: Path) -> None:
    model = site.folder / "not-finite"
    shutil.copytree(tiny_moe, model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.self_attn.q_norm.weight"][3] = torch.nan
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    job = site.start(*command(model, chat_rows, "nan", "--tensor_model_parallel_size", 2), NPROC_PER_NODE="2")
    assert_failed(job, 2)
    assert "failed first: the loss must be finite; seen: nan; the first rows of the step: [" in job.last_line
    assert job.screen.count("must be finite") == 1 and "Traceback" not in job.screen
    assert [path.name for path in (site.folder / "nan").iterdir()] == ["train_log.jsonl"]  # no checkpoint
    assert '"loss"' not in (site.folder / "nan" / "train_log.jsonl").read_text()
