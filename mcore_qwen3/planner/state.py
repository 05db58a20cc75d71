"""What a rank holds between two steps: weights, gradients, master weights and moments, padding of their buffers included."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields

from mcore_qwen3.arch import ModelShape, ParallelLayout, padded_vocab_size
from mcore_qwen3.planner.chunks import ChunkKind, chunk_kind
from mcore_qwen3.planner.settings import Settings

# megatron-core 0.19.2, core/distributed/param_and_grad_buffer.py: a parameter starts at a multiple of 64 elements of its
# buffer, and a buffer ends at a multiple of lcm(ranks that share it, 128).
_PARAMETER_MULTIPLE = 64
_BUFFER_MULTIPLE = 128


@dataclass(frozen=True, slots=True)
class Tensor:
    """One parameter tensor of a rank: number of values, and whether it belongs to an expert."""

    size: int
    is_expert: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """Bytes of one rank. `trained` and `frozen` count parameters, `experts` those of both that belong to experts; each is in
    `weights`. `on_host`: master weights and moments in host memory, which no other field counts."""

    trained: int
    frozen: int
    experts: int
    weights: int
    gradients: int
    master_weights: int
    moments: int
    on_host: int

    @property
    def parameters(self) -> int:
        """All parameters of the rank."""
        return self.trained + self.frozen

    @property
    def dense(self) -> int:
        """Parameters that are no expert's: the optimizer shards them over DP x CP."""
        return self.parameters - self.experts

    @property
    def total(self) -> int:
        """All bytes of the GPU."""
        return self.weights + self.gradients + self.master_weights + self.moments


@dataclass(frozen=True, slots=True)
class Buffers:
    """Sums over tensors: parameters, those of experts, and the elements that dense and expert ones take in their buffers."""

    parameters: int = 0
    of_experts: int = 0
    dense: int = 0
    experts: int = 0

    def __add__(self, other: Buffers) -> Buffers:
        return Buffers(
            self.parameters + other.parameters,
            self.of_experts + other.of_experts,
            self.dense + other.dense,
            self.experts + other.experts,
        )

    def __rmul__(self, number: int) -> Buffers:
        return Buffers(number * self.parameters, number * self.of_experts, number * self.dense, number * self.experts)


def chunk_tensors(
    shape: ModelShape, layout: ParallelLayout, stage: int, chunk: int, moe_grouped_gemm: bool = True
) -> list[Tensor]:
    """Every parameter tensor that a rank builds for one model chunk.

    Args:
        shape: the model.
        layout: a layout resolved for it.
        stage: pipeline rank, 0 to PP - 1.
        chunk: model chunk, 0 to virtual_pipeline - 1.
        moe_grouped_gemm: the experts of a rank are two stacked tensors; False: two tensors each.
    """
    grid = (layout.tensor, layout.expert, layout.expert_tensor)
    tensors = list(_end_tensors(shape, layout, chunk_kind(shape, layout, stage, chunk)))
    for number in layout.chunk_layers(stage, chunk):
        tensors += _layer_tensors(shape, *grid, shape.moe_layers[number], moe_grouped_gemm)
    return tensors


def _end_tensors(shape: ModelShape, layout: ParallelLayout, chunk: ChunkKind) -> Iterator[Tensor]:
    """The embedding of the first chunk; the last norm and the output layer of the last one."""
    table = padded_vocab_size(shape.vocab_size, layout.tensor) // layout.tensor * shape.hidden_size
    if chunk.is_first:
        yield Tensor(table)
    if chunk.is_last:
        yield Tensor(shape.hidden_size)
        if not (shape.tie_word_embeddings and chunk.is_first):
            yield Tensor(table)


@functools.lru_cache
def _layer_tensors(
    shape: ModelShape, tensor: int, expert: int, expert_tensor: int, has_experts: bool, grouped: bool
) -> tuple[Tensor, ...]:
    hidden = shape.hidden_size
    query = shape.num_attention_heads * shape.head_dim
    norms = [hidden, hidden, shape.head_dim, shape.head_dim]
    sizes = [*norms, shape.qkv_rows * hidden // tensor, query * hidden // tensor]
    if not has_experts:
        width = shape.ffn_hidden_size // tensor
        return tuple(map(Tensor, [*sizes, 2 * width * hidden, width * hidden]))
    own = shape.num_experts // expert
    width = shape.moe_ffn_hidden_size // expert_tensor
    experts = [2 * width * hidden, width * hidden]
    of_experts = [Tensor(own * size, True) for size in experts]
    if not grouped:
        of_experts = [Tensor(size, True) for size in experts for _ in range(own)]
    return (*map(Tensor, [*sizes, shape.num_experts * hidden]), *of_experts)


@functools.lru_cache
def _adapter_tensors(
    shape: ModelShape, tensor: int, expert: int, expert_tensor: int, has_experts: bool, lora_rank: int
) -> tuple[Tensor, ...]:
    """The LoRA adapters of one layer (Hu et al. 2021): A [rank, in] and B [out, rank] beside each linear layer.

    Tensor parallel splits B of a layer whose rows are split (QKV, fc1) and A of one whose columns are (output of
    attention, fc2); every expert has adapters of its own.
    """
    hidden, query = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    sizes = [hidden, shape.qkv_rows // tensor, query // tensor, hidden]
    width, copies = shape.ffn_hidden_size // tensor, 1
    if has_experts:
        width, copies = shape.moe_ffn_hidden_size // expert_tensor, shape.num_experts // expert
    mlp = [Tensor(lora_rank * size, has_experts) for size in (hidden, 2 * width, width, hidden)]
    return (*(Tensor(lora_rank * size) for size in sizes), *mlp * copies)


def state_bytes(shape: ModelShape, layout: ParallelLayout, settings: Settings, stage: int) -> StateBytes:
    """Bytes that a rank of a stage holds between steps under megatron's distributed optimizer.

    Weights and gradients lie whole on every rank, in one buffer a chunk for dense parameters and one for experts where other
    ranks share those, padding included. Master weights and moments are cut over the ranks that hold the same parameters: DP x CP for dense ones,
    expert-DP for experts; counted is the share of a rank whose part of the buffers holds no padding.

    Args:
        shape: the model.
        layout: a layout resolved for it.
        settings: bytes of each kind, experts grouped or not, what is trained.
        stage: pipeline rank, 0 to PP - 1.
    """
    adapters = settings.lora_rank if settings.train_type == "lora" else 0
    whole = _stage_buffers(shape, layout, stage, settings.moe_grouped_gemm, adapters)
    shares = 1 - settings.optimizer_offload_fraction
    return StateBytes(
        trained=whole.trained,
        frozen=whole.frozen,
        experts=whole.of_experts,
        weights=(whole.padded + whole.frozen) * settings.element_bytes,
        gradients=whole.padded * settings.gradient_bytes,
        master_weights=round(whole.share * settings.master_bytes * shares),
        moments=round(whole.share * settings.moment_bytes * shares),
        on_host=round(whole.share * (settings.master_bytes + settings.moment_bytes) * (1 - shares)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StageBuffers:
    """Elements of the buffers of a stage, and a rank's share of them; the parameters that they hold, and those beside;
    those of both that belong to experts."""

    trained: int = 0
    frozen: int = 0
    of_experts: int = 0
    padded: int = 0
    share: int = 0


@functools.lru_cache(maxsize=4096)
def _stage_buffers(
    shape: ModelShape, layout: ParallelLayout, stage: int, grouped: bool, lora_rank: int
) -> StageBuffers:
    chunks = Counter(chunk_kind(shape, layout, stage, chunk) for chunk in range(layout.virtual_pipeline))
    parts = [(number, _chunk_buffers(shape, layout, chunk, grouped, lora_rank)) for chunk, number in chunks.items()]
    return StageBuffers(
        **{
            field.name: sum(number * getattr(part, field.name) for number, part in parts)
            for field in fields(StageBuffers)
        }
    )


def _chunk_buffers(
    shape: ModelShape, layout: ParallelLayout, chunk: ChunkKind, grouped: bool, lora_rank: int
) -> StageBuffers:
    grid = (layout.tensor, layout.expert, layout.expert_tensor)
    kinds = Counter(chunk.layers)
    sizes = buffer_sizes(tuple(_end_tensors(shape, layout, chunk)))
    for has_experts, number in kinds.items():
        sizes += number * buffer_sizes(_layer_tensors(shape, *grid, has_experts, grouped))
    frozen, of_experts = 0, sizes.of_experts
    if lora_rank:
        frozen, sizes = sizes.parameters, Buffers()
        for has_experts, number in kinds.items():
            sizes += number * buffer_sizes(_adapter_tensors(shape, *grid, has_experts, lora_rank))
        of_experts += sizes.of_experts
    dense, experts = sizes.dense, sizes.experts
    if layout.expert == 1 and layout.expert_tensor == layout.tensor:  # the same ranks share both: one buffer
        dense, experts = dense + experts, 0
    buffers = ((dense, layout.data * layout.context), (experts, layout.expert_data))
    return StageBuffers(
        trained=sizes.parameters,
        frozen=frozen,
        of_experts=of_experts,
        padded=sum(padded_buffer(size, ranks) for size, ranks in buffers),
        share=sum(padded_buffer(size, ranks) // ranks for size, ranks in buffers),
    )


@functools.lru_cache
def buffer_sizes(tensors: tuple[Tensor, ...]) -> Buffers:
    """Their sizes, and in the two buffers, where each starts at a multiple of 64 elements."""
    dense, experts = (
        sum(_up(tensor.size, _PARAMETER_MULTIPLE) for tensor in tensors if tensor.is_expert is kind)
        for kind in (False, True)
    )
    of_experts = sum(tensor.size for tensor in tensors if tensor.is_expert)
    return Buffers(sum(tensor.size for tensor in tensors), of_experts, dense, experts)


def padded_buffer(size: int, ranks: int) -> int:
    """Elements of a gradient buffer whose parameters take `size`, their padding included, and that so many ranks share."""
    return _up(size, math.lcm(ranks, _BUFFER_MULTIPLE))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
