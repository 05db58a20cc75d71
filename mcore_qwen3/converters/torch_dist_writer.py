"""Write a torch_dist checkpoint directory from pieces of global tensors, with torch alone.

The layout is the one that megatron-core 0.16 and 0.19 both read: `.distcp` files and `.metadata` of
torch.distributed.checkpoint, `metadata.json` with four fields, `common.pt` with the iteration.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True, slots=True)
class Chunk:
    """A rectangle of a global tensor that this process writes.

    Attributes:
        key: name of the global tensor.
        global_shape: its shape.
        starts: place of the first value in it.
        sizes: size on each axis.
        dtype: of the stored values.
        resolve: gives the values, in any shape with the right number of them; called once, when its turn comes.
    """

    key: str
    global_shape: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    resolve: Callable[[], torch.Tensor]


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


def write_chunks(directory: Path, chunks: Sequence[Chunk]) -> None:
    """Write this process's chunks and, on rank 0, `.metadata`; collective when torch.distributed runs.

    Args:
        directory: exists and is empty of checkpoint files.
        chunks: together over all ranks they must cover every global tensor exactly once.

    Raises:
        dcp.api.CheckpointException: a chunk overlaps another, a tensor is incomplete, or the disk refused.
    """
    writer = dcp.FileSystemWriter(directory, single_file_per_rank=True, sync_files=True)
    dcp.save({}, storage_writer=writer, planner=_Planner(chunks))


def write_common(directory: Path, iteration: int) -> None:
    """Write `common.pt` and `metadata.json`, which make megatron take the directory for a checkpoint; last of all files."""
    torch.save({"iteration": iteration, "checkpoint_version": 3.0}, directory / "common.pt")
    (directory / "metadata.json").write_text(json.dumps(FORMAT))
