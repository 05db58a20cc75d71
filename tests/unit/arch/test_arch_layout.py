"""Layouts: group sizes, the place of every rank, and refusals with the nearest legal values."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from official_configs import D2, M2, OFFICIAL

from mcore_qwen3.arch import ModelShape, ParallelLayout, resolve_layout
from mcore_qwen3.errors import ConfigError

DENSE = ModelShape.from_hf_config(D2 | {"num_hidden_layers": 4, "num_key_value_heads": 4})
MOE = ModelShape.from_hf_config(M2 | {"num_hidden_layers": 4, "num_key_value_heads": 4})
MIXED = ModelShape.from_hf_config(M2 | {"num_key_value_heads": 4, "mlp_only_layers": [0]})
BIG = ModelShape.from_hf_config(OFFICIAL["30B-A3B"])


def sizes(layout: ParallelLayout) -> tuple[int, ...]:
    return layout.tensor, layout.pipeline, layout.data, layout.expert, layout.expert_tensor, layout.expert_data


def refusal(world_size: int, shape: ModelShape = MOE, **degrees: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_layout(world_size, shape=shape, **degrees)
    return str(caught.value)


@pytest.mark.parametrize(
    ("world_size", "degrees", "expected"),
    [
        (1, {}, (1, 1, 1, 1, 1, 1)),
        (4, {}, (1, 1, 4, 1, 1, 4)),
        (4, {"expert": 2}, (1, 1, 4, 2, 1, 2)),
        (4, {"pipeline": 2, "expert": 2}, (1, 2, 2, 2, 1, 1)),
        # B60: expert-TP that is not set is 1.
        (4, {"tensor": 2, "expert": 2}, (2, 1, 2, 2, 1, 2)),
        (4, {"tensor": 4, "expert": 4, "expert_tensor": 1}, (4, 1, 1, 4, 1, 1)),
        (4, {"tensor": 2, "expert": 2, "expert_tensor": 2}, (2, 1, 2, 2, 2, 1)),
    ],
)
def test_group_sizes(world_size: int, degrees: dict[str, int], expected: tuple[int, ...]) -> None:
    assert sizes(resolve_layout(world_size, shape=MOE, **degrees)) == expected


def test_the_users_command_on_two_nodes() -> None:
    layout = resolve_layout(16, tensor=2, expert=8, sequence_parallel=True, shape=BIG)
    assert layout.grid_text() == (
        "world size 16 = TP 2 x CP 1 x DP 8 x PP 1; experts = expert-TP 1 x EP 8 x expert-DP 2 x PP 1;"
        " sequence parallel on"
    )
    assert layout.notes == ("expert_tensor_parallel_size is not set: 1 is taken",)


def test_dense_grid_says_nothing_of_experts() -> None:
    layout = resolve_layout(4, tensor=2, shape=DENSE)
    assert layout.grid_text() == "world size 4 = TP 2 x CP 1 x DP 2 x PP 1; sequence parallel off"
    assert layout.notes == ()


def test_sequence_parallel_is_switched_and_said() -> None:
    moe = resolve_layout(2, tensor=2, expert_tensor=1, shape=MOE)
    assert moe.sequence_parallel and "switched on" in moe.notes[0]
    one = resolve_layout(2, sequence_parallel=True, shape=DENSE)
    assert not one.sequence_parallel and "switched off" in one.notes[0]
    assert resolve_layout(2, tensor=2, sequence_parallel=True, shape=DENSE).sequence_parallel
    assert not resolve_layout(2, tensor=2, shape=DENSE).sequence_parallel


# Rank groups that megatron-core 0.19.2's RankGenerator(order="tp-cp-ep-dp-pp") gives, printed once and written down
# here: importing it takes seconds.
GROUPS_8 = {  # TP2 PP2 DP2; EP2, expert-TP 1, expert-DP 2
    "tensor": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "data": [[0, 2], [1, 3], [4, 6], [5, 7]],
    "pipeline": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "expert": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "expert_data": [[0, 2], [1, 3], [4, 6], [5, 7]],
}
GROUPS_16 = {  # TP2 CP2 PP2 DP2; expert-TP 2, EP2, expert-DP 2
    "tensor": [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]],
    "context": [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
    "data": [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]],
    "pipeline": [[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]],
    "expert_tensor": [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]],
    "expert": [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
    "expert_data": [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]],
}


@pytest.mark.parametrize(
    ("layout", "groups"),
    [
        (resolve_layout(8, tensor=2, pipeline=2, expert=2, shape=MOE), GROUPS_8),
        (resolve_layout(16, tensor=2, pipeline=2, context=2, expert=2, expert_tensor=2, shape=MOE), GROUPS_16),
    ],
    ids=["8 ranks", "16 ranks"],
)
def test_coordinates_are_places_in_megatrons_groups(layout: ParallelLayout, groups: dict[str, list[list[int]]]) -> None:
    for axis, axis_groups in groups.items():
        for group in axis_groups:
            assert [getattr(layout.coordinates(rank), axis) for rank in group] == list(range(len(group))), axis


def test_a_rank_outside_the_world_has_no_coordinates() -> None:
    with pytest.raises(IndexError):
        resolve_layout(2, shape=MOE).coordinates(2)


@pytest.mark.parametrize(
    ("world_size", "shape", "degrees", "rule", "seen", "fix"),
    [
        (6, MOE, {"tensor": 4}, "multiple of TP x CP x PP", "world size 6, TP 4 x CP 1 x PP 1 = 4",
         "a world size (NNODES x NPROC_PER_NODE) of 4 or 8, or --tensor_model_parallel_size 2"),
        # B60: the rule counts experts, and the message says how many ranks they need.
        (4, MOE, {"tensor": 4, "expert": 4, "expert_tensor": 4}, "multiple of expert-TP x EP x PP", "multiple of 16",
         "of 16, or --expert_tensor_parallel_size 1, or --expert_model_parallel_size 1"),
        (2, MOE, {"pipeline": 4}, "multiple of TP x CP x PP", "PP 4 = 4", "of 4, or --pipeline_model_parallel_size 2"),
        (3, MOE, {"expert": 3}, "num_experts must be a multiple of EP", "4 experts, EP 3",
         "--expert_model_parallel_size 1"),
        (4, DENSE, {"expert": 2}, "EP must be 1 for a model without experts", "EP 2, qwen3",
         "--expert_model_parallel_size 1"),
        (4, DENSE, {"expert_tensor": 2}, "expert-TP must be 1 for a model without experts", "expert-TP 2, qwen3",
         "--expert_tensor_parallel_size 1"),
        (3, MOE, {"pipeline": 3}, "num_layers must be a multiple of PP", "4 layers, PP 3",
         "--pipeline_model_parallel_size 1, or --decoder_first_pipeline_num_layers 1"
         " --decoder_last_pipeline_num_layers 1 (stages 1,2,1)"),
        (8, BIG, {"tensor": 8}, "key-value heads must be a multiple of TP", "4 key-value heads, TP 8",
         "--tensor_model_parallel_size 4"),
        (3, DENSE, {"tensor": 3}, "intermediate_size must be a multiple of TP", "intermediate_size 32, TP 3",
         "--tensor_model_parallel_size 1"),
        (3, MIXED, {"tensor": 3}, "intermediate_size must be a multiple of TP", "intermediate_size 32, TP 3",
         "--tensor_model_parallel_size 1"),
        (3, MOE, {"expert_tensor": 3}, "moe_intermediate_size must be a multiple of expert-TP",
         "moe_intermediate_size 8, expert-TP 3", "--expert_tensor_parallel_size 1"),
        (4, MOE, {"tensor": 0}, "at least 1", "0", "--tensor_model_parallel_size 1 or more"),
        # No single size mends TP and PP both.
        (9, DENSE, {"tensor": 3, "pipeline": 3}, "intermediate_size must be", "TP 3",
         "_parallel_size 2 or 4; and mend what is broken as well: num_layers must be a multiple of PP (4 layers, PP 3),"
         " the number of key-value heads must be a multiple of TP (4 key-value heads, TP 3)"),
    ],
)  # fmt: skip
def test_refusals(world_size: int, shape: ModelShape, degrees: dict[str, int], rule: str, seen: str, fix: str) -> None:
    message = refusal(world_size, shape, **degrees)
    for fragment in (rule, seen, fix):
        assert fragment in message, message
    assert message.endswith(fix) and message.count("\n") == 0


def test_the_refusal_prints_the_grid() -> None:
    assert "(grid: world size 6, TP 4, CP 1, PP 1, EP 2, expert-TP 1)" in refusal(6, tensor=4, expert=2)


def test_every_value_that_a_refusal_names_is_legal() -> None:
    """Small grids: what is refused names sizes, each of which is then accepted, or the other rules that are broken."""
    knobs = {
        r"NPROC_PER_NODE\) of ([\d or]+)": "world_size",
        r"--tensor_model_parallel_size ([\d or]+)": "tensor",
        r"--pipeline_model_parallel_size ([\d or]+)": "pipeline",
        r"--expert_model_parallel_size ([\d or]+)": "expert",
    }
    accepted, doubly_broken = 0, 0
    for numbers in itertools.product(range(1, 7), (1, 2, 3), (1, 2), (1, 2, 4)):
        chosen = dict(zip(knobs.values(), numbers, strict=True))
        try:
            resolve_layout(**chosen, shape=BIG)
            continue
        except ConfigError as error:
            fix = error.fix or ""
        if "and mend what is broken as well: " in fix:
            doubly_broken += 1
            continue
        named = [(knob, v) for text, knob in knobs.items() for v in re.findall(r"\d+", " ".join(re.findall(text, fix)))]
        assert named, fix
        for knob, value in named:
            resolve_layout(**chosen | {knob: int(value)}, shape=BIG)
            accepted += 1
    assert accepted > 20 and doubly_broken > 5
