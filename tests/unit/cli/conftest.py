"""A tiny model folder (config.json alone), a data file, and the command line as a subprocess."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
# What a machine that runs the tests may have set, and what would change the answers here.
_UNSET = ("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")

Megatron = Callable[..., "subprocess.CompletedProcess[str]"]
WriteCheckpoint = Callable[..., Path]


def model_config(**changes: Any) -> dict[str, Any]:
    """A tiny Qwen3-MoE config.json: 4 layers, 2 KV heads, 8 experts."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 32,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 64, "vocab_size": 128,
        "max_position_embeddings": 1024, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True,
    }  # fmt: skip
    return config | changes


@pytest.fixture
def moe_dir(tmp_path: Path) -> Path:
    """A Hugging Face folder with nothing but config.json."""
    folder = tmp_path / "tiny-moe"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model_config()))
    return folder


@pytest.fixture
def dense_dir(tmp_path: Path) -> Path:
    """The same sizes without experts."""
    moe_only = {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"}
    config = {name: value for name, value in model_config().items() if name not in moe_only}
    config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    folder = tmp_path / "tiny-dense"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    """One chat row."""
    file = tmp_path / "rows.jsonl"
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
    file.write_text(json.dumps(row) + "\n")
    return file


@pytest.fixture
def write_checkpoint() -> WriteCheckpoint:
    """Write the files that make a training checkpoint complete, and the tracker; returns the iteration's folder."""

    def write(root: Path, iteration: int, has_optimizer: bool = True, tracker: bool = True) -> Path:
        folder = root / f"iter_{iteration:07d}"
        folder.mkdir(parents=True)
        for name in (".metadata", "metadata.json", "train_state.json"):
            (folder / name).write_text(json.dumps({"iteration": iteration, "has_optimizer": has_optimizer}))
        if tracker:
            (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
        return folder

    return write


@pytest.fixture
def megatron(tmp_path: Path) -> Megatron:
    """Run ``python -m mcore_qwen3 <words>`` in ``tmp_path``; keyword arguments are environment variables."""

    def run(*words: object, **environ: str) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if name not in _UNSET}
        env |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **environ}
        command = [sys.executable, "-m", "mcore_qwen3", *map(str, words)]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=50)

    return run
