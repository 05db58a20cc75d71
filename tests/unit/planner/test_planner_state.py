"""Parameters of each rank against what megatron builds on the meta device, and the bytes of their state by hand."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3.arch import ModelShape, resolve_layout
from mcore_qwen3.errors import ConfigError
from mcore_qwen3.planner.measured_memory import SHAPES
from mcore_qwen3.planner.memory import heaviest_account
from mcore_qwen3.planner.settings import Settings
from mcore_qwen3.planner.state import Tensor, buffer_sizes, chunk_tensors, padded_buffer, state_bytes

ROOT = Path(__file__).resolve().parents[3]

GIB = 2**30
# Hidden 16 with four heads of 8, so that head_dim is not hidden / heads; 101 words, so that the table is padded.
D2 = ModelShape(
    model_type="qwen3",
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=8,
    ffn_hidden_size=32,
    vocab_size=101,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=True,
    initializer_range=0.02,
    torch_dtype="bfloat16",
)
M2 = dataclasses.replace(
    D2,
    model_type="qwen3_moe",
    num_layers=4,
    tie_word_embeddings=False,
    num_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=8,
    moe_layers=(True,) * 4,
)


def dense(num_layers: int, **changes: Any) -> ModelShape:
    return dataclasses.replace(D2, num_layers=num_layers, moe_layers=(False,) * num_layers, **changes)


TINY = {
    "dense": dense(4, tie_word_embeddings=False),
    "tied": dense(4),
    "moe": M2,
    "mixed": dataclasses.replace(M2, moe_layers=(False, True, False, True)),
}
QWEN3_8B = dense(
    36,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    head_dim=128,
    ffn_hidden_size=12288,
    vocab_size=151936,
    tie_word_embeddings=False,
)
# World size and layout of the two models, each with its own reason to be here: expert-TP, uneven ends, chunks, DP, CP.
BIG: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "Qwen3-30B-A3B": [
        (1, {}),
        (8, {"expert": 8}),
        (16, {"tensor": 2, "expert": 8}),
        (16, {"tensor": 2, "expert": 8, "expert_tensor": 2}),
        (16, {"pipeline": 2, "expert": 8}),
        (8, {"tensor": 4, "pipeline": 2, "expert": 4, "first_stage_layers": 25, "last_stage_layers": 23}),
        (16, {"pipeline": 2, "expert": 8, "virtual_pipeline": 12}),
        (32, {"tensor": 2, "context": 2, "expert": 8}),
        (64, {"tensor": 4, "pipeline": 4, "expert": 16}),
        (16, {"expert": 16}),
    ],
    "Qwen3-235B-A22B": [
        (64, {"tensor": 4, "pipeline": 2, "expert": 8}),
        (64, {"tensor": 2, "pipeline": 8, "expert": 8, "first_stage_layers": 11, "last_stage_layers": 11}),
        (64, {"pipeline": 2, "expert": 32}),
        (64, {"tensor": 4, "pipeline": 8, "expert": 8, "account_for_embedding": True, "account_for_loss": True}),
        (
            128,
            {
                "tensor": 2,
                "pipeline": 8,
                "expert": 8,
                "virtual_pipeline": 4,
                "account_for_embedding": True,
                "account_for_loss": True,
            },
        ),
        (128, {"tensor": 4, "pipeline": 2, "expert": 16, "expert_tensor": 4}),
        (128, {"tensor": 2, "context": 2, "pipeline": 2, "expert": 32}),
        (32, {"tensor": 4, "pipeline": 4, "expert": 8, "first_stage_layers": 24, "last_stage_layers": 22}),
        (16, {"expert": 16}),
        (64, {"tensor": 2, "expert": 32, "expert_tensor": 2}),
    ],
}


# Four layers: with PP 2 evenly or as 1 + 3, with PP 3 as 2 + 1 + 1 or with the ends counted as layers (1 + 2 + 1).
CUTS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{}, {"first_stage_layers": 1}],
    3: [{"first_stage_layers": 2}, {"account_for_embedding": True, "account_for_loss": True}],
    4: [{}],
}


def every_layout(shape: ModelShape) -> Iterator[tuple[int, dict[str, Any]]]:
    """(ranks, layout): every legal TP, PP, chunks, EP and expert-TP on up to 8 ranks, each on the fewest ranks it fits.

    More ranks of the same are data or context parallel, which hold the same parameters; CP 2 is taken where it fits in 8.
    """
    sizes = (1, 2, 4, 8)
    moe_sizes = sizes if shape.is_moe else (1,)
    for tensor, pipeline, virtual, expert, expert_tensor in itertools.product(
        sizes, CUTS, (1, 2), moe_sizes, moe_sizes
    ):
        for cut in CUTS[pipeline]:
            layout = cut | {
                "tensor": tensor,
                "pipeline": pipeline,
                "virtual_pipeline": virtual,
                "expert": expert,
                "expert_tensor": expert_tensor,
            }
            legal = [
                (world, layout | {"context": context})
                for world in range(1, 9)
                for context in (2, 1)
                if is_legal(shape, world, layout | {"context": context})
            ]
            yield from legal[:1]


def is_legal(shape: ModelShape, world: int, layout: dict[str, Any]) -> bool:
    try:
        resolve_layout(world, shape=shape, **layout)
    except ConfigError:
        return False
    return True


def built(cases: list[dict[str, Any]]) -> list[Any]:
    """The answers of tests/helpers/fake_world.py."""
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "helpers" / "fake_world.py")],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


def case_of(shape: ModelShape, world: int, layout: dict[str, Any], grouped: bool = True) -> dict[str, Any]:
    stages = list(range(layout.get("pipeline", 1)))
    if len(stages) > 4:
        stages = [0, 1, len(stages) - 1]  # the ones between are alike
    sizes = {field.name: getattr(shape, field.name) for field in dataclasses.fields(shape)}
    return {"sizes": sizes, "world": world, "layout": layout, "stages": stages, "grouped": grouped}


def compare(shapes_and_cases: list[tuple[ModelShape, dict[str, Any]]]) -> int:
    """Every parameter tensor of every stage; returns the number of stages."""
    number = 0
    for (shape, case), answer in zip(shapes_and_cases, built([case for _, case in shapes_and_cases]), strict=True):
        layout = resolve_layout(case["world"], shape=shape, **case["layout"])
        for stage, chunks in zip(case["stages"], answer, strict=True):
            where = f"{case['world']} ranks, {case['layout']}, stage {stage}"
            for chunk, tensors in enumerate(chunks):
                ours = chunk_tensors(shape, layout, stage, chunk, case["grouped"])
                assert sorted((t.size, t.is_expert) for t in ours) == sorted(map(tuple, tensors)), where
            state = state_bytes(shape, layout, plain(moe_grouped_gemm=case["grouped"]), stage)
            sizes = [(size, is_expert) for tensors in chunks for size, is_expert in tensors]
            assert state.parameters == sum(size for size, _ in sizes), where
            assert state.experts == sum(size for size, is_expert in sizes if is_expert), where
            number += 1
    return number


def test_every_layout_of_the_tiny_models_on_up_to_8_ranks() -> None:
    cases = [
        (shape, case_of(shape, world, layout, grouped=number % 2 == 0))
        for shape in TINY.values()
        for number, (world, layout) in enumerate(every_layout(shape))
    ]
    assert len(cases) > 70
    assert compare(cases) > len(cases)


def test_ten_layouts_of_each_real_model() -> None:
    assert all(len(layouts) == 10 for layouts in BIG.values())
    cases = [(SHAPES[model], case_of(SHAPES[model], *layout)) for model in BIG for layout in BIG[model]]
    compare(cases)


@pytest.mark.parametrize(
    ("model", "parameters"), [("Qwen3-30B-A3B", 30_532_122_624), ("Qwen3-235B-A22B", 235_093_634_560)]
)
def test_b96_parameters_of_the_stages_sum_to_the_model(model: str, parameters: int) -> None:
    shape = SHAPES[model]
    layout = resolve_layout(2, pipeline=2, shape=shape)
    assert sum(tensor.size for stage in range(2) for tensor in chunk_tensors(shape, layout, stage, 0)) == parameters


def plain(**changes: Any) -> Settings:
    return Settings(row_length=8192, effective_length=8192, global_batch_size=16, **changes)


@pytest.mark.parametrize(("expert_tensor", "expected"), [(1, 45.93), (2, 35.80)])
def test_b96_the_users_command_on_16_gpus(expert_tensor: int, expected: float) -> None:
    shape = SHAPES["Qwen3-30B-A3B"]
    layout = resolve_layout(16, tensor=2, expert=8, expert_tensor=expert_tensor, shape=shape)
    assert round(state_bytes(shape, layout, plain(), 0).total / GIB, 2) == expected


def test_bytes_a_parameter_of_each_optimizer_setting() -> None:
    """The 8B model on 4 ranks of DP, whose buffers need no padding: bytes a parameter by hand."""
    shape = QWEN3_8B
    layout = resolve_layout(4, shape=shape)
    expected = {
        6 + 12 / 4: {},
        4 + 12 / 4: {"gradient_bytes": 2},
        6 + 10 / 4: {"master_bytes": 2},
        4 + 6 / 4: {"gradient_bytes": 2, "master_bytes": 2, "moment_bytes": 4},
        6.0: {"optimizer_offload_fraction": 1.0},
        6 + 6 / 4: {"optimizer_offload_fraction": 0.5},
        8 + 8 / 4: {"bf16": False, "master_bytes": 0},
    }
    for per_parameter, changes in expected.items():
        state = state_bytes(shape, layout, plain(**changes), 0)
        assert state.total == per_parameter * 8_190_735_360, changes


def test_lora_keeps_frozen_weights_and_trains_adapters() -> None:
    """One dense layer of D2 at TP 2 by hand: rank x (in + out) of QKV, output, fc1 and fc2, the split side halved."""
    shape = dense(1)
    layout = resolve_layout(2, tensor=2, shape=shape)
    state = state_bytes(shape, layout, plain(train_type="lora", lora_rank=4), 0)
    assert state.trained == 4 * ((16 + 64 // 2) + (32 // 2 + 16) + (16 + 64 // 2) + (32 // 2 + 16))
    assert state.frozen == state_bytes(shape, layout, plain(), 0).parameters
    padded = 2 * 4 * (16 + 32 + 16 + 16)  # each of the eight adapters has a multiple of 64 values, their sum one of 128
    assert state.weights == 2 * (state.frozen + padded)
    assert state.gradients == 4 * padded


def test_b97_the_heaviest_of_uneven_stages() -> None:
    """Three layers as 1 + 2, tied: a stage also holds its table; the first has the embedding, the last the final norm."""
    shape = dense(3)
    layout = resolve_layout(2, pipeline=2, first_stage_layers=1, shape=shape)
    layer, table = 64 * 16 + 32 * 16 + 3 * 32 * 16 + 2 * 16 + 2 * 8, 101 * 16
    stages = [state_bytes(shape, layout, plain(), stage).parameters for stage in range(2)]
    assert stages == [layer + table, 2 * layer + table + 16]
    assert heaviest_account(shape, layout, plain()).stage == 1


def test_experts_are_split_over_ep_and_expert_tp_and_the_router_over_nothing() -> None:
    """M2 with two layers on 8 ranks, TP 2, EP 2, expert-TP 2 (DP 4, expert-DP 2): 4 experts of 3 x 16 x 8, by hand."""
    shape = dataclasses.replace(M2, num_layers=2, moe_layers=(True,) * 2)
    state = state_bytes(shape, resolve_layout(8, tensor=2, expert=2, expert_tensor=2, shape=shape), plain(), 0)
    attention, norms, router = 64 * 16 // 2 + 32 * 16 // 2, 2 * 16 + 2 * 8, 4 * 16
    tables = 2 * 51 * 16  # 101 words are padded to 102
    assert state.experts == 2 * (4 // 2) * 3 * 16 * 4
    assert state.dense == 2 * (attention + norms + router) + tables + 16


def test_a_rank_holds_its_own_kinds_of_layers_alone() -> None:
    """Two chunks a stage of the mixed model: stage 0 has layers 0 and 2, without experts, stage 1 layers 1 and 3."""
    shape = TINY["mixed"]
    layout = resolve_layout(2, pipeline=2, virtual_pipeline=2, shape=shape)
    experts = [state_bytes(shape, layout, plain(), stage).experts for stage in range(2)]
    assert experts == [0, 2 * 4 * 3 * 16 * 8]


def test_padding_of_a_buffer_by_hand() -> None:
    def size(*parameters: int) -> int:
        return buffer_sizes(tuple(map(Tensor, parameters))).dense

    assert padded_buffer(size(64, 64), 1) == 128
    assert padded_buffer(size(16, 65), 1) == 256  # 64 + 128, then to a multiple of 128
    assert padded_buffer(size(128), 3) == 384  # lcm(3, 128)
