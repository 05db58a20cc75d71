"""What goes wrong while ranks run: all of them end, nothing is left, and the last line says what it was."""

from __future__ import annotations

import shutil
import socket
import time
from pathlib import Path

import pytest
import torch
from e2e_kit import Job, Site
from safetensors.torch import load_file, save_file

from mcore_qwen3.launch.ports import free_port

pytestmark = pytest.mark.timeout(900)


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


def test_weights_that_are_no_numbers_stop_before_the_first_step(site: Site, tiny_moe: Path, chat_rows: Path) -> None:
    """B47: the first bad tensor is named as in a Megatron checkpoint, its layer as the first number of the index."""
    model = site.folder / "not-finite"
    shutil.copytree(tiny_moe, model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.self_attn.q_norm.weight"][3] = torch.nan
    tensors["model.norm.weight"][0] = torch.inf
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    job = site.start(*command(model, chat_rows, "nan", "--tensor_model_parallel_size", 2), NPROC_PER_NODE="2")
    assert_failed(job, 2)
    name = "decoder.layers.self_attention.q_layernorm.weight[1, 3] = nan on rank 0"
    assert f"failed first: every weight must be finite; seen: {name}; change: " in job.last_line
    assert job.screen.count("must be finite") == 1 and "Traceback" not in job.screen
    assert list((site.folder / "nan").iterdir()) == []  # no log and no checkpoint


def test_nodes_that_do_not_share_the_save_folder_are_refused(
    site: Site, tmp_path: Path, tiny_moe: Path, chat_rows: Path
) -> None:
    """B94: two nodes, here two folders to work in, and a relative --save: another folder on each."""
    other = Site(tmp_path)
    other.environ["XDG_CACHE_HOME"] = site.environ["XDG_CACHE_HOME"]
    port = str(free_port())
    words = command(tiny_moe, chat_rows, "own")
    jobs = [
        node.start(
            *words, NNODES="2", NODE_RANK=str(rank), NPROC_PER_NODE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port
        )
        for rank, node in enumerate((site, other))
    ]
    try:
        for job in jobs:
            assert_failed(job, 2)
            assert "failed first: --save must be one folder that all ranks share; " in job.last_line
            assert f"is not seen by rank 1 on {socket.gethostname()} ({tmp_path / 'own'}); " in job.last_line
            assert "weights: " not in job.screen
        assert list((site.folder / "own").iterdir()) == [] and not (tmp_path / "own").exists()
    finally:
        jobs[1].kill()
