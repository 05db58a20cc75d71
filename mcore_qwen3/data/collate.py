"""Rows -> the arrays of one micro-batch. One contract, packed or not.

Shapes: B rows of R tokens each, laid end to end: T = B * R.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .reader import Sample


def micro_batch_arrays(rows: Sequence[Sequence[Sample]], row_length: int, pad_token_id: int) -> dict[str, np.ndarray]:
    """The fields of `batches.MicroBatch` but `max_seqlen`, as NumPy arrays.

    A target is trained or not by its place, never by its value: an end token that is also the padding token is trained
    where it ends a turn. The last token of a sample has no target, whatever follows it in the row.

    Args:
        rows: the samples of each row; a row without samples is all padding.
        row_length: R; no row has more tokens.
    """
    total = len(rows) * row_length
    tokens = np.full(total, pad_token_id, dtype=np.int64)
    labels = np.zeros(total, dtype=np.int64)
    loss_mask = np.zeros(total, dtype=np.float32)
    padding_mask = np.ones(total, dtype=np.bool_)
    boundaries = [0]
    for number, samples in enumerate(rows):
        at = number * row_length
        row_end = at + row_length
        for ids, mask in samples:
            end = at + len(ids)
            if end > row_end:
                raise ValueError(f"samples of more than {row_length} tokens in one row")
            tokens[at:end] = ids
            padding_mask[at:end] = False
            loss_mask[at : end - 1] = mask[1:]
            labels[at : end - 1] = np.where(mask[1:], ids[1:], 0)
            at = end
            boundaries.append(at)
        if at < row_end:
            boundaries.append(row_end)
    cu_seqlens = np.array(boundaries, dtype=np.int32)
    starts = np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))
    return {
        "tokens": tokens[None],
        "labels": labels[None],
        "loss_mask": loss_mask[None],
        "position_ids": (np.arange(total, dtype=np.int64) - starts)[None],
        "cu_seqlens": cu_seqlens,
        "padding_mask": padding_mask[None],
    }
