"""What every reader of weights offers: torch_dist keys with their shapes, and any slice of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from mcore_qwen3.errors import ConversionError

Bounds = tuple[tuple[int, int], ...]
_NAMES_SHOWN = 4


@dataclass(frozen=True)
class Entry:
    """Global shape (vocabulary unpadded) and dtype of one torch_dist key."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightSource(ABC):
    """Weights of one model under torch_dist keys, whatever files they lie in.

    Attributes:
        all_tensors: names of every tensor in the files, as the files call them.
        used_tensors: those of them that this object has read from so far.
    """

    def __init__(self, entries: dict[str, Entry], all_tensors: Iterable[str]) -> None:
        self._entries = entries
        self.all_tensors = frozenset(all_tensors)
        self.used_tensors: set[str] = set()

    def entries(self) -> dict[str, Entry]:
        """Every key with its global shape and dtype."""
        return dict(self._entries)

    def read(self, key: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """A slice of a key's global tensor, as a new contiguous CPU tensor. Only what overlaps it is read.

        Args:
            key: torch_dist key.
            slices: one slice for each axis of the global shape, of step 1, inside it. Open ends mean the whole axis.

        Raises:
            ConversionError: unknown key, slices that do not fit the shape, or damaged files.
        """
        if key not in self._entries:
            raise ConversionError("the checkpoint holds no tensor of this name", seen=key)
        entry = self._entries[key]
        bounds = _bounds(key, slices, entry.shape)
        out = torch.empty([high - low for low, high in bounds], dtype=entry.dtype)
        if out.numel():
            self._fill(key, bounds, out)
        return out

    def check_all_used(self, used: Set[str]) -> None:
        """Refuse a load that left tensors of the files unread.

        Args:
            used: the union of `used_tensors` over everything that took part, such as all ranks.

        Raises:
            ConversionError: with the names never read.
        """
        unused = self.all_tensors - used
        if unused:
            raise ConversionError(
                "every tensor of the checkpoint must be used",
                seen=f"{name_some(unused)} never read",
                fix="load with the model these files belong to",
            )

    @abstractmethod
    def recipe(self) -> Callable[[], WeightSource]:
        """Opens the same files again, in another process: a function that can be pickled."""

    @abstractmethod
    def _fill(self, key: str, bounds: Bounds, out: torch.Tensor) -> None:
        """Write the slice `bounds` (low, high for each axis; not empty) of `key` into `out`."""

    @abstractmethod
    def close(self) -> None:
        """Let go of open files. Tensors that were read stay valid."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def name_some(names: Iterable[str]) -> str:
    """The number of names and the first few of them, for a message."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:_NAMES_SHOWN])
    more = "" if len(ordered) <= _NAMES_SHOWN else ", ..."
    return f"{len(ordered)} tensor{'' if len(ordered) == 1 else 's'} ({shown}{more})"


def _bounds(key: str, slices: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    if len(slices) != len(shape):
        raise ConversionError(
            "a read needs one slice for each axis", seen=f"{len(slices)} slices for {key} of shape {shape}"
        )
    bounds = []
    for piece, size in zip(slices, shape, strict=True):
        low = 0 if piece.start is None else piece.start
        high = size if piece.stop is None else piece.stop
        if piece.step not in (None, 1) or not 0 <= low <= high <= size:
            raise ConversionError(
                "a slice must have step 1 and lie inside the tensor", seen=f"{piece} for {key} of shape {shape}"
            )
        bounds.append((low, high))
    return tuple(bounds)
