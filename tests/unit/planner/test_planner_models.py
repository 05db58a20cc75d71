"""Models by name: their parameters as published, and their shapes as the released config.json files give them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_qwen3.arch import ModelShape, count_parameters
from mcore_qwen3.errors import ConfigError
from mcore_qwen3.planner.models import find_model, load_name, model_names

PARAMETERS = {
    "0.6B": 596_049_920,
    "1.7B": 1_720_574_976,
    "4B": 4_022_468_096,
    "8B": 8_190_735_360,
    "14B": 14_768_307_200,
    "32B": 32_762_123_264,
    "30B-A3B": 30_532_122_624,
    "235B-A22B": 235_093_634_560,
    "480B-A35B": 480_154_875_392,
}
VARIANTS = {
    "0.6B": ["", "-Base"],
    "1.7B": ["", "-Base"],
    "4B": ["", "-Base", "-Instruct-2507", "-Thinking-2507"],
    "8B": ["", "-Base"],
    "14B": ["", "-Base"],
    "32B": [""],
    "30B-A3B": ["", "-Base", "-Instruct-2507", "-Thinking-2507"],
    "235B-A22B": ["", "-Instruct-2507", "-Thinking-2507"],
}
NAMES = {f"Qwen3-{size}{variant}": size for size, variants in VARIANTS.items() for variant in variants} | {
    "Qwen3-Coder-30B-A3B-Instruct": "30B-A3B",
    "Qwen3-Coder-480B-A35B-Instruct": "480B-A35B",
}
# Facts that tell the variants apart: base of RoPE, longest position, token that ends a text.
FACTS = {
    "Qwen3-4B": (1e6, 40960, 151645),
    "Qwen3-30B-A3B-Base": (1e6, 32768, 151643),
    "Qwen3-4B-Instruct-2507": (5e6, 262144, 151645),
    "Qwen3-30B-A3B-Thinking-2507": (1e7, 262144, 151645),
    "Qwen3-235B-A22B-Instruct-2507": (5e6, 262144, 151645),
    "Qwen3-Coder-480B-A35B-Instruct": (1e7, 262144, 151645),
}
CONFIG_30B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False, "head_dim": 128,
    "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960, "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "initializer_range": 0.02, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 151936,
    "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip


def test_every_released_model_has_its_name() -> None:
    assert set(model_names()) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert count_parameters(find_model(name)).total == PARAMETERS[NAMES[name]]


@pytest.mark.parametrize("name", FACTS)
def test_variants_differ_in_positions_and_end_token(name: str) -> None:
    shape = find_model(name)
    assert (shape.rope_theta, shape.max_position_embeddings, shape.eos_token_id[0]) == FACTS[name]


@pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b", "30B-A3B"])
def test_the_name_is_read_as_people_write_it(name: str) -> None:
    assert find_model(name) == ModelShape.from_hf_config(CONFIG_30B)


def test_a_config_file_and_its_directory_are_models_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG_30B | {"num_hidden_layers": 7}), encoding="utf-8")
    assert find_model(str(tmp_path)) == find_model(str(tmp_path / "config.json"))
    assert find_model(str(tmp_path)).num_layers == 7


def test_an_unknown_name_gets_the_nearest_ones() -> None:
    with pytest.raises(ConfigError) as raised:
        find_model("Qwen3-30B-A3")
    assert "Qwen3-30B-A3B" in str(raised.value.fix)
    assert "Qwen3-0.6B" not in str(raised.value.fix)


def test_a_file_that_is_no_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"broken\.json"):
        find_model(str(tmp_path / "broken.json"))


def test_what_load_takes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert load_name(str(tmp_path / "config.json")) == load_name(str(tmp_path)) == str(tmp_path)
    for written in ("qwen3-30b-a3b-base", "Qwen/Qwen3-30B-A3B-Base", "30B-A3B-Base"):
        assert load_name(written) == "Qwen/Qwen3-30B-A3B-Base"
