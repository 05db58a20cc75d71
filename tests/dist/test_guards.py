"""The guards of a run over ranks: what is named, what all ranks do alike, what stays untouched. Known fault B47."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.guard_checks import BAD_TOKEN, run_loop
from helpers.ranks import pool
from helpers.tiny import Sample, samples, write_model
from helpers.training import Cut, Layout


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("moe")
    write_model(directory, moe=True, num_hidden_layers=4)
    return str(directory)


def good(seed: int, number: int = 8) -> list[Sample]:
    return samples(number, seed=seed, vocabulary=BAD_TOKEN - 1)


def with_bad_row(seed: int, place: int) -> list[Sample]:
    """Rows of which one has the token that the planted faults look for."""
    rows = good(seed)
    ids = rows[place].ids.copy()
    ids[0] = BAD_TOKEN
    rows[place] = replace(rows[place], ids=ids)
    return rows


def events(result: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [record for record in result["records"] if record.get("event") == name]


def run(layout: Layout, **arguments: Any) -> list[dict[str, Any]]:
    if layout.tensor > 1:
        arguments["sequence_parallel"] = True
    ranks = pool(layout.world).run(run_loop, layout=layout, **arguments)
    first = ranks[0]
    assert all((rank["error"], rank["state"], rank["steps"]) == (first["error"], first["state"], first["steps"]) for rank in ranks)
    return ranks


# Layout, the ranks with a bad weight, and of the first in the model its layer of 4 and the column that is 3 on that rank
# in the whole tensor: the output projection's columns are split over TP (64 of them).
BAD_WEIGHTS = [
    (Layout(), (0,), 3, 3),
    (Layout(tensor=2), (1,), 3, 32 + 3),
    (Layout(pipeline=2), (0, 1), 1, 3),
    (Layout(pipeline=2), (1,), 3, 3),
    (Layout(pipeline=2, virtual=2), (0,), 2, 3),
    (Layout(data=2, expert=2), (1,), 3, 3),
]


@pytest.mark.parametrize(("layout", "on_ranks", "layer", "column"), BAD_WEIGHTS, ids=lambda value: str(value))
def test_a_nan_weight_stops_in_one_step(
    model_dir: str, tmp_path: Path, layout: Layout, on_ranks: tuple[int, ...], layer: int, column: int
) -> None:
    """B47: stop within 1 step, with the name of the first bad tensor of the model (a later norm is bad too)."""
    arguments = {"model_dir": model_dir, "save": str(tmp_path), "batches": [good(0), good(1)]}
    ranks = run(layout, **arguments, fault="bad weight", on_ranks=on_ranks)
    assert [record["iteration"] for record in ranks[0]["records"] if "event" not in record] == [1]
    for rank in ranks:
        name = f"decoder.layers.self_attention.linear_proj.weight[{layer}, 2, {column}] = nan on rank {on_ranks[0]}"
        assert rank["error"].startswith(f"NonFiniteError: every weight must be finite; seen: {name}; change: ")
        assert (rank["changed"], rank["steps"]) == ([], set())


def test_a_bad_weight_that_no_token_meets_is_not_saved(model_dir: str, tmp_path: Path) -> None:
    arguments = {"model_dir": model_dir, "save": str(tmp_path), "batches": [good(0), good(1)]}
    for rank in run(Layout(data=2), **arguments, fault="unseen bad weight"):
        name = f"embedding.word_embeddings.weight[{BAD_TOKEN}, 7] = inf on rank 0"
        assert rank["error"].startswith(f"NonFiniteError: every weight must be finite; seen: {name}; change: ")
        assert (rank["steps"], rank["saves"]) == ({2.0}, 0)
    (rank, _) = run(Layout(data=2), **{**arguments, "save": str(tmp_path / "good")})
    assert (rank["error"], rank["saves"]) == ("", 1)


LAYOUTS = [Layout(), Layout(data=2), Layout(tensor=2), Layout(pipeline=2), Layout(pipeline=2, virtual=2), Layout(context=2)]


@pytest.mark.parametrize("fault", ["bad loss", "bad gradient"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_bad_row_is_skipped_by_all_ranks_and_named(model_dir: str, tmp_path: Path, layout: Layout, fault: str) -> None:
    place = 5 if fault == "bad loss" else 4  # at DP 2 the one is rank 1's, the other rank 0's
    batches = [good(0), with_bad_row(1, place), good(2)]
    ranks = run(layout, model_dir=model_dir, save=str(tmp_path), batches=batches, fault=fault)
    for rank in ranks:
        assert (rank["error"], rank["state"], rank["steps"]) == ("", (3, 2, 24), {2.0})
        # Running it again takes longer than a step may.
        assert rank["phases"].count("looking for a fault") == 1
    # Rows are dealt out as (micro-batch, data-parallel rank).
    micro_batch, data_rank = divmod(place, layout.data)
    (event,) = events(ranks[0], "skipped")
    assert event["iteration"] == 2
    reason = event["reason"]
    quantity = "loss" if fault == "bad loss" else "gradient norm"
    assert reason.startswith(f"the {quantity} is nan; rank ")
    named = int(reason.split("rank ")[1].split(",")[0])
    assert f"rank {named}, micro-batch {micro_batch}, row {place} (rows.jsonl:{place + 1}); " in reason
    if layout.data > 1:
        assert named == data_rank
    if fault == "bad loss":
        assert "; loss nan; first bad gradient output_layer.weight[" in reason
    else:
        assert "first bad gradient decoder.layers.mlp." in reason and "weight[0, " in reason  # the first layer of four
    steps = {record["iteration"]: record for record in ranks[0]["records"] if "event" not in record}
    assert "loss" not in steps[2] and steps[2]["skipped"] == f"the {quantity} is nan"
    assert steps[3]["loss"] > 0


@pytest.mark.parametrize("layout", [Layout(), Layout(data=2)], ids=str)
def test_a_step_after_a_skipped_one_is_as_if_there_was_none(model_dir: str, tmp_path: Path, layout: Layout) -> None:
    losses = []
    for name, batches in (("with", [good(0), with_bad_row(1, 2), good(2)]), ("without", [good(0), good(2)])):
        ranks = run(layout, model_dir=model_dir, save=str(tmp_path / name), batches=batches, fault="bad gradient")
        losses.append([record["loss"] for record in ranks[0]["records"] if "loss" in record])
    assert losses[0] == losses[1]


def test_a_fault_that_does_not_come_again_is_told_as_such(model_dir: str, tmp_path: Path) -> None:
    batches = [with_bad_row(0, 0), good(1)]
    (rank,) = run(Layout(), model_dir=model_dir, save=str(tmp_path), batches=batches, fault="once")
    (event,) = events(rank, "skipped")
    assert event["reason"] == (
        "the gradient norm is nan; it did not happen again when each micro-batch ran alone: a fault of the hardware, "
        "or in communication"
    )


@pytest.mark.parametrize("layout", [Layout(), Layout(data=2)], ids=str)
def test_too_many_skipped_in_a_row_stop(model_dir: str, tmp_path: Path, layout: Layout) -> None:
    """Two bad steps, a good one, then three bad ones with at most two allowed: the sixth stops, the third did not."""
    bad = [with_bad_row(seed, 0) for seed in range(5)]
    batches = [*bad[:2], good(9), *bad[2:], good(8)]
    arguments = {"model_dir": model_dir, "save": str(tmp_path), "batches": batches, "fault": "bad gradient"}
    for rank in run(layout, **arguments, max_skipped_iters=2):
        assert rank["error"].startswith(
            "SkippedStepsError: no more steps in a row than --max_skipped_iters may be skipped; seen: 3 of at most 2, "
            "the last is step 6: "
            "the gradient norm is nan; rank 0, micro-batch 0, row 0 (rows.jsonl:1); "
        )
        assert rank["steps"] == {1.0}


@pytest.mark.parametrize("layout", [Layout(), Layout(pipeline=2)], ids=str)
def test_a_loss_of_exactly_zero_changes_nothing_and_stops(model_dir: str, tmp_path: Path, layout: Layout) -> None:
    """B47: a user saw loss 0.0 with a gradient norm of 2.6457 for days."""
    arguments = {"model_dir": model_dir, "save": str(tmp_path), "batches": [good(seed) for seed in range(4)]}
    for rank in run(layout, **arguments, fault="zero loss", max_skipped_iters=1):
        assert rank["error"].startswith(
            "SkippedStepsError: no more steps in a row than --max_skipped_iters may be skipped; seen: 2 of at most 1, "
            "the last is step 2: "
            "the loss is exactly 0, with gradient norm "
        )
        assert (rank["changed"], rank["steps"]) == ([], set())


def test_steps_without_a_trained_token_stop_with_the_reason(model_dir: str, tmp_path: Path) -> None:
    nothing = [replace(row, mask=np.zeros_like(row.mask)) for row in good(0)]
    arguments = {"model_dir": model_dir, "save": str(tmp_path), "batches": [good(1), nothing, nothing, good(2)]}
    for rank in run(Layout(data=2), **arguments, max_skipped_iters=1):
        assert "seen: 2 of at most 1, the last is step 3: no trained token; change: look at what is trained" in rank["error"]
    (rank, _) = run(Layout(data=2), **{**arguments, "save": str(tmp_path / "two")}, max_skipped_iters=2)
    assert (rank["error"], rank["state"]) == ("", (4, 2, 32))


def test_micro_batches_of_several_rows(model_dir: str, tmp_path: Path) -> None:
    batches = [with_bad_row(0, 6)]
    cut = Cut(micro_batch=2)
    ranks = run(Layout(data=2), model_dir=model_dir, save=str(tmp_path), batches=batches, fault="bad loss", cut=cut)
    (event,) = events(ranks[0], "skipped")
    assert "rank 1, micro-batch 1, row 6 (rows.jsonl:7), row 7 (rows.jsonl:8); loss nan" in event["reason"]  # rows 0 1 | 2 3, then 4 5 | 6 7
