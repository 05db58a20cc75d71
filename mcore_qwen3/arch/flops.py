"""Floating-point operations of a model: what a token costs, for speed (TFLOP/s), utilisation and time estimates.

A multiplication and an addition count as two. A matrix product of the forward pass costs two more of its size in the
backward pass. Norms, activations, RoPE, the softmax and the embedding look-up are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mcore_qwen3.arch.shape import ModelShape

# Backward costs two products for each one of the forward pass: by the weights and by the inputs.
FORWARD_AND_BACKWARD = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFlops:
    """Forward operations of one token in one layer.

    Attributes:
        projections: QKV and output projection.
        core_attention: scores and weighted values, the causal half only.
        mlp: the dense MLP; 0 in a layer with experts.
        experts: the experts that the token goes to, at the expert's own width; 0 in a dense layer.
        router: the scores of all experts; 0 in a dense layer.
    """

    projections: float
    core_attention: float
    mlp: float
    experts: float
    router: float


def effective_length(lengths: Iterable[int]) -> float:
    """The row length that costs as much attention a token as these documents, each attending to itself alone.

    sum(length^2) / sum(length); for one full causal row it is the row's length. Lengths in tokens, not all 0.
    """
    squares = total = 0
    for length in lengths:
        squares += length * length
        total += length
    return squares / total


def layer_flops(shape: ModelShape, has_experts: bool, effective_length: float) -> LayerFlops:
    """Forward operations of one token in one layer.

    Projections 2 x (QKV rows + heads x head_dim) x hidden; core attention 2 x 2 x heads x head_dim x length / 2, the half
    that causality leaves; SwiGLU MLP 2 x 3 x hidden x ffn; router 2 x experts x hidden.

    Args:
        shape: the model.
        has_experts: whether it is a layer with experts or a dense one.
        effective_length: tokens, see `effective_length`.
    """
    attention_rows = shape.num_attention_heads * shape.head_dim
    swiglu = 2 * 3 * shape.hidden_size
    return LayerFlops(
        projections=2 * shape.hidden_size * (shape.qkv_rows + attention_rows),
        core_attention=2 * attention_rows * effective_length,
        mlp=0 if has_experts else swiglu * shape.ffn_hidden_size,
        experts=swiglu * shape.moe_ffn_hidden_size * shape.moe_router_topk if has_experts else 0,
        router=2 * shape.num_experts * shape.hidden_size if has_experts else 0,
    )


def logit_flops(shape: ModelShape) -> float:
    """Forward operations of the output layer for one token: 2 x hidden x vocabulary, tied or not."""
    return 2 * shape.hidden_size * shape.vocab_size


def flops_per_token(shape: ModelShape, effective_length: float) -> float:
    """Forward and backward operations of one token in the whole model.

    As Megatron-LM's `num_floating_point_operations` counts them, so that published TFLOP/s can be compared: active experts
    only, the router left out, activations that are computed again left out.

    Args:
        shape: the model.
        effective_length: tokens, see `effective_length`; the row length where every row is one full document.
    """
    forward = 0.0
    for has_experts in set(shape.moe_layers):
        layer = layer_flops(shape, has_experts, effective_length)
        one = layer.projections + layer.core_attention + layer.mlp + layer.experts
        forward += shape.moe_layers.count(has_experts) * one
    return FORWARD_AND_BACKWARD * (forward + logit_flops(shape))
