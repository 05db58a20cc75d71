"""Choices that are made before a model is built: its modules and megatron's configuration."""

from __future__ import annotations

import pytest
import torch
from helpers.model_checks import TINY_MOE, choices_of_modules, config_fields, logits_gradients
from helpers.ranks import pool


def test_choice_of_modules() -> None:
    te, here, absent = "transformer_engine", True, False
    cases = {
        ("torch", True, here): "torch: asked for by --transformer_impl",
        ("torch", False, absent): "torch: asked for by --transformer_impl",
        ("auto", True, here): f"{te}: auto: a GPU is in use and transformer-engine is installed",
        ("auto", True, absent): "torch: auto: transformer-engine is not installed",
        ("auto", False, here): "torch: auto: transformer-engine runs on CUDA only",
        ("auto", False, absent): "torch: auto: transformer-engine runs on CUDA only",
        (te, True, here): f"{te}: asked for by --transformer_impl",
    }
    refused = {
        (te, True, absent): "seen: device cuda, package not found",
        (te, False, here): "seen: device cpu, package found",
        (te, False, absent): "seen: device cpu, package not found",
    }
    answers = pool(1).run(choices_of_modules, cases=[*cases, *refused])[0]
    assert dict(zip([*cases, *refused], answers, strict=True)) == cases | {
        case: f"--transformer_impl {te} needs a GPU and the transformer-engine package; {seen}; "
        "change: use --transformer_impl torch, or pip install 'mcore-qwen3[gpu]' on the GPU nodes"
        for case, seen in refused.items()
    }


def test_no_expert_settings_in_a_dense_model() -> None:
    names = ["num_moe_experts", "kv_channels", "tensor_model_parallel_size", "add_bias_linear", "qk_layernorm"]
    fields = pool(1).run(config_fields, sizes={}, names=names)[0]
    assert fields == dict(zip(names, [None, 8, 1, False, True], strict=True))


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_pre_softmax_is_the_negation_of_norm_topk_prob(norm_topk_prob: bool) -> None:
    sizes = {**TINY_MOE, "norm_topk_prob": norm_topk_prob}
    names = ["moe_router_pre_softmax", "moe_router_topk", "num_moe_experts", "moe_router_score_function"]
    fields = pool(1).run(config_fields, sizes=sizes, names=names)[0]
    assert fields == dict(zip(names, [not norm_topk_prob, 2, 4, "softmax"], strict=True))


def test_router_flags_reach_megatron_under_their_own_names() -> None:
    chosen = {
        "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.25,
        "moe_router_dtype": "fp64", "moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True,
        "moe_token_drop_policy": "position", "moe_token_dispatcher_type": "allgather",
    }  # fmt: skip
    assert pool(1).run(config_fields, sizes=TINY_MOE, names=list(chosen), **chosen)[0] == chosen
    plain = {"moe_router_dtype": None, "moe_layer_freq": 1}
    assert pool(1).run(config_fields, sizes=TINY_MOE, names=list(plain), moe_router_dtype="none")[0] == plain


def test_b20_a_mixed_model_names_its_layers() -> None:
    sizes = {**TINY_MOE, "num_layers": 4, "moe_layers": (False, True, False, False)}
    assert pool(1).run(config_fields, sizes=sizes, names=["moe_layer_freq"])[0] == {"moe_layer_freq": [0, 1, 0, 0]}


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        ({}, {}, (None, ["core_attn"], None, None)),
        (TINY_MOE, {"recompute_granularity": "selective"}, ("selective", ["core_attn"], None, None)),
        (
            TINY_MOE,
            {
                "recompute_granularity": "selective",
                "recompute_modules": ("moe", "layernorm"),
                "recompute_num_layers": 1,
            },
            ("selective", ["moe", "layernorm"], None, None),
        ),
        # Megatron refuses the modules of experts in a dense model.
        (
            {},
            {"recompute_granularity": "selective", "recompute_modules": ("moe", "moe_act", "mlp")},
            ("selective", ["mlp"], None, None),
        ),
        (
            {},
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
            ("full", ["core_attn"], "block", 1),
        ),
    ],
)
def test_recompute(sizes: dict, options: dict, expected: tuple) -> None:
    names = ["recompute_granularity", "recompute_modules", "recompute_method", "recompute_num_layers"]
    assert pool(1).run(config_fields, sizes=sizes, names=names, **options)[0] == dict(zip(names, expected, strict=True))


@pytest.mark.parametrize(("bf16", "asked", "used"), [(False, True, False), (True, True, True), (True, False, False)])
def test_the_fused_cross_entropy_is_for_bf16_alone(bf16: bool, asked: bool, used: bool) -> None:
    names = ["cross_entropy_loss_fusion", "params_dtype", "calculate_per_token_loss"]
    args = {"sizes": {}, "names": names, "bf16": bf16, "cross_entropy_loss_fusion": asked}
    fields = pool(1).run(config_fields, **args)[0]
    assert fields == dict(zip(names, [used, torch.bfloat16 if bf16 else torch.float32, True], strict=True))


def test_why_megatrons_fused_cross_entropy_rounds_the_gradient() -> None:
    # If this fails, megatron keeps fp32 now, and an fp32 run can take the fused function too.
    logits = torch.randn(6, 1, 32, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(6)[:, None]
    right = logits.double().softmax(-1)
    right[torch.arange(6), 0, labels[:, 0]] -= 1
    found = pool(1).run(logits_gradients, logits=logits, labels=labels)[0]
    torch.testing.assert_close(found["plain"].double(), right, rtol=1e-5, atol=1e-6)
    assert torch.equal(found["fused"], found["fused"].bfloat16().float())
    assert float((found["fused"].double() - right).abs().max()) > 1e-3
