"""Samples -> rows of a fixed capacity, on whole token counts."""

from __future__ import annotations

import numpy as np


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack samples of `lengths` tokens (int64 [n], 1..capacity) into rows of `capacity` tokens.

    Global best-fit-decreasing: longest sample first, each into the row with the least room that still holds it. Rows
    are kept by the room left in them, with one bit set per room that some row has, so finding the row costs a shift and
    not a search. Every sample is in exactly one row, whole. Rows stand in the order of their first sample and hold
    their samples in order, so that the first rows are about the first samples of the data.

    Returns:
        `samples` int64 [n], the sample numbers row after row, and `starts` int64 [rows + 1]: row r holds
        samples[starts[r]:starts[r + 1]].
    """
    _check_lengths(lengths, capacity)
    rows_with_room: list[list[int]] = [[] for _ in range(capacity)]
    rooms = 0  # bit r is set when some row has room for exactly r more tokens
    rows = 0
    row_of = np.empty(len(lengths), dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    for sample, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = rows_with_room[room].pop()
            if not rows_with_room[room]:
                rooms ^= 1 << room
        else:
            room, row = capacity, rows
            rows += 1
        row_of[sample] = row
        if left := room - length:
            rows_with_room[left].append(row)
            rooms |= 1 << left
    return _in_data_order(row_of, rows)


def pack_in_order(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """The same as `pack` returns, with the samples in data order: a row ends where the next sample has no room."""
    _check_lengths(lengths, capacity)
    starts, room = [0], capacity
    for sample, length in enumerate(lengths.tolist()):
        if length > room:
            starts.append(sample)
            room = capacity
        room -= length
    if len(lengths):
        starts.append(len(lengths))
    return np.arange(len(lengths), dtype=np.int64), np.array(starts, dtype=np.int64)


def one_a_row(number: int) -> tuple[np.ndarray, np.ndarray]:
    """The same as `pack` returns, for `number` samples each in a row of its own."""
    return np.arange(number, dtype=np.int64), np.arange(number + 1, dtype=np.int64)


def _check_lengths(lengths: np.ndarray, capacity: int) -> None:
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= capacity:
        raise ValueError(f"lengths {lengths.min()}..{lengths.max()} do not fit 1..{capacity}")


def _in_data_order(row_of: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    first_sample = np.full(rows, len(row_of), dtype=np.int64)
    np.minimum.at(first_sample, row_of, np.arange(len(row_of)))
    new_row = np.empty(rows, dtype=np.int64)
    new_row[np.argsort(first_sample)] = np.arange(rows)
    row_of = new_row[row_of]
    starts = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=rows))])
    return np.argsort(row_of, kind="stable"), starts.astype(np.int64)


PACKERS = {"binpack": pack, "sequential": pack_in_order}
