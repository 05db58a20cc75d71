"""Exact parameters and training-state bytes of one rank."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_qwen3.arch.layout import ParallelLayout
from mcore_qwen3.arch.params import count_layer, sum_layers
from mcore_qwen3.arch.rows import padded_vocab_size
from mcore_qwen3.arch.shape import ModelShape

# For whoever prints these bytes.
NOT_COUNTED = "activations, communication buffers and the padding of gradient buckets are not counted"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankState:
    """What one rank of a pipeline stage holds between two steps, its model chunks together.

    Every rank of the stage holds as much. `layers` counts layers, the seven after it parameters. `output` is the output layer of the last stage; with tied embeddings
    and PP above 1 it is that stage's own copy of the embedding. Bytes: weights in bf16 or fp32, gradients in fp32,
    optimizer = this rank's share of fp32 master weights and Adam's two moments. See NOT_COUNTED.
    """

    layers: int
    embedding: int
    output: int
    attention: int
    norms: int
    mlp: int
    router: int
    experts: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int

    @property
    def dense(self) -> int:
        """Parameters that are no expert's: the optimizer shards them over DP x CP."""
        return self.embedding + self.output + self.attention + self.norms + self.mlp + self.router

    @property
    def parameters(self) -> int:
        """All parameters of the rank."""
        return self.dense + self.experts

    @property
    def total_bytes(self) -> int:
        """Weights, gradients and optimizer state."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes


def rank_state(shape: ModelShape, layout: ParallelLayout, pp_rank: int, bf16: bool) -> RankState:
    """Parameters and state bytes of a rank in one pipeline stage, under Megatron's distributed optimizer.

    Per parameter: bf16 = 2 (weight) + 4 (gradient) + 12 / shards (fp32 master, two moments). In fp32 the optimizer
    works on a view of the weight itself (megatron-core 0.19.2, `_build_model_and_main_param_groups`), so 4 + 4 +
    8 / shards. Shards: DP x CP for dense parameters, expert-DP for experts.

    Args:
        shape: the model.
        layout: a layout resolved for it.
        pp_rank: the pipeline stage, 0 to PP - 1.
        bf16: weights in bf16 (else fp32).
    """
    numbers = [layer for chunk in range(layout.virtual_pipeline) for layer in layout.chunk_layers(pp_rank, chunk)]
    layers = sum_layers(
        count_layer(shape, shape.moe_layers[number], layout.tensor, layout.expert, layout.expert_tensor)
        for number in numbers
    )
    last = pp_rank == layout.pipeline - 1
    table = padded_vocab_size(shape.vocab_size, layout.tensor) // layout.tensor * shape.hidden_size
    counts = {
        "embedding": table if pp_rank == 0 else 0,
        "output": table if last and not (shape.tie_word_embeddings and layout.pipeline == 1) else 0,
        "attention": layers.attention,
        "norms": layers.norms + (shape.hidden_size if last else 0),
        "mlp": layers.mlp,
        "router": layers.router,
        "experts": layers.experts,
    }
    parameters = sum(counts.values())
    per_shard = 12 if bf16 else 8
    dense_share = -(-(parameters - counts["experts"]) // (layout.data * layout.context))
    expert_share = -(-counts["experts"] // layout.expert_data)
    return RankState(
        layers=len(numbers),
        **counts,
        weight_bytes=parameters * (2 if bf16 else 4),
        gradient_bytes=parameters * 4,
        optimizer_bytes=per_shard * (dense_share + expert_share),
    )


def heaviest_stage(shape: ModelShape, layout: ParallelLayout, bf16: bool) -> tuple[int, RankState]:
    """(pipeline rank, its state) where a rank holds most; the first of several. A cluster is sized by this one."""
    states = [rank_state(shape, layout, stage, bf16) for stage in range(layout.pipeline)]
    return max(enumerate(states), key=lambda pair: (pair[1].total_bytes, -pair[0]))
