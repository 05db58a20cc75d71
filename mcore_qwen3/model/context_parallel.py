"""Context parallel: which tokens of a packed row a rank holds, and which keys each of its queries sees.

Every segment (sample, or the padding behind a row) of length L is cut into 2 * CP chunks; rank r holds chunks r and
2 * CP - 1 - r, so that causal attention costs all ranks the same (zig-zag, as megatron and transformer-engine cut). Keys
and values are gathered whole.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams


@dataclass(frozen=True, slots=True)
class KeyPlan:
    """The attention calls of one rank: call i has `query_lengths[i]` queries, the last of the `key_lengths[i]` keys.

    Attributes:
        key_index: int64 [sum(key_lengths)], places of the keys of all calls in the gathered keys (rank after rank).
        query_lengths: queries of each call; queries lie one behind the other as the rank holds them.
        key_lengths: keys of each call; a call's queries stand at the end of its keys.
    """

    key_index: torch.Tensor
    query_lengths: list[int]
    key_lengths: list[int]


@dataclass
class PackedRow(PackedSeqParams):
    """Megatron's description of a packed row, with what the torch attention needs under context parallel."""

    key_plan: KeyPlan | None = None


def own_tokens(cu_seqlens: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """Places in the whole row of the tokens that a rank holds, in its order, int64 [T / ranks].

    Args:
        cu_seqlens: segment borders; every length is a multiple of 2 * ranks.
    """
    parts = []
    for start, stop in _segments(cu_seqlens):
        chunk = (stop - start) // (2 * ranks)
        for place in (rank, 2 * ranks - 1 - rank):
            parts.append(torch.arange(start + place * chunk, start + (place + 1) * chunk))
    return torch.cat(parts)


def plan_keys(cu_seqlens: torch.Tensor, ranks: int, rank: int) -> KeyPlan:
    """The attention calls of a rank: two a segment, one for each chunk it holds."""
    total = int(cu_seqlens[-1])
    gathered = torch.empty(total, dtype=torch.int64)  # place in the row -> place in the gathered keys
    for other in range(ranks):
        mine = own_tokens(cu_seqlens, ranks, other)
        gathered[mine] = torch.arange(len(mine)) + other * (total // ranks)
    index, queries, keys = [], [], []
    for start, stop in _segments(cu_seqlens):
        chunk = (stop - start) // (2 * ranks)
        for place in (rank, 2 * ranks - 1 - rank):
            seen = (place + 1) * chunk
            index.append(gathered[start : start + seen])
            queries.append(chunk)
            keys.append(seen)
    return KeyPlan(torch.cat(index), queries, keys)


def _segments(cu_seqlens: torch.Tensor) -> list[tuple[int, int]]:
    borders = cu_seqlens.tolist()
    return list(itertools.pairwise(borders))
