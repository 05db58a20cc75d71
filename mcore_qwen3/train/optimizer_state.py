"""The optimizer's moments (and bf16's fp32 weights) as pieces of global tensors, so that any layout can read what another wrote.

Megatron's distributed optimizer keeps, of each parameter, one flat range a data-parallel rank. A flat range of a row-major
array is a few rectangles, and a rectangle has a place in the global tensor: so each rank writes and reads its own part,
nothing is gathered, and no format depends on the layout. Names on disk are megatron's: `optimizer.state.exp_avg.<weight>`.
Where some parameters are frozen each layer has a name of its own, since a tensor of all layers would have holes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from mcore_qwen3.errors import ConversionError
from mcore_qwen3.model.build import Qwen3Model
from mcore_qwen3.model.names import is_stacked, name_in_model
from mcore_qwen3.model.pieces import Block, Index, Piece, flat_range_blocks, pieces
from mcore_qwen3.model.weights import Source, check_shape, read_block

PREFIX = "optimizer.state."
MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
MASTER = "param"


@dataclass(frozen=True, slots=True)
class Stored:
    """A rectangle on disk.

    Attributes:
        key: name of the global tensor.
        global_shape: of the weight, vocabulary padded for this layout.
        block: the rectangle in the global tensor.
    """

    key: str
    global_shape: Index
    block: Block


@dataclass(frozen=True, slots=True)
class StatePart:
    """A rectangle of one state tensor that this rank holds.

    Attributes:
        place: where it goes on disk.
        elsewhere: where a run that froze another part of the model, or none, has it.
        values: a view of this rank's state, of the rectangle's shape without leading axes.
        is_first_copy: False if another tensor- or pipeline-parallel rank holds the same values.
        is_vocabulary: the first axis may be padded differently elsewhere.
    """

    place: Stored
    elsewhere: Stored
    values: torch.Tensor
    is_first_copy: bool
    is_vocabulary: bool


def ensure_state(optimizer: ChainedOptimizer) -> None:
    """Allocate the moments of an optimizer that has not stepped yet, all zero, without changing a weight.

    A step with zero gradients and learning rate 0 allocates them in torch's, apex's and transformer-engine's optimizers
    alike.
    """
    for part in _parts(optimizer):
        if not part.optimizer.state:
            for group in part.optimizer.param_groups:
                group["lr"] = 0.0
            part._init_optimizer_states_with_dummy_values()
            _set_step(part, 0)  # it was none of the run's
            for state in part.optimizer.state.values():
                if "momentum_buffer" in state:  # SGD has put the weight decay of that step in
                    state["momentum_buffer"].zero_()


def _parts(optimizer: ChainedOptimizer) -> Iterator[DistributedOptimizer]:
    """Megatron's optimizers of this rank; one without a parameter to train has no state."""
    for part in optimizer.chained_optimizers:
        assert isinstance(part, DistributedOptimizer)
        if not part.is_stub_optimizer:
            yield part


def set_step(optimizer: ChainedOptimizer, step: int) -> None:
    """Set the number of finished updates, which Adam's bias correction counts."""
    for part in _parts(optimizer):
        _set_step(part, step)


def _set_step(part: DistributedOptimizer, step: int) -> None:
    for state in part.optimizer.state.values():
        if "step" in state:  # torch: a tensor a parameter
            state["step"] = torch.full_like(torch.as_tensor(state["step"]), step)
    for group in part.optimizer.param_groups:
        if "step" in group:  # apex and transformer-engine: a number a group
            group["step"] = step


def state_parts(models: Sequence[Qwen3Model], optimizer: ChainedOptimizer, *, with_master: bool) -> Iterator[StatePart]:
    """Every rectangle of this rank's optimizer state.

    Args:
        models: this rank's chunks, without wrappers.
        optimizer: with allocated state (`ensure_state`).
        with_master: also the fp32 weights that bf16 parameters are rounded from.
    """
    by_parameter: dict[torch.nn.Parameter, list[Piece]] = defaultdict(list)
    for model in models:
        for piece in pieces(model):
            by_parameter[piece.parameter].append(piece)
    for part in _parts(optimizer):
        for parameter, start, stop in _own_ranges(part):
            tensors = part._get_main_param_and_optimizer_states(parameter)
            moments = [name for name in MOMENTS[part.config.optimizer] if name in tensors]  # SGD may go without
            names = [*moments, *([MASTER] if with_master else [])]
            for flat, rectangle in flat_range_blocks(start, stop, tuple(parameter.shape)):
                for piece in by_parameter[parameter]:
                    common = rectangle.intersect(piece.block)
                    if common is None:
                        continue
                    inner = common.relative_to(rectangle).slices
                    for name in names:
                        flat_values = tensors[name].view(-1)[flat - start :][: math.prod(rectangle.sizes)]
                        values = flat_values.view(rectangle.sizes)[inner]
                        yield _state_part(piece, common, name, values, by_layer=models[0].partly_frozen)


def _state_part(piece: Piece, common: Block, name: str, values: torch.Tensor, *, by_layer: bool) -> StatePart:
    block = piece.global_block(common)
    together = single = Stored(f"{PREFIX}{name}.{piece.key}", piece.global_shape, block)
    if is_stacked(piece):
        key = f"{PREFIX}{name}.{name_in_model(piece)}"
        single = Stored(key, piece.global_shape[1:], Block(block.starts[1:], block.sizes[1:]))
    return StatePart(
        place=single if by_layer else together,
        elsewhere=together if by_layer else single,
        values=values,
        is_first_copy=not any(piece.copies[:-1]),
        is_vocabulary=piece.is_vocabulary,
    )


def _own_ranges(part: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, int, int]]:
    """(parameter, first, last + 1 flat position) of what this data-parallel rank updates."""
    for ranges in part.gbuf_ranges:
        for buckets in ranges.values():
            for bucket in buckets:
                for parameter, where in bucket["param_map"].items():
                    yield parameter, where["param"].start, where["param"].end


def read_state(
    models: Sequence[Qwen3Model], optimizer: ChainedOptimizer, source: Source, *, step: int, with_master: bool
) -> None:
    """Fill this rank's optimizer state from a checkpoint of any layout.

    Args:
        models: this rank's chunks, without wrappers.
        optimizer: a fresh optimizer.
        source: gives the `optimizer.state.*` entries.
        step: finished updates of the checkpoint.
        with_master: the run is bf16; the fp32 weights are read where the checkpoint has them (an fp32 run's has not: there
            the weights themselves, already read, are exact).

    Raises:
        ConversionError: an entry is missing or of another shape.
    """
    ensure_state(optimizer)
    entries = source.entries()
    has_master = any(key.startswith(f"{PREFIX}{MASTER}.") for key in entries)
    for part in state_parts(models, optimizer, with_master=with_master and has_master):
        place = part.place if part.place.key in entries else part.elsewhere
        if place.key not in entries:
            raise ConversionError(
                "the checkpoint lacks optimizer state of a weight that is trained",
                seen=part.place.key,
                fix="train what the run to continue trained, or --no_load_optim true",
            )
        stored = tuple(entries[place.key].shape)
        check_shape(place.key, place.global_shape, stored, part.is_vocabulary)
        read_block(source, place.key, stored, place.block.slices, part.values)
    set_step(optimizer, step)
