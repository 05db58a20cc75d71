"""The nearest values that would have been legal, for error messages."""

from __future__ import annotations

from collections.abc import Callable


def nearest_legal(value: int, limit: int, legal: Callable[[int], bool]) -> str:
    """The nearest legal values below and above a value, as "2 or 4"; empty where there are none.

    Args:
        value: the value that is not legal.
        limit: the largest value to try.
        legal: whether a candidate of 1 or more is legal.
    """
    below = next((candidate for candidate in range(min(value - 1, limit), 0, -1) if legal(candidate)), None)
    above = next((candidate for candidate in range(max(value + 1, 1), limit + 1) if legal(candidate)), None)
    return " or ".join(str(candidate) for candidate in (below, above) if candidate is not None)
