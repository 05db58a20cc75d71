"""What a checkpoint holds and how its directory becomes visible: fsync, rename, then the tracker."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.transformer.module import MegatronModule

from mcore_qwen3.arch.shape import TRACKER, replaced_path
from mcore_qwen3.errors import McoreQwen3Error
from mcore_qwen3.model.build import Qwen3Model
from mcore_qwen3.model.pieces import Block, Index, pieces
from mcore_qwen3.train.optimizer_state import ensure_state, state_parts

Place = tuple[str, Index]
"""A rectangle's global tensor and the place of its first value there."""
# A reader takes whole chunks, so they bound the memory of a load. Below 32 MiB glibc uses the same memory for every chunk.
_CHUNK_BYTES = 30 * 2**20


BEST_TRACKER = "best_checkpointed_iteration.txt"


class SaveError(McoreQwen3Error):
    """A checkpoint could not be written; the earlier ones are as they were."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A rectangle of a global tensor that this rank writes; the fields are those that the writer takes."""

    key: str
    global_shape: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    values: torch.Tensor

    @property
    def place(self) -> Place:
        """What tells it from all others."""
        return self.key, self.starts


@dataclass(frozen=True, slots=True)
class CheckpointWriter:
    """How to write the files, handed in by the command line, so that training knows no file format.

    All of it runs in threads beside training, so none of it may be collective.

    Attributes:
        write_part: (directory, tensors of this rank, rank) -> what was written, for `complete`; the file is durable then.
        complete: rank 0 only: (directory, what every rank has written, iteration): everything else that the directory needs.
        sync: make a directory tree durable.
        after: rank 0 only: called with the directory of each finished checkpoint.
    """

    write_part: Callable[[Path, Sequence[SavedTensor], int], Any]
    complete: Callable[[Path, Sequence[Any], int], None]
    sync: Callable[[Path], None]
    after: Callable[[Path], None]


def iteration_name(iteration: int) -> str:
    """The directory's name, as Megatron's."""
    return f"iter_{iteration:07d}"


def partial_path(final: Path) -> Path:
    """Where a checkpoint is written before it is complete."""
    return final.with_name(f".{final.name}.partial")


def weights_held(models: Sequence[MegatronModule]) -> list[SavedTensor]:
    """The weights of this rank; other ranks hold copies of some, and one of them has to write (`Shares`)."""
    return [
        part
        for model in models
        for piece in pieces(model)
        for part in _cut(
            piece.key, piece.global_shape, piece.global_block(piece.block), piece.parameter.data[piece.block.slices]
        )
    ]


def state_held(models: Sequence[Qwen3Model], optimizer: ChainedOptimizer, *, with_master: bool) -> list[SavedTensor]:
    """The optimizer state that this rank writes; together the ranks write each value once."""
    ensure_state(optimizer)
    return [
        part
        for whole in state_parts(models, optimizer, with_master=with_master)
        if whole.is_first_copy
        for part in _cut(whole.place.key, whole.place.global_shape, whole.place.block, whole.values)
    ]


def _cut(key: str, global_shape: Index, block: Block, values: torch.Tensor) -> Iterator[SavedTensor]:
    """Rows of a rectangle, as many as go into a chunk; `values` lacks the leading axes of size 1."""
    lead = len(block.sizes) - values.dim()
    rows = max(1, _CHUNK_BYTES // max(1, values[:1].nbytes))
    for first in range(0, values.shape[0], rows):
        part = values[first : first + rows]
        starts = (*block.starts[:lead], block.starts[lead] + first, *block.starts[lead + 1 :])
        yield SavedTensor(key, global_shape, starts, (*block.sizes[:lead], *part.shape), part)


def publish(final: Path) -> None:
    """Give a complete and durable partial directory its name and make the tracker name it."""
    older = replaced_path(final)
    shutil.rmtree(older, ignore_errors=True)
    if final.exists():  # an earlier run's checkpoint of the same step
        os.replace(final, older)
    os.replace(partial_path(final), final)
    shutil.rmtree(older, ignore_errors=True)
    _sync_names(final.parent)
    write_tracker(final.parent, str(int(final.name.removeprefix("iter_"))))
    _sync_names(final.parent)


def write_tracker(root: Path, text: str, name: str = TRACKER) -> None:
    """Replace `latest_checkpointed_iteration.txt`, or its like, in one move."""
    temporary = root / f".{name}.partial"
    with open(temporary, "w") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, root / name)


def _sync_names(directory: Path) -> None:
    """Make renames in a directory durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
