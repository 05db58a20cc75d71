"""Saving and loading of a checkpoint against torch.save and safetensors, and how long an async save holds training up.

    python benchmarks/checkpoint.py --dir FOLDER [--gib 1] [--rounds 3] [--steps 6]

Files: the same tensors, the same disk, one process, the ways in turn in every round, the median of the rounds. Every save
ends with fsync of its files; every load is of files that the page cache has let go of (`posix_fadvise`). torch.save and
torch.load are given one file, safetensors one file, ours its directory; torch.load is given `mmap=True` too, and every
loaded value is read once. Ours compares check sums as it reads; `torch.load` and safetensors have none to compare.

Stall: a real model trains on one rank, one save after the second step. What saving takes from the loop is the time in
`save` and in the polls between steps, and what the steps beside the writing are slower than the others.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from mcore_qwen3.converters import OptimizerSource
from mcore_qwen3.converters.staging import flush, flush_tree
from mcore_qwen3.converters.torch_dist_writer import Chunk, merge_parts, write_common, write_part

Tensors = dict[str, torch.Tensor]
CHUNK_ROWS = 7 * 2**20  # fp32 values of a chunk, as the trainer cuts them


def make_tensors(gib: float) -> Tensors:
    """Matrices of 4,096 columns, as many as fill the size, with random values."""
    generator = torch.Generator().manual_seed(0)
    count = max(1, round(gib * 2**30 / (4096 * 4096 * 4)))
    return {f"optimizer.state.exp_avg.{n}": torch.randn(4096, 4096, generator=generator) for n in range(count)}


def cut(key: str, values: torch.Tensor) -> Iterator[Chunk]:
    """A tensor's chunks."""
    rows = CHUNK_ROWS // values.shape[1]
    for first in range(0, len(values), rows):
        part = values[first : first + rows]
        yield Chunk(key, (*values.shape,), (first, 0), (*part.shape,), values.dtype, partial(_itself, part))


def _itself(values: torch.Tensor) -> torch.Tensor:
    return values


def save_ours(tensors: Tensors, folder: Path) -> None:
    """A directory as the trainer writes it."""
    folder.mkdir()
    chunks = [chunk for key, values in tensors.items() for chunk in cut(key, values)]
    merge_parts(folder, chunks, write_part(folder, chunks, 0))
    write_common(folder, 1)
    flush_tree(folder)


def load_ours(folder: Path) -> Iterator[torch.Tensor]:
    """Every tensor, whole."""
    with OptimizerSource(folder) as source:
        for key, entry in source.entries().items():
            yield source.read(key, (slice(None),) * len(entry.shape))


def save_torch(tensors: Tensors, folder: Path) -> None:
    """One file of torch.save."""
    folder.mkdir()
    torch.save(tensors, folder / "all.pt")
    flush_tree(folder)


def load_torch(folder: Path, *, mmap: bool) -> Iterator[torch.Tensor]:
    """Every tensor of torch.load."""
    yield from torch.load(folder / "all.pt", weights_only=True, mmap=mmap).values()


def save_safetensors(tensors: Tensors, folder: Path) -> None:
    """One safetensors file."""
    folder.mkdir()
    save_file(tensors, folder / "all.safetensors")
    flush_tree(folder)


def load_safetensors(folder: Path) -> Iterator[torch.Tensor]:
    """Every tensor of load_file."""
    yield from load_file(folder / "all.safetensors").values()


SAVES = {"ours": save_ours, "torch.save": save_torch, "safetensors": save_safetensors}
LOADS: dict[str, tuple[str, Callable[[Path], Iterator[torch.Tensor]]]] = {
    "ours": ("ours", load_ours),
    "torch.load": ("torch.save", partial(load_torch, mmap=False)),
    "torch.load mmap": ("torch.save", partial(load_torch, mmap=True)),
    "safetensors": ("safetensors", load_safetensors),
}


def forget(folder: Path) -> None:
    """Let the page cache drop a folder's files."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def seconds(action: Callable[[], Any]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def costs(action: Callable[[], Any]) -> tuple[float, float]:
    """(seconds, CPU seconds of this process): the second says something on a busy machine too."""
    before = time.process_time()
    return seconds(action), time.process_time() - before


def compare_files(root: Path, gib: float, rounds: int) -> None:
    """Print GB/s, and CPU seconds for a GB, of every way."""
    tensors = make_tensors(gib)
    nbytes = sum(values.nbytes for values in tensors.values())
    saving: dict[str, list[tuple[float, float]]] = {name: [] for name in SAVES}
    loading: dict[str, list[tuple[float, float]]] = {name: [] for name in LOADS}

    def read_all(load: Callable[[Path], Iterator[torch.Tensor]], folder: Path) -> None:
        for values in load(folder):
            values.sum()

    for _ in range(rounds):
        for name, save in SAVES.items():
            saving[name].append(costs(partial(save, tensors, root / name)))
        for name, (writer, load) in LOADS.items():
            forget(root / writer)
            loading[name].append(costs(partial(read_all, load, root / writer)))
        for name in SAVES:
            shutil.rmtree(root / name)
        flush(root)
    print(f"{nbytes / 1e9:.2f} GB of fp32 in {len(tensors)} tensors, {rounds} rounds, median (all)")
    for what, times in (("save", saving), ("load", loading)):
        for name, taken in times.items():
            each = " ".join(f"{nbytes / 1e9 / wall:.2f}" for wall, _ in taken)
            speed = nbytes / 1e9 / statistics.median(wall for wall, _ in taken)
            cpu = statistics.median(cpu for _, cpu in taken) / (nbytes / 1e9)
            print(f"  {what} {name:16} {speed:5.2f} GB/s ({each}), {cpu:.2f} CPU seconds a GB")


MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 512,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1024, "vocab_size": 32000,
    "max_position_embeddings": 1024, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "norm_topk_prob": True,
}  # fmt: skip


def start_model(device_name: str) -> tuple[Any, Any]:
    """(wrapped chunks, optimizer) of a random model on one rank."""
    from mcore_qwen3.arch import ModelShape, resolve_layout
    from mcore_qwen3.runtime import groups
    from mcore_qwen3.runtime.device import choose_device

    device = choose_device(device_name)
    groups.prepare_megatron(device)
    groups.start_process_group(device)
    shape = ModelShape.from_hf_config(MODEL, source="benchmark")
    layout = resolve_layout(1, tensor=1, pipeline=1, expert=1, shape=shape)
    groups.start_model_parallel(layout)
    groups.seed_everything(1)
    from mcore_qwen3.model.build import build_chunks
    from mcore_qwen3.model.config import ModelOptions
    from mcore_qwen3.train.optimizer import OptimizerSettings, build_optimizer, wrap_for_data_parallel

    models = build_chunks(shape, layout, ModelOptions(on_cuda=device.is_cuda))
    for parameter in models[0].parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.02)
    chunks = wrap_for_data_parallel(models)
    return chunks, build_optimizer(chunks, OptimizerSettings())


def make_batch(tokens: int) -> Any:
    """A step's batch: one row of random tokens, all trained."""
    from mcore_qwen3.data.batches import StepBatch
    from mcore_qwen3.data.micro_batch import build_micro_batch

    ids = np.random.default_rng(0).integers(2, MODEL["vocab_size"], tokens).astype(np.int64)
    batch = build_micro_batch([[(ids, np.ones(tokens, dtype=np.uint8))]], tokens, 0, 1)
    rows = np.zeros((1, 1), dtype=np.int64)
    return StepBatch([batch], tokens, rows, tokens, tokens - 1, tokens, tokens - 1, tokens**2, lambda row: [])


def train_with_saver(chunks: Any, optimizer: Any, batch: Any, saver: Any, steps: int) -> tuple[float, float, float]:
    """(seconds in save and polls, seconds of a step beside a pending save, seconds of another step)."""
    from mcore_qwen3.train.state import TrainState
    from mcore_qwen3.train.step import train_step

    stalled, beside, alone = 0.0, [], []
    for step in range(1, steps + 1):
        pending = saver.is_pending
        (beside if pending else alone).append(seconds(partial(train_step, chunks, optimizer, batch, 1e-5)))
        stalled += seconds(saver.poll)
        if step == 2:
            stalled += seconds(partial(saver.save, TrainState(iteration=step), chunks, optimizer))
    saver.wait()
    return stalled, statistics.median(beside) if beside else 0.0, statistics.median(alone)


def measure_stall(root: Path, rounds: int, steps: int, device: str) -> None:
    """Print what a save takes from the loop, synchronous and not."""
    chunks, optimizer = start_model(device)
    from mcore_qwen3.cli import rank_parts
    from mcore_qwen3.config import RunConfig, with_values

    (root / "hf").mkdir()
    (root / "hf" / "config.json").write_text("{}")
    taken: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    savers = {}
    for asynchronous in taken:
        config = with_values(RunConfig(), {"save": str(root / f"run_{asynchronous}"), "async_save": asynchronous})
        run: Any = SimpleNamespace(config=config, hf_files=root / "hf")
        savers[asynchronous] = rank_parts.checkpoint_saver(run, lambda text: None)
    batch = make_batch(512)
    for _ in range(rounds):
        for asynchronous, saver in savers.items():
            taken[asynchronous].append(train_with_saver(chunks, optimizer, batch, saver, steps))
            size = sum(file.stat().st_size for file in (root / f"run_{asynchronous}" / "iter_0000002").iterdir())
    stalls = {asynchronous: statistics.median(one[0] for one in all_of) for asynchronous, all_of in taken.items()}
    alone = statistics.median(one[2] for all_of in taken.values() for one in all_of)
    beside = statistics.median(one[1] for one in taken[True])
    print(f"stall of one save of {size / 1e9:.2f} GB, {rounds} rounds, median (all)")
    for asynchronous, all_of in taken.items():
        each = " ".join(f"{one[0]:.2f}" for one in all_of)
        print(f"  {'async' if asynchronous else 'sync ':5} {stalls[asynchronous]:6.2f} s ({each})")
    print(f"  async / sync {stalls[True] / stalls[False]:.1%}; a step {alone:.2f} s, beside the writing {beside:.2f} s")


def main() -> None:
    """Both measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dir", type=Path, required=True, help="a folder on the disk to measure; a new one in it is used"
    )
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    root = args.dir / f"checkpoint_benchmark_{os.getpid()}"
    root.mkdir(parents=True)
    try:
        compare_files(root, args.gib, args.rounds)
        measure_stall(root, args.rounds, args.steps, args.device)
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
