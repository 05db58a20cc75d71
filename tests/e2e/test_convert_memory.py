"""Memory of a conversion: a few tensors, whatever the size of the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mcore_qwen3.arch import ModelShape
from mcore_qwen3.converters import plan_hf
from mcore_qwen3.converters.table import name_table

ROOT = Path(__file__).resolve().parents[2]
SHARD = 8 * 2**20
SHARDS = 16
# 16 layers of 8 MiB in bf16: 512 x (2 x 512 + 2 x 256 + 3 x 2048) x 2 bytes = 7.5 MiB and the norms.
CONFIG = {
    "model_type": "qwen3", "hidden_size": 512, "num_hidden_layers": 16, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "intermediate_size": 2048, "vocab_size": 64, "rope_theta": 1e6, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}  # fmt: skip
# Private memory alone: pages of a mapped file are the kernel's to drop. Sampled, so a peak of a moment can be missed; what
# is held from the first tensor to the last cannot. The limits of chunk, block and cache, made for shards of gigabytes, are
# as small here as the shards are.
MEASURED = """
import sys, threading
from pathlib import Path
from mcore_qwen3.cli.convert import run
from mcore_qwen3.converters import hf_reader, hf_writer, mcore_writer, torch_dist
mcore_writer.CHUNK_BYTES = hf_writer._BLOCK_BYTES = hf_reader._BLOCK_BYTES = 2 * 2**20
torch_dist._CACHE_BYTES = 8 * 2**20
{plant}
def private():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return 1024 * int(line.split()[1])
command, small, big, out = sys.argv[1:]
assert run([command, small, out + "-small"]) == 0  # imports, pools and buffers of the allocator
before = highest = private()
done = threading.Event()
def watch():
    global highest
    while not done.wait(0.0005):
        highest = max(highest, private())
watcher = threading.Thread(target=watch)
watcher.start()
assert run([command, big, out]) == 0
done.set()
watcher.join()
print("extra bytes:", highest - before)
"""
# Reads every file whole when it is opened, and keeps it.
HOLDS_ALL = """
from mcore_qwen3.converters import hf_reader
inner, kept = hf_reader._open_file, []
def open_and_keep(path):
    kept.append(bytearray(path.read_bytes()))
    return inner(path)
hf_reader._open_file = open_and_keep
"""


def write_sharded(directory: Path, layers: int) -> None:
    """A random model in files of one shard's size."""
    config = CONFIG | {"num_hidden_layers": layers}
    shape = ModelShape.from_hf_config(config)
    stored = {rule.key: torch.bfloat16 for rule in name_table(shape)}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    weight_map: dict[str, str] = {}
    for file, tensors in plan_hf(stored, shape, dtype=None, max_shard_bytes=SHARD).items():
        save_file(
            {t.name: torch.randn(t.shape).bfloat16() for t in tensors}, directory / file, metadata={"format": "pt"}
        )
        weight_map |= {tensor.name: file for tensor in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def extra_bytes(command: str, small: Path, big: Path, out: Path, plant: str = "") -> int:
    """Highest memory of a conversion, over what the process had before, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED.format(plant=plant), command, str(small), str(big), str(out)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return int(done.stdout.split("extra bytes:")[1])


@pytest.mark.timeout(180)
def test_b18_sixteen_shards_need_the_memory_of_less_than_three(tmp_path: Path) -> None:
    """Both directions; and a reader that holds its source whole would be seen."""
    write_sharded(tmp_path / "small", 2)
    write_sharded(tmp_path / "big", SHARDS)
    sizes = [file.stat().st_size for file in (tmp_path / "big").glob("*.safetensors")]
    assert len(sizes) == SHARDS and sum(sizes) > 0.9 * SHARDS * SHARD
    assert extra_bytes("hf2mcore", tmp_path / "small", tmp_path / "big", tmp_path / "mcore") < 3 * SHARD
    assert extra_bytes("mcore2hf", tmp_path / "mcore-small", tmp_path / "mcore", tmp_path / "back") < 3 * SHARD
    held = extra_bytes("hf2mcore", tmp_path / "small", tmp_path / "big", tmp_path / "held", HOLDS_ALL)
    assert held > 0.9 * SHARDS * SHARD
