"""config.json -> ModelShape: both spellings, transformers' defaults, and a refusal by name for everything else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from official_configs import D2, M2, OFFICIAL

from mcore_qwen3.arch import ModelShape, read_model_shape
from mcore_qwen3.errors import ConfigError


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        ModelShape.from_hf_config(config, source="config.json")
    assert str(caught.value).count("\n") == 0
    return str(caught.value)


def test_every_field_of_an_official_moe_config() -> None:
    assert ModelShape.from_hf_config(OFFICIAL["30B-A3B"]) == ModelShape(
        model_type="qwen3_moe",
        num_layers=48,
        hidden_size=2048,
        num_attention_heads=32,
        num_query_groups=4,
        head_dim=128,
        ffn_hidden_size=6144,
        vocab_size=151936,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=False,
        initializer_range=0.02,
        torch_dtype="bfloat16",
        num_experts=128,
        moe_router_topk=8,
        moe_ffn_hidden_size=768,
        norm_topk_prob=True,
        moe_layers=(True,) * 48,
        rope_scaling=None,
        eos_token_id=(151645,),
    )


def test_every_field_of_an_official_dense_config() -> None:
    shape = ModelShape.from_hf_config(OFFICIAL["0.6B"])
    assert (shape.model_type, shape.is_moe, shape.tie_word_embeddings) == ("qwen3", False, True)
    assert (shape.num_layers, shape.hidden_size, shape.ffn_hidden_size) == (28, 1024, 3072)
    assert (shape.num_attention_heads, shape.num_query_groups, shape.head_dim) == (16, 8, 128)
    assert (shape.num_experts, shape.moe_router_topk, shape.moe_ffn_hidden_size) == (0, 0, 0)


def test_b10_head_dim_is_the_configs_own_not_hidden_over_heads() -> None:
    assert ModelShape.from_hf_config(OFFICIAL["0.6B"]).qkv_rows == 4096  # 3072 with hidden / heads
    assert ModelShape.from_hf_config(D2).qkv_rows == 64  # 32 with hidden / heads


@pytest.mark.parametrize("config", [D2, M2, OFFICIAL["0.6B"], OFFICIAL["30B-A3B"]], ids=["D2", "M2", "0.6B", "30B"])
def test_what_transformers_writes_reads_as_the_same_shape(config: dict, tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(**config).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "rope_theta" not in written and "torch_dtype" not in written  # else this would test nothing new
    assert ("num_local_experts" in written) == (config["model_type"] == "qwen3_moe")
    assert read_model_shape(tmp_path) == ModelShape.from_hf_config(config)


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
def test_a_key_left_out_means_what_it_means_to_transformers(model_type: str) -> None:
    from transformers import AutoConfig

    optional = [
        "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "initializer_range", "norm_topk_prob",
        "eos_token_id", "head_dim",
    ]  # fmt: skip
    config = without(D2 if model_type == "qwen3" else M2, *optional)
    theirs = AutoConfig.for_model(**config)
    ours = ModelShape.from_hf_config(config)
    assert ours.max_position_embeddings == theirs.max_position_embeddings == 32768
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.initializer_range == theirs.initializer_range
    assert ours.tie_word_embeddings is theirs.tie_word_embeddings is False
    assert ours.eos_token_id == () and theirs.eos_token_id is None
    if model_type == "qwen3_moe":
        assert ours.norm_topk_prob is theirs.norm_topk_prob is False
        # The model takes hidden / heads where the configuration has no head_dim.
        assert not hasattr(theirs, "head_dim") and ours.head_dim == 16 // 4
    else:
        assert ours.head_dim == theirs.head_dim == 128


M4 = M2 | {"num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("changes", "with_experts"),
    [
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, {1}),  # B20
        ({"decoder_sparse_step": 2}, {1, 3}),
        ({"mlp_only_layers": [0, 2, 9]}, {1, 3}),
        ({"decoder_sparse_step": 3}, {2}),
        ({}, {0, 1, 2, 3}),
    ],
)
def test_b20_layers_with_experts_are_those_of_transformers(changes: dict, with_experts: set[int]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = ModelShape.from_hf_config(M4 | changes)
    assert {layer for layer, has in enumerate(shape.moe_layers) if has} == with_experts
    assert shape.is_moe and shape.is_mixed == (len(with_experts) < 4)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**M4 | changes))
    theirs = {layer for layer, module in enumerate(model.model.layers) if hasattr(module.mlp, "experts")}
    assert theirs == with_experts


def test_moe_layers_left_out_or_wrong() -> None:
    shape = ModelShape.from_hf_config(M2)
    assert dataclasses.replace(shape, moe_layers=()).moe_layers == (True, True)
    assert ModelShape.from_hf_config(D2).moe_layers == (False, False)
    with pytest.raises(ConfigError, match="moe_layers must name every layer; seen: 1 of 2"):
        dataclasses.replace(shape, moe_layers=(True,))
    with pytest.raises(ConfigError, match="if, and only if"):
        dataclasses.replace(shape, moe_layers=(False, False))


def test_both_spellings_of_a_key_must_agree() -> None:
    assert ModelShape.from_hf_config(M2 | {"num_local_experts": 4}).num_experts == 4
    assert "num_experts = 4, num_local_experts = 8" in refusal(M2 | {"num_local_experts": 8})
    assert "dtype = 'float32'" in refusal(D2 | {"dtype": "float32"})
    assert ModelShape.from_hf_config(D2 | {"rope_parameters": {"rope_theta": 1e6}}).rope_theta == 1e6
    assert "rope_parameters.rope_theta = 5000000.0" in refusal(D2 | {"rope_parameters": {"rope_theta": 5e6}})


def test_dtype_left_out_is_float32_which_keeps_every_weight() -> None:
    assert ModelShape.from_hf_config(without(D2, "torch_dtype")).torch_dtype == "float32"


def test_eos_token_id_may_be_a_list() -> None:
    assert ModelShape.from_hf_config(D2 | {"eos_token_id": [7, 9]}).eos_token_id == (7, 9)


@pytest.mark.parametrize(
    "key",
    ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
     "vocab_size", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "rope_theta"],
)  # fmt: skip
def test_a_missing_key_is_named(key: str) -> None:
    assert f"seen: {key} missing" in refusal(without(M2, key))


def test_all_missing_keys_are_named_at_once() -> None:
    assert "seen: num_hidden_layers, hidden_size missing" in refusal(without(D2, "hidden_size", "num_hidden_layers"))


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"model_type": "qwen2"}, ["qwen3, qwen3_moe", "model_type = 'qwen2'"]),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, ["architectures", "Qwen3ForCausalLM"]),
        ({"attention_bias": True}, ["attention_bias must be False", "attention_bias = True"]),
        ({"attention_dropout": 0.1}, ["attention_dropout must be 0", "0.1"]),
        ({"hidden_act": "gelu"}, ["hidden_act must be 'silu'", "'gelu'"]),
        ({"use_sliding_window": True}, ["use_sliding_window must be False"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding_attention"]),
        ({"decoder_sparse_step": 2}, ["decoder_sparse_step must be 1", "a dense model has no experts"]),
        ({"mlp_only_layers": [0]}, ["mlp_only_layers must be []", "[0]"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "2 layers"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config must be null", "fp8", "bf16 release"]),
        ({"auto_map": {"AutoConfig": "x.Y"}}, ["auto_map must be None"]),
        ({"torch_dtype": "int8"}, ["torch_dtype must be one of bfloat16, float16, float32", "'int8'"]),
        ({"num_experts": 4}, ["unknown key 'num_experts' for model_type qwen3", "remove the key"]),
        ({"brand_new_switch": "on"}, ["unknown key 'brand_new_switch'", "brand_new_switch = 'on'", "remove the key"]),
        ({"hidden_size": "16"}, ["hidden_size must be a whole number", "'16'"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers must be a whole number"]),
        ({"rms_norm_eps": "1e-6"}, ["rms_norm_eps must be a number"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings must be true or false"]),
        ({"head_dim": None}, ["head_dim must be a whole number"]),
        ({"eos_token_id": ["<eos>"]}, ["eos_token_id must be a whole number"]),
        ({"eos_token_id": 101}, ["eos_token_id must lie in the vocabulary", "vocab_size 101"]),
        ({"num_hidden_layers": 0}, ["num_layers must be above 0", "0"]),
        ({"rms_norm_eps": 0.0}, ["rms_norm_eps must be above 0"]),
        ({"head_dim": 7}, ["head_dim must be even"]),
        ({"num_key_value_heads": 3}, ["multiple of the key-value heads", "num_attention_heads 4", "heads 3"]),
    ],
)  # fmt: skip
def test_refused_by_name(changes: dict[str, Any], fragments: list[str]) -> None:
    message = refusal(D2 | changes)
    assert all(fragment in message for fragment in fragments), message


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"decoder_sparse_step": 0}, ["decoder_sparse_step must be 1 or more", "= 0"]),
        ({"decoder_sparse_step": True}, ["decoder_sparse_step must be a whole number"]),
        ({"mlp_only_layers": 1}, ["mlp_only_layers must be a list", "= 1"]),
        ({"mlp_only_layers": ["0"]}, ["mlp_only_layers must be a whole number", "'0'"]),
        ({"mlp_only_layers": [0, 1]}, ["needs a layer with experts", "2 layers", "mlp_only_layers [0, 1]", "qwen3"]),
        ({"decoder_sparse_step": 3}, ["needs a layer with experts", "decoder_sparse_step 3"]),
        ({"shared_expert_intermediate_size": 64}, ["shared_expert_intermediate_size must be 0"]),
        ({"use_qk_norm": False}, ["use_qk_norm must be True"]),
        ({"qkv_bias": True}, ["qkv_bias must be False"]),
        ({"num_experts_per_tok": 5}, ["more experts than there are", "num_experts_per_tok 5, num_experts 4"]),
        ({"num_experts": 0}, ["num_experts must be above 0"]),
        ({"norm_topk_prob": None}, ["norm_topk_prob must be true or false"]),
    ],
)
def test_refused_by_name_in_a_moe_model(changes: dict[str, Any], fragments: list[str]) -> None:
    message = refusal(M2 | changes)
    assert all(fragment in message for fragment in fragments), message


def test_moe_without_head_dim_needs_heads_that_divide_hidden() -> None:
    config = without(M2, "head_dim") | {"num_attention_heads": 6}
    assert "hidden_size 16, num_attention_heads 6; change: add head_dim" in refusal(config)


def test_harmless_and_empty_keys_pass() -> None:
    plain = ModelShape.from_hf_config(D2)
    extra = {
        "use_cache": False, "transformers_version": "5.24.0", "max_window_layers": 99, "sliding_window": 4096,
        "attention_dropout": 0, "pad_token_id": 3, "layer_types": ["full_attention"] * 2, "mlp_only_layers": None,
        "never_heard_of": None, "nor_of_this": False, "or_this": 0, "nor_this": [],
    }  # fmt: skip
    assert ModelShape.from_hf_config(D2 | extra) == plain


def write_config(directory: Path, config: dict[str, Any]) -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("tracker", "name"), [("release\n", "release"), ("200", "iter_0000200")])
def test_megatron_checkpoint_directory(tmp_path: Path, tracker: str, name: str) -> None:
    write_config(tmp_path / name / "hf", M2)
    write_config(tmp_path / "iter_0000100" / "hf", D2)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracker)
    assert read_model_shape(tmp_path) == ModelShape.from_hf_config(M2)
    assert read_model_shape(str(tmp_path / "iter_0000100")) == ModelShape.from_hf_config(D2)


def directory_refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_model_shape(path)
    return str(caught.value)


def test_directories_that_hold_no_model(tmp_path: Path) -> None:
    assert f"{tmp_path}/gone does not exist" in directory_refusal(tmp_path / "gone")
    assert f"neither config.json nor hf/config.json in {tmp_path}" in directory_refusal(tmp_path)
    (tmp_path / "file").write_text("")
    assert "is a file" in directory_refusal(tmp_path / "file")
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("200")
    assert f"{tmp_path}/iter_0000200 does not exist" in directory_refusal(tmp_path)
    tracker.write_text("latest")
    assert "holds 'latest'" in directory_refusal(tmp_path)


def test_config_that_is_no_json_object(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{\n  "model_type" "qwen3"\n}')
    assert f"{path}, line 2:" in directory_refusal(tmp_path)
    path.write_text("[]")
    assert "holds a list" in directory_refusal(tmp_path)
    path.write_bytes(b"\xff\xfe{}")
    assert "UTF-8" in directory_refusal(tmp_path)


def test_the_message_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(D2 | {"attention_bias": True}))
    assert str(tmp_path / "config.json") in directory_refusal(tmp_path)
