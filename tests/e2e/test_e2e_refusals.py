"""Mistakes that a user can mend: one line, exit code 2, and no rank is started. And the dry run, which starts none either.

Each is made once in a command that would run otherwise. What the messages say in detail is tested where they are made.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e_kit import Site
from safetensors.torch import load_file, save_file

Refused = Callable[..., str]


@pytest.fixture
def refused(site: Site, tiny_moe: Path, chat_rows: Path) -> Refused:
    """Run a good command with one thing changed; returns the one line that it printed on stderr."""

    def run(*more: object, load: Path = tiny_moe, dataset: object = chat_rows, ranks: int = 2) -> str:
        words = ["sft", "--load", load, "--dataset", dataset, "--train_iters", 4, "--save", "never", *more]
        done = site.run(*words, NPROC_PER_NODE=str(ranks))
        assert done.returncode == 2, done.stderr + done.stdout
        (line,) = done.stderr.splitlines()  # neither a traceback nor a word of the launcher
        assert line.startswith("megatron sft: error: ")
        assert "ranks joined" not in done.stdout and not (site.folder / "never").exists()
        return line

    return run


def test_unknown_flag(refused: Refused) -> None:
    line = refused("--tensor_model_paralel_size", 2)
    assert "nearest to tensor_model_paralel_size: --tensor_model_parallel_size" in line


def test_missing_file(refused: Refused) -> None:
    assert "no file none.jsonl" in refused(dataset="none.jsonl")


def test_row_that_is_no_json(refused: Refused, chat_rows: Path, tmp_path: Path) -> None:
    rows = chat_rows.read_text(encoding="utf-8").splitlines()
    rows[6] = rows[6][:-1]
    (tmp_path / "bad.jsonl").write_text("\n".join(rows), encoding="utf-8")
    assert f"{tmp_path / 'bad.jsonl'}:7: " in refused(dataset=tmp_path / "bad.jsonl")


def test_world_size_that_the_layout_does_not_divide(refused: Refused) -> None:
    line = refused("--tensor_model_parallel_size", 2, ranks=3)
    assert "grid: world size 3, TP 2, CP 1, PP 1, EP 1, expert-TP 1" in line


def test_layers_that_pp_does_not_divide(refused: Refused) -> None:
    assert "2 layers, PP 3" in refused("--pipeline_model_parallel_size", 3, ranks=3)


def test_global_batch_that_is_not_divisible(refused: Refused) -> None:
    assert "--global_batch_size 12 or 18" in refused("--micro_batch_size", 3, "--global_batch_size", 16)


def test_no_trained_token_in_the_whole_data(refused: Refused, chat_rows: Path) -> None:
    """Four tokens are less than any row's header."""
    line = refused("--max_length", 4, "--truncation_strategy", "right")
    assert "at least one trained token" in line and str(chat_rows) in line


def test_missing_tensor(refused: Refused, tiny_moe: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    model = tmp_path / "incomplete"
    shutil.copytree(tiny_moe, model)
    tensors = load_file(model / "model.safetensors")
    del tensors[name]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    assert f"1 tensor ({name}) missing" in refused(load=model)


# Qwen3-30B-A3B as it was published.
QWEN3_30B_A3B = {
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


def test_dry_run_of_the_users_command_for_16_gpus(site: Site, chat_rows: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    words = f"""sft --load {tmp_path} --dataset {chat_rows} --tensor_model_parallel_size 2
        --expert_model_parallel_size 8 --moe_grouped_gemm true --moe_shared_expert_overlap true
        --moe_aux_loss_coeff 0.01 --micro_batch_size 1 --global_batch_size 16 --packing true
        --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 --train_iters 2000
        --eval_iters 50 --finetune true --cross_entropy_loss_fusion true --lr 1e-5 --lr_warmup_iters 100
        --min_lr 1e-6 --save megatron_output/Qwen3-30B-A3B-Base --eval_interval 200 --save_interval 200
        --max_length 8192 --num_workers 8 --dataset_num_proc 8 --no_save_optim true --no_save_rng true
        --sequence_parallel true --use_flash_attn true --device cuda --dry_run true"""
    done = site.run(*words.split(), NNODES="2", NPROC_PER_NODE="8")
    assert (done.returncode, done.stderr) == (0, "")
    assert "30,532,122,624 parameters" in done.stdout
    grid = "world size 16 = TP 2 x CP 1 x DP 8 x PP 1; experts = expert-TP 1 x EP 8 x expert-DP 2 x PP 1"
    assert f"ranks: {grid}; sequence parallel on; device cuda, bf16" in done.stdout
    assert "16 rows a step = micro-batch 1 x DP 8 x 2 micro-batches; packed rows of 8,192 tokens" in done.stdout
    assert done.stdout.splitlines()[-1] == "dry run: nothing was started"
    assert not (site.folder / "megatron_output").exists()
