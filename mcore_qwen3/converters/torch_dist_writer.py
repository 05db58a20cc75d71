"""Write a torch_dist checkpoint directory from pieces of global tensors, with torch alone.

The layout is the one that megatron-core 0.16 and 0.19 both read: `.distcp` files and `.metadata` of
torch.distributed.checkpoint, `metadata.json` with four fields, `common.pt` with the iteration.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mcore_qwen3.errors import ConversionError

FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_HOST = torch.empty(0).device
Written = tuple[str, tuple[int, ...], str, int, int]
"""One chunk on disk: key, place of its first value, file, first byte, bytes. JSON can hold it."""


def _no_values() -> torch.Tensor:
    raise RuntimeError("the values of this chunk are elsewhere")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A rectangle of a global tensor, to be written by one process.

    Attributes:
        key: name of the global tensor.
        global_shape: its shape.
        starts: place of the first value in it.
        sizes: size on each axis.
        dtype: of the stored values.
        resolve: gives the values, in any shape with the right number of them; called once, when its turn comes. Left out where the chunk is only described.
    """

    key: str
    global_shape: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    resolve: Callable[[], torch.Tensor] = _no_values


class _Planner(dcp.DefaultSavePlanner):
    """Offers the chunks to torch's writer; its global plan checks that they cover every tensor exactly once."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._chunks = {(chunk.key, chunk.starts): chunk for chunk in chunks}
        if len(self._chunks) != len(chunks):
            raise ValueError("a chunk was offered twice")

    def create_local_plan(self) -> SavePlan:
        """One write item a chunk."""
        self.plan = SavePlan([_write_item(chunk) for chunk in self._chunks.values()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The values of one chunk, contiguous and of their own storage (a view would store its whole base)."""
        offset = write_item.index.offset
        assert offset is not None
        chunk = self._chunks[write_item.index.fqn, tuple(offset)]
        values = chunk.resolve().detach().reshape(chunk.sizes).contiguous()
        return values.clone() if values.untyped_storage().nbytes() != values.nbytes else values


class _Writer(dcp.FileSystemWriter):
    """torch's writer, but holding one chunk at a time: torch's own keeps the last chunk of every tensor in memory."""

    def __init__(self, directory: Path, report: Callable[[int], None]) -> None:
        super().__init__(directory, single_file_per_rank=True, sync_files=True)
        self._report = report

    def write_data(self, plan: SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        """Write all chunks of a plan into one file."""
        file = f"{plan.storage_data.prefix}0.distcp"
        results = []
        with (Path(self.path) / file).open("wb") as stream:
            for item in plan.items:
                values, start = planner.resolve_data(item), stream.tell()
                assert isinstance(values, torch.Tensor)
                _save(values, stream)
                length = stream.tell() - start
                results.append(WriteResult(item.index, length, _StorageInfo(file, start, length)))
                self._report(values.nbytes)
            stream.flush()
            os.fsync(stream.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _save(values: torch.Tensor, stream: BinaryIO) -> None:
    """torch.save from host memory, wherever the values lie."""
    try:
        torch.save(values.detach().to(_HOST), stream)
    except RuntimeError as error:
        # When the disk refuses, torch still ends its archive, and hides the reason behind a complaint about that.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _write_item(chunk: Chunk) -> WriteItem:
    starts, sizes = torch.Size(chunk.starts), torch.Size(chunk.sizes)
    return WriteItem(
        index=MetadataIndex(chunk.key, starts),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=starts, sizes=sizes),
            properties=TensorProperties(dtype=chunk.dtype),
            size=torch.Size(chunk.global_shape),
        ),
    )


def _unheard(nbytes: int) -> None:
    """Where nobody asks how far the writing is."""


def write_part(
    directory: Path, chunks: Sequence[Chunk], part: int, report: Callable[[int], None] = _unheard
) -> list[Written]:
    """Write one part's chunks into a file of its own, without torch.distributed; `merge_parts` completes the directory.

    Args:
        directory: exists.
        chunks: of this part.
        part: its number.
        report: called with the bytes of each chunk once it is written.

    Returns:
        Where each chunk lies; the file is durable.

    Raises:
        OSError: the disk refused.
    """
    if not chunks:
        return []
    planner = _Planner(chunks)
    plan = replace(planner.create_local_plan(), storage_data=_StoragePrefix(f"__{part}_"))
    results = _Writer(directory, report).write_data(plan, planner).wait()
    places = [(*result.index.offset,) for result in results if result.index.offset is not None]
    stored = [result.storage_data for result in results]
    return [
        (result.index.fqn, place, info.relative_path, info.offset, info.length)
        for result, place, info in zip(results, places, stored, strict=True)
    ]


def merge_parts(directory: Path, chunks: Sequence[Chunk], written: Sequence[Written]) -> None:
    """Write `.metadata` over all parts, through torch's own classes, once every chunk is known to be written once.

    Args:
        directory: holds the files of all parts.
        chunks: of all parts; their values are not asked for.
        written: what `write_part` returned, over all parts.

    Raises:
        ConversionError: chunks overlap, leave a hole, or were written never or twice.
    """
    planner = _Planner(chunks)
    places = {(key, tuple(offsets)): _StorageInfo(file, first, length) for key, offsets, file, first, length in written}
    if len(places) != len(written) or places.keys() != {(chunk.key, chunk.starts) for chunk in chunks}:
        raise ConversionError("every piece must be written exactly once", seen=f"{len(written)} for {len(chunks)}")
    try:
        # With an empty second plan torch checks that the chunks fill their tensors, too.
        (plan, _), metadata = planner.create_global_plan([planner.create_local_plan(), SavePlan([])])
    except ValueError as error:
        raise ConversionError("the pieces must cover every tensor exactly once", seen=error) from error
    results = []
    for item in plan.items:
        assert item.index.offset is not None
        info = places[item.index.fqn, tuple(item.index.offset)]
        results.append(WriteResult(item.index, info.length, info))
    _Writer(directory, _unheard).finish(metadata, [results])


def write_common(directory: Path, iteration: int) -> None:
    """Write `common.pt` and `metadata.json`, which make megatron take the directory for a checkpoint; last of all files."""
    torch.save({"iteration": iteration, "checkpoint_version": 3.0}, directory / "common.pt")
    (directory / "metadata.json").write_text(json.dumps(FORMAT))
