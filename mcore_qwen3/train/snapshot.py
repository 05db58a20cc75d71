"""A rank's parts of a step's tensors. Imports no megatron, so that they can be read where none runs.

Shapes: T tokens of a micro-batch, t of them on this rank, D head_dim, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Activation:
    """A rank's part of what a module gave for the first micro-batch.

    Attributes:
        kind: embedding, query, key, value (as attention takes them), context (as attention gives it), attention, router
            (weights of the chosen experts, [t, E]), mlp, layer, final_norm, or loss (of each token).
        layer: from 0; -1 where there is none.
        tokens: int64 [t], places of the part's tokens in the micro-batch's line.
        first_head: the first of the part's heads, where it has heads: [t, heads, D].
        values: fp32 [t, ...].
    """

    kind: str
    layer: int
    tokens: torch.Tensor
    first_head: int
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangle of a global tensor under its torch_dist key; `starts` is the place of its first value."""

    key: str
    starts: tuple[int, ...]
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Snapshot:
    """This rank's parts. Activations are of data-parallel rank 0's first micro-batch; others have none."""

    activations: list[Activation]
    weights: list[Part]
    gradients: list[Part]
