"""Rows -> one micro-batch. One contract, packed or not.

Shapes: B rows of R tokens each, laid end to end in one line: T = B * R.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mcore_qwen3.data.reader import Sample


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """CPU tensors of one forward pass.

    A segment is a sample with the padding that brings it to the sample multiple, or the padding at the end of a row;
    attention stays inside it. Padding inside a segment stands behind the sample, so no sample's token sees it.

    Attributes:
        tokens: int64 [1, T].
        labels: int64 [1, T], the next token of the same sample where it is trained, else 0.
        loss_mask: float32 [1, T], 1 where the label is trained, else 0.
        position_ids: int64 [1, T], from 0 in each segment; they run on through its padding.
        cu_seqlens: int32 [segments + 1], segment borders: first 0, last T, strictly increasing.
        padding_mask: bool [1, T], True = padding.
        max_seqlen: the length of the longest segment.
        datasets: int64 [1, T], which of the run's data sets each token is of (0 at padding); None: not asked for.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    padding_mask: torch.Tensor
    max_seqlen: int
    datasets: torch.Tensor | None = None


def build_micro_batch(
    rows: Sequence[Sequence[Sample]],
    row_length: int,
    pad_token_id: int,
    sample_multiple: int = 1,
    datasets: Sequence[Sequence[int]] | None = None,
) -> MicroBatch:
    """Lay rows of samples end to end.

    A target is trained or not by its place, never by its value: an end token that is also the padding token is trained
    where it ends a turn. The last token of a sample has no target, whatever follows it in the row.

    Args:
        rows: the samples of each row; a row without samples is all padding.
        row_length: R, a multiple of `sample_multiple`; no row has more tokens, padding of its samples included.
        sample_multiple: every segment's length is a multiple of it (context parallel cuts each into equal parts).
        datasets: of each row, the number of each sample's data set, where that is asked for.
    """
    if row_length % sample_multiple:
        raise ValueError(f"a row of {row_length} tokens is not a multiple of {sample_multiple}")
    total = len(rows) * row_length
    tokens = np.full(total, pad_token_id, dtype=np.int64)
    labels = np.zeros(total, dtype=np.int64)
    loss_mask = np.zeros(total, dtype=np.float32)
    padding_mask = np.ones(total, dtype=np.bool_)
    of_dataset = None if datasets is None else np.zeros(total, dtype=np.int64)
    borders = [0]
    for number, samples in enumerate(rows):
        at = number * row_length
        row_end = at + row_length
        for place, (ids, mask) in enumerate(samples):
            end = at + len(ids)
            segment_end = at + -(-len(ids) // sample_multiple) * sample_multiple
            if segment_end > row_end:
                raise ValueError(f"samples of more than {row_length} tokens in one row")
            tokens[at:end] = ids
            padding_mask[at:end] = False
            if of_dataset is not None and datasets is not None:
                of_dataset[at:end] = datasets[number][place]
            loss_mask[at : end - 1] = mask[1:]
            labels[at : end - 1] = np.where(mask[1:], ids[1:], 0)
            at = segment_end
            borders.append(at)
        if at < row_end:
            borders.append(row_end)
    cu_seqlens = np.array(borders, dtype=np.int32)
    lengths = np.diff(cu_seqlens)
    position_ids = np.arange(total, dtype=np.int64) - np.repeat(cu_seqlens[:-1], lengths)
    line = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": position_ids}
    return MicroBatch(
        **{name: torch.from_numpy(array)[None] for name, array in line.items()},
        cu_seqlens=torch.from_numpy(cu_seqlens),
        padding_mask=torch.from_numpy(padding_mask)[None],
        max_seqlen=int(lengths.max()),
        datasets=None if of_dataset is None else torch.from_numpy(of_dataset)[None],
    )
