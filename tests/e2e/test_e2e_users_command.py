"""The command that the project is for, every flag as it is written, on four CPU ranks with a tiny model.

Only paths and sizes differ: fewer ranks and experts, 20 steps, rows of 512 tokens, and a learning rate at which a random
model moves in so few steps.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from e2e_kit import Done, Site, steps_of
from safetensors.torch import load_file

from mcore_qwen3.arch import read_model_shape
from mcore_qwen3.converters import OptimizerSource, TorchDistSource

pytestmark = pytest.mark.timeout(900)

VOCABULARY = 3001 + 26  # the cut tokenizer's, added tokens included
ENVIRONMENT = {"NPROC_PER_NODE": "4", "NNODES": "1", "NODE_RANK": "0"}


def users_command(load: Path, dataset: Path, train_iters: int = 20) -> list[object]:
    """The words after `megatron`."""
    return f"""sft
        --load {load} --dataset {dataset}
        --tensor_model_parallel_size 2 --expert_model_parallel_size 2
        --moe_grouped_gemm true --moe_shared_expert_overlap true --moe_aux_loss_coeff 0.01
        --micro_batch_size 1 --global_batch_size 16 --packing true
        --recompute_granularity full --recompute_method uniform --recompute_num_layers 1
        --train_iters {train_iters} --eval_iters 2 --finetune true --cross_entropy_loss_fusion true
        --lr 3e-3 --lr_warmup_iters 5 --min_lr 1e-6 --save megatron_output/tiny
        --eval_interval 10 --save_interval 10 --max_length 512 --num_workers 2 --dataset_num_proc 2
        --no_save_optim true --no_save_rng true --sequence_parallel true --use_flash_attn true""".split()


@pytest.fixture(scope="module")
def done(site: Site, small_vocabulary_moe: Path, chat_rows: Path) -> Done:
    """The command, run to its end once for all tests here."""
    return site.run(*users_command(small_vocabulary_moe, chat_rows), **ENVIRONMENT)


@pytest.fixture
def save(site: Site) -> Path:
    return site.folder / "megatron_output" / "tiny"


def test_it_trains_to_the_end(done: Done, save: Path) -> None:
    assert done.returncode == 0, done.stderr + done.stdout
    records = steps_of(save)
    assert [record["iteration"] for record in records] == list(range(1, 21))
    losses = [record["loss"] for record in records]
    assert all(map(math.isfinite, losses))
    assert abs(losses[0] - math.log(VOCABULARY)) < 0.2  # random weights: ln of the vocabulary
    assert losses[0] - sum(losses[-5:]) / 5 > 1
    assert all(0.99 < record["balance_loss"] < 2 for record in records)
    events = [json.loads(line) for line in (save / "train_log.jsonl").read_text().splitlines() if "event" in line]
    happened = [("start", 0), ("eval", 10), ("save", 10), ("eval", 20), ("save", 20), ("memory", 20), ("stop", 20)]
    assert [(event["event"], event["iteration"]) for event in events] == happened
    for event in (each for each in events if each["event"] == "eval"):
        assert event["eval_ppl"] == pytest.approx(math.exp(event["eval_loss"])) and 0 <= event["eval_token_acc"] <= 1
    assert (save / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_what_is_tried_and_trained_is_said(done: Done, save: Path, small_vocabulary_moe: Path) -> None:
    """All of the model's parameters, counted over TP 2 and EP 2; rows are packs of 512 tokens."""
    weights = load_file(small_vocabulary_moe / "model.safetensors")
    total = sum(weight.numel() for weight in weights.values())
    assert f"; {total:,} of {total:,} parameters are trained" in done.stdout
    assert done.stdout.count("dry batch of the largest shape, 1 x 512 tokens: ") == 1
    assert done.stdout.index("dry batch") < done.stdout.index("step 1/20 | ")
    for record in steps_of(save):
        assert 1 <= record["expert_load"] <= 8
    assert " | expert load " in done.stdout


def test_the_peak_stands_beside_the_estimate(done: Done, save: Path) -> None:
    """The process grows by more than the tensors of a tiny model: libraries open and buffers are made in its first step."""
    (line,) = [line for line in done.stdout.splitlines() if "peak memory of the fullest rank" in line]
    (memory,) = [json.loads(each) for each in (save / "train_log.jsonl").read_text().splitlines() if '"memory"' in each]
    assert 0 < memory["estimated_gib"] < memory["peak_gib"] < 2
    assert f"step 20/20 | peak memory of the fullest rank: {memory['peak_gib']:.3f} GiB" in line
    assert f"; estimated {memory['estimated_gib']:.3f} GiB (" in line


def test_flags_without_effect_are_said_once(done: Done) -> None:
    for name in ("moe_shared_expert_overlap", "no_save_rng", "attention_backend", "cross_entropy_loss_fusion"):
        assert done.stdout.count(f"note: --{name} has no effect") == 1, done.stdout
    assert done.stdout.count("--use_flash_attn true is read as --attention_backend flash") == 1
    assert done.stdout.count("expert_tensor_parallel_size is not set: 1 is taken") == 1
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in done.stdout  # set for GPUs alone
    assert "modules: torch (auto: transformer-engine runs on CUDA only); fp32" in done.stdout


def test_the_checkpoint_is_complete_and_has_no_optimizer(done: Done, save: Path, small_vocabulary_moe: Path) -> None:
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "20"
    assert sorted(path.name for path in save.glob("iter_*")) == ["iter_0000010", "iter_0000020"]
    last = save / "iter_0000020"
    for name in (".metadata", "metadata.json", "common.pt", "run_config.yaml", "train_state.json"):
        assert (last / name).stat().st_size, name
    for file in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (last / "hf" / file).read_bytes() == (small_vocabulary_moe / file).read_bytes()
    state = json.loads((last / "train_state.json").read_text())
    facts = {"iteration": 20, "consumed_samples": 320, "has_optimizer": False, "stopped_by": "end"}
    assert {name: state[name] for name in facts} == facts
    shape = read_model_shape(str(save))
    with TorchDistSource(last, shape) as weights, OptimizerSource(last) as moments:
        assert not moments.entries()
        embedding = weights.read("embedding.word_embeddings.weight", (slice(None), slice(None)))
        assert embedding.shape == (VOCABULARY, 32)
        assert sum(math.prod(entry.shape) for entry in weights.entries().values()) == _parameters()


def _parameters() -> int:
    """Of the tiny model, by hand: two embeddings, two layers (attention, norms, router, experts), a last norm."""
    attention = 32 * (4 + 2 + 2) * 16 + 4 * 16 * 32
    layer = attention + 2 * 32 + 2 * 16 + 8 * 32 + 8 * 3 * 32 * 16
    return 2 * VOCABULARY * 32 + 2 * layer + 32


def test_the_same_command_again_has_nothing_to_do(
    done: Done, site: Site, small_vocabulary_moe: Path, chat_rows: Path, save: Path
) -> None:
    before = (save / "train_log.jsonl").read_bytes()
    again = site.run(*users_command(small_vocabulary_moe, chat_rows), **ENVIRONMENT)
    assert (again.returncode, again.stderr) == (0, "")
    assert "iter_0000020 has 20 of 20 steps" in again.stdout.splitlines()[-1]
    assert (save / "train_log.jsonl").read_bytes() == before


def test_more_steps_without_optimizer_state_name_the_three_ways_out(
    done: Done, site: Site, small_vocabulary_moe: Path, chat_rows: Path
) -> None:
    more = site.run(*users_command(small_vocabulary_moe, chat_rows, train_iters=30), **ENVIRONMENT)
    assert more.returncode == 2 and len(more.stdout.splitlines()) == 7, more.stdout  # the launcher's table alone
    (line,) = more.stderr.splitlines()  # and none of the launcher's: no rank was started
    assert line.startswith("megatron sft: error: ") and "no optimizer state" in line
    assert all(way in line for way in ("--no_load_optim true", "--resume never", "another --save"))
