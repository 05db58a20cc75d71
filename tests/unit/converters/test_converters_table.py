"""The name table: keys, shapes and row blocks against numbers from outside the table."""

from __future__ import annotations

import math

import pytest
from converter_kit import KINDS, tiny_shape

from mcore_qwen3.converters.table import Rule, name_table, units

ATTENTION = {
    "embedding.word_embeddings.weight": (101, 16),
    "decoder.final_layernorm.weight": (16,),
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (2, 16),
    "decoder.layers.self_attention.linear_qkv.weight": (2, 64, 16),
    "decoder.layers.self_attention.q_layernorm.weight": (2, 8),
    "decoder.layers.self_attention.k_layernorm.weight": (2, 8),
    "decoder.layers.self_attention.linear_proj.weight": (2, 16, 32),
}
DENSE = {
    "decoder.layers.mlp.linear_fc1.layer_norm_weight": (2, 16),
    "decoder.layers.mlp.linear_fc1.weight": (2, 64, 16),
    "decoder.layers.mlp.linear_fc2.weight": (2, 16, 32),
}
MOE = {
    "decoder.layers.pre_mlp_layernorm.weight": (2, 16),
    "decoder.layers.mlp.router.weight": (2, 4, 16),
    "decoder.layers.mlp.experts.experts.linear_fc1.weight": (2, 4, 16, 16),
    "decoder.layers.mlp.experts.experts.linear_fc2.weight": (2, 4, 16, 8),
}
HEAD = {"output_layer.weight": (101, 16)}
# Keys and shapes of Megatron's transformer-engine spec; HF tensors and parameters counted from the HF models.
EXPECTED = {
    "dense_tied": (ATTENTION | DENSE, 24, 7_872),
    "dense_untied": (ATTENTION | DENSE | HEAD, 25, 9_488),
    "moe": (ATTENTION | MOE | HEAD, 45, 9_616),
}


@pytest.mark.parametrize("kind", KINDS)
def test_keys_shapes_and_counts(kind: str) -> None:
    table = name_table(tiny_shape(kind))
    keys, num_tensors, parameters = EXPECTED[kind]
    assert {rule.key: rule.shape for rule in table} == keys
    names = [rule.hf_name(part, index) for rule, index in units(table) for part in range(len(rule.parts))]
    assert len(names) == len(set(names)) == num_tensors
    assert sum(math.prod(rule.shape) for rule in table) == parameters
    assert sum(".experts." in name for name in names) == (24 if kind == "moe" else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_cover_every_row_of_every_part_once(kind: str) -> None:
    for rule in name_table(tiny_shape(kind)):
        assert rows_from(rule, 0, rule.rows) == sorted_rows(rule)
        cut = rule.rows // 3
        assert sorted(rows_from(rule, 0, cut) + rows_from(rule, cut, rule.rows)) == sorted(sorted_rows(rule))


def rows_from(rule: Rule, start: int, stop: int) -> list[tuple[int, int]]:
    """(part, row) that segments name, sorted."""
    pairs = [(s.part, s.part_row + i) for s in rule.segments(start, stop) for i in range(s.rows)]
    assert len(pairs) == stop - start
    return sorted(pairs)


def sorted_rows(rule: Rule) -> list[tuple[int, int]]:
    return sorted((number, row) for number, part in enumerate(rule.parts) for row in range(part.rows))


def test_row_blocks_of_four_heads_over_two_groups() -> None:
    """B11: q0 q1 k0 v0 q2 q3 k1 v1, 8 rows each."""
    rule = rule_of("dense_tied", "decoder.layers.self_attention.linear_qkv.weight")
    order = [
        ("qkv"[s.part], row // 8) for s in rule.segments(0, 64) for row in range(s.part_row, s.part_row + s.rows, 8)
    ]
    assert order == [("q", 0), ("q", 1), ("k", 0), ("v", 0), ("q", 2), ("q", 3), ("k", 1), ("v", 1)]


def test_head_dim_is_the_config_s() -> None:
    """B10: Qwen3-0.6B has (16 + 2 x 8) x 128 = 4096 fused rows; hidden / heads would give 2048."""
    shape = tiny_shape(
        "dense_tied",
        hidden_size=1024,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        num_hidden_layers=28,
    )
    rules = {rule.key: rule.shape for rule in name_table(shape)}
    assert rules["decoder.layers.self_attention.linear_qkv.weight"] == (28, 4096, 1024)


def rule_of(kind: str, key: str) -> Rule:
    return next(rule for rule in name_table(tiny_shape(kind)) if rule.key == key)
