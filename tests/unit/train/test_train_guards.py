"""Warnings that come once, errors that say what to change, and a dry batch that leaves no trace."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from helpers.guard_checks import (
    dead_experts,
    out_of_memory,
    parameter_counts,
    share_folder,
    spikes,
    steps_behind_a_dry_batch,
)
from helpers.ranks import pool
from helpers.tiny import samples, write_model
from helpers.training import Layout


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    directory = tmp_path_factory.mktemp("moe")
    return str(directory), write_model(directory, moe=True, vocab_size=101)


def test_a_loss_spike_is_told_once() -> None:
    steady = [2.0 + 0.1 * (-1) ** place for place in range(30)]  # mean 2, standard deviation 0.1: the bound is 2.6
    assert pool(1).run(spikes, losses=[*steady, 2.59])[0] == []
    assert pool(1).run(spikes, losses=[*steady, 2.61])[0] == [(30, pytest.approx(2.6))]
    again = pool(1).run(spikes, losses=[*steady, 9.0, 90.0, 900.0, 2.0, 90000.0])[0]
    assert [place for place, _ in again] == [30, 34], "once for the three that follow each other"
    assert pool(1).run(spikes, losses=[2.0] * 19 + [9.0])[0] == [], "too few to know what is usual"
    assert pool(1).run(spikes, losses=[2.0] * 30 + [2.1])[0] == [], "a tenth above a still loss is none"
    falling = [8.0 * 0.97**place for place in range(200)]
    assert pool(1).run(spikes, losses=falling)[0] == []


def test_an_expert_without_tokens_is_told_once_until_it_gets_one() -> None:
    # Two layers of three experts, the middle one a layer without experts.
    def step(a: int, b: int) -> list[list[int]]:
        return [[5, a, 5], [0, 0, 0], [b, 5, 5]]

    tokens = [
        step(1, 1),
        step(0, 1),
        step(0, 0),
        step(0, 0),
        step(0, 0),
        step(1, 0),
        step(0, 1),
        step(0, 0),
        step(0, 0),
    ]
    told = pool(1).run(dead_experts, tokens=tokens, after=3)[0]
    assert told == [[], [], [], [(0, 1)], [(2, 0)], [], [], [], [(0, 1)]]


LAYOUTS = [Layout(), Layout(data=2, expert=2), Layout(pipeline=2), Layout(tensor=2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_dry_batch_leaves_no_trace(moe: tuple[str, Any], layout: Layout) -> None:
    options: dict[str, Any] = {"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "global_aux_loss"}
    if layout.tensor > 1:
        options["sequence_parallel"] = True
    arguments = {"dry": samples(4, seed=9, longest=80, vocabulary=101)}
    batches = [samples(4, seed=seed, vocabulary=101) for seed in range(2)]
    for rank in pool(layout.world).run(
        steps_behind_a_dry_batch, model_dir=moe[0], layout=layout, batches=batches, **arguments, **options
    ):
        assert rank["equal"]
        assert rank["gradient of the dry batch"] > 1e-3


def test_out_of_memory_says_what_to_lower(moe: tuple[str, Any]) -> None:
    rows = samples(4, seed=3, vocabulary=101)
    length = -(-max(len(row.ids) for row in rows) // 2) * 2

    def told(**arguments: Any) -> str:
        return pool(1).run(out_of_memory, model_dir=moe[0], rows=rows, **arguments)[0]

    larger = "a larger --tensor_model_parallel_size, --context_parallel_size or --pipeline_model_parallel_size"
    assert told(kind="gpu", micro_batch=2) == (
        f"a micro-batch must fit in the memory of every rank; seen: 2 x {length} tokens: GPU 0 is out of memory. Tried to "
        f"allocate 2.00 GiB.; change: a lower --micro_batch_size (now 2), or a lower --max_length (rows of {length} tokens), "
        f"or --recompute_granularity full, or {larger}"
    )
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    cpu = told(kind="cpu", micro_batch=1, **full)
    assert "can't allocate memory" in cpu  # torch's own words
    assert cpu.endswith(f"; change: a lower --max_length (rows of {length} tokens), or {larger}")
    assert told(kind="other", micro_batch=1) == "RuntimeError: another fault"


@pytest.mark.parametrize("layout", [*LAYOUTS, Layout(data=2), Layout(context=2)], ids=str)
def test_parameters_are_counted_over_all_ranks_once(moe: tuple[str, Any], layout: Layout) -> None:
    """101 tokens: at TP 2 the vocabulary has a row of padding, which is no parameter of the model."""
    directory, reference = moe
    total = sum(parameter.numel() for parameter in reference.parameters())
    experts = sum(parameter.numel() for name, parameter in reference.named_parameters() if "experts" in name)
    options = {"sequence_parallel": True} if layout.tensor > 1 else {}
    for frozen, trained in (("", total), ("experts", total - experts)):
        ranks = pool(layout.world).run(parameter_counts, model_dir=directory, layout=layout, frozen=frozen, **options)
        assert ranks == [(trained, total)] * layout.world


def test_tied_embeddings_are_counted_once(tmp_path: Path) -> None:
    reference = write_model(tmp_path, moe=False, tie_word_embeddings=True)
    total = reference.num_parameters()
    assert pool(2).run(parameter_counts, model_dir=str(tmp_path), layout=Layout(pipeline=2)) == [(total, total)] * 2


def test_a_folder_that_is_not_shared_is_refused(tmp_path: Path) -> None:
    """B94: two ranks with different save roots. Every rank is told, and nothing is left behind."""
    one, other = tmp_path / "one", tmp_path / "other"
    told = pool(2).run(share_folder, folders=[str(one), str(other)], patience=0.5)
    blind = f"rank 1 on {socket.gethostname()} ({other})"
    assert (
        told[0]
        == told[1]
        == (
            "--save must be one folder that all ranks share; "
            f"seen: what rank 0 wrote is not seen by {blind}; "
            "change: a --save on a file system that all nodes mount, with the same path on each"
        )
    )
    assert list(one.iterdir()) == [] and not other.exists()
    assert pool(2).run(share_folder, folders=[str(one)] * 2, patience=0.5) == ["", ""]
    assert list(one.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused_by_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    path = str(tmp_path / "file" / "save")
    told = pool(2).run(share_folder, folders=[path, path], patience=0.5)
    assert told[0] == told[1] and told[0].startswith("rank 0 must be able to write to --save; seen: ")
    assert path in told[0]
