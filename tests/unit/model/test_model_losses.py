"""Losses of whole tiny models: vocabulary padding, packing, bf16. The files are written by transformers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.model_checks import losses_by_token, one_step
from helpers.ranks import pool
from helpers.tiny import Sample, hf_model, samples, token_losses, write_model
from helpers.training import Layout

# D2 of the known faults: a vocabulary that no tensor-parallel size divides, head_dim that is not hidden / heads.
D2: dict[str, Any] = {"vocab_size": 101, "hidden_size": 16, "head_dim": 8, "intermediate_size": 32}


def sample(*ids: int) -> Sample:
    """Every token but the first is trained."""
    return Sample(np.array(ids, dtype=np.int64), np.array([0] + [1] * (len(ids) - 1), dtype=np.uint8))


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2)], ids=str)
def test_vocabulary_padding_takes_no_probability(layout: Layout, tmp_path: Path) -> None:
    # All logits equal: each of the 101 tokens has probability 1/101, whatever the 102nd row of two ranks holds.
    model = hf_model(moe=False, **D2)
    torch.nn.init.zeros_(model.lm_head.weight)  # type: ignore[arg-type, union-attr]
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    rows = [[sample(5, 0, 100, 51, 50)]]
    for losses in pool(layout.world).run(losses_by_token, model_dir=str(tmp_path), layout=layout, rows=rows):
        assert losses == pytest.approx([math.log(101)] * 4, abs=1e-6)
        assert losses == pytest.approx([4.615121] * 4, abs=1e-6)


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2)], ids=str)
def test_packed_samples_lose_what_they_lose_apart(layout: Layout, tmp_path: Path) -> None:
    # Known fault B33: samples of 3 and 5 tokens in one row must not see each other, and positions restart.
    model = write_model(tmp_path, moe=False, **D2)
    short, long = sample(7, 70, 3), sample(90, 2, 100, 11, 64)
    args = {"model_dir": str(tmp_path), "layout": layout}
    packed = pool(layout.world).run(losses_by_token, **args, rows=[[short, long]])[0]
    apart = [pool(layout.world).run(losses_by_token, **args, rows=[[each]])[0] for each in (short, long)]
    reference = [token_losses(model, each).sum().item() for each in (short, long)]
    assert len(packed) == 6
    assert sum(packed) == pytest.approx(sum(map(sum, apart)), abs=1e-5)
    assert [sum(losses) for losses in apart] == pytest.approx(reference, rel=1e-5)
    as_one = token_losses(model, Sample(np.concatenate([short.ids, long.ids]), np.array([0, 1, 1, 0, 1, 1, 1, 1])))
    assert abs(as_one.sum().item() - sum(packed)) > 0.01, "these samples would not show that they see each other"


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_bf16_stays_near_fp32(moe: bool, tmp_path: Path) -> None:
    write_model(tmp_path, moe=moe)
    args = {"model_dir": str(tmp_path), "rows": [[row] for row in samples(4)]}
    exact, rounded = (pool(1).run(one_step, **args, bf16=bf16)[0] for bf16 in (False, True))
    assert (exact["parameters"], exact["gradients"]) == ({"torch.float32"}, {"torch.float32"})
    assert (rounded["parameters"], rounded["gradients"]) == ({"torch.bfloat16"}, {"torch.float32"})
    assert rounded["loss"] == pytest.approx(exact["loss"], rel=0.02)
    assert rounded["loss"] != exact["loss"]
    assert rounded["norm"] == pytest.approx(exact["norm"], rel=0.1)
