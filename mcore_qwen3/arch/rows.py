"""Sizes that have to be rounded up because ranks share them: the length of a row and the rows of the vocabulary."""

from __future__ import annotations

import math


def row_multiple(tensor: int, sequence_parallel: bool, context: int = 1) -> int:
    """The number that the length of every row (in tokens) must be a multiple of.

    Sequence parallel cuts a row into TP parts. Context parallel cuts it into 2 x CP parts, two to a rank, of which
    each rank's share is cut again into TP parts: CP x lcm(2, TP).

    Args:
        tensor: TP size.
        sequence_parallel: whether activations are split over TP along the row.
        context: CP size.
    """
    if context > 1:
        return context * math.lcm(2, tensor)
    return tensor if sequence_parallel else 1


def padded_vocab_size(vocab: int, tensor: int) -> int:
    """Vocabulary rows of the whole model once every TP rank holds the same number.

    Args:
        vocab: rows in the checkpoint, for all ranks together; padded once, here.
        tensor: TP size.
    """
    return -(-vocab // tensor) * tensor
