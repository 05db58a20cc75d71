"""Batch sizes, row lengths and the padded vocabulary."""

from __future__ import annotations

import pytest

from mcore_qwen3.arch import padded_vocab_size, resolve_batch, row_multiple
from mcore_qwen3.errors import ConfigError


@pytest.mark.parametrize(("micro", "global_", "data", "expected"), [(1, 16, 8, 2), (2, 16, 2, 4), (4, 4, 1, 1)])
def test_number_of_micro_batches(micro: int, global_: int, data: int, expected: int) -> None:
    plan = resolve_batch(micro, global_, data)
    assert plan.num_microbatches == expected
    assert (plan.micro_batch_size, plan.global_batch_size, plan.data) == (micro, global_, data)


@pytest.mark.parametrize(
    ("micro", "global_", "data", "fix"),
    [
        (3, 16, 2, "--global_batch_size 12 or 18, or --micro_batch_size 2 or 4"),  # B64
        (1, 2, 4, "--global_batch_size 4"),
        (2, 15, 1, "--global_batch_size 14 or 16, or --micro_batch_size 1 or 3"),
    ],
)
def test_b64_a_batch_that_does_not_divide(micro: int, global_: int, data: int, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_batch(micro, global_, data)
    assert caught.value.fix == fix
    assert f"global_batch_size {global_}, micro_batch_size {micro} x DP {data} = {micro * data}" in str(caught.value)


@pytest.mark.parametrize(("micro", "global_", "flag"), [(0, 4, "micro_batch_size"), (1, 0, "global_batch_size")])
def test_a_batch_of_nothing(micro: int, global_: int, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} must be at least 1"):
        resolve_batch(micro, global_, 1)


@pytest.mark.parametrize(
    ("context", "tensor", "expected"),
    [(1, 2, 2), (2, 1, 4), (2, 2, 4), (2, 4, 8), (4, 2, 8), (2, 3, 12), (1, 1, 1)],
)
def test_b34_row_multiple(context: int, tensor: int, expected: int) -> None:
    assert row_multiple(tensor, True, context) == expected


def test_row_multiple_without_sequence_parallel() -> None:
    assert row_multiple(4, False) == 1


@pytest.mark.parametrize(
    ("vocab", "tensor", "expected"), [(151669, 4, 151672), (101, 2, 102), (151936, 8, 151936), (101, 1, 101)]
)
def test_b01_padded_vocab_size(vocab: int, tensor: int, expected: int) -> None:
    assert padded_vocab_size(vocab, tensor) == expected


def test_b02_the_global_size_is_padded_once() -> None:
    padded = padded_vocab_size(101, 2)
    assert padded // 2 == 51  # 102 rows per rank where the size of one rank was taken for that of all
    assert padded_vocab_size(padded, 2) == padded


def test_interleaved_micro_batches_come_in_groups_of_pp() -> None:
    assert resolve_batch(1, 16, 2, pipeline=4, virtual_pipeline=2).num_microbatches == 8
    assert resolve_batch(1, 6, 1, pipeline=4).num_microbatches == 6  # the plain schedule takes any number
    with pytest.raises(ConfigError) as caught:
        resolve_batch(1, 12, 2, pipeline=4, virtual_pipeline=2)
    message = str(caught.value)
    assert "multiple of PP" in message and "6 micro-batches" in message
    assert caught.value.fix == "--global_batch_size 8 or 16, or no --virtual_pipeline_model_parallel_size"
    with pytest.raises(ConfigError) as caught:
        resolve_batch(3, 16, 1, pipeline=2, virtual_pipeline=2)
    assert caught.value.fix == "--global_batch_size 12 or 18, or --micro_batch_size 2 or 4"
