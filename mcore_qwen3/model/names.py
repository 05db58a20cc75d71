"""Names of the model's parameters that do not depend on the layout, for patterns that users write."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from megatron.core.transformer.module import MegatronModule

from mcore_qwen3.model.pieces import Piece, pieces

_LAYERS = "decoder.layers."


def parameter_names(models: Sequence[MegatronModule]) -> dict[torch.nn.Parameter, str]:
    """This rank's parameters by their names in the whole model.

    A name is the parameter's checkpoint key with the layer's number in the whole model, whatever the layout and the
    modules: `decoder.layers.3.self_attention.linear_qkv.weight`. All experts of a layer share one name.
    """
    return {piece.parameter: name_in_model(piece) for model in models for piece in pieces(model)}


def parameter_sizes(models: Sequence[MegatronModule]) -> dict[str, int]:
    """Values of each parameter of this rank in the whole model, by name; vocabulary padding counts."""
    return {
        name_in_model(piece): math.prod(piece.global_shape[1 if is_stacked(piece) else 0 :])
        for model in models
        for piece in pieces(model)
    }


def is_stacked(piece: Piece) -> bool:
    """Whether the key is one tensor for all layers, with the layer as first axis; else it has the number in it."""
    return piece.key.startswith(_LAYERS) and not piece.key.removeprefix(_LAYERS)[0].isdigit()


def name_in_model(piece: Piece) -> str:
    """The key with the layer's number."""
    if not is_stacked(piece):
        return piece.key
    return f"{_LAYERS}{piece.global_starts[0]}.{piece.key.removeprefix(_LAYERS)}"
