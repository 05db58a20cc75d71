"""A checkpoint does not depend on the layout that wrote it: weights, moments and the run go on at any other."""

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
MODEL: dict[str, Any] = {"moe": True, "vocab_size": 101, "num_experts": 6, "num_hidden_layers": 2}
ONE = Layout()
LAYOUTS = [
    ONE,
    Layout(data=2),
    Layout(tensor=2),
    Layout(pipeline=2),
    Layout(data=2, expert=2),
    Layout(tensor=2, expert_tensor=2),
    Layout(tensor=2, expert=2, data=2),
]
PAIRS = [(LAYOUTS[i], LAYOUTS[j]) for i, j in ((0, 6), (6, 3), (3, 5), (5, 4), (4, 2), (2, 1), (1, 0))]
CUT = Cut(pack=2)


@pytest.fixture(scope="module")
def batches() -> list[list[Sample]]:
    rows = samples(8 * STEPS, vocabulary=101, seed=5)
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
    return {**ranks[0], "tensors": assemble(ranks)}


@pytest.fixture(scope="module")
def unbroken(model_dir: Path, batches: list[list[Sample]]) -> dict[str, Any]:
    """Five steps on one rank without a break."""
    return _run(model_dir, ONE, batches)


@pytest.fixture(scope="module")
def saved(
    model_dir: Path, batches: list[list[Sample]], tmp_path_factory: pytest.TempPathFactory
) -> dict[Layout, tuple[Path, dict[str, Any]]]:
    """Layout -> (checkpoint after two steps, what that run held)."""
    found = {}
    for layout in LAYOUTS:
        root = tmp_path_factory.mktemp("save")
        result = _run(model_dir, layout, batches[:SAVED_AT], save=str(root))
        found[layout] = (root / f"iter_{SAVED_AT:07d}", result)
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_files_hold_what_the_ranks_held(saved: dict, layout: Layout) -> None:
    directory, result = saved[layout]
    stored = stored_tensors(directory)
    assert stored.keys() == result["tensors"].keys()
    for key, values in stored.items():
        assert torch.equal(values, result["tensors"][key]), key
    moments = [key for key in stored if key.startswith("optimizer.state.exp_avg_sq.")]
    assert len(moments) == len([key for key in stored if not key.startswith("optimizer.")])
    assert all(float(stored[key].abs().max()) > 0 for key in moments)


def test_form_is_what_megatron_reads(saved: dict) -> None:
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
    model_dir: Path, batches: list[list[Sample]], saved: dict, layout: Layout
) -> None:
    whole = _run(model_dir, layout, batches)
    rest = _run(model_dir, layout, batches, resume=str(saved[layout][0]), skip=SAVED_AT)
    assert rest["losses"] == whole["losses"][SAVED_AT:]
    assert rest["grad_norms"] == whole["grad_norms"][SAVED_AT:]
    for key, values in whole["tensors"].items():
        assert torch.equal(values, rest["tensors"][key]), key


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=[f"{a}->{b}" for a, b in PAIRS])
def test_another_layout_continues(
    model_dir: Path,
    batches: list[list[Sample]],
    saved: dict,
    unbroken: dict[str, Any],
    source: Layout,
    target: Layout,
) -> None:
    rest = _run(model_dir, target, batches, resume=str(saved[source][0]), skip=SAVED_AT)
    assert rest["losses"] == pytest.approx(unbroken["losses"][SAVED_AT:], rel=1e-5)
    for key, values in unbroken["tensors"].items():
        rows = MODEL["vocab_size"] if "word_embeddings" in key or "output_layer" in key else len(values)
        ours, theirs = rest["tensors"][key][:rows], values[:rows]  # another layout pads the vocabulary differently
        assert float((ours - theirs).abs().max()) <= 1e-4 * float(theirs.abs().max()), key


def test_lost_moments_are_seen(
    model_dir: Path, batches: list[list[Sample]], saved: dict, unbroken: dict[str, Any]
) -> None:
    """The comparison above fails for a run that continues with fresh moments."""
    rest = _run(model_dir, ONE, batches, resume=str(saved[ONE][0]), skip=SAVED_AT, drop_moments=True)
    assert rest["losses"] != pytest.approx(unbroken["losses"][SAVED_AT:], rel=1e-5)

