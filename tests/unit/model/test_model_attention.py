"""Packed attention against a masked softmax written out here. Shapes: T tokens, N query heads, G KV heads, D head_dim."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.model_checks import packed_attention
from helpers.ranks import pool

T, N, G, D = 12, 4, 2, 8


def inputs(seed: int = 0, heads: int = N, groups: int = G) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"query": (T, heads, D), "key": (T, groups, D), "value": (T, groups, D), "upstream": (T, heads * D)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def naive(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, upstream: torch.Tensor, lengths: list[int]
) -> dict[str, torch.Tensor]:
    """Softmax over all tokens at once, in fp64, with a mask: the same sample, not later."""
    query, key, value = (tensor.double().requires_grad_() for tensor in (query, key, value))
    sample_T = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    allowed_TT = (sample_T[:, None] == sample_T[None, :]) & torch.ones(T, T).tril().bool()
    heads = []
    for head in range(query.shape[1]):
        group = head // (query.shape[1] // key.shape[1])  # neighbouring query heads share a KV head
        scores_TT = query[:, head] @ key[:, group].T / math.sqrt(D)
        heads.append(scores_TT.masked_fill(~allowed_TT, -math.inf).softmax(-1) @ value[:, group])
    output = torch.cat(heads, dim=-1)
    output.backward(upstream.double())
    grads = {"query": query.grad, "key": key.grad, "value": value.grad}
    return {"output": output.detach(), **{name: grad for name, grad in grads.items() if grad is not None}}


@pytest.mark.parametrize("lengths", [[12], [3, 5, 4], [1, 10, 1]], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_equals_masked_softmax_forward_and_backward(lengths: list[int], groups: int) -> None:
    given = inputs(groups=groups)
    ours = pool(1).run(packed_attention, **given, lengths=lengths)[0]
    right = naive(**given, lengths=lengths)
    assert ours.keys() == right.keys()
    for name, tensor in right.items():
        torch.testing.assert_close(ours[name].double(), tensor, rtol=1e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_a_sample_does_not_see_its_neighbours() -> None:
    lengths, second = [3, 5, 4], slice(3, 8)
    one, other = inputs(seed=0), inputs(seed=1)
    for name, tensor in other.items():
        tensor[second] = one[name][second]
    first = pool(1).run(packed_attention, **one, lengths=lengths)[0]
    changed = pool(1).run(packed_attention, **other, lengths=lengths)[0]
    for name in first:
        assert torch.equal(first[name][second], changed[name][second]), name
        assert not torch.equal(first[name][:3], changed[name][:3]), name
