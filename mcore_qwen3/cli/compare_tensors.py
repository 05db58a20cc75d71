"""This project's tensors and transformers' side by side: put together from all ranks, in one shape, under both names.

Shapes: T tokens of a micro-batch, N heads, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from mcore_qwen3.arch import ModelShape
from mcore_qwen3.converters.table import Rule, fill_name, name_table, units
from mcore_qwen3.train.snapshot import Activation, Part

Key = tuple[str, int]

# Of each kind of activation, in the order of the computation: our module and transformers', layer left open.
_BEFORE = {"embedding": ("embedding", "model.embed_tokens")}
_IN_LAYER = {
    "query": ("self_attention.core_attention (query)", "self_attn (query after q_norm and rotary embedding)"),
    "key": ("self_attention.core_attention (key)", "self_attn (key after k_norm and rotary embedding)"),
    "value": ("self_attention.core_attention (value)", "self_attn.v_proj"),
    "context": ("self_attention.core_attention", "self_attn (before o_proj)"),
    "attention": ("self_attention", "self_attn.o_proj"),
    "router": ("mlp.router", "mlp.gate (weights of the chosen experts)"),
    "mlp": ("mlp", "mlp"),
    "layer": ("", ""),
}
_AFTER = {"final_norm": ("decoder.final_layernorm", "model.norm"), "loss": ("loss of each token", "loss of each token")}


@dataclass(frozen=True, slots=True)
class Pair:
    """One tensor in both worlds.

    Attributes:
        kind: as `Activation.kind`; "weight" or "gradient" of a parameter.
        layer: from 0; -1 where there is none.
        our_name, hf_name: what it is called here and in transformers.
        ours, theirs: of one shape.
    """

    kind: str
    layer: int
    our_name: str
    hf_name: str
    ours: torch.Tensor
    theirs: torch.Tensor

    @property
    def error(self) -> float:
        """max |a - b| / max |b|; infinite where something meets only zeros, or is no number."""
        return relative_error(self.ours, self.theirs)


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """max |a - b| / max |b|; infinite where something meets only zeros, or is no number."""
    if not theirs.numel():
        return 0.0
    difference, largest = float((ours - theirs).abs().max()), float(theirs.abs().max())
    if math.isnan(difference) or math.isnan(largest):
        return math.inf
    return 0.0 if difference == 0 else difference / largest if largest else math.inf


def activation_pairs(
    ours: Iterable[Activation], theirs: Mapping[Key, torch.Tensor], padding_T: torch.Tensor
) -> list[Pair]:
    """The activations in the order of the computation; padding, which nothing trains, is zero on both sides.

    Args:
        ours: of all ranks.
        theirs: (kind, layer) -> [T, ...].
        padding_T: bool [T], True at padding.
    """
    by_key: dict[Key, list[Activation]] = {}
    for part in ours:
        by_key.setdefault((part.kind, part.layer), []).append(part)
    if by_key.keys() != theirs.keys():
        raise RuntimeError(f"only one of the two loops has {sorted(by_key.keys() ^ theirs.keys())}")
    layers = 1 + max(layer for _, layer in theirs)
    order = [(kind, -1) for kind in _BEFORE]
    order += [(kind, layer) for layer in range(layers) for kind in _IN_LAYER]
    order += [(kind, -1) for kind in _AFTER]
    pairs = []
    for kind, layer in order:
        if (kind, layer) not in theirs:
            continue
        reference = theirs[kind, layer]
        whole = _together(by_key[kind, layer], reference.shape)
        hidden = padding_T.view(-1, *(1,) * (reference.dim() - 1))
        names = _names(kind, layer)
        pairs.append(Pair(kind, layer, *names, whole.masked_fill(hidden, 0), reference.masked_fill(hidden, 0)))
    return pairs


def _names(kind: str, layer: int) -> tuple[str, str]:
    if kind not in _IN_LAYER:
        return (_BEFORE | _AFTER)[kind]
    ours, theirs = _IN_LAYER[kind]
    return f"decoder.layers.{layer}.{ours}".rstrip("."), f"model.layers.{layer}.{theirs}".rstrip(".")


def _together(parts: list[Activation], shape: torch.Size) -> torch.Tensor:
    whole = torch.full(shape, math.nan)
    for part in parts:
        if len(shape) == 3:
            whole[part.tokens, part.first_head : part.first_head + part.values.shape[1]] = part.values
        else:
            whole[part.tokens] = part.values
    return whole


def parameter_pairs(
    kind: str, ours: Iterable[Part], theirs: Callable[[str], torch.Tensor | None], shape: ModelShape
) -> Iterator[Pair]:
    """Weights or gradients, one Hugging Face tensor after the other.

    Args:
        kind: "weight" or "gradient".
        ours: the parts of all ranks.
        theirs: Hugging Face name -> tensor, None where transformers has no such parameter.
        shape: the model.
    """
    wholes = _wholes(ours)
    for rule, index in units(name_table(shape)):
        if rule.key not in wholes:
            raise RuntimeError(f"no rank has left a {kind} of {rule.key}")
        unit = wholes[rule.key][index][: rule.rows]
        for number, part in enumerate(rule.parts):
            name = rule.hf_name(number, index)
            reference = theirs(name)
            if reference is None and part.packed is not None:
                packed = theirs(fill_name(part.packed.name, index))
                rows = slice(part.packed.first_row, part.packed.first_row + part.rows)
                reference = None if packed is None else packed[index[-1], rows]
            if reference is None:
                raise RuntimeError(f"transformers has no parameter {name}")
            place = "".join(f"[{at}]" for at in index)
            yield Pair(kind, _layer(name), rule.key + place, name, _part(rule, number, unit), reference.float().cpu())


def _layer(name: str) -> int:
    words = name.split(".")
    return int(words[2]) if words[1] == "layers" else -1


def _part(rule: Rule, number: int, unit: torch.Tensor) -> torch.Tensor:
    rows = torch.empty(rule.hf_shape(number))
    for segment in rule.segments(0, rule.rows):
        if segment.part == number:
            rows[segment.part_row : segment.part_row + segment.rows] = unit[
                segment.unit_row : segment.unit_row + segment.rows
            ]
    return rows


def _wholes(parts: Iterable[Part]) -> dict[str, torch.Tensor]:
    """The global tensors; a vocabulary keeps its padding."""
    by_key: dict[str, list[Part]] = {}
    for part in parts:
        by_key.setdefault(part.key, []).append(part)
    wholes = {}
    for key, pieces in by_key.items():
        stops = [[at + size for at, size in zip(p.starts, p.values.shape, strict=True)] for p in pieces]
        whole = torch.full([max(axis) for axis in zip(*stops, strict=True)], math.nan)
        for piece, stop in zip(pieces, stops, strict=True):
            whole[tuple(map(slice, piece.starts, stop))] = piece.values
        wholes[key] = whole
    return wholes
