"""Parameter counts against published numbers, and against the modules that transformers builds."""

from __future__ import annotations

import hashlib

import pytest
from official_configs import D2, M2, OFFICIAL, official_text

from mcore_qwen3.arch import ModelShape, count_parameters

# sha256 (first 8 digits) of the released config.json files, pinned in public repositories.
SHA256 = {
    "0.6B": "660db3b7",
    "1.7B": "1ddb5b89",
    "4B": "8ba006f7",
    "8B": "f7c4eadf",
    "14B": "e73c3664",
    "32B": "97e295b6",
    "30B-A3B": "2850ddb3",
    "235B-A22B": "0ecd5d6f",
}
TOTAL = {
    "0.6B": 596_049_920,
    "1.7B": 1_720_574_976,
    "4B": 4_022_468_096,
    "8B": 8_190_735_360,
    "14B": 14_768_307_200,
    "32B": 32_762_123_264,
    "30B-A3B": 30_532_122_624,
    "235B-A22B": 235_093_634_560,
    "Coder-480B-A35B": 480_154_875_392,
}
ACTIVE_BILLIONS = {"30B-A3B": 3.35, "235B-A22B": 22.2, "Coder-480B-A35B": 35.5}


@pytest.mark.parametrize("name", SHA256)
def test_rebuilt_config_is_the_released_file(name: str) -> None:
    assert hashlib.sha256(official_text(OFFICIAL[name]).encode()).hexdigest().startswith(SHA256[name])


@pytest.mark.parametrize("name", TOTAL)
def test_total_of_every_released_size(name: str) -> None:
    count = count_parameters(ModelShape.from_hf_config(OFFICIAL[name]))
    assert count.total == TOTAL[name]
    if name not in ACTIVE_BILLIONS:
        assert count.active == count.total


@pytest.mark.parametrize("name", ACTIVE_BILLIONS)
def test_active_parameters(name: str) -> None:
    count = count_parameters(ModelShape.from_hf_config(OFFICIAL[name]))
    assert count.active / 1e9 == pytest.approx(ACTIVE_BILLIONS[name], abs=0.05 if ACTIVE_BILLIONS[name] > 10 else 0.005)


@pytest.mark.parametrize(
    ("config", "total"),
    [(D2, 7_872), (D2 | {"tie_word_embeddings": False}, 9_488), (M2, 9_616)],
    ids=["dense tied", "dense untied", "moe"],
)
def test_tiny_models(config: dict, total: int) -> None:
    assert count_parameters(ModelShape.from_hf_config(config)).total == total


MIXED = M2 | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}


@pytest.mark.parametrize("config", [D2, M2, MIXED], ids=["dense", "moe", "mixed"])
def test_every_part_equals_the_modules_of_transformers(config: dict) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    parts = {"embedding": 0, "output": 0, "attention": 0, "norms": 0, "mlp": 0, "router": 0, "experts": 0}
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            part = "embedding"
        elif "lm_head" in name:
            part = "output"
        elif "self_attn" in name:
            part = "attention"
        elif "norm" in name:
            part = "norms"
        elif "experts" in name:
            part = "experts"
        else:
            part = "router" if "mlp.gate." in name else "mlp"
        parts[part] += parameter.numel()
    count = count_parameters(ModelShape.from_hf_config(config))
    assert {part: getattr(count, part) for part in parts} == parts


def test_b20_a_mixed_model_is_not_counted_as_all_moe() -> None:
    count = count_parameters(ModelShape.from_hf_config(MIXED))
    expert, mlp = 3 * 16 * 8, 3 * 16 * 32
    assert (count.experts, count.active_experts, count.router, count.mlp) == (4 * expert, 2 * expert, 4 * 16, 3 * mlp)


def test_active_experts_are_the_chosen_ones() -> None:
    count = count_parameters(ModelShape.from_hf_config(M2))
    assert count.active_experts * 2 == count.experts  # top-2 of 4
    assert count.total - count.active == count.experts - count.active_experts
