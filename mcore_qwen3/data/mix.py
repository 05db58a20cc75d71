"""How many samples of each source are trained on, and in what order they lie. All choices come from the seed alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mcore_qwen3.data.order import permutation, uniform


def chosen_below(number: int, wanted: int, seed: int, stream: str) -> np.ndarray:
    """`wanted` (at most `number`) of range(number) without replacement, in order: int64."""
    return np.sort(permutation(number, seed, f"sample {stream}")[:wanted])


def with_copies(kept: int, usable: int, wanted: int, seed: int, stream: str) -> np.ndarray:
    """range(kept) in whole copies and a random remainder: int64.

    Args:
        kept: samples that `usable` rows gave; some were dropped, or split in several.
        usable: rows they came from.
        wanted: rows asked for, at least `usable`: wanted // usable copies, and the remainder's share of the samples.
    """
    copies, more = divmod(wanted, usable)
    rest = chosen_below(kept, round(kept * more / usable), seed, stream)
    return np.concatenate([np.tile(np.arange(kept), copies), rest])


def interleave(parts: Sequence[np.ndarray], probabilities: Sequence[float], seed: int) -> np.ndarray:
    """Draw from `parts` by `probabilities`, each part in its own order, until one is used up: int64."""
    needed = min(len(part) / share for part, share in zip(parts, probabilities, strict=True))
    borders = np.cumsum(probabilities)[:-1]
    draws = np.zeros(0, np.int64)
    ends = []
    for block in range(1 << 20):  # one block is nearly always enough
        more = uniform(int(needed) + 1024, seed, f"interleave {block}")
        draws = np.concatenate([draws, np.searchsorted(borders, more, side="right")])
        places = [np.flatnonzero(draws == number) for number in range(len(parts))]
        ends = [int(at[len(part) - 1]) for at, part in zip(places, parts, strict=True) if len(at) >= len(part)]
        if ends:
            break
    draws = draws[: min(ends) + 1]
    mixed = np.empty(len(draws), np.int64)
    for number, part in enumerate(parts):
        at = draws == number
        mixed[at] = part[: at.sum()]
    return mixed
