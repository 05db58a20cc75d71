"""`megatron compare` as a user starts it: two that agree, and a model whose rope base is another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from e2e_kit import Done, Site


def compare(site: Site, hf: Path, dataset: Path, *more: object, ranks: int) -> Done:
    words = f"compare --hf {hf} --dataset {dataset} --steps 2 --device cpu --packing true --max_length 128"
    return site.run(*words.split(), "--global_batch_size", 4, "--lr", 1e-3, *more, NPROC_PER_NODE=str(ranks))


def test_two_that_agree(site: Site, small_vocabulary_moe: Path, chat_rows: Path) -> None:
    """Ours from a torch_dist directory."""
    assert site.run("convert", "hf2mcore", small_vocabulary_moe, "mcore").returncode == 0
    words = ("--load", "mcore", "--tensor_model_parallel_size", 2, "--moe_aux_loss_coeff", 0.0, "--save", "unused")
    done = compare(site, small_vocabulary_moe, chat_rows, *words, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no effect in a comparison, which is in fp32 and saves nothing: --save" in done.stdout
    assert "weights, 69: the same, bit for bit" in done.stdout
    assert "activations of the first micro-batch, 19: agree" in done.stdout
    assert "gradients of the first step, 69: agree" in done.stdout
    assert "the two loops agree over 2 steps" in done.stdout.splitlines()[-1]
    assert "megatron: mcore (qwen3_moe, " in done.stdout
    assert not (site.folder / "unused").exists() and not (site.folder / "nothing is saved").exists()


def test_another_rope_base_is_found_and_named(
    site: Site, small_vocabulary_moe: Path, chat_rows: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(small_vocabulary_moe, other)
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 1e4
    (other / "config.json").write_text(json.dumps(config))
    done = compare(site, small_vocabulary_moe, chat_rows, "--load", other, ranks=1)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "config.json: rope_theta is 10000.0 in --load and 1000000.0 in --hf" in done.stdout
    assert "weights, 69: the same, bit for bit" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith(
        "the two loops differ, first in model.layers.0.self_attn (query after q_norm and rotary embedding)"
    )
    assert ": the rotary embedding: its base (rope_theta)" in last
