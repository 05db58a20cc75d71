"""Rectangles of arrays: flat ranges cut into them, and their common parts."""

from __future__ import annotations

import math

from helpers.model_checks import all_flat_ranges, block_arithmetic
from helpers.ranks import pool

SHAPES = [(1,), (7,), (1, 1), (1, 6), (5, 1), (3, 4), (4, 3), (2, 3, 4), (3, 1, 4), (3, 2, 1), (1, 2, 5), (2, 2, 2, 3)]


def test_every_flat_range_of_small_arrays() -> None:
    ranges = [(size + 1) * (size + 2) // 2 for size in map(math.prod, SHAPES)]
    assert pool(1).run(all_flat_ranges, shapes=SHAPES) == [sum(ranges)]


def test_common_part_and_place_of_rectangles() -> None:
    common, inside, slices, touching, beside = pool(1).run(block_arithmetic)[0]
    assert common == ((4, 3), (2, 2))
    assert inside == ((2, 0), (2, 2))
    assert slices == (slice(4, 6), slice(3, 5))
    assert touching is None and beside is None
