"""Exact parameter counts of a whole model."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_qwen3.arch.shape import ModelShape


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


def count_parameters(shape: ModelShape) -> ParameterCount:
    """Parameters of the whole model, without rows that pad the vocabulary.

    A layer: attention = QKV rows x hidden + hidden x heads x head_dim + q_norm and k_norm (head_dim each); norms = two of
    hidden; mlp = gate, up and down, 3 x hidden x ffn; with experts instead: router = experts x hidden, experts = experts x
    3 x hidden x moe ffn. Then the last norm, and a table of vocabulary x hidden at each end, one where they are tied.
    """
    hidden, layers, with_experts = shape.hidden_size, shape.num_layers, sum(shape.moe_layers)
    projections = hidden * (shape.qkv_rows + shape.num_attention_heads * shape.head_dim)
    expert = 3 * hidden * shape.moe_ffn_hidden_size
    table = shape.vocab_size * hidden
    return ParameterCount(
        embedding=table,
        output=0 if shape.tie_word_embeddings else table,
        attention=layers * (projections + 2 * shape.head_dim),
        norms=(2 * layers + 1) * hidden,
        mlp=(layers - with_experts) * 3 * hidden * shape.ffn_hidden_size,
        router=with_experts * shape.num_experts * hidden,
        experts=with_experts * shape.num_experts * expert,
        active_experts=with_experts * shape.moe_router_topk * expert,
    )
