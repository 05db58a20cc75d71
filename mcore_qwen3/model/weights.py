"""Read a checkpoint into this rank's parameters, each rank its own slices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

import torch
from megatron.core.transformer.module import MegatronModule

from mcore_qwen3.errors import ConversionError
from mcore_qwen3.model.pieces import Index, pieces


class Entry(Protocol):
    """One global tensor of a source."""

    @property
    def shape(self) -> Index:
        """Global shape."""
        ...


class Source(Protocol):
    """A checkpoint seen as torch_dist keys, whatever its files are."""

    def entries(self) -> Mapping[str, Entry]:
        """Key -> entry of every global tensor."""
        ...

    def read(self, key: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """The part of a global tensor; as many slices as it has axes."""
        ...


def read_weights(model: MegatronModule, source: Source) -> None:
    """Fill every parameter of the model from the source.

    Raises:
        ConversionError: a key is missing or has another shape, or a parameter was not filled exactly once.
    """
    entries = source.entries()
    filled: Counter[str] = Counter()
    for piece in pieces(model):
        if piece.key not in entries:
            raise ConversionError("the checkpoint lacks a tensor of the model", seen=piece.key)
        shape = tuple(entries[piece.key].shape)
        check_shape(piece.key, piece.global_shape, shape, piece.is_vocabulary)
        target = piece.parameter.data[piece.block.slices]
        read_block(source, piece.key, shape, piece.global_block(piece.block).slices, target)
        filled[piece.name] += target.numel()
    for name, parameter in model.named_parameters():
        if filled[name] != parameter.numel():
            raise ConversionError(
                "every parameter must be filled exactly once",
                seen=f"{name}: {filled[name]} values read for {parameter.numel()}",
            )


def check_shape(key: str, wanted: Index, stored: Index, is_vocabulary: bool) -> None:
    """Refuse a global tensor of another shape; only the vocabulary's rows may be padded differently.

    Raises:
        ConversionError: names the key and both shapes.
    """
    if wanted != stored and not (is_vocabulary and wanted[1:] == stored[1:]):
        raise ConversionError(
            "a tensor of the checkpoint has another shape than the model's",
            seen=f"{key}: {list(stored)} in the checkpoint, {list(wanted)} in the model",
            fix="compare config.json with the checkpoint",
        )


@torch.no_grad()
def read_block(source: Source, key: str, stored: Index, slices: tuple[slice, ...], target: torch.Tensor) -> None:
    """Copy a rectangle of a global tensor into `target`; rows past the stored ones (vocabulary padding) become zero.

    Args:
        source: where from.
        key: global tensor.
        stored: its shape in the source.
        slices: the rectangle in the global tensor.
        target: a view to fill; its shape may lack leading axes of size 1.
    """
    stop = min(slices[0].stop, stored[0])
    rows = slices[0].stop - slices[0].start
    present = max(0, stop - slices[0].start)
    if present < rows:  # only a vocabulary axis, the first one of both shapes
        target.zero_()
        target = target[:present]
    if present > 0:
        part = source.read(key, (slice(slices[0].start, stop), *slices[1:]))
        target.copy_(part.reshape(target.shape))
