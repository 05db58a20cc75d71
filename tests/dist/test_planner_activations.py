"""Activations of the torch modules: bytes that a forward keeps on CPU, against the planner's rows.

The account is even where routing is not: the rows that the experts really received are handed to it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.ranks import pool
from helpers.saved_bytes import bytes_kept, most_in_flight
from helpers.tiny import Sample

from mcore_qwen3.arch import ModelShape, resolve_layout
from mcore_qwen3.planner.activations import logit_values, tokens_of
from mcore_qwen3.planner.chunks import in_flight, stage_chunks
from mcore_qwen3.planner.settings import Settings

LENGTH = 128
TOLERANCE = 0.02
DENSE = {
    "model_type": "qwen3",
    "num_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "head_dim": 16,
    "ffn_hidden_size": 160,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "torch_dtype": "float32",
}
MOE = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "norm_topk_prob": True,
}
MIXED = MOE | {"moe_layers": (True, False, True)}


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def full(method: str, layers: int) -> dict[str, Any]:
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}


def rows(lengths: tuple[int, ...]) -> list[list[Sample]]:
    """One row of samples of these lengths."""
    generator = np.random.default_rng(len(lengths))
    return [[Sample(generator.integers(2, 250, n), np.ones(n, dtype=np.uint8)) for n in lengths]]


def account(
    sizes: dict[str, Any], layout: dict[str, Any], options: dict[str, Any], lengths: tuple[int, ...], world: int, load: float
) -> float:
    """The planner's bytes for one micro-batch of a rank that holds the whole depth."""
    shape = ModelShape(**sizes)
    resolved = resolve_layout(world, shape=shape, **layout)
    settings = Settings(
        modules="torch",
        on_cuda=False,
        row_length=LENGTH,
        effective_length=sum(n * n for n in lengths) / sum(lengths),
        moe_imbalance=load,
        **({"bf16": False} | options),
    )
    kept = stage_chunks(shape, resolved, settings, 0)[0].kept
    return kept + 4 * logit_values(shape, resolved, tokens_of(shape, resolved, settings))


def ratios(
    sizes: dict[str, Any],
    layout: dict[str, Any],
    cases: dict[str, tuple[dict[str, Any], tuple[int, ...]]],
    *,
    world: int = 1,
) -> dict[str, list[float]]:
    """Name of a case -> the planner's bytes / the bytes kept, on each rank. A case: options, and lengths of the samples."""
    found = pool(world).run(
        bytes_kept,
        sizes=sizes,
        layout=layout,
        cases=[(options, rows(lengths)) for options, lengths in cases.values()],
        length=LENGTH,
    )
    moe_layers = sum(ModelShape(**sizes).moe_layers)
    result: dict[str, list[float]] = {name: [] for name in cases}
    for of_rank in found:
        for (name, (options, lengths)), kept in zip(cases.items(), of_rank, strict=True):
            load = 1.0
            if moe_layers and "moe_expert_capacity_factor" not in options:
                even = LENGTH / layout.get("context", 1) / layout.get("tensor", 1) * sizes["moe_router_topk"]
                load = kept["received"] / moe_layers / (even * layout.get("expert_tensor", 1))
            result[name].append(account(sizes, layout, options, lengths, world, load) / kept["bytes"])
    return result


def off(found: dict[str, list[float]]) -> dict[str, list[float]]:
    """The cases outside the tolerance."""
    return {name: each for name, each in found.items() if any(abs(ratio - 1) >= TOLERANCE for ratio in each)}


MODES = {
    "none": {},
    "core_attn": selective("core_attn"),
    "layernorm": selective("layernorm"),
    "layernorm and core_attn": selective("layernorm", "core_attn"),
    "uniform 1": full("uniform", 1),
    "uniform 2": full("uniform", 2),
    "block 2": full("block", 2),
}
MOE_MODES = MODES | {"moe": selective("moe"), "moe_act": selective("moe_act"), "moe and layernorm": selective("moe", "layernorm")}


LENGTHS = {"one sample": (LENGTH,), "packed": (24, 40, 64)}


@pytest.mark.parametrize(
    ("sizes", "modes"),
    [(DENSE, MODES | {"mlp": selective("mlp")}), (MOE, MOE_MODES), (MIXED, MOE_MODES | {"mlp": selective("mlp")})],
    ids=["dense", "moe", "mixed"],
)
def test_every_recompute_mode_on_one_rank(sizes: dict, modes: dict) -> None:
    cases = {
        f"{mode}, {form}, {'bf16' if bf16 else 'fp32'}": ({"bf16": bf16} | options, lengths)
        for mode, options in modes.items()
        for form, lengths in LENGTHS.items()
        for bf16 in (False, True)
    }
    assert off(ratios(sizes, {}, cases)) == {}


OPTIONS = {
    "sequential experts": {"moe_grouped_gemm": False},
    "allgather": {"moe_token_dispatcher_type": "allgather"},
    "balance and z loss": {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1},
    "padded to capacity": {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True},
    "a capacity that drops nothing": {"moe_expert_capacity_factor": 4.0},  # 4 x 2 of 8 experts: place for all tokens
    "unfused loss": {"cross_entropy_loss_fusion": False, "bf16": True},
}


def test_options_of_experts_and_loss() -> None:
    assert off(ratios(MOE, {}, {name: (options, (LENGTH,)) for name, options in OPTIONS.items()})) == {}


LAYOUTS = [
    (2, {"tensor": 2}, DENSE),
    (2, {"tensor": 2, "sequence_parallel": True}, DENSE),
    (2, {"tensor": 2}, MOE),
    (2, {"tensor": 2, "expert_tensor": 2}, MOE),
    (2, {"expert": 2}, MOE),
    (2, {"context": 2}, DENSE),
    (2, {"context": 2}, MOE),
    (4, {"context": 2, "tensor": 2}, MOE),
    (4, {"tensor": 4, "sequence_parallel": True}, DENSE),
    (4, {"context": 2, "tensor": 2, "expert": 4}, MOE),
]


@pytest.mark.parametrize(
    ("world", "layout", "sizes"), LAYOUTS, ids=[f"{sizes['model_type']} {layout}" for _, layout, sizes in LAYOUTS]
)
def test_layouts(world: int, layout: dict, sizes: dict) -> None:
    modes = {"none": {}, "core_attn": selective("core_attn"), "full": full("uniform", 1)}
    forms = {"fp32 packed": (False, (32, 96)), "bf16": (True, (LENGTH,))}
    cases = {
        f"{mode}, {form}": ({"bf16": bf16} | options, lengths)
        for mode, options in modes.items()
        for form, (bf16, lengths) in forms.items()
    }
    assert off(ratios(sizes, layout, cases, world=world)) == {}


@pytest.mark.parametrize(
    ("pipeline", "chunks", "micro_batches"), [(2, 1, 4), (4, 1, 6), (4, 1, 2), (2, 2, 4), (4, 2, 8)]
)
def test_micro_batches_that_the_schedule_holds(pipeline: int, chunks: int, micro_batches: int) -> None:
    sizes = DENSE | {"num_layers": 8}
    layout = {"pipeline": pipeline, "virtual_pipeline": chunks}
    batches = [rows((16, 16))] * micro_batches
    found = pool(pipeline).run(most_in_flight, sizes=sizes, layout=layout, micro_batches=batches, length=32)
    resolved = resolve_layout(pipeline, shape=ModelShape(**sizes), **layout)
    assert found == [in_flight(resolved, micro_batches, stage) for stage in range(pipeline)]
