"""Save a run so that what is visible is complete: temporary directory, fsync, rename, then the tracker."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.transformer.module import MegatronModule

from mcore_qwen3.arch.shape import TRACKER
from mcore_qwen3.errors import McoreQwen3Error
from mcore_qwen3.model.build import unwrapped
from mcore_qwen3.model.pieces import pieces
from mcore_qwen3.train.optimizer import Chunks
from mcore_qwen3.train.optimizer_state import ensure_state, state_parts
from mcore_qwen3.train.state import TrainState


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


@dataclass(frozen=True, slots=True)
class CheckpointWriter:
    """How to write the files, handed in by the command line, so that training knows no file format.

    Attributes:
        write_tensors: (directory, tensors of this rank); collective.
        write_sides: rank 0 only: (directory, iteration): the files that make the directory complete and self-contained.
        sync: make a directory tree durable.
    """

    write_tensors: Callable[[Path, Sequence[SavedTensor]], None]
    write_sides: Callable[[Path, int], None]
    sync: Callable[[Path], None]


def iteration_name(iteration: int) -> str:
    """The directory's name, as Megatron's."""
    return f"iter_{iteration:07d}"


def tensors_to_save(
    models: Sequence[MegatronModule], optimizer: ChainedOptimizer | None, *, with_master: bool
) -> list[SavedTensor]:
    """The rectangles of weights and optimizer state that this rank writes; together the ranks write each value once."""
    saved = []
    for piece in (piece for model in models for piece in pieces(model)):
        if not any(piece.copies):
            place = piece.global_block(piece.block)
            values = piece.parameter.data[piece.block.slices]
            saved.append(SavedTensor(piece.key, piece.global_shape, place.starts, place.sizes, values))
    if optimizer is not None:
        ensure_state(optimizer)
        for part in state_parts(models, optimizer, with_master=with_master):
            if part.is_first_copy:
                saved.append(SavedTensor(part.key, part.global_shape, part.block.starts, part.block.sizes, part.values))
    return saved


def save_checkpoint(
    root: Path,
    state: TrainState,
    chunks: Chunks,
    optimizer: ChainedOptimizer | None,
    writer: CheckpointWriter,
) -> Path:
    """Write `<root>/iter_<n>` and make the tracker name it. Collective.

    Args:
        root: the run's save directory.
        state: progress to store.
        chunks: the wrapped model.
        optimizer: None leaves the moments out.
        writer: the file format.

    Returns:
        The checkpoint's directory.

    Raises:
        SaveError: on every rank, if any rank could not write; nothing that looks complete is left.
    """
    final = root / iteration_name(state.iteration)
    partial = root / f".{final.name}.partial"
    inner = [unwrapped(chunk) for chunk in chunks]
    stored = replace(state, has_optimizer=optimizer is not None)

    def clear() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def publish() -> None:
        stored.write(partial)
        writer.write_sides(partial, state.iteration)
        writer.sync(partial)
        older = root / f".{final.name}.replaced"
        if final.exists():  # an earlier run's checkpoint of the same step
            os.replace(final, older)
        os.replace(partial, final)
        shutil.rmtree(older, ignore_errors=True)
        _sync_names(root)
        write_tracker(root, str(state.iteration))
        _sync_names(root)

    _together(lambda: clear() if dist.get_rank() == 0 else None, "create a directory for the checkpoint", partial)
    tensors = tensors_to_save(inner, optimizer, with_master=inner[0].config.bf16)
    _together(lambda: writer.write_tensors(partial, tensors), "write the tensors of the checkpoint", partial)
    _together(lambda: publish() if dist.get_rank() == 0 else None, "complete the checkpoint", final)
    return final


def _together(action: Callable[[], None], what: str, where: Path) -> None:
    """Run the action on this rank; if it failed on any rank, fail on all with the first rank's reason."""
    reason = None
    try:
        action()
    except Exception as exc:  # every kind of failure has to reach the other ranks, or they wait for ever
        reason = f"{type(exc).__name__}: {exc}"
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    for rank, text in enumerate(reasons):
        if text is not None:
            raise SaveError(
                f"could not {what}",
                seen=f"rank {rank}, {where}: {text}",
                fix="make room or mend the rights, then start again: earlier checkpoints are complete",
            )


def write_tracker(root: Path, text: str) -> None:
    """Replace `latest_checkpointed_iteration.txt` in one move."""
    temporary = root / f".{TRACKER}.partial"
    with open(temporary, "w") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, root / TRACKER)


def _sync_names(directory: Path) -> None:
    """Make renames in a directory durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
