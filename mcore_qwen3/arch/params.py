"""Exact parameter counts: of a whole model, and of one layer as one rank holds it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from mcore_qwen3.arch.shape import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCount:
    """Parameters of transformer layers on one rank. `experts` counts all experts that the rank holds."""

    attention: int
    norms: int
    mlp: int
    router: int
    experts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCount:
    """Parameters of a whole model. `output` is 0 where the word embeddings are tied, so nothing is counted twice."""

    embedding: int
    output: int
    attention: int
    norms: int
    mlp: int
    router: int
    experts: int
    active_experts: int

    @property
    def total(self) -> int:
        """All parameters."""
        return self.active - self.active_experts + self.experts

    @property
    def active(self) -> int:
        """Parameters that one token meets: all but the experts that its routers do not choose."""
        dense = self.embedding + self.output + self.attention + self.norms + self.mlp + self.router
        return dense + self.active_experts


def count_layer(
    shape: ModelShape, has_experts: bool, tensor: int = 1, expert: int = 1, expert_tensor: int = 1
) -> LayerCount:
    """Parameters of one layer on one rank.

    attention = QKV rows x hidden + hidden x heads x head_dim, split over TP, + q_norm and k_norm (head_dim each);
    norms = two of hidden; mlp = gate, up and down, 3 x hidden x ffn, split over TP; router = experts x hidden, on
    every rank; experts = experts / EP x 3 x hidden x moe ffn / expert-TP.

    Args:
        shape: the model.
        has_experts: whether it is a layer with experts (router and experts) or a dense one (mlp).
        tensor: TP size; divides heads, key-value heads and ffn_hidden_size.
        expert: EP size; divides the number of experts.
        expert_tensor: expert-TP size; divides moe_ffn_hidden_size.
    """
    hidden = shape.hidden_size
    projections = hidden * (shape.qkv_rows + shape.num_attention_heads * shape.head_dim)
    expert_size = 3 * hidden * shape.moe_ffn_hidden_size
    return LayerCount(
        attention=projections // tensor + 2 * shape.head_dim,
        norms=2 * hidden,
        mlp=0 if has_experts else 3 * hidden * shape.ffn_hidden_size // tensor,
        router=shape.num_experts * hidden if has_experts else 0,
        experts=shape.num_experts // expert * (expert_size // expert_tensor) if has_experts else 0,
    )


def sum_layers(layers: Iterable[LayerCount]) -> LayerCount:
    """Parameters of several layers together."""
    together = list(layers)
    return LayerCount(
        **{field.name: sum(getattr(layer, field.name) for layer in together) for field in fields(LayerCount)}
    )


def count_parameters(shape: ModelShape) -> ParameterCount:
    """Parameters of the whole model, without rows that pad the vocabulary."""
    layers = sum_layers(count_layer(shape, has_experts) for has_experts in shape.moe_layers)
    expert_size = 3 * shape.hidden_size * shape.moe_ffn_hidden_size
    table = shape.vocab_size * shape.hidden_size
    return ParameterCount(
        embedding=table,
        output=0 if shape.tie_word_embeddings else table,
        attention=layers.attention,
        norms=layers.norms + shape.hidden_size,
        mlp=layers.mlp,
        router=layers.router,
        experts=layers.experts,
        active_experts=sum(shape.moe_layers) * expert_size * shape.moe_router_topk,
    )
