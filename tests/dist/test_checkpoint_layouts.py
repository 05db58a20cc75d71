"""A checkpoint does not depend on the layout that wrote it: weights, moments and the run go on at any other.

By default each layout is the source and the target of one change; `--whole-matrix` runs all of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import pool
from helpers.resuming import stored_tensors, train_and_save
from helpers.tiny import Sample, samples, write_model
from helpers.training import Cut, Layout, assemble

STEPS, SAVED_AT = 5, 2
VOCABULARY = 101  # no multiple of anything: each layout pads it differently
MODEL: dict[str, Any] = {
    "moe": True,
    "vocab_size": VOCABULARY,
    "num_experts": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
}
ONE = Layout()
LAYOUTS = [
    ONE,
    Layout(tensor=2),
    Layout(pipeline=2),
    Layout(pipeline=2, virtual=2),
    Layout(data=2, expert=2),
    Layout(context=2),
    Layout(data=2),
    Layout(tensor=2, expert_tensor=2),
    Layout(tensor=2, expert=2, data=2),
]
CUT = Cut(pack=2)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Pairs of layouts, the targets in order: ranks keep their groups while the layout stays."""
    if {"source", "target"} <= set(metafunc.fixturenames):
        pairs = [(source, target) for target in LAYOUTS for source in LAYOUTS]
        if not metafunc.config.getoption("whole_matrix"):
            pairs = metafunc.function.part
        metafunc.parametrize(("source", "target"), pairs, ids=[f"{a}->{b}" for a, b in pairs])


def by_default(part: list[tuple[Layout, Layout]]) -> Any:
    """The changes that run without `--whole-matrix`."""

    def mark(test: Any) -> Any:
        test.part = part
        return test

    return mark


CYCLE = [(LAYOUTS[(place + 4) % len(LAYOUTS)], target) for place, target in enumerate(LAYOUTS)]


@pytest.fixture(scope="module")
def batches() -> list[list[Sample]]:
    rows = samples(8 * STEPS, vocabulary=VOCABULARY, seed=5)
    return [rows[i : i + 8] for i in range(0, len(rows), 8)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("moe101")
    write_model(directory, **MODEL)
    return directory


def _run(model_dir: Path, layout: Layout, batches: list[list[Sample]], **options: Any) -> dict[str, Any]:
    ranks = pool(layout.world).run(
        train_and_save,
        model_dir=str(model_dir),
        layout=layout,
        batches=batches,
        cut=CUT,
        sequence_parallel=layout.tensor > 1,
        **options,
    )
    first = assemble([{"gradients": rank["first"]} for rank in ranks])
    return {**ranks[0], "tensors": assemble(ranks), "first": first}


@pytest.fixture(scope="module")
def unbroken(model_dir: Path, batches: list[list[Sample]]) -> dict[str, Any]:
    """Five steps on one rank without a break."""
    return _run(model_dir, ONE, batches)


class Saved:
    """For each layout (checkpoint after two steps, what that run held), made when it is first asked for."""

    def __init__(self, model_dir: Path, batches: list[list[Sample]], factory: pytest.TempPathFactory) -> None:
        self._model_dir, self._batches, self._factory = model_dir, batches, factory
        self._found: dict[Layout, tuple[Path, dict[str, Any]]] = {}

    def __getitem__(self, layout: Layout) -> tuple[Path, dict[str, Any]]:
        if layout not in self._found:
            root = self._factory.mktemp("save")
            held = _run(self._model_dir, layout, self._batches[:SAVED_AT], save=str(root))
            self._found[layout] = (root / f"iter_{SAVED_AT:07d}", held)
        return self._found[layout]


@pytest.fixture(scope="module")
def saved(model_dir: Path, batches: list[list[Sample]], tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(model_dir, batches, tmp_path_factory)


def real_rows(key: str, values: torch.Tensor) -> torch.Tensor:
    """Without the rows that a layout pads the vocabulary with."""
    return values[:VOCABULARY] if "word_embeddings" in key or "output_layer" in key else values


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_files_hold_what_the_ranks_held(saved: Saved, layout: Layout) -> None:
    directory, result = saved[layout]
    stored = stored_tensors(directory)
    assert stored.keys() == result["tensors"].keys()
    for key, values in stored.items():
        assert torch.equal(values, result["tensors"][key]), key
    moments = [key for key in stored if key.startswith("optimizer.state.exp_avg_sq.")]
    assert len(moments) == len([key for key in stored if not key.startswith("optimizer.")])
    assert all(float(stored[key].abs().max()) > 0 for key in moments)


def test_form_is_what_megatron_reads(saved: Saved) -> None:
    directory, _ = saved[ONE]
    assert json.loads((directory / "metadata.json").read_text()) == {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    common = torch.load(directory / "common.pt", weights_only=True)
    assert common == {"iteration": SAVED_AT, "checkpoint_version": 3.0}
    assert (directory.parent / "latest_checkpointed_iteration.txt").read_text() == str(SAVED_AT)
    assert not list(directory.parent.glob(".*partial*")), "nothing half-written is left"


@pytest.mark.parametrize("layout", [ONE, Layout(data=2, expert=2), Layout(tensor=2, expert=2, data=2)], ids=str)
def test_same_layout_continues_bitwise(
    model_dir: Path, batches: list[list[Sample]], saved: Saved, layout: Layout
) -> None:
    whole = _run(model_dir, layout, batches)
    rest = _run(model_dir, layout, batches, resume=str(saved[layout][0]), skip=SAVED_AT)
    assert rest["losses"] == whole["losses"][SAVED_AT:]
    assert rest["grad_norms"] == whole["grad_norms"][SAVED_AT:]
    for key, values in whole["tensors"].items():
        assert torch.equal(values, rest["tensors"][key]), key


@by_default(CYCLE)
def test_another_layout_continues(
    model_dir: Path,
    batches: list[list[Sample]],
    saved: Saved,
    unbroken: dict[str, Any],
    source: Layout,
    target: Layout,
) -> None:
    """B55: what is read is bit for bit what was saved, moments included, and the run goes on as if unbroken."""
    directory, held = saved[source]
    rest = _run(model_dir, target, batches, resume=str(directory), skip=SAVED_AT)
    for key, values in held["tensors"].items():
        assert torch.equal(real_rows(key, rest["first"][key]), real_rows(key, values)), key
    assert rest["losses"] == pytest.approx(unbroken["losses"][SAVED_AT:], rel=1e-5)
    for key, values in unbroken["tensors"].items():
        ours, theirs = real_rows(key, rest["tensors"][key]), real_rows(key, values)
        assert float((ours - theirs).abs().max()) <= 1e-4 * float(theirs.abs().max()), key


@by_default(CYCLE[::3])
def test_lost_moments_are_seen(
    model_dir: Path,
    batches: list[list[Sample]],
    saved: Saved,
    unbroken: dict[str, Any],
    source: Layout,
    target: Layout,
) -> None:
    """Both comparisons above fail for a run that continues with fresh moments."""
    directory, held = saved[source]
    rest = _run(model_dir, target, batches, resume=str(directory), skip=SAVED_AT, drop_moments=True)
    moments = [key for key in held["tensors"] if key.startswith("optimizer.")]
    assert not any(torch.equal(real_rows(key, rest["first"][key]), held["tensors"][key]) for key in moments)
    assert rest["losses"] != pytest.approx(unbroken["losses"][SAVED_AT:], rel=1e-5)


@pytest.mark.parametrize(("writer", "reader"), [("apex", "apex"), ("apex", "torch"), ("torch", "apex")])
def test_adams_of_other_libraries_continue(
    model_dir: Path,
    batches: list[list[Sample]],
    unbroken: dict[str, Any],
    tmp_path: Path,
    writer: str,
    reader: str,
) -> None:
    """Apex and transformer-engine count updates once a group, torch once a parameter: neither is in the files."""
    source, target = Layout(data=2, expert=2), Layout(tensor=2)
    _run(model_dir, source, batches[:SAVED_AT], save=str(tmp_path), adam=writer)
    rest = _run(
        model_dir, target, batches, resume=str(tmp_path / f"iter_{SAVED_AT:07d}"), skip=SAVED_AT, adam=reader
    )
    assert rest["losses"] == pytest.approx(unbroken["losses"][SAVED_AT:], rel=1e-5)
