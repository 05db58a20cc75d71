"""Weights that several ranks hold are written once, and every rank writes as much as the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.ranks import pool
from helpers.resuming import written_bytes
from helpers.tiny import write_model
from helpers.training import Layout


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("moe")
    write_model(directory, moe=True, num_hidden_layers=4)
    return directory


@pytest.mark.parametrize("moments", [True, False], ids=["moments", "weights alone"])
@pytest.mark.parametrize(
    "layout",
    [Layout(data=2), Layout(context=2), Layout(data=2, expert=2), Layout(tensor=2, data=2), Layout(pipeline=2, data=2)],
    ids=str,
)
def test_ranks_write_each_value_once_and_equally_many(model_dir: Path, layout: Layout, moments: bool) -> None:
    chunk_bytes = 4096
    ranks = pool(layout.world).run(
        written_bytes, model_dir=str(model_dir), layout=layout, moments=moments, chunk_bytes=chunk_bytes
    )
    written = [place for rank in ranks for place in rank["own"]]
    assert len(written) == len(set(written))
    assert set(written) >= {place for rank in ranks for place in rank["held"]}
    copied = sum(sum(rank["held"].values()) for rank in ranks) / len({p for rank in ranks for p in rank["held"]})
    assert copied > 0
    # Pipeline stages hold different layers: only ranks of one stage can be equal.
    stages = [ranks] if layout.pipeline == 1 else [ranks[: len(ranks) // 2], ranks[len(ranks) // 2 :]]
    for stage in stages:
        totals = [sum(rank["own"].values()) for rank in stage]
        assert max(totals) - min(totals) <= 2 * chunk_bytes, totals
        assert max(totals) <= 1.05 * min(totals), totals


def test_large_weights_are_cut(model_dir: Path) -> None:
    """A chunk is what a reader takes at once."""
    (rank,) = pool(1).run(written_bytes, model_dir=str(model_dir), layout=Layout(), moments=True, chunk_bytes=2048)
    sizes = list(rank["own"].values())
    assert max(sizes) <= 2048
    assert sum(sizes) == 3 * sum(rank["held"].values())
