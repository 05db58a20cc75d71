"""Weights, gradients and optimizer state: what megatron's buffers and Adam allocate on CPU, against the planner."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.ranks import pool
from helpers.saved_bytes import bytes_held

from mcore_qwen3.arch import ModelShape, resolve_layout
from mcore_qwen3.config import RunConfig, with_values
from mcore_qwen3.planner.settings import Settings, settings_of
from mcore_qwen3.planner.state import chunk_tensors, state_bytes

# Sizes that are no multiples of 64, so that every parameter has a gap before it and every buffer an end to fill.
DENSE = {
    "model_type": "qwen3",
    "num_layers": 2,
    "hidden_size": 20,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "head_dim": 10,
    "ffn_hidden_size": 36,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "torch_dtype": "float32",
}
MOE = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 12,
    "norm_topk_prob": True,
}
CASES = [
    (1, {}, MOE),
    (3, {}, DENSE),
    (2, {"expert": 2}, MOE),
    (2, {"tensor": 2, "expert_tensor": 2}, MOE),
    (2, {"pipeline": 2}, DENSE | {"tie_word_embeddings": True, "num_layers": 3}),
    (2, {"pipeline": 2, "virtual_pipeline": 2}, MOE | {"num_layers": 4}),
    (4, {"tensor": 2, "expert": 2}, MOE),
    (4, {"context": 2, "expert": 2}, MOE),
]


# bf16, grouped experts; fp32, an expert a module; SGD with momentum.
OPTIONS = [
    {"bf16": True, "moe_grouped_gemm": True},
    {"bf16": False, "moe_grouped_gemm": False},
    {"bf16": True, "moe_grouped_gemm": True, "optimizer": "sgd"},
]


@pytest.mark.parametrize(("world", "layout", "sizes"), CASES, ids=[f"{world} {layout}" for world, layout, _ in CASES])
def test_buffers_and_optimizer_state(world: int, layout: dict[str, Any], sizes: dict[str, Any]) -> None:
    if layout.get("pipeline") == 2 and sizes["num_layers"] == 3:
        layout = layout | {"first_stage_layers": 1}
    shape = ModelShape(**sizes)
    resolved = resolve_layout(world, shape=shape, **layout)
    found = pool(world).run(bytes_held, sizes=sizes, layout=layout, cases=OPTIONS)
    for options, ranks in zip(OPTIONS, zip(*found, strict=True), strict=True):
        run = with_values(RunConfig(), {"max_length": 64} | options)
        settings = settings_of(run, resolved, modules="torch", on_cuda=False)
        for stage in range(resolved.pipeline):
            compare(shape, resolved, settings, stage, [rank for rank in ranks if rank["stage"] == stage])


def compare(shape: ModelShape, layout: Any, settings: Settings, stage: int, own: list[dict[str, Any]]) -> None:
    """What the planner counts for a rank of a stage, against what its ranks hold."""
    state = state_bytes(shape, layout, settings, stage)
    assert {(rank["weights"], rank["gradients"]) for rank in own} == {(state.weights, state.gradients)}
    for counted, found in ((state.moments, "moments"), (state.master_weights, "master")):
        # The rank whose share is full holds what is counted, less the gaps before parameters in it.
        padding = counted * (1 - settings.gradient_bytes * state.trained / state.gradients)
        assert counted - max(rank[found] for rank in own) <= padding * len(own) + 1
        assert max(rank[found] for rank in own) <= counted
    # All ranks of the stage together: each parameter once for every rank that has a copy of it, and nothing else.
    assert sum(rank["moments"] for rank in own) == settings.moment_bytes * copies(state, layout, shape, stage, settings)


def copies(state: Any, layout: Any, shape: ModelShape, stage: int, settings: Settings) -> int:
    """Parameters of all ranks of a stage, each counted once for each tensor- or expert-parallel copy."""
    tensors = [
        tensor
        for chunk in range(layout.virtual_pipeline)
        for tensor in chunk_tensors(shape, layout, stage, chunk, settings.moe_grouped_gemm)
    ]
    dense = sum(tensor.size for tensor in tensors if not tensor.is_expert)
    experts = sum(tensor.size for tensor in tensors if tensor.is_expert)
    return dense * layout.tensor + experts * layout.expert * layout.expert_tensor
