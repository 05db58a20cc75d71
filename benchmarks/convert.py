"""How fast conversions run, against `cp` of the same files: a random checkpoint of the true Qwen3-30B-A3B shapes.

    python benchmarks/convert.py --folder /tmp/convert-benchmark [--layers 4] [--workers 2] [--repeats 3]

Makes `<folder>/hf` once (4 layers: about 6 GB, bf16), then in turn, `--repeats` times: `cp` of the Hugging Face files,
hf2mcore, `cp` of the Megatron files, mcore2hf. Each ends by fsync of every file, each source was read just before, so
that all have the same cache. Prints the median of each in GB/s, the largest private memory (RssAnon) of any process, and
what `convert verify` says about the round trip. About three times the checkpoint's size is needed on the disk.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file

from mcore_qwen3.arch.shape import ModelShape
from mcore_qwen3.converters import plan_hf
from mcore_qwen3.converters.staging import flush_tree
from mcore_qwen3.converters.table import name_table

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SHARD_BYTES = 2_000_000_000


def make_checkpoint(directory: Path, layers: int, seed: int = 0) -> int:
    """Write random weights under official names, with an index; returns their bytes."""
    config = CONFIG | {"num_hidden_layers": layers, "max_window_layers": layers}
    shape = ModelShape.from_hf_config(config)
    stored = {rule.key: torch.bfloat16 for rule in name_table(shape)}
    shards = plan_hf(stored, shape, dtype=None, max_shard_bytes=SHARD_BYTES)
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    weight_map: dict[str, str] = {}
    for file, planned in shards.items():
        tensors = {}
        for tensor in planned:
            bits = torch.randint(-(2**15), 2**15, tensor.shape, generator=generator, dtype=torch.int16)
            # Any sign and mantissa, one exponent: finite values of the size of weights, which nothing compresses.
            tensors[tensor.name] = ((bits & -0x7F81) | 0x3B80).view(torch.bfloat16)
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    total = sum(tensor.nbytes for planned in shards.values() for tensor in planned)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    (directory / "generation_config.json").write_text('{"eos_token_id": [151645, 151643]}')
    flush_tree(directory)
    return total


def copy(source: Path, target: Path) -> None:
    """`cp` without sharing blocks, ended by fsync."""
    subprocess.run(["cp", "-r", "--reflink=never", source, target], check=True)
    flush_tree(target)


def convert(*words: object) -> int:
    """Run one conversion; returns the largest private memory of any of its processes, in bytes."""
    process = psutil.Popen(
        [sys.executable, "-m", "mcore_qwen3", "convert", *map(str, words)], stdout=subprocess.DEVNULL
    )
    largest = 0
    while process.poll() is None:
        try:
            for one in [process, *process.children(recursive=True)]:
                status = Path(f"/proc/{one.pid}/status").read_text()
                kilobytes = next((line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")), 0)
                largest = max(largest, int(kilobytes) * 1024)
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            pass
        time.sleep(0.05)
    if process.returncode:
        sys.exit(f"convert {' '.join(map(str, words))} failed")
    return largest


def read_once(directory: Path) -> None:
    """Bring the files into the cache, as far as it holds them."""
    subprocess.run(["sh", "-c", 'find "$0" -type f -exec cat {} + > /dev/null', directory], check=True)


def timed(source: Path, target: Path, job: object) -> float:
    """Seconds of one job from a source that was just read to a target that does not exist."""
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    read_once(source)
    start = time.perf_counter()
    job()  # type: ignore[operator]
    return time.perf_counter() - start


def side_file_hashes(directory: Path) -> dict[str, str]:
    """sha256 of config.json and generation_config.json."""
    names = ("config.json", "generation_config.json")
    return {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in names}


def main() -> None:
    """Make the checkpoint, measure, verify, and remove the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    hf, mcore, back, copied = (args.folder / name for name in ("hf", "mcore", "back", "copy"))
    if not hf.exists():
        make_checkpoint(hf, args.layers)
    size = sum(file.stat().st_size for file in hf.glob("*.safetensors"))
    print(f"{size / 1e9:.2f} GB, {args.layers} layers, {args.workers} workers, {os.cpu_count()} CPUs", flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in ("cp hf", "hf2mcore", "cp mcore", "mcore2hf")}
    memory = {"hf2mcore": 0, "mcore2hf": 0}
    workers = ("--workers", args.workers)

    def measured(name: str, source: Path, target: Path) -> None:
        memory[name] = max(memory[name], convert(name, source, target, *workers))

    for _ in range(args.repeats):
        seconds["cp hf"].append(timed(hf, copied, lambda: copy(hf, copied)))
        shutil.rmtree(copied)
        seconds["hf2mcore"].append(timed(hf, mcore, lambda: measured("hf2mcore", hf, mcore)))
        seconds["cp mcore"].append(timed(mcore, copied, lambda: copy(mcore, copied)))
        shutil.rmtree(copied)
        seconds["mcore2hf"].append(timed(mcore, back, lambda: measured("mcore2hf", mcore, back)))
        print({name: [round(value, 2) for value in values] for name, values in seconds.items()}, flush=True)
    speed = {name: size / 1e9 / statistics.median(values) for name, values in seconds.items()}
    for ours, cp in (("hf2mcore", "cp hf"), ("mcore2hf", "cp mcore")):
        print(
            f"{ours}: {speed[ours]:.2f} GB/s; {cp}: {speed[cp]:.2f} GB/s; ratio {speed[ours] / speed[cp]:.2f}; "
            f"largest RssAnon {memory[ours] / 1e9:.2f} GB"
        )
    print(f"side files equal: {side_file_hashes(hf) == side_file_hashes(back)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "mcore_qwen3", "convert", "verify", hf, back]).returncode
    for directory in (mcore, back):
        shutil.rmtree(directory)
    sys.exit(code)


if __name__ == "__main__":
    main()
