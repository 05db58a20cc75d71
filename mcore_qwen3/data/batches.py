"""Prepared data -> the micro-batches of each optimizer step, for one data-parallel rank.

Which rows a step holds depends on (seed, epoch, place in the run) alone: sample k of the run is row
permutation(epoch)[k % rows] with epoch = k // rows, and a step takes the next `global_batch_size` of them, across
epochs where needed. Micro-batch m of rank d takes places m * B * D + d * B ... + B of the step (B rows a micro-batch,
D ranks), so the step's rows do not depend on B or D, and a run continues at any sample.
"""

from __future__ import annotations

import atexit
import itertools
import math
import signal
import weakref
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from .collate import micro_batch_arrays
from .order import permutation
from .prepare import TRAIN, VALIDATION, Prepared
from .reader import SplitReader

EMPTY = -1  # the number of a row that only fills up the last evaluation batch
UNPACKED_MULTIPLE = 8  # row lengths without packing are rounded up to it, for the matrix units of GPUs


class BatchPlan(Protocol):
    """How a step is cut; `arch.BatchPlan` is one. global_batch_size = micro_batch_size * data * num_microbatches."""

    @property
    def micro_batch_size(self) -> int: ...
    @property
    def global_batch_size(self) -> int: ...
    @property
    def data(self) -> int: ...
    @property
    def num_microbatches(self) -> int: ...


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """CPU tensors of one forward pass. B rows of R tokens laid end to end in one line: T = B * R.

    A segment is a sample, or the padding at the end of a row; attention stays inside it.

    Attributes:
        tokens: int64 [1, T].
        labels: int64 [1, T], the next token of the same sample where it is trained, else 0.
        loss_mask: float32 [1, T], 1 where the label is trained, else 0.
        position_ids: int64 [1, T], from 0 in each segment.
        cu_seqlens: int32 [segments + 1], segment borders: first 0, last T, strictly increasing.
        padding_mask: bool [1, T], True = padding.
        max_seqlen: the length of the longest segment.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    padding_mask: torch.Tensor
    max_seqlen: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One optimizer step (or evaluation iteration) of one data-parallel rank.

    Attributes:
        micro_batches: `num_microbatches` of them, all rows R = `row_length` long, on every rank.
        rows: int64 [num_microbatches, B], the numbers of this rank's rows; EMPTY where a row only fills up.
        tokens, trained_tokens: this rank's tokens without padding, and trained targets.
        global_tokens, global_trained_tokens: the same over all ranks; every rank knows them without asking.
    """

    micro_batches: list[MicroBatch]
    row_length: int
    rows: np.ndarray
    tokens: int
    trained_tokens: int
    global_tokens: int
    global_trained_tokens: int


def train_batches(
    prepared: Prepared, plan: BatchPlan, *, dp_rank: int, consumed_samples: int, seed: int, num_workers: int
) -> Iterator[StepBatch]:
    """The steps of rank `dp_rank` from the `consumed_samples`-th row of the run on, without end.

    `num_workers` processes prepare the next steps (0 = this process does); they end when the iterator is closed or
    dropped, at interpreter exit, or within seconds of this process' death.
    """
    reader = SplitReader(prepared.path, TRAIN)
    steps = _Steps(prepared, reader, plan, dp_rank, _ShuffledOrder(len(reader), seed), consumed_samples)
    stream = _stream(steps, itertools.count(), num_workers)
    if num_workers:
        atexit.register(_close, weakref.ref(stream))
    return stream


def eval_batches(prepared: Prepared, plan: BatchPlan, *, dp_rank: int, eval_iters: int) -> Iterator[StepBatch]:
    """The first `eval_iters` batches of the validation rows (-1, or more than there are: all), in data order.

    The same every time and the same number on every rank; the last batch is filled up with empty rows (all padding,
    nothing trained).
    """
    if prepared.validation is None:
        raise ValueError("there is no validation split")
    reader = SplitReader(prepared.path, VALIDATION)
    whole = -(-len(reader) // plan.global_batch_size)
    number = whole if eval_iters == -1 else min(eval_iters, whole)
    return _stream(_Steps(prepared, reader, plan, dp_rank, _DataOrder(len(reader)), 0), range(number), 0)


class _ShuffledOrder:
    """Places of the run -> row numbers, a new permutation each epoch."""

    def __init__(self, rows: int, seed: int) -> None:
        self._rows = rows
        self._seed = seed
        self._known: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))  # the last epoch and its permutation

    def take(self, start: int, number: int) -> np.ndarray:
        """Row numbers, int64 [number], of places start ... start + number - 1."""
        pieces = []
        end = start + number
        while start < end:
            epoch, place = divmod(start, self._rows)
            if self._known[0] != epoch:
                self._known = (epoch, permutation(self._rows, self._seed, epoch))
            piece = self._known[1][place : place + end - start]
            pieces.append(piece)
            start += len(piece)
        return np.concatenate(pieces)


class _DataOrder:
    """Places -> row numbers as they stand in the data, then EMPTY."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def take(self, start: int, number: int) -> np.ndarray:
        places = np.arange(start, start + number, dtype=np.int64)
        return np.where(places < self._rows, places, EMPTY)


@dataclass(frozen=True, slots=True)
class _StepArrays:
    """A StepBatch before its arrays are tensors.

    Workers hand over NumPy arrays, which go through a pipe: tensors would go through shared memory, which containers
    limit to 64 MB, and hold a file descriptor each.
    """

    micro_batches: list[dict[str, np.ndarray]]
    facts: dict[str, int]
    rows: np.ndarray


class _Steps(Dataset[_StepArrays]):
    """Step number -> the arrays of that step for one rank."""

    def __init__(
        self,
        prepared: Prepared,
        reader: SplitReader,
        plan: BatchPlan,
        dp_rank: int,
        order: _ShuffledOrder | _DataOrder,
        start: int,
    ) -> None:
        self._prepared = prepared
        self._reader = reader
        self._plan = plan
        self._dp_rank = dp_rank
        self._order = order
        self._start = start

    def __getitem__(self, step: int) -> _StepArrays:
        plan = self._plan
        everyone = self._order.take(self._start + step * plan.global_batch_size, plan.global_batch_size)
        # Places of the step by micro-batch, then rank, then row.
        mine = everyone.reshape(plan.num_microbatches, plan.data, plan.micro_batch_size)[:, self._dp_rank]
        row_length = self._row_length(everyone)
        tokens, trained = self._reader.tokens, self._reader.trained_tokens
        micro_batches = [
            micro_batch_arrays(
                [[] if row == EMPTY else self._reader.samples(row) for row in rows],
                row_length,
                self._prepared.pad_token_id,
            )
            for rows in mine.tolist()
        ]
        return _StepArrays(
            micro_batches,
            {
                "row_length": row_length,
                "tokens": int(tokens[mine[mine != EMPTY]].sum()),
                "trained_tokens": int(trained[mine[mine != EMPTY]].sum()),
                "global_tokens": int(tokens[everyone[everyone != EMPTY]].sum()),
                "global_trained_tokens": int(trained[everyone[everyone != EMPTY]].sum()),
            },
            mine,
        )

    def _row_length(self, rows: np.ndarray) -> int:
        """R of a step: fixed with packing, else its longest row on any rank, rounded up. Every rank finds the same."""
        full = self._prepared.full_row_length
        if self._prepared.packing:
            return full
        longest = int(self._reader.tokens[rows[rows != EMPTY]].max())
        multiple = math.lcm(self._prepared.row_multiple, UNPACKED_MULTIPLE)
        return min(-(-longest // multiple) * multiple, full)


def _stream(steps: _Steps, numbers: Iterable[int], num_workers: int) -> Generator[StepBatch]:
    loader = DataLoader(
        steps,
        batch_size=None,
        sampler=numbers,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        worker_init_fn=_start_worker,
        generator=torch.Generator(),  # its own: the loader would draw from the global one, which training uses
    )
    for arrays in loader:
        yield StepBatch([_tensors(fields) for fields in arrays.micro_batches], rows=arrays.rows, **arrays.facts)


def _tensors(fields: dict[str, np.ndarray]) -> MicroBatch:
    longest = int(np.diff(fields["cu_seqlens"]).max())
    return MicroBatch(**{name: torch.from_numpy(array) for name, array in fields.items()}, max_seqlen=longest)


def _as_it_is(item: Any) -> Any:
    return item


def _start_worker(_: int) -> None:
    # Batch systems send signals to every process of a job. A worker that ended by one would fail the rank while it
    # saves; workers end with the rank.
    for stop in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(stop, signal.SIG_IGN)


def _close(stream: weakref.ref[Generator[StepBatch]]) -> None:
    """At exit, before multiprocessing waits for workers that take no SIGTERM."""
    if (alive := stream()) is not None:
        alive.close()
