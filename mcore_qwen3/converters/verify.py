"""Compares two checkpoints bit for bit, in whatever formats they are, one chunk of each at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from mcore_qwen3.arch.shape import ModelShape
from mcore_qwen3.converters.mcore_writer import Piece, plan_mcore
from mcore_qwen3.converters.source import WeightSource
from mcore_qwen3.converters.table import Rule, name_table
from mcore_qwen3.errors import ConversionError


@dataclass(frozen=True)
class Difference:
    """One HF tensor that is not the same on both sides, and how."""

    name: str
    how: str


@dataclass(frozen=True)
class Comparison:
    """Tensors compared, their bytes in the first checkpoint, and those that differ."""

    num_tensors: int
    num_bytes: int
    differences: tuple[Difference, ...]


def compare(
    a: WeightSource, b: WeightSource, shape: ModelShape, report: Callable[[int], None] = lambda nbytes: None
) -> Comparison:
    """Compare dtypes and bits of every tensor of a model.

    Args:
        a, b: the checkpoints; both hold every tensor of the model, which their readers have checked.
        shape: the model of both.
        report: called with bytes as they are compared.

    Raises:
        ConversionError: files cannot be read.
    """
    rules = {rule.key: rule for rule in name_table(shape)}
    a_entries, b_entries = a.entries(), b.entries()
    found: dict[str, Difference] = {}
    num_bytes = 0
    for piece in plan_mcore(a_entries, shape):
        slices = tuple(slice(at, at + size) for at, size in zip(piece.starts, piece.sizes, strict=True))
        num_bytes += piece.nbytes
        rule = rules[piece.key]
        dtypes = a_entries[piece.key].dtype, b_entries[piece.key].dtype
        if dtypes[0] != dtypes[1]:
            how = f"{dtypes[0]} and {dtypes[1]}".replace("torch.", "")
            for name in _names(rule, piece):
                found.setdefault(name, Difference(name, how))
        else:
            one, other = a.read(piece.key, slices), b.read(piece.key, slices)
            for place in _differing_places(one, other):
                index = tuple(start + step for start, step in zip(piece.starts, place, strict=True))
                depth = len(rule.stacked)
                (segment,) = rule.segments(index[depth], index[depth] + 1)
                name = rule.hf_name(segment.part, index[:depth])
                where = (segment.part_row, *index[depth + 1 :])
                values = f"{one[place].item()} and {other[place].item()}"
                found.setdefault(name, Difference(name, f"first at {list(where)}: {values}"))
        report(piece.nbytes)
    everything = sum(len(rule.parts) * math.prod(rule.stacked) for rule in rules.values())
    return Comparison(everything, num_bytes, tuple(found[name] for name in sorted(found)))


def check_same_model(a: ModelShape, b: ModelShape) -> None:
    """Refuse checkpoints whose tensors have other names or shapes.

    Raises:
        ConversionError: with the settings that differ.
    """
    if [(rule.key, rule.shape) for rule in name_table(a)] != [(rule.key, rule.shape) for rule in name_table(b)]:
        fields = [name for name in ModelShape.__slots__ if getattr(a, name) != getattr(b, name)]
        seen = ", ".join(f"{name} {getattr(a, name)} and {getattr(b, name)}" for name in fields)
        raise ConversionError("two checkpoints can only be compared if they are of one model", seen=seen)


def _differing_places(one: torch.Tensor, other: torch.Tensor) -> Iterator[tuple[int, ...]]:
    """The first differing place in each row, bits compared."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    same = one.view(width) == other.view(width)
    if bool(same.all()):
        return
    rows = same if same.dim() == 1 else same.all(dim=-1)
    for place in (~rows).nonzero().tolist():
        column = [] if same.dim() == 1 else [int((~same[tuple(place)]).nonzero()[0])]
        yield (*place, *column)


def _names(rule: Rule, piece: Piece) -> Iterator[str]:
    """HF names of all parts in the units that a piece touches."""
    ranges = [range(start, start + size) for start, size in zip(piece.starts, piece.sizes, strict=True)]
    for index in itertools.product(*ranges[: len(rule.stacked)]):
        yield from (rule.hf_name(part, index) for part in range(len(rule.parts)))
