"""Exact parameter counts: of a whole model, and of one layer as one rank holds it."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_qwen3.arch.shape import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCount:
    """Parameters of one transformer layer on one rank. `experts` counts all experts that the rank holds."""

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


def count_layer(shape: ModelShape, tensor: int = 1, expert: int = 1, expert_tensor: int = 1) -> LayerCount:
    """Parameters of one layer on one rank.

    attention = QKV rows x hidden + hidden x heads x head_dim, split over TP, + q_norm and k_norm (head_dim each);
    norms = two of hidden; mlp = gate, up and down, 3 x hidden x ffn, split over TP; router = experts x hidden, on
    every rank; experts = experts / EP x 3 x hidden x moe ffn / expert-TP.

    Args:
        shape: the model.
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
        mlp=0 if shape.is_moe else 3 * hidden * shape.ffn_hidden_size // tensor,
        router=shape.num_experts * hidden,
        experts=shape.num_experts // expert * (expert_size // expert_tensor),
    )


def count_parameters(shape: ModelShape) -> ParameterCount:
    """Parameters of the whole model, without rows that pad the vocabulary."""
    layer, layers = count_layer(shape), shape.num_layers
    table = shape.vocab_size * shape.hidden_size
    return ParameterCount(
        embedding=table,
        output=0 if shape.tie_word_embeddings else table,
        attention=layers * layer.attention,
        norms=layers * layer.norms + shape.hidden_size,
        mlp=layers * layer.mlp,
        router=layers * layer.router,
        experts=layers * layer.experts,
        active_experts=layers * 3 * shape.hidden_size * shape.moe_ffn_hidden_size * shape.moe_router_topk,
    )
