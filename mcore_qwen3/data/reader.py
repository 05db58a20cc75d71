"""A split of prepared data, memory-mapped: a process reads only the pages of the rows it asks for."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np

from mcore_qwen3.data.cache import PLACES

Sample = tuple[np.ndarray, np.ndarray]  # int32 ids, uint8 marks of trained targets; equal in length


class SplitReader:
    """Rows of one split."""

    def __init__(self, folder: Path, split: str) -> None:
        self._folder = folder
        self._split = split

    def __len__(self) -> int:
        return len(self._starts) - 1

    def samples(self, row: int) -> list[Sample]:
        """The samples of a row, in order."""
        numbers = self.numbers(row).tolist()
        bounds = [(int(self._offsets[number]), int(self._offsets[number + 1])) for number in numbers]
        return [(self._ids[start:end], self._mask[start:end]) for start, end in bounds]

    def numbers(self, row: int) -> np.ndarray:
        """The numbers of a row's samples among all samples of the folder."""
        numbers: np.ndarray = self._samples[self._starts[row] : self._starts[row + 1]]
        return numbers

    def places(self, row: int) -> list[str]:
        """Where each sample of a row comes from, as `file:line`. Reads all places: it is for errors."""
        places = (self._folder / PLACES).read_text(encoding="utf-8").split("\n")
        return [places[number] for number in self.numbers(row).tolist()]

    @cached_property
    def tokens(self) -> np.ndarray:
        """Tokens of each row, int64 [rows]."""
        return self._row_sums(np.diff(self._offsets))

    @cached_property
    def trained_tokens(self) -> np.ndarray:
        """Trained targets of each row, int64 [rows]."""
        return self._row_sums(self._open("trained"))

    @cached_property
    def squared_lengths(self) -> np.ndarray:
        """Sum of the squared lengths of each row's samples, int64 [rows]."""
        return self._row_sums(np.diff(self._offsets) ** 2)

    def _row_sums(self, per_sample: np.ndarray) -> np.ndarray:
        return np.add.reduceat(per_sample[self._samples], self._starts[:-1], dtype=np.int64)

    def _open(self, name: str) -> np.ndarray:
        return np.load(self._folder / f"{name}.npy", mmap_mode="r")

    @cached_property
    def _ids(self) -> np.ndarray:
        return self._open("ids")

    @cached_property
    def _mask(self) -> np.ndarray:
        return self._open("mask")

    @cached_property
    def _offsets(self) -> np.ndarray:
        return self._open("offsets")

    @cached_property
    def _samples(self) -> np.ndarray:
        return self._open(f"{self._split}_samples")

    @cached_property
    def _starts(self) -> np.ndarray:
        return self._open(f"{self._split}_rows")
