"""Prepared data -> the micro-batches of each optimizer step, for one data-parallel rank.

Which rows a step holds depends on (seed, epoch, place in the run) alone: sample k of the run is row
permutation(epoch)[k % rows] with epoch = k // rows, and a step takes the next `global_batch_size` of them, across
epochs where needed. Micro-batch m of rank d takes places m * B * D + d * B ... + B of the step (B rows a micro-batch,
D ranks), so the step's rows do not depend on B or D, and a run continues at any sample.

Steps are built ahead by threads, not by worker processes: a micro-batch of 8,192 tokens is 0.2 ms of copying out of
memory-mapped files, and processes would have to be forked beside CUDA and communication threads, would take the signals
that a batch system sends to every process of a job, and would outlive a killed rank.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from mcore_qwen3.arch import BatchPlan
from mcore_qwen3.data.micro_batch import MicroBatch, build_micro_batch
from mcore_qwen3.data.order import permutation
from mcore_qwen3.data.reader import SplitReader
from mcore_qwen3.data.request import TRAIN, VALIDATION, Prepared

EMPTY = -1  # the number of a row that only fills up the last evaluation batch
UNPACKED_MULTIPLE = 8  # row lengths without packing are rounded up to it, for the matrix units of GPUs


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One optimizer step (or evaluation iteration) of one data-parallel rank.

    Attributes:
        micro_batches: `num_microbatches` of them, all rows R = `row_length` long, on every rank.
        rows: int64 [num_microbatches, B], the numbers of this rank's rows; EMPTY where a row only fills up.
        tokens, trained_tokens: this rank's tokens without padding, and trained targets.
        global_tokens, global_trained_tokens: the same over all ranks; every rank knows them without asking.
        global_squared_lengths: sum of the squared lengths of all ranks' samples.
        datasets: the run's data sets, which the micro-batches number; empty: not asked for.
        places: number of a row (not EMPTY) -> the file and line of each of its samples; slow, for errors.
    """

    micro_batches: list[MicroBatch]
    row_length: int
    rows: np.ndarray
    tokens: int
    trained_tokens: int
    global_tokens: int
    global_trained_tokens: int
    global_squared_lengths: int
    places: Callable[[int], list[str]]
    datasets: tuple[str, ...] = ()


def train_batches(
    prepared: Prepared,
    plan: BatchPlan,
    *,
    dp_rank: int,
    consumed_samples: int,
    seed: int,
    num_workers: int,
    datasets: tuple[str, ...] = (),
) -> Generator[StepBatch]:
    """The steps of rank `dp_rank` from the `consumed_samples`-th row of the run on, without end.

    `datasets`: names of the data sets, in order, where their tokens are to be told apart. `num_workers` threads build the
    next steps (0 = each is built when it is asked for). Close the generator to end
    them; a dropped one, and the end of the process, do so too.
    """
    reader = SplitReader(prepared.path, TRAIN)
    steps = _Steps(prepared, reader, plan, dp_rank, _ShuffledOrder(len(reader), seed), consumed_samples, datasets)
    return _ahead(steps, itertools.count(), num_workers)


def eval_batches(prepared: Prepared, plan: BatchPlan, *, dp_rank: int, eval_iters: int) -> Generator[StepBatch]:
    """The first `eval_iters` batches of the validation rows (-1, or more than there are: all), in data order.

    The same every time and the same number on every rank; the last batch is filled up with empty rows (all padding,
    nothing trained).
    """
    if prepared.validation is None:
        raise ValueError("there is no validation split")
    reader = SplitReader(prepared.path, VALIDATION)
    whole = -(-len(reader) // plan.global_batch_size)
    number = whole if eval_iters == -1 else min(eval_iters, whole)
    return _ahead(_Steps(prepared, reader, plan, dp_rank, _DataOrder(len(reader)), 0), range(number), 0)


def largest_batch(prepared: Prepared, plan: BatchPlan, *, num_microbatches: int) -> StepBatch:
    """A step of the largest shape that the training rows can give: each micro-batch holds the longest rows.

    The same rows on every rank. With packing every row has this length; without, only a step with the longest row.
    """
    reader = SplitReader(prepared.path, TRAIN)
    longest = np.argsort(-reader.tokens, kind="stable")[: plan.micro_batch_size]
    small = replace(
        plan,
        num_microbatches=num_microbatches,
        global_batch_size=num_microbatches * plan.data * plan.micro_batch_size,
    )
    return _Steps(prepared, reader, small, 0, _Repeated(longest), 0).build(0)


class _ShuffledOrder:
    """Places of the run -> row numbers, a new permutation each epoch."""

    def __init__(self, rows: int, seed: int) -> None:
        self._rows = rows
        self._seed = seed
        self._last: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))  # an epoch and its permutation

    def take(self, start: int, number: int) -> np.ndarray:
        """Row numbers, int64 [number], of places start ... start + number - 1."""
        pieces = []
        end = start + number
        while start < end:
            epoch, place = divmod(start, self._rows)
            piece = self._permutation(epoch)[place : place + end - start]
            pieces.append(piece)
            start += len(piece)
        return np.concatenate(pieces)

    def _permutation(self, epoch: int) -> np.ndarray:
        last = self._last  # read and written whole: threads may build steps of different epochs
        if last[0] != epoch:
            self._last = last = (epoch, permutation(self._rows, self._seed, epoch))
        return last[1]


class _DataOrder:
    """Places -> row numbers as they stand in the data, then EMPTY."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def take(self, start: int, number: int) -> np.ndarray:
        places = np.arange(start, start + number, dtype=np.int64)
        return np.where(places < self._rows, places, EMPTY)


@dataclass(frozen=True, slots=True)
class _Repeated:
    """The same few rows at all places."""

    rows: np.ndarray

    def take(self, start: int, number: int) -> np.ndarray:
        return np.resize(self.rows, start + number)[start:]


@dataclass(frozen=True, slots=True)
class _Steps:
    """Builds the steps of one rank; `start` is the place of the run where step 0 begins."""

    prepared: Prepared
    reader: SplitReader
    plan: BatchPlan
    dp_rank: int
    order: _ShuffledOrder | _DataOrder | _Repeated
    start: int
    datasets: tuple[str, ...] = ()

    def build(self, step: int) -> StepBatch:
        plan = self.plan
        everyone = self.order.take(self.start + step * plan.global_batch_size, plan.global_batch_size)
        # Places of the step by micro-batch, then rank, then row.
        mine = everyone.reshape(plan.num_microbatches, plan.data, plan.micro_batch_size)[:, self.dp_rank]
        row_length = self._row_length(everyone)
        micro_batches = []
        for rows in mine.tolist():
            samples = [[] if row == EMPTY else self.reader.samples(row) for row in rows]
            micro_batches.append(
                build_micro_batch(
                    samples,
                    row_length,
                    self.prepared.pad_token_id,
                    self.prepared.sample_multiple,
                    [self._datasets(row) for row in rows] if self.datasets else None,
                )
            )
        return StepBatch(
            micro_batches,
            row_length,
            mine,
            tokens=_total(self.reader.tokens, mine),
            trained_tokens=_total(self.reader.trained_tokens, mine),
            global_tokens=_total(self.reader.tokens, everyone),
            global_trained_tokens=_total(self.reader.trained_tokens, everyone),
            global_squared_lengths=_total(self.reader.squared_lengths, everyone),
            places=self.reader.places,
            datasets=self.datasets,
        )

    def _datasets(self, row: int) -> list[int]:
        """The number of the data set of each sample of a row."""
        ends = np.cumsum(self.prepared.dataset_samples)
        numbers: list[int] = np.searchsorted(ends, self.reader.numbers(row), side="right").tolist()
        return numbers

    def _row_length(self, rows: np.ndarray) -> int:
        """R of a step: fixed with packing, else its longest row on any rank, rounded up. Every rank finds the same."""
        full = self.prepared.full_row_length
        if self.prepared.packing:
            return full
        longest = int(self.reader.tokens[rows[rows != EMPTY]].max())
        multiple = math.lcm(self.prepared.row_multiple, self.prepared.sample_multiple, UNPACKED_MULTIPLE)
        return min(-(-longest // multiple) * multiple, full)


def _total(per_row: np.ndarray, rows: np.ndarray) -> int:
    return int(per_row[rows[rows != EMPTY]].sum())


def _ahead(steps: _Steps, numbers: Iterable[int], threads: int) -> Generator[StepBatch]:
    """Build the steps `numbers`, in order; `threads` of them while earlier ones are used."""
    if threads == 0:
        yield from map(steps.build, numbers)
        return
    waiting: deque[Future[StepBatch]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="batches")
    try:
        for number in numbers:
            waiting.append(pool.submit(steps.build, number))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        pool.shutdown()
