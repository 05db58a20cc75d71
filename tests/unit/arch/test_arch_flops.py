"""Operations a token against published throughputs, a count by hand, and torch's own counter."""

from __future__ import annotations

import pytest
import torch
from official_configs import M2, OFFICIAL, moe
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from mcore_qwen3.arch import ModelShape
from mcore_qwen3.arch.flops import effective_length, flops_per_token, layer_flops

GIGA = 1e9
# Published pairs of TFLOP/s and tokens/s of one GPU, by Megatron's own count, on full rows of 4,096 tokens.
PUBLISHED = {
    "30B-A3B": 299.352e12 / 13011.378,
    "235B-A22B": 1300.36e12 / 8784,
    "8B": 512.7e12 / 10456,
}
# GFLOP a token at 4,096, from the formula in Megatron-LM's training script.
AT_4096 = {"0.6B": 4.99, "1.7B": 11.7, "4B": 27.8, "8B": 49.0, "14B": 89.0, "32B": 204.8, "30B-A3B": 23.01}


def shape_of(name: str) -> ModelShape:
    return ModelShape.from_hf_config(OFFICIAL[name])


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_runs_give_the_same_cost_of_a_token(name: str) -> None:
    assert flops_per_token(shape_of(name), 4096) == pytest.approx(PUBLISHED[name], rel=1e-3)


@pytest.mark.parametrize("name", AT_4096)
def test_every_size_at_4096(name: str) -> None:
    assert flops_per_token(shape_of(name), 4096) / GIGA == pytest.approx(AT_4096[name], rel=5e-3)


@pytest.mark.parametrize(
    ("name", "fixed", "by_length"), [("30B-A3B", 18.174, 0.001180), ("235B-A22B", 129.11, 0.00462)]
)
def test_cost_is_linear_in_the_effective_length(name: str, fixed: float, by_length: float) -> None:
    at_0, at_1000 = (flops_per_token(shape_of(name), length) / GIGA for length in (0, 1000))
    assert at_0 == pytest.approx(fixed, rel=1e-4)
    assert (at_1000 - at_0) / 1000 == pytest.approx(by_length, rel=2e-3)


def test_b98_an_expert_layer_counts_active_experts_at_their_own_width() -> None:
    layer = layer_flops(ModelShape.from_hf_config(M2), True, 1)
    assert (layer.experts, layer.router, layer.mlp) == (2 * 3 * 2 * 16 * 8, 128, 0)
    assert layer.experts == 1536


def test_a_mixed_model_pays_for_each_layer_what_it_has() -> None:
    mixed = ModelShape.from_hf_config(M2 | {"mlp_only_layers": [0]})
    dense_mlp, experts = 2 * 3 * 16 * 32, 1536
    all_experts = flops_per_token(ModelShape.from_hf_config(M2), 8)
    assert all_experts - flops_per_token(mixed, 8) == 3 * (experts - dense_mlp)


def test_torch_counts_the_same_forward_operations() -> None:
    """Without causality: torch counts the whole square, which is an effective length of twice the row's."""
    config = moe(
        32,
        2,
        4,
        2,
        64,
        16,
        head_dim=16,
        vocab_size=128,
        num_experts=8,
        num_experts_per_tok=2,
        eos_token_id=1,
        bos_token_id=0,
    )
    keys = {key: value for key, value in config.items() if key not in ("architectures", "transformers_version")}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**keys, attn_implementation="eager", experts_implementation="eager"))
    ids = torch.randint(0, 128, (1, 24))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False)
    shape = ModelShape.from_hf_config(config)
    router = sum(layer_flops(shape, True, 0).router for _ in range(2))
    assert counter.get_total_flops() == 24 * (flops_per_token(shape, 2 * 24) / 3 + router)


def test_documents_in_a_pack_attend_to_themselves_alone() -> None:
    assert effective_length([4096]) == 4096
    assert effective_length([1024] * 4) == 1024
    assert effective_length([3000, 1000]) == 2500
