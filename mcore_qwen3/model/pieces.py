"""Where each piece of this rank's parameters lies in the model's global tensors, as megatron itself describes it.

`model.sharded_state_dict()` names, for each piece of each parameter, the global tensor it belongs to and its place there.
One walk over it serves reading and writing, weights and optimizer state, every layout and both module sets: no rule about
splitting is written in this project.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.transformer.module import MegatronModule

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of an array: first index and size on each axis."""

    starts: Index
    sizes: Index

    @property
    def slices(self) -> tuple[slice, ...]:
        """As an index expression."""
        return tuple(map(slice, self.starts, self._stops))

    @property
    def _stops(self) -> Index:
        return tuple(start + size for start, size in zip(self.starts, self.sizes, strict=True))

    def intersect(self, other: Block) -> Block | None:
        """The common part, None if there is none."""
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self._stops, other._stops))
        if any(stop <= start for start, stop in zip(starts, stops, strict=True)):
            return None
        return Block(starts, tuple(stop - start for start, stop in zip(starts, stops, strict=True)))

    def relative_to(self, outer: Block) -> Block:
        """The same rectangle counted from the first index of an array that `outer` was cut out as."""
        return Block(tuple(a - b for a, b in zip(self.starts, outer.starts, strict=True)), self.sizes)


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of one parameter and its place in a global tensor.

    Attributes:
        key: torch_dist key of the global tensor.
        global_shape: with leading axes (layer, expert) that the parameter does not have; vocabulary padded for this layout.
        global_starts: place of the piece's first value.
        lead: number of leading axes.
        parameter: the parameter it is a part of.
        name: the parameter's name in the model.
        block: the rectangle within the parameter.
        copies: which copy of the same values this is: (pipeline, tensor, data); all 0 = the first.
        is_vocabulary: the first axis may be padded differently elsewhere.
    """

    key: str
    global_shape: Index
    global_starts: Index
    lead: int
    parameter: torch.nn.Parameter
    name: str
    block: Block
    copies: Index
    is_vocabulary: bool

    def global_block(self, part: Block) -> Block:
        """The place in the global tensor of a part of `block` (given in the parameter's coordinates)."""
        within = part.relative_to(self.block).starts
        starts = tuple(start + at for start, at in zip(self.global_starts[self.lead :], within, strict=True))
        return Block(self.global_starts[: self.lead] + starts, (1,) * self.lead + part.sizes)


def pieces(model: MegatronModule) -> Iterator[Piece]:
    """Describe every parameter of this rank; `_extra_state` of transformer-engine is passed over."""
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = model.sharded_state_dict(metadata=metadata)
    apply_factories(state)
    named = sorted(((p.data_ptr(), name, p) for name, p in model.named_parameters()), key=lambda item: item[0])
    addresses = [address for address, _, _ in named]
    for shard in nested_values(state):
        if isinstance(shard, ShardedTensor):
            assert shard.data is not None
            address, name, parameter = named[bisect.bisect_right(addresses, shard.data.data_ptr()) - 1]
            offset = (shard.data.data_ptr() - address) // shard.data.element_size()
            assert offset + shard.data.numel() <= parameter.numel(), f"{shard.key} is no part of a parameter"
            replica = shard.replica_id
            yield Piece(
                key=shard.key,
                global_shape=tuple(shard.global_shape),
                global_starts=tuple(shard.global_offset),
                lead=shard.prepend_axis_num,
                parameter=parameter,
                name=name,
                block=Block(_unravel(offset, tuple(parameter.shape)), tuple(shard.data.shape)),
                copies=replica if isinstance(replica, tuple) else (replica,),
                is_vocabulary=shard.allow_shape_mismatch,
            )


def _unravel(offset: int, shape: Index) -> Index:
    index = []
    for size in reversed(shape):
        offset, position = divmod(offset, size)
        index.append(position)
    return tuple(reversed(index))


def flat_range_blocks(start: int, stop: int, shape: Index) -> Iterator[tuple[int, Block]]:
    """Cut the range [start, stop) of a row-major array into rectangles, at most 2 x axes - 1 of them.

    Yields:
        (flat position of the rectangle's first value, the rectangle); each is contiguous in flat order.
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield start, Block((start,), (stop - start,))
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # full rows
    if first > last:  # inside one row
        yield from _in_row(start, stop, start // row, row, shape)
        return
    yield from _in_row(start, first * row, first - 1, row, shape)
    if first < last:
        yield first * row, Block((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
    yield from _in_row(last * row, stop, last, row, shape)


def _in_row(start: int, stop: int, index: int, row: int, shape: Index) -> Iterator[tuple[int, Block]]:
    for flat, block in flat_range_blocks(start - index * row, stop - index * row, shape[1:]):
        yield flat + index * row, Block((index, *block.starts), (1, *block.sizes))
