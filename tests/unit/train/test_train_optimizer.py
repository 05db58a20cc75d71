"""The update: what moves, what does not, and that bad numbers move nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.ranks import pool
from helpers.tiny import samples, write_model
from helpers.train_checks import allocated_state, non_finite_gradient, zero_gradient_step
from helpers.training import Cut, Layout, assemble, run_steps


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("moe")
    write_model(directory, moe=True)
    return str(directory)


@pytest.mark.parametrize(("bad", "seen"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "inf")])
@pytest.mark.parametrize("layout", [Layout(), Layout(data=2)], ids=str)
def test_a_bad_gradient_moves_nothing_on_any_rank(model_dir: str, layout: Layout, bad: float, seen: str) -> None:
    args = {"model_dir": model_dir, "rows": samples(4), "layout": layout, "bad": bad}
    for found in pool(layout.world).run(non_finite_gradient, **args, on_rank=layout.world - 1):
        assert found["skipped"] == f"the gradient norm is {seen}"
        assert found["moved by the good step"] > 0.9, "or nothing moving would show nothing"
        assert found["changed"] == []
        assert found["moments kept"]
        assert found["steps"] == {1.0}


@pytest.mark.parametrize("bf16", [False, True])
def test_decay_shrinks_matrices_and_leaves_norms_alone(model_dir: str, bf16: bool) -> None:
    lr, decay = (0.5, 0.5) if bf16 else (0.1, 0.1)  # 1 - 0.25 is exact in bf16
    found = pool(1).run(zero_gradient_step, model_dir=model_dir, lr=lr, weight_decay=decay, bf16=bf16)[0]
    vectors = {name: error for name, (axes, error) in found.items() if axes == 1}
    matrices = {name: error for name, (axes, error) in found.items() if axes > 1}
    assert len(vectors) == 2 * 4 + 1 and all("norm" in name for name in vectors)
    assert len(matrices) == 2 * 5 + 2  # qkv, proj, router, two stacks of experts; embedding and output layer
    assert set(vectors.values()) == {0.0}
    assert max(matrices.values()) <= (2**-8 if bf16 else 1e-7), matrices


@pytest.mark.parametrize("bf16", [False, True])
def test_allocating_moments_is_no_step(model_dir: str, bf16: bool) -> None:
    facts = pool(1).run(allocated_state, model_dir=model_dir, rows=samples(4), bf16=bf16)[0]
    assert facts == {
        "changed": [],
        "moments": 0.0,
        "steps at first": {0.0},
        "steps then": {1.0},
        "moments kept": True,
        "same first step": True,
        "steps when set": {7.0},
    }


LAYOUTS: list[tuple[Layout, dict[str, Any]]] = [
    (Layout(), {}),
    (Layout(data=2), {}),
    (Layout(data=2, expert=2), {}),
    (Layout(tensor=2, expert_tensor=2), {"sequence_parallel": True}),
]


@pytest.mark.parametrize(("layout", "options"), LAYOUTS, ids=[str(layout) for layout, _ in LAYOUTS])
def test_grad_norm_is_that_of_all_gradients(model_dir: str, layout: Layout, options: dict[str, Any]) -> None:
    args = {"model_dir": model_dir, "layout": layout, "batches": [samples(4)], "cut": Cut()}
    ranks = pool(layout.world).run(run_steps, **args, **options)
    # The gathered gradients are sums over tokens that the schedule has divided by the step's trained tokens.
    norm = torch.stack([gradient.double().norm() for gradient in assemble(ranks, atol=1e-6).values()]).norm()
    for rank in ranks:
        assert rank["grad_norms"] == [pytest.approx(float(norm), rel=1e-6)]
