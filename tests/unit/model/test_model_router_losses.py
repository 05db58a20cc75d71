"""The router's numbers of known public faults: B62, B67, B68, B70, B71, B74."""

from __future__ import annotations

import pytest
from helpers.ranks import pool
from helpers.router_checks import context_parallel_loss, route

ROWS = [[2.0, 1.0, 0.0, -1.0], [2.0, 1.0, 0.0, -1.0], [2.0, 0.0, 1.0, -1.0], [0.0, 1.0, 2.0, 3.0]]
PADDING = [[9.0, 0.0, 0.0, 0.0]] * 2


def test_padding_is_in_no_number() -> None:
    """B67: 1.152964 for the four rows; 1.358080 if two padding rows are counted. transformers' form is k times it (B71)."""
    masked = pool(1).run(route, micro_batches=[ROWS + PADDING], topk=2, padded=[2])[0]
    assert masked["balance_loss"] == pytest.approx(1.152964, abs=1e-6)
    assert 2 * masked["balance_loss"] == pytest.approx(2.305928, abs=2e-6)
    assert all(value == 0 for row in masked["gradients"][0][4:] for value in row)
    counted = pool(1).run(route, micro_batches=[ROWS + PADDING], topk=2)[0]
    assert counted["balance_loss"] == pytest.approx(1.358080, abs=1e-6)


def test_layers_are_measured_one_by_one() -> None:
    """B70: all tokens to one expert is 3.480194 in each layer; joined over both layers it would read 1.826731."""
    for expert in (0, 3):
        rows = [[3.0 if index == expert else 0.0 for index in range(4)]] * 5
        assert pool(1).run(route, micro_batches=[rows], topk=1)[0]["balance_loss"] == pytest.approx(3.480194, abs=1e-6)


def test_even_routing_is_one() -> None:
    """B71: perfectly even routing gives 1 whatever top-k is."""
    for topk in (1, 2):
        rows = [
            [1.0 if index in ((turn + step) % 4 for step in range(topk)) else 0.0 for index in range(4)]
            for turn in range(4)
        ]
        assert pool(1).run(route, micro_batches=[rows], topk=topk)[0]["balance_loss"] == pytest.approx(1.0, abs=1e-6)


def test_only_totals_matter_to_the_global_loss() -> None:
    """B68: micro-batches of 4, 4, 4 and of 6, 2, 4 tokens with the same frequencies press the same way."""
    kinds = ([2.0, 1.0, 0.0, -1.0], [0.0, 1.0, 2.0, 3.0])

    def pressure(sizes: tuple[int, ...]) -> list[list[float]]:
        micro_batches = [[list(kinds[index % 2]) for index in range(size)] for size in sizes]
        found = pool(1).run(route, micro_batches=micro_batches, topk=1, kind="global_aux_loss")[0]["gradients"]
        # The mean gradient of each kind of token, summed over micro-batches: what a weight shared by them would get.
        return [[sum(sum(row[e] for row in rows[kind::2]) for rows in found) for e in range(4)] for kind in range(2)]

    even, uneven = pressure((4, 4, 4)), pressure((6, 2, 4))
    assert even[0] == pytest.approx(uneven[0], abs=1e-7)
    assert even[1] == pytest.approx(uneven[1], abs=1e-7)
    assert max(abs(value) for value in even[0]) > 1e-3


def test_dropped_share_is_exact() -> None:
    """B74: eight tokens, all to the same two of four experts, capacity 0.5: 2 places each, 4 of 16 kept."""
    rows = [[3.0, 2.0, 0.0, 0.0]] * 8
    found = pool(1).run(route, micro_batches=[rows], topk=2, capacity=0.5)[0]
    assert found["dropped_share"] == 0.75
    padded = pool(1).run(route, micro_batches=[rows + PADDING], topk=2, capacity=0.5, padded=[2])[0]
    assert padded["dropped_share"] == 0.75, "padding takes no place and is not counted"


def test_context_parallel_counts_only_trained_tokens() -> None:
    """B62: losses 1 to 8, only token 5 trained, zig-zag over two ranks: 5.0; dividing by each rank's count gives 2.5."""
    total, count = pool(1).run(context_parallel_loss, losses=[1.0, 2, 3, 4, 5, 6, 7, 8], trained=[4], ranks=2)[0]
    assert total / count == 5.0
