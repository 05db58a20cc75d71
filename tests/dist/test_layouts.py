"""Every layout gives one rank's numbers, on real rows: first gradients, then five Adam steps (DESIGN's bounds).

Each rank and micro-batch holds other rows with other numbers of trained tokens, so a wrong average or a missing
reduction shows; `test_a_missing_reduction_is_seen` plants two.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import pool
from helpers.real_rows import real_samples
from helpers.tiny import Sample, write_model
from helpers.training import Cut, Layout, assemble, relative_error, run_steps

STEPS = 5
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"moe": False},
    "dense_tied": {"moe": False, "tie_word_embeddings": True},
    "dense_101": {"moe": False, "vocab_size": 101},
    "moe": {"moe": True},
    "tied_four": {"moe": False, "num_hidden_layers": 4, "tie_word_embeddings": True},
    "mixed": {"moe": True, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
}
# (model, layout, sequence parallel)
CASES = [  # MoE with experts in every layer is in test_covering_design.py
    ("dense", Layout(data=2), False),
    ("dense", Layout(tensor=2), False),
    ("dense", Layout(tensor=2), True),
    ("dense_101", Layout(tensor=2), True),
    ("dense_tied", Layout(pipeline=2), False),
    ("dense", Layout(context=2), False),
    ("tied_four", Layout(pipeline=3, first_stage=2), False),
    ("mixed", Layout(pipeline=2), False),
    ("mixed", Layout(tensor=2, expert=2), True),
]
CUTS = {"packed": Cut(pack=2), "unpacked": Cut()}


@pytest.fixture(scope="module")
def batches(material_dir: Path) -> list[list[Sample]]:
    """Global batches of 8 samples."""
    rows = real_samples(material_dir, 8 * STEPS)
    return [rows[i : i + 8] for i in range(0, len(rows), 8)]


@pytest.fixture(scope="module")
def reference(batches: list[list[Sample]], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(model, cut, options) -> (directory, what one rank computes), each computed once."""

    @cache
    def compute(model: str, cut: str, **options: Any) -> tuple[str, dict[str, Any]]:
        directory = tmp_path_factory.mktemp(model)
        changes = dict(MODELS[model])
        write_model(directory, **changes)
        return str(directory), _run(str(directory), Layout(), _fitting(model, batches), CUTS[cut], **options)

    return compute


def _fitting(model: str, batches: list[list[Sample]]) -> list[list[Sample]]:
    vocabulary = MODELS[model].get("vocab_size")
    if vocabulary is None:
        return batches
    return [[Sample(sample.ids % vocabulary, sample.mask) for sample in rows] for rows in batches]


def _run(directory: str, layout: Layout, batches: list[list[Sample]], cut: Cut, **options: Any) -> dict[str, Any]:
    ranks = pool(layout.world).run(
        run_steps, model_dir=directory, layout=layout, batches=batches, cut=cut, lr=1e-3, **options
    )
    first = ranks[0]
    for other in ranks[1:]:
        assert other["losses"] == first["losses"], "every rank reports the same loss"
        assert other["grad_norms"] == first["grad_norms"], "every rank clips by the same norm"
    return {**first, "gradients": assemble(ranks, atol=1e-7)}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    ("model", "layout", "sequence_parallel"), CASES, ids=[f"{m}-{lay}{'+SP' if sp else ''}" for m, lay, sp in CASES]
)
def test_layout_equals_one_rank(
    model: str, layout: Layout, sequence_parallel: bool, cut: str, batches: list[list[Sample]], reference: Any
) -> None:
    directory, one = reference(model, cut)
    many = _run(
        directory, layout, _fitting(model, batches), CUTS[cut], sequence_parallel=sequence_parallel
    )
    errors = {key: relative_error(many["gradients"][key], one["gradients"][key]) for key in one["gradients"]}
    assert max(errors.values()) <= 1e-5, errors
    assert many["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert many["grad_norms"] == pytest.approx(one["grad_norms"], rel=1e-4)


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_cut_of_the_batch_changes_nothing(model: str, batches: list[list[Sample]], reference: Any) -> None:
    directory, one = reference(model, "unpacked")
    for cut in (Cut(micro_batch=2), Cut(micro_batch=4), Cut(micro_batch=8), Cut(micro_batch=2, pack=2)):
        other = _run(directory, Layout(), batches, cut)
        errors = {key: relative_error(other["gradients"][key], one["gradients"][key]) for key in one["gradients"]}
        assert max(errors.values()) <= 1e-5, (cut, errors)
        assert other["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert other["grad_norms"] == pytest.approx(one["grad_norms"], rel=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"moe_grouped_gemm": False},
        {"moe_token_dispatcher_type": "allgather"},
        {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "moe_act", "layernorm")},
        {"recompute_granularity": "selective", "recompute_modules": ("moe",)},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    ],
    ids=["sequential_experts", "allgather", "recompute_selective", "recompute_moe", "recompute_uniform", "recompute_block"],
)
def test_options_that_must_not_change_numbers(
    options: dict[str, Any], batches: list[list[Sample]], reference: Any
) -> None:
    directory, one = reference("moe", "packed")
    for layout in (Layout(), Layout(tensor=2, expert=2, data=2)):
        other = _run(directory, layout, batches, CUTS["packed"], sequence_parallel=layout.tensor > 1, **options)
        errors = {key: relative_error(other["gradients"][key], one["gradients"][key]) for key in one["gradients"]}
        assert max(errors.values()) <= 1e-5, (layout, errors)
        assert other["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert other["grad_norms"] == pytest.approx(one["grad_norms"], rel=1e-4)


@pytest.mark.parametrize("layout", [Layout(), Layout(context=2)], ids=str)
def test_selective_recompute_of_a_dense_model(
    layout: Layout, batches: list[list[Sample]], reference: Any
) -> None:
    directory, one = reference("dense", "packed")
    modules = ("core_attn", "mlp", "layernorm")
    other = _run(
        directory, layout, batches, CUTS["packed"], recompute_granularity="selective", recompute_modules=modules
    )
    errors = {key: relative_error(other["gradients"][key], one["gradients"][key]) for key in one["gradients"]}
    assert max(errors.values()) <= 1e-5, errors
    assert other["losses"] == pytest.approx(one["losses"], rel=1e-5)


@pytest.mark.parametrize(
    ("sabotage", "layout"), [("data", Layout(data=2)), ("norms", Layout(tensor=2))], ids=["data", "norms"]
)
def test_a_missing_reduction_is_seen(
    sabotage: str, layout: Layout, batches: list[list[Sample]], reference: Any
) -> None:
    """The comparison above fails when gradients are not summed over ranks: over DP, or norms' over TP with SP."""
    directory, one = reference("dense", "packed")
    ranks = pool(layout.world).run(
        run_steps,
        model_dir=directory,
        layout=layout,
        batches=batches[:1],
        cut=CUTS["packed"],
        sequence_parallel=layout.tensor > 1,
        sabotage=sabotage,
    )
    broken = assemble(ranks, atol=float("inf"))
    errors = {key: relative_error(broken[key], one["gradients"][key]) for key in one["gradients"]}
    assert max(errors.values()) > 1e-2
