"""The cut of the layers into stages and chunks: megatron's own functions, known faults, refusals with a way out."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from official_configs import D2

from mcore_qwen3.arch import ModelShape, ParallelLayout, resolve_layout
from mcore_qwen3.errors import ConfigError


def dense(num_layers: int) -> ModelShape:
    return ModelShape.from_hf_config(D2 | {"num_hidden_layers": num_layers})


def cut(num_layers: int, pipeline: int, **choices: Any) -> ParallelLayout:
    return resolve_layout(pipeline, pipeline=pipeline, shape=dense(num_layers), **choices)


def refusal(num_layers: int, pipeline: int, **choices: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        cut(num_layers, pipeline, **choices)
    assert str(caught.value).count("\n") == 0
    return str(caught.value)


FIRST, LAST = "first_stage_layers", "last_stage_layers"
BOTH_COUNT = {"account_for_embedding": True, "account_for_loss": True}


@pytest.mark.parametrize(
    ("num_layers", "pipeline", "choices", "stages"),
    [
        (48, 4, {}, "12, 12, 12, 12"),
        (94, 4, {FIRST: 23, LAST: 23}, "23, 24, 24, 23"),  # B58
        (94, 4, BOTH_COUNT, "23, 24, 24, 23"),
        (94, 16, BOTH_COUNT, "5" + ", 6" * 14 + ", 5"),
        (5, 3, {LAST: 1}, "2, 2, 1"),
        (5, 2, {FIRST: 2}, "2, 3"),
        (2, 4, BOTH_COUNT, "0, 1, 1, 0"),
        (7, 4, {"account_for_loss": True}, "2, 2, 2, 1"),
        (40, 2, {"virtual_pipeline": 10}, ", ".join(["+".join("2" * 10)] * 2)),  # B59
        (10, 2, {"virtual_pipeline": 2, FIRST: 4}, "2+2, 3+3"),
        (10, 2, {"virtual_pipeline": 3, **BOTH_COUNT}, "1+2+2, 2+2+1"),
    ],
)
def test_stages(num_layers: int, pipeline: int, choices: dict[str, Any], stages: str) -> None:
    layout = cut(num_layers, pipeline, **choices)
    assert layout.stages_text() == stages
    assert sum(map(sum, layout.stages)) == num_layers


def test_layers_run_through_a_chunk_of_every_rank_before_the_next_chunk() -> None:
    layout = cut(8, 2, virtual_pipeline=2)  # the example in megatron's get_num_layers_to_build
    assert [list(layout.chunk_layers(0, chunk)) for chunk in (0, 1)] == [[0, 1], [4, 5]]
    assert [list(layout.chunk_layers(1, chunk)) for chunk in (0, 1)] == [[2, 3], [6, 7]]


def megatron_chunks(num_layers: int, pipeline: int, virtual: int, own: dict[str, Any]) -> list[list[range]]:
    """Layers of each [stage][chunk] as megatron-core builds them."""
    import torch
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = TransformerConfig(
        num_layers=num_layers, hidden_size=8, num_attention_heads=2, pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        num_layers_in_first_pipeline_stage=own.get(FIRST),
        num_layers_in_last_pipeline_stage=own.get(LAST),
        account_for_embedding_in_pipeline_split=own.get("account_for_embedding", False),
        account_for_loss_in_pipeline_split=own.get("account_for_loss", False),
    )  # fmt: skip

    def chunk(stage: int, number: int) -> range:
        vp_stage = number if virtual > 1 else None
        start = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=stage)
        return range(start, start + get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=stage))

    return [[chunk(stage, number) for number in range(virtual)] for stage in range(pipeline)]


STRINGS = [
    ("Et*3|t*5L", 2, 8, ((3,), (5,))),
    ("Et|(tt|)*2tL", 2, 6, ((1, 2), (2, 1))),
    ("E,tt|tt|t,t|ttL", 2, 8, ((2, 2), (2, 2))),
    ("Ett|(t|t|)*2t*3L", 3, 9, ((2, 1), (1, 1), (1, 3))),
]


@pytest.mark.parametrize(("text", "pipeline", "num_layers", "stages"), STRINGS)
def test_a_layout_string_is_read_as_megatron_reads_it(text: str, pipeline: int, num_layers: int, stages: Any) -> None:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    layout = cut(num_layers, pipeline, pipeline_layout=text)
    assert layout.stages == stages and layout.virtual_pipeline == len(stages[0])
    theirs = PipelineParallelLayerLayout(text, pipeline)
    theirs.validate_layer_layout(num_layers, 0)
    for stage, number in itertools.product(range(pipeline), range(len(stages[0]))):
        letters = [kind.name for kind in theirs.layout[stage][number]]
        assert letters.count("decoder") == len(layout.chunk_layers(stage, number))


@pytest.mark.parametrize(
    ("text", "pipeline", "own", "seen"),
    [
        ("Et*3|t*5L", 2, {"virtual_pipeline": 2}, "a pipeline layout and the virtual stages must agree"),
        ("Et*3|t*5L", 2, {FIRST: 3}, "a pipeline layout says all about the cut"),
        ("Et*3|t*5L", 2, {"account_for_loss": True}, "a pipeline layout says all about the cut"),
        ("Et*3|t*4L", 2, {}, "a pipeline layout has 8 t, one for each layer of the model"),
        ("t*3|t*5L", 2, {}, "a pipeline layout has one E, first of all"),
        ("Et*3|t*5", 2, {}, "a pipeline layout has one L, last of all"),
        ("Et*3|t*5L", 1, {}, "a multiple of PP, and PP above 1"),
        ("Et*3|t*4|tL", 2, {}, "a multiple of PP, and PP above 1"),
        ("E|t*8|", 2, {}, "one L"),
        ("E|t*8L", 2, {}, "at least one layer in every chunk"),
        ("Et*3|m*5L", 2, {}, "is made of E, t, L"),
    ],
)
def test_a_layout_string_that_does_not_fit_is_refused(text: str, pipeline: int, own: dict[str, Any], seen: str) -> None:
    with pytest.raises(ConfigError, match=seen):
        cut(8, pipeline, pipeline_layout=text, **own)


def test_legal_cuts_are_those_that_megatron_builds_without_losing_a_layer() -> None:
    ends = [{}, {FIRST: 2}, {LAST: 2}, {FIRST: 4}, {LAST: 6}, {FIRST: 2, LAST: 2}, {FIRST: 4, LAST: 6}]
    counted = [{"account_for_embedding": True}, {"account_for_loss": True}, BOTH_COUNT]
    choices = [*ends, *counted, {FIRST: 2} | counted[1]]
    accepted, refused, lost = 0, 0, 0
    for num_layers, pipeline, virtual, own in itertools.product((4, 6, 8, 10, 11), (2, 3, 4), (1, 2, 3), choices):
        try:
            layout = cut(num_layers, pipeline, virtual_pipeline=virtual, **own)
        except ConfigError:
            try:
                chunks = megatron_chunks(num_layers, pipeline, virtual, own)
            except (ValueError, AssertionError, ZeroDivisionError):
                refused += 1
                continue
            # What megatron itself lets pass, building more or fewer layers than the model has.
            assert sum(len(chunk) for stage in chunks for chunk in stage) != num_layers
            lost += 1
            continue
        mine = [[layout.chunk_layers(stage, number) for number in range(virtual)] for stage in range(pipeline)]
        assert mine == megatron_chunks(num_layers, pipeline, virtual, own)
        accepted += 1
    assert accepted > 50 and refused > 100 and lost > 5


@pytest.mark.parametrize(
    ("num_layers", "pipeline", "choices", "fragments"),
    [
        # B58: 28 of the 30 layers were built elsewhere, and 24 of the 48.
        (30, 4, {}, [
            "num_layers must be a multiple of PP", "30 layers, PP 4",
            "--decoder_first_pipeline_num_layers 7 --decoder_last_pipeline_num_layers 7 (stages 7,8,8,7)",
        ]),
        (48, 2, {FIRST: 11, LAST: 13}, [
            "the first and the last stage must hold all layers at PP 2", "num_layers 11", "num_layers 13",
            "--decoder_first_pipeline_num_layers 35", "--decoder_last_pipeline_num_layers 37",
            "no flag that makes stages unequal (stages 24,24)",
        ]),
        # B58: "last k" at PP 1 built k layers.
        (4, 1, {LAST: 2}, ["needs PP above 1", "no flag that makes stages unequal (stages 4)"]),
        (94, 4, {FIRST: 22, LAST: 23}, [
            "must be shared equally", "49 for 2 stages", "num_layers 21 or 23", "num_layers 22 or 24",
        ]),
        (4, 3, {FIRST: 2, LAST: 2}, ["one or more each", "0 for 1 stage (", "num_layers 1"]),
        (94, 4, {FIRST: 23, "account_for_loss": True}, [
            "count as layers only where no stage is given",
            "change: only --decoder_first_pipeline_num_layers 23 --decoder_last_pipeline_num_layers 23 (stages 23,24,24,23)",
        ]),
        (94, 4, {"account_for_loss": True}, ["with the embedding and the loss where they count", ": 95"]),
        (4, 1, {"virtual_pipeline": 2}, ["virtual pipeline stages need PP above 1", "model_parallel_size 1"]),
        # B59
        (40, 2, {"virtual_pipeline": 12}, [
            "a multiple of the virtual stages", "20 layers a stage, 12 virtual stages",
            "--virtual_pipeline_model_parallel_size 10 or 20",
        ]),
        (8, 2, {"virtual_pipeline": 2, FIRST: 4, LAST: 4}, [
            "at PP 2 with virtual stages only one", "no flag that makes stages unequal (stages 4,4)",
        ]),
        (10, 2, {"virtual_pipeline": 2, FIRST: 4, LAST: 6}, [
            "only one of the two", "change: only --decoder_first_pipeline_num_layers 4 (stages 4,6)",
        ]),
        (4, 2, {FIRST: 0}, ["must be at least 1", "--decoder_first_pipeline_num_layers 1 or more"]),
    ],
)  # fmt: skip
def test_refusals(num_layers: int, pipeline: int, choices: dict[str, Any], fragments: list[str]) -> None:
    message = refusal(num_layers, pipeline, **choices)
    assert all(fragment in message for fragment in fragments), message


def test_every_cut_that_a_refusal_names_is_legal() -> None:
    flags = {FIRST: "--decoder_first_pipeline_num_layers", LAST: "--decoder_last_pipeline_num_layers"}
    accepted = 0
    for num_layers, pipeline, virtual, first in itertools.product((7, 10, 12), (2, 3, 4), (1, 2), (None, 1, 3)):
        chosen = {"virtual_pipeline": virtual, FIRST: first}
        try:
            cut(num_layers, pipeline, **chosen)
            continue
        except ConfigError as error:
            fix = error.fix or ""
        for named in re.findall(r"(?:^|or )([^,]*) \(stages", fix):
            own = {name: int(found[1]) for name, flag in flags.items() if (found := re.search(flag + r" (\d+)", named))}
            cut(num_layers, pipeline, virtual_pipeline=virtual, **own)
            accepted += 1
    assert accepted > 10


def test_counting_the_embedding_at_pp_1_is_said_to_do_nothing() -> None:
    layout = cut(4, 1, account_for_embedding=True)
    assert layout.stages == ((4,),) and "no effect at PP 1" in layout.notes[0]
