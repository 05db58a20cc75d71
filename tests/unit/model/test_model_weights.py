"""Reading a checkpoint into a model: all of it, exactly once, or one clear error."""

from __future__ import annotations

import pytest
from helpers.model_checks import TINY_MOE, read_with_fault
from helpers.ranks import pool

PROJ = "decoder.layers.self_attention.linear_proj.weight"


@pytest.mark.parametrize("sizes", [{}, {"num_layers": 3}, TINY_MOE], ids=["dense", "layers", "moe"])
def test_every_value_comes_to_its_place(sizes: dict[str, int]) -> None:
    assert pool(1).run(read_with_fault, sizes=sizes, fault="") == [("", True)]


def test_a_vocabulary_padded_otherwise_is_read_and_the_rest_is_zero() -> None:
    assert pool(1).run(read_with_fault, sizes={}, fault="fewer rows") == [("", True)]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", f"the checkpoint lacks a tensor of the model; seen: {PROJ}"),
        (
            "shape",
            "a tensor of the checkpoint has another shape than the model's; "
            f"seen: {PROJ}: [1, 16, 33] in the checkpoint, [1, 16, 32] in the model",
        ),
        ("wider vocabulary", "embedding.word_embeddings.weight: [16, 17] in the checkpoint, [16, 16] in the model"),
        (
            "twice",
            "every parameter must be filled exactly once; seen: output_layer.weight: 512 values read for 256",
        ),
        ("half", "every parameter must be filled exactly once; seen: output_layer.weight: 128 values read for 256"),
    ],
)
def test_what_does_not_fit_is_refused(fault: str, message: str) -> None:
    error, _ = pool(1).run(read_with_fault, sizes={}, fault=fault)[0]
    assert message in error
