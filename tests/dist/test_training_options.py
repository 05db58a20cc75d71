"""Options that change when messages are sent, not what is computed: the same numbers as without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.option_checks import losses_by_dataset, train_with
from helpers.ranks import pool
from helpers.tiny import samples, token_losses, write_model
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


@pytest.mark.parametrize("recompute", [None, ("layernorm", "moe_act")], ids=str)
def test_expert_messages_beside_computation_change_no_number(model_dir: str, recompute: Any) -> None:
    args = {"model_dir": model_dir, "layout": Layout(data=2, expert=2), "rates": [0.01] * 2, "bf16": True}
    args["batches"] = [samples(8, seed=n) for n in range(2)]  # four micro-batches on each rank
    if recompute:
        args |= {"recompute_granularity": "selective", "recompute_modules": recompute}
    plain = pool(2).run(train_with, **args)
    for ours, theirs in zip(pool(2).run(train_with, **args, overlap_moe_expert_parallel_comm=True), plain, strict=True):
        assert ours["losses"] == theirs["losses"] and ours["grad_norms"] == theirs["grad_norms"]
        pairs = zip(ours["gradients"], theirs["gradients"], strict=True)
        assert all(a[:3] == b[:3] and torch.equal(a[3], b[3]) for a, b in pairs)


@pytest.mark.parametrize("layout", [Layout(), Layout(data=2), Layout(context=2), Layout(pipeline=2)], ids=str)
def test_the_loss_of_each_data_set_is_that_of_its_own_tokens(layout: Layout, tmp_path: Path) -> None:
    model = write_model(tmp_path, moe=True)
    rows, of = samples(4), [0, 1, 0, 0]
    with torch.no_grad():
        losses = [token_losses(model, row).double() for row in rows]
    wanted = {
        name: float(torch.cat([one for one, mine in zip(losses, of, strict=True) if mine == number]).mean())
        for number, name in enumerate("ab")
    }
    whole = float(torch.cat(losses).mean())
    args = {"model_dir": str(tmp_path), "layout": layout, "rows": rows, "of": of}
    for loss, by_dataset in pool(layout.world).run(losses_by_dataset, **args):
        assert loss == pytest.approx(whole, rel=1e-6)
        assert by_dataset == pytest.approx(wanted, rel=1e-6), "and none for the one without a token"


@pytest.mark.parametrize("text", ["Et*3|tL", "Et|t|t|tL"])
def test_a_layout_string_trains_as_one_rank(model_dir: str, text: str) -> None:
    args = {"model_dir": model_dir, "batches": [samples(4, seed=n) for n in range(2)], "rates": [0.01] * 2}
    (alone,) = pool(1).run(train_with, **args, layout=Layout())
    for rank in pool(2).run(train_with, **args, layout=Layout(pipeline=2), pipeline_layout=text):
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert rank["grad_norms"] == pytest.approx(alone["grad_norms"], rel=1e-4)
