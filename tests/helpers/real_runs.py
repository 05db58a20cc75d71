"""Whole runs of `megatron sft` on one rank, without its processes: the trainer's own loop, log and checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from helpers.ranks import pool
from helpers.training import start_groups


def train(words: str, prepared: Any) -> None:
    """`megatron sft <words>` on prepared data, to its end."""
    from mcore_qwen3.cli.resolve import resolve
    from mcore_qwen3.config import parse_args

    run = resolve(parse_args([*words.split(), "--dataset", "rows.jsonl", "--device", "cpu"], "sft"), 1, {})
    assert pool(1).run(_train, run=run, prepared=prepared) == [0]


def _train(run: Any, prepared: Any) -> int:
    from mcore_qwen3.cli.sft_rank import _train as train_rank
    from mcore_qwen3.runtime.device import cpu

    start_groups(run.layout)
    return train_rank(run, prepared, cpu(), lambda text: None)


def two_runs(folder: Path, model: Path, prepared: Any) -> tuple[Path, Path]:
    """Save folders of two runs of 24 steps; the second lost its last checkpoint and did steps 17 to 20 again."""
    common = (
        f"--load {model} --packing true --max_length 64 --global_batch_size 4 --lr_decay_iters 24 --eval_interval 8 "
        "--eval_iters 1 --num_workers 0 --log_interval 100"
    )
    plain, broken = folder / "lr-1e-3", folder / "lr-3e-3-balanced"
    train(f"{common} --save {plain} --train_iters 24 --save_interval 8 --lr 1e-3", prepared)
    other = f"{common} --save {broken} --lr 3e-3 --moe_aux_loss_coeff 0.01"
    train(f"{other} --train_iters 16 --save_interval 8", prepared)
    train(f"{other} --train_iters 20 --save_interval 100", prepared)
    shutil.rmtree(broken / "iter_0000020")  # as if the run had been killed before it was saved
    (broken / "latest_checkpointed_iteration.txt").write_text("16")
    train(f"{other} --train_iters 24 --save_interval 100", prepared)
    return plain, broken
