"""Weights that several ranks hold are written by one of them, so that all write the same number of bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from mcore_qwen3.train.checkpoint import Place, SavedTensor


class Shares:
    """Which rank writes which of the weights that several ranks hold: bytes are balanced, moments included.

    The ranks tell each other once what they hold; the answer is kept for the run.
    """

    def __init__(self) -> None:
        self._own: set[Place] | None = None

    def own(self, weights: Sequence[SavedTensor], other_bytes: int) -> list[SavedTensor]:
        """The weights that this rank writes. Collective.

        Args:
            weights: all that it holds.
            other_bytes: what else it writes.
        """
        if self._own is None:
            held: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(held, (other_bytes, {each.place: each.values.nbytes for each in weights}))
            loads = [other for other, _ in held]
            writers = spread([sizes for _, sizes in held], loads)
            self._own = {place for place, rank in writers.items() if rank == dist.get_rank()}
        return [each for each in weights if each.place in self._own]


def spread(held: Sequence[Mapping[Place, int]], loads: Sequence[int]) -> dict[Place, int]:
    """A writer for every item, the largest items first, each to the least loaded of the ranks that hold it.

    Args:
        held: by rank: the items and their bytes.
        loads: by rank: bytes that it writes besides.
    """
    totals, holders, sizes = list(loads), defaultdict[Place, list[int]](list), dict[Place, int]()
    for rank, items in enumerate(held):
        for place, nbytes in items.items():
            holders[place].append(rank)
            sizes[place] = nbytes
    writers = {}
    # Items of a single rank come first: nothing can be chosen about them.
    for place in sorted(sizes, key=lambda place: (len(holders[place]) > 1, -sizes[place], place)):
        writers[place] = min(holders[place], key=lambda rank: totals[rank])
        totals[writers[place]] += sizes[place]
    return writers
