"""Cutting to the length limit, and packing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mcore_qwen3.data.encode import LengthRule, fit
from mcore_qwen3.data.pack import one_a_row, pack, pack_in_order


def sample(prompt: int, answer: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.arange(1, prompt + answer + 1, dtype=np.int32)
    return ids, np.array([0] * prompt + [1] * answer, dtype=np.uint8)


def fitted_one(ids: np.ndarray, mask: np.ndarray, rule: LengthRule) -> tuple[np.ndarray, np.ndarray]:
    fitted = fit(ids, mask, rule)
    assert not isinstance(fitted, str) and len(fitted) == 1
    return fitted[0]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("delete", [[4]]),
        ("right", [[4], [8], [8]]),
        ("left", [[4], [8], [8]]),
        ("split", [[4], [8, 1], [8, 8, 4]]),
    ],
)
def test_lengths_4_9_20_at_limit_8(strategy: str, expected: list[list[int]]) -> None:  # known fault B30
    fitted = [fit(*sample(1, length - 1), LengthRule(8, strategy)) for length in (4, 9, 20)]
    assert [[len(ids) for ids, _ in one] for one in fitted if not isinstance(one, str)] == expected
    assert all(one == "longer than max_length 8" for one in fitted if isinstance(one, str))


def test_split_loses_no_token_and_no_part_starts_with_a_target() -> None:
    ids = np.arange(20, dtype=np.int32)
    fitted = fit(ids, np.ones(20, np.uint8), LengthRule(8, "split"))
    assert not isinstance(fitted, str)
    assert np.concatenate([part for part, _ in fitted]).tolist() == ids.tolist()
    assert [mask.tolist() for _, mask in fitted] == [[0] + [1] * 7, [0] + [1] * 7, [0] + [1] * 3]


def test_which_end_is_cut() -> None:
    ids, mask = sample(2, 8)
    right, left = (fitted_one(ids, mask, LengthRule(4, end)) for end in ("right", "left"))
    assert (right[0].tolist(), right[1].tolist()) == ([1, 2, 3, 4], [0, 0, 1, 1])
    # The first token that is left is predicted by nothing.
    assert (left[0].tolist(), left[1].tolist()) == ([7, 8, 9, 10], [0, 1, 1, 1])
    assert mask.tolist() == [0, 0] + [1] * 8


def test_prompt_10_answer_3_limit_8_has_nothing_to_learn() -> None:  # known fault B31
    assert fit(*sample(10, 3), LengthRule(8, "right")) == "without trained tokens"
    assert fitted_one(*sample(10, 3), LengthRule(8, "left"))[1].sum() == 3


def test_a_single_trained_token_at_the_start_has_no_target() -> None:
    assert fit(np.array([5], np.int32), np.array([1], np.uint8), LengthRule(8, "delete")) == "without trained tokens"


def packs(lengths: list[int], capacity: int) -> list[list[int]]:
    """The sample numbers of each row, checked: every sample once, whole, and no row over its capacity."""
    samples, starts = pack(np.array(lengths, dtype=np.int64), capacity)
    rows = [samples[a:b].tolist() for a, b in itertools.pairwise(starts)]
    assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
    assert all(row and sum(lengths[number] for number in row) <= capacity for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows) and all(row == sorted(row) for row in rows)
    return rows


def slow_best_fit_decreasing(lengths: list[int], capacity: int) -> list[int]:
    """Room left in each row, by trying every row for every sample."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda row: rooms[row])] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


def fewest_rows(lengths: list[int], capacity: int, rooms: tuple[int, ...] = ()) -> int:
    """The least number of rows, by trying everything."""
    if not lengths:
        return len(rooms)
    first, rest = lengths[0], lengths[1:]
    tries = [fewest_rows(rest, capacity, (*rooms, capacity - first))]
    for row, room in enumerate(rooms):
        if room >= first:
            tries.append(fewest_rows(rest, capacity, (*rooms[:row], room - first, *rooms[row + 1 :])))
    return min(tries)


def test_lengths_7_5_4_3_3_2_at_limit_8_are_4_packs() -> None:  # known fault B35
    lengths = [7, 5, 4, 3, 3, 2]
    rows = packs(lengths, 8)
    assert sorted(sorted(lengths[number] for number in row) for row in rows) == [[2], [3, 4], [3, 5], [7]]


def test_packs_are_those_of_best_fit_decreasing() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        capacity = int(rng.integers(3, 40))
        lengths = rng.integers(1, capacity + 1, size=int(rng.integers(1, 60))).tolist()
        rooms = sorted(capacity - sum(lengths[number] for number in row) for row in packs(lengths, capacity))
        assert rooms == slow_best_fit_decreasing(lengths, capacity)


def test_sequential_packs_keep_the_order_of_the_data() -> None:
    lengths = np.array([5, 3, 4, 2, 3, 8, 1], dtype=np.int64)
    samples, starts = pack_in_order(lengths, 8)
    assert samples.tolist() == list(range(7))
    assert starts.tolist() == [0, 2, 4, 5, 6, 7]  # 5+3, 4+2 (3 has no room), 3, 8, 1
    assert [array.tolist() for array in pack_in_order(np.zeros(0, np.int64), 8)] == [[], [0]]
    with pytest.raises(ValueError, match="do not fit"):
        pack_in_order(np.array([9], dtype=np.int64), 8)


def test_packs_are_near_the_fewest() -> None:
    rng = np.random.default_rng(1)
    for _ in range(40):
        lengths = rng.integers(1, 11, size=6).tolist()
        assert len(packs(lengths, 10)) <= 11 / 9 * fewest_rows(lengths, 10) + 6 / 9  # the proven bound (Dosa 2007)


def test_fill_of_real_length_distributions() -> None:
    # performance notes, section 4: global best-fit-decreasing fills 99.86 % and 99.97 %
    for mean, sigma, least, fill in ((7.7, 0.7, 32, 0.9986), (5.3, 0.8, 16, 0.9997)):
        drawn = np.random.default_rng(0).lognormal(mean, sigma, 100_000)
        lengths = np.clip(np.rint(drawn), least, 8192).astype(np.int64)
        _, starts = pack(lengths, 8192)
        assert lengths.sum() / ((len(starts) - 1) * 8192) == pytest.approx(fill, abs=5e-5)


def test_one_sample_a_row_and_nothing() -> None:
    assert [array.tolist() for array in one_a_row(3)] == [[0, 1, 2], [0, 1, 2, 3]]
    assert [array.tolist() for array in pack(np.zeros(0, np.int64), 8)] == [[], [0]]
    for lengths in ([9], [0]):
        with pytest.raises(ValueError, match="do not fit"):
            pack(np.array(lengths, dtype=np.int64), 8)
