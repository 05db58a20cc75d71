"""The checkpoint keys and global shapes of our modules are those of transformer-engine's (read off on a real one)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.model_checks import TINY_MOE, stored_tensors
from helpers.ranks import pool


@pytest.fixture(scope="module")
def golden(repo_root: Path) -> dict[str, Any]:
    return json.loads((repo_root / "tests/golden/te_checkpoint_keys.json").read_text())


def sizes_of(config: dict[str, Any], *, moe: bool) -> dict[str, Any]:
    names = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "vocab_size")
    sizes = {name: config[name] for name in names}
    sizes |= {"head_dim": config["kv_channels"], "tie_word_embeddings": config["tied"]}
    if moe:
        experts = {"num_experts": config["num_moe_experts"], "moe_ffn_hidden_size": config["moe_ffn_hidden_size"]}
        sizes |= {**experts, "moe_router_topk": 2, "norm_topk_prob": True}
    return sizes


@pytest.mark.parametrize("spec", ["dense", "moe_grouped", "moe_sequential"])
def test_keys_and_shapes_are_transformer_engines(golden: dict[str, Any], spec: str) -> None:
    sizes = sizes_of(golden["config"], moe=spec != "dense")
    stored = pool(1).run(stored_tensors, sizes=sizes, moe_grouped_gemm=spec == "moe_grouped")[0]
    assert {key: shape for key, (shape, _) in stored.items()} == golden["specs"][spec]
    assert [key for key, (_, once) in stored.items() if not once] == []


def test_a_tied_model_has_no_output_layer() -> None:
    tied, untied = (pool(1).run(stored_tensors, sizes={"tie_word_embeddings": tied})[0] for tied in (True, False))
    assert untied.keys() - tied.keys() == {"output_layer.weight"}
    assert tied.keys() < untied.keys()
    assert all(once for _, once in tied.values())


def test_head_dim_is_the_configs_and_not_hidden_over_heads() -> None:
    # Known fault B10: head_dim is a number of its own. D2 has 64 fused rows (32 with hidden / heads).
    d2 = pool(1).run(stored_tensors, sizes={"num_layers": 2})[0]
    assert d2["decoder.layers.self_attention.linear_qkv.weight"][0] == [2, 64, 16]
    assert d2["decoder.layers.self_attention.linear_proj.weight"][0] == [2, 16, 32]
    # Qwen3-0.6B: 16 x 128 + 2 x 8 x 128 = 4096 rows (3072 with hidden / heads).
    small = {"hidden_size": 1024, "num_attention_heads": 16, "num_query_groups": 8, "head_dim": 128}
    stored = pool(1).run(stored_tensors, sizes=small)[0]
    assert stored["decoder.layers.self_attention.linear_qkv.weight"][0] == [1, 4096, 1024]
    assert stored["decoder.layers.self_attention.q_layernorm.weight"][0] == [1, 128]


def test_a_moe_model_has_no_dense_mlp() -> None:
    keys = pool(1).run(stored_tensors, sizes=TINY_MOE)[0].keys()
    mlp = {key for key in keys if ".mlp." in key}
    start = "decoder.layers.mlp."
    assert mlp == {
        f"{start}router.weight",
        f"{start}experts.experts.linear_fc1.weight",
        f"{start}experts.experts.linear_fc2.weight",
    }
