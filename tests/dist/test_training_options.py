"""Options that change when messages are sent, not what is computed: the same numbers as without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.option_checks import train_with
from helpers.ranks import pool
from helpers.tiny import samples, write_model
from helpers.training import Layout

OVERLAP = {"overlap_grad_reduce": True}
CASES: list[tuple[Layout, dict[str, bool]]] = [
    (Layout(data=2), OVERLAP),
    (Layout(data=2, expert=2), OVERLAP | {"overlap_param_gather": True}),
    (Layout(pipeline=2, virtual=2), OVERLAP | {"overlap_param_gather": True}),
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("moe")
    write_model(directory, moe=True, num_hidden_layers=4)
    return str(directory)


@pytest.mark.parametrize(("layout", "wrapping"), CASES, ids=[f"{one} {len(flags)}" for one, flags in CASES])
def test_overlap_changes_no_number(model_dir: str, layout: Layout, wrapping: dict[str, Any], tmp_path: Path) -> None:
    args = {"model_dir": model_dir, "layout": layout, "batches": [samples(4, seed=n) for n in range(3)]}
    plain = pool(layout.world).run(train_with, **args, rates=[0.01] * 3)
    overlapped = pool(layout.world).run(train_with, **args, rates=[0.01] * 3, wrapping=wrapping)
    for ours, theirs in zip(overlapped, plain, strict=True):
        assert ours["losses"] == theirs["losses"] and ours["grad_norms"] == theirs["grad_norms"]
        pairs = zip(ours["gradients"], theirs["gradients"], strict=True)
        assert all(a[:3] == b[:3] and torch.equal(a[3], b[3]) for a, b in pairs)
