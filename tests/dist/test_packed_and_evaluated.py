"""Packing changes no loss, and an evaluation set that does not fill its last batch gives the mean of its rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.evaluating import evaluation_mean, loss_sum
from helpers.prepared import prepared_data
from helpers.ranks import pool
from helpers.real_rows import real_samples
from helpers.tiny import Sample, samples, token_losses, write_model
from helpers.training import Cut, Layout


def transformers_losses(model: torch.nn.Module, rows: list[Sample]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [token_losses(model, row).double() for row in rows]


@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_packed_losses_are_the_single_ones(moe: bool, context: int, material_dir: Path, tmp_path: Path) -> None:
    """Real rows: the sum over packs of four is transformers' sum of one row at a time, and our own, to 1e-5."""
    model = write_model(tmp_path, moe=moe)
    rows = real_samples(material_dir, 16)
    single = transformers_losses(model, rows)
    layout = Layout(context=context)
    for pack in (1, 4):
        for total, trained in pool(context).run(
            loss_sum, model_dir=str(tmp_path), layout=layout, samples=rows, cut=Cut(pack=pack)
        ):
            assert trained == sum(len(losses) for losses in single)
            assert total == pytest.approx(float(torch.cat(single).sum()), rel=1e-5)


@pytest.mark.parametrize("layout", [Layout(), Layout(data=2), Layout(data=2, context=2)], ids=str)
def test_five_rows_on_two_ranks_with_micro_batch_2(layout: Layout, tmp_path: Path) -> None:
    """B40: the last batch is short, one rank's part of it empty; the mean is that of the five rows."""
    model = write_model(tmp_path / "model", moe=False)
    rows = samples(5, longest=16)
    multiple = 2 * layout.context if layout.context > 1 else 1
    prepared = prepared_data(
        tmp_path,
        [(row.ids.astype("int32"), row.mask) for row in rows],
        packing=False,
        row_multiple=multiple,
        sample_multiple=multiple,
    )
    expected = torch.cat(transformers_losses(model, rows)).mean()
    for mean in pool(layout.world).run(
        evaluation_mean,
        model_dir=str(tmp_path / "model"),
        layout=layout,
        prepared=prepared,
        micro_batch=2,
        global_batch=4,
    ):
        assert mean == pytest.approx(float(expected), rel=1e-6)
