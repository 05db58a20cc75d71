"""The loss: sum of token losses and their number, from a mask by position."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mcore_qwen3.data.micro_batch import build_micro_batch
from mcore_qwen3.train.losses import token_loss


def over_all(*micro_batches: tuple[list[float], list[float]]) -> tuple[float, int]:
    """(loss, trained tokens) of a step made of (mask, losses), as the schedule divides: once, over all."""
    parts = [token_loss(torch.tensor([mask]), torch.tensor([losses])) for mask, losses in micro_batches]
    count = sum(int(part[1]) for part in parts)
    logged = torch.stack([part[2]["loss"] for part in parts]).sum(0)
    assert logged.tolist() == [float(sum(part[0] for part in parts)), count], "the log tells what is minimised"
    return float(sum(part[0] for part in parts)) / count, count


def test_tokens_weigh_the_same_in_short_and_long_answers() -> None:
    # Known fault B44: 2.0 as the mean of the micro-batches' means.
    assert over_all(([1, 0, 0], [1, 9, 9]), ([1, 1, 1], [3, 3, 3])) == (2.5, 4)


def test_a_micro_batch_without_trained_tokens_adds_nothing() -> None:
    # Known fault B46.
    assert over_all(([0, 0], [7, 8]), ([1, 1], [2, 4])) == (3.0, 2)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_untrained_positions_never_leak(bad: float) -> None:
    assert over_all(([0, 1, 1], [bad, 2, 4])) == (3.0, 2)
    losses = torch.tensor([[bad, 2.0, 4.0]], requires_grad=True)
    total, _, _ = token_loss(torch.tensor([[0.0, 1.0, 1.0]]), losses)
    total.backward()
    assert losses.grad is not None and losses.grad.tolist() == [[0, 1, 1]]


def test_trained_positions_do() -> None:
    total, _, _ = token_loss(torch.ones(1, 2), torch.tensor([[math.nan, 2.0]]))
    assert math.isnan(total)


def test_an_empty_micro_batch_has_a_finite_gradient() -> None:
    losses = torch.tensor([[math.inf, 3.0]], requires_grad=True)
    total, count, _ = token_loss(torch.zeros(1, 2), losses)
    total.backward()
    assert (total.item(), int(count)) == (0.0, 0)
    assert losses.grad is not None and losses.grad.tolist() == [[0, 0]]


def test_types_are_those_of_megatrons_schedules() -> None:
    total, count, metrics = token_loss(torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bfloat16, requires_grad=True))
    assert (total.dtype, total.shape, count.dtype, count.shape) == (torch.float32, (), torch.int32, ())
    assert total.requires_grad and not metrics["loss"].requires_grad


def test_the_end_token_is_trained_where_it_ends_a_turn_and_not_as_padding() -> None:
    # Known fault B32: the padding token is the end token. Trained targets are 6 and the first end token, no more.
    end = 2
    ids, marks = np.array([5, 6, end], dtype=np.int32), np.array([0, 1, 1], dtype=np.uint8)
    batch = build_micro_batch([[(ids, marks)]], row_length=5, pad_token_id=end)
    assert batch.tokens.tolist() == [[5, 6, end, end, end]]
    losses = torch.tensor([[1.0, 10.0, 100.0, 1000.0, 10000.0]])
    total, count, _ = token_loss(batch.loss_mask, losses)
    assert (float(total), int(count)) == (11.0, 2)
    assert batch.labels[0, :2].tolist() == [6, end]
