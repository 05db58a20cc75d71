"""State of one rank: numbers written out by hand, and published bytes of the real model."""

from __future__ import annotations

import pytest
from official_configs import D2, M2, OFFICIAL

from mcore_qwen3.arch import ModelShape, RankState, count_parameters, rank_state, resolve_layout

GIB = 2**30


@pytest.mark.parametrize(("expert_tensor", "expected"), [(1, 45.93), (2, 35.80)])
def test_b96_the_users_command_on_16_gpus(expert_tensor: int, expected: float) -> None:
    shape = ModelShape.from_hf_config(OFFICIAL["30B-A3B"])
    layout = resolve_layout(16, tensor=2, expert=8, expert_tensor=expert_tensor, shape=shape)
    state = rank_state(shape, layout, 0, bf16=True)
    assert round(state.total_bytes / GIB, 2) == expected


def parts(state: RankState) -> dict[str, int]:
    names = ("layers", "embedding", "output", "attention", "norms", "mlp", "router", "experts")
    return {name: getattr(state, name) for name in names}


def test_dense_tied_tp2_pp2_by_hand() -> None:
    shape = ModelShape.from_hf_config(D2)  # hidden 16, 2 layers, vocabulary 101, QKV 64 rows, ffn 32
    layout = resolve_layout(4, tensor=2, pipeline=2, shape=shape)
    layer = {"attention": 32 * 16 + 16 * 16 + 2 * 8, "mlp": 3 * 16 * 16, "router": 0, "experts": 0, "layers": 1}
    first, last = rank_state(shape, layout, 0, bf16=False), rank_state(shape, layout, 1, bf16=False)
    assert parts(first) == layer | {"embedding": 51 * 16, "output": 0, "norms": 2 * 16}
    # The last stage holds its own copy of the tied embedding, and the final norm.
    assert parts(last) == layer | {"embedding": 0, "output": 51 * 16, "norms": 3 * 16}
    assert (first.parameters, last.parameters) == (2400, 2416)
    # fp32: weight 4, gradient 4, two moments 8; DP is 1.
    assert (last.weight_bytes, last.gradient_bytes, last.optimizer_bytes) == (2416 * 4, 2416 * 4, 2416 * 8)


def test_tied_without_pipeline_has_no_copy_and_untied_has_an_output_layer() -> None:
    tied = ModelShape.from_hf_config(D2)
    untied = ModelShape.from_hf_config(D2 | {"tie_word_embeddings": False})
    assert rank_state(tied, resolve_layout(1, shape=tied), 0, bf16=True).output == 0
    assert rank_state(untied, resolve_layout(1, shape=untied), 0, bf16=True).output == 101 * 16


def test_moe_experts_are_split_over_ep_and_expert_tp_and_the_router_over_nothing() -> None:
    shape = ModelShape.from_hf_config(M2)  # 4 experts of 3 x 16 x 8
    layout = resolve_layout(8, tensor=2, expert=2, expert_tensor=2, shape=shape)  # DP 4, expert-DP 2
    state = rank_state(shape, layout, 0, bf16=True)
    assert state.experts == 2 * (4 // 2) * 3 * 16 * 4
    assert state.router == 2 * 4 * 16
    assert state.mlp == 0
    assert state.weight_bytes == 2 * state.parameters and state.gradient_bytes == 4 * state.parameters
    assert state.optimizer_bytes == 12 * (state.dense // 4 + state.experts // 2)


@pytest.mark.parametrize("config", [D2 | {"tie_word_embeddings": False}, M2], ids=["dense", "moe"])
def test_one_rank_holds_the_whole_model(config: dict) -> None:
    shape = ModelShape.from_hf_config(config)
    state = rank_state(shape, resolve_layout(1, shape=shape), 0, bf16=True)
    assert state.parameters == count_parameters(shape).total
    assert state.total_bytes == state.parameters * (2 + 4 + 12)


def test_a_share_that_does_not_divide_is_rounded_up() -> None:
    shape = ModelShape.from_hf_config(D2)
    state = rank_state(shape, resolve_layout(5, shape=shape), 0, bf16=True)
    assert state.parameters % 5 == 2
    assert state.optimizer_bytes == 12 * (state.parameters // 5 + 1)
