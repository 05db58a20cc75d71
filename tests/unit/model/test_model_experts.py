"""Grouped experts against a loop over experts, and their checkpoint entries against megatron's one module an expert."""

from __future__ import annotations

import pytest
import torch
from helpers.model_checks import expert_entries, grouped_experts
from helpers.ranks import pool
from helpers.training import Layout

EXPERTS = 4


def inputs(counts: list[int], hidden_size: int, width: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    total = sum(counts)
    return {
        "weight1": torch.randn(EXPERTS, 2 * width, hidden_size, generator=generator),
        "weight2": torch.randn(EXPERTS, hidden_size, width, generator=generator),
        "hidden": torch.randn(total, hidden_size, generator=generator),
        "probs": torch.rand(total, generator=generator),
    }


def loop(
    weight1: torch.Tensor, weight2: torch.Tensor, hidden: torch.Tensor, probs: torch.Tensor, counts: list[int]
) -> dict[str, torch.Tensor]:
    """Each token through its expert, one by one, in fp64: fc2(silu(gate) * up * probability)."""
    given = {"weight1": weight1, "weight2": weight2, "hidden": hidden, "probs": probs}
    leaves = {name: tensor.double().requires_grad_() for name, tensor in given.items()}
    owners = [expert for expert, count in enumerate(counts) for _ in range(count)]
    rows = []
    for token, expert in enumerate(owners):
        gate, up = (leaves["weight1"][expert] @ leaves["hidden"][token]).chunk(2)
        inner = gate * torch.sigmoid(gate) * up * leaves["probs"][token]
        rows.append(leaves["weight2"][expert] @ inner)
    output = torch.stack(rows) if rows else torch.zeros(0, hidden.shape[1], dtype=torch.float64)
    if rows:
        output.sum().backward()
    grads = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    return {"output": output.detach(), **grads}


# fp32 rows of 16 bytes are multiples of 4 values: 16 and 8 fit torch's grouped_mm, 6 does not, and the loop is used.
@pytest.mark.parametrize(
    ("counts", "hidden_size", "width", "grouped_calls"),
    [
        ([3, 5, 2, 7], 16, 8, 2),
        ([0, 4, 0, 1], 16, 8, 2),
        ([0, 0, 0, 6], 16, 8, 2),
        ([0, 0, 0, 0], 16, 8, 0),
        ([3, 0, 2, 4], 16, 6, 1),  # 12 x 16 fits in the first product, 16 x 6 does not in the second
        ([3, 0, 2, 4], 6, 8, 0),
        ([0, 0, 0, 0], 6, 6, 0),
    ],
)
def test_equals_a_loop_over_experts(counts: list[int], hidden_size: int, width: int, grouped_calls: int) -> None:
    given = inputs(counts, hidden_size, width)
    ours = pool(1).run(grouped_experts, **given, counts=counts)[0]
    assert ours.pop("grouped_mm calls") == grouped_calls
    right = loop(**given, counts=counts)
    assert ours.keys() == right.keys()
    for name, tensor in right.items():
        assert ours[name].shape == tensor.shape, name
        torch.testing.assert_close(ours[name].double(), tensor, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(expert=2, data=2), Layout(tensor=2, expert_tensor=2), Layout(data=2)], ids=str
)
def test_checkpoint_entries_are_those_of_a_sequence_of_experts(layout: Layout) -> None:
    ranks = pool(layout.world).run(expert_entries, layout=layout)
    held = 0
    for found in ranks:
        grouped, sequential = found["grouped"], found["sequential"]
        assert grouped.keys() == sequential.keys()
        assert set(grouped) == {f"mlp.experts.experts.linear_fc{number}.weight" for number in (1, 2)}
        for key, (whole, replicas, traits) in sequential.items():
            assert torch.equal(grouped[key][0].nan_to_num(9e9), whole.nan_to_num(9e9)), key
            assert (grouped[key][1], grouped[key][2]) == (replicas, traits), key
            held += int((~whole.isnan()).sum())
    copies = layout.world // (layout.expert * layout.expert_tensor)
    assert held == copies * 4 * (2 * 8 * 16 + 16 * 8)  # 4 experts of gate, up and down, in the second layer alone
