"""Every layout, micro-batch, packing, recompute, expert form, tying and vocabulary gives one rank's numbers.

`UPDATE_LAYOUTS=1` writes the measured errors into docs/layouts.md; without it the page must list exactly these runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers.covering import LAYOUTS, Run, design, uncovered
from helpers.ranks import pool
from helpers.real_rows import real_samples
from helpers.tiny import Sample, write_model
from helpers.training import Cut, Layout, assemble, relative_error, run_steps

STEPS = 5
measured: dict[Run, tuple[float, float, float]] = {}
HEAD = "| layout | micro-batch | rows | recompute | experts | embeddings | vocabulary |"


@pytest.fixture(scope="module")
def reference(material_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(tied, vocabulary) -> directory, batches and what one rank computes with the plainest options."""
    rows = real_samples(material_dir, 16 * STEPS, longest=56)

    @cache
    def compute(tied: bool, vocabulary: int) -> tuple[str, list[list[Sample]], dict[str, Any]]:
        directory = tmp_path_factory.mktemp("model")
        write_model(directory, moe=True, num_hidden_layers=4, vocab_size=vocabulary, tie_word_embeddings=tied)
        fitting = [Sample(sample.ids % vocabulary, sample.mask) for sample in rows]
        batches = [fitting[i : i + 16] for i in range(0, len(fitting), 16)]
        return str(directory), batches, _run(str(directory), Layout(), batches, Cut())

    return compute


@pytest.fixture(scope="module", autouse=True)
def page(repo_root: Path) -> Iterator[None]:
    yield
    if os.environ.get("UPDATE_LAYOUTS"):
        (repo_root / "docs" / "layouts.md").write_text(page_text(), encoding="utf-8")


def page_text() -> str:
    """docs/layouts.md with the figures of this run."""
    lines = [
        "# Every layout gives one rank's numbers",
        "",
        "Made by `UPDATE_LAYOUTS=1 pytest tests/dist/test_covering_design.py`; every run of the suite checks the bounds",
        "again. A MoE model of 4 layers trains 5 Adam steps on real rows in fp32 on CPU ranks, each layout in three runs so",
        "that every value of every column meets it at least once; what is compared is one rank with micro-batch 1, no",
        "packing, no recompute and grouped experts. Bounds: each gradient of the first step e <= 1e-5 (largest difference /",
        "largest value), losses 1e-5 and gradient norms 1e-4 relative. Measured: the largest of each.",
        "",
        HEAD + " gradients | losses | norms |",
        "|" + " --- |" * 10,
    ]
    lines += [f"{run.row()} " + " | ".join(f"{value:.0e}" for value in measured[run]) + " |" for run in design()]
    return "\n".join(lines) + "\n"


def _run(directory: str, layout: Layout, batches: list[list[Sample]], cut: Cut, **options: Any) -> dict[str, Any]:
    ranks = pool(layout.world).run(
        run_steps,
        model_dir=directory,
        layout=layout,
        batches=batches,
        cut=cut,
        sequence_parallel=layout.tensor > 1,
        **options,
    )
    return {**ranks[0], "gradients": assemble(ranks, atol=1e-7)}


def test_the_design_has_no_gap() -> None:
    assert uncovered(design()) == []
    assert uncovered([run for run in design() if run.micro_batch != 4]), "the check must see a gap"


@pytest.mark.parametrize("run", design(), ids=lambda run: run.row().strip("| ").replace(" | ", "-"))
def test_run_equals_one_rank(run: Run, reference: Any) -> None:
    directory, batches, one = reference(run.tied, run.vocabulary)
    many = _run(directory, LAYOUTS[run.layout], batches, run.cut, **run.options)
    gradients = max(relative_error(many["gradients"][key], value) for key, value in one["gradients"].items())
    losses, norms = (
        max(abs(a - b) / abs(b) for a, b in zip(many[name], one[name], strict=True)) for name in ("losses", "grad_norms")
    )
    measured[run] = (gradients, losses, norms)
    assert gradients <= 1e-5
    assert losses <= 1e-5
    assert norms <= 1e-4


def test_the_page_lists_these_runs(repo_root: Path) -> None:
    if os.environ.get("UPDATE_LAYOUTS"):
        pytest.skip("the page is being written")
    text = (repo_root / "docs" / "layouts.md").read_text(encoding="utf-8")
    listed = [line for line in text.splitlines() if line.startswith("|")][2:]
    assert [line.rsplit("|", 4)[0] + "|" for line in listed] == [run.row() for run in design()]
