"""What a rank holds between two steps: weights, gradients, master weights and moments, padding of their buffers included."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from mcore_qwen3.arch import ModelShape, ParallelLayout, padded_vocab_size
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
    """Bytes of one rank. `trained` and `frozen` count parameters; each is in `weights`."""

    trained: int
    frozen: int
    weights: int
    gradients: int
    master_weights: int
    moments: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.weights + self.gradients + self.master_weights + self.moments


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
    first = stage == 0 and chunk == 0
    last = stage == layout.pipeline - 1 and chunk == layout.virtual_pipeline - 1
    table = padded_vocab_size(shape.vocab_size, layout.tensor) // layout.tensor * shape.hidden_size
    tensors = [Tensor(table)] if first else []
    for number in layout.chunk_layers(stage, chunk):
        tensors += _layer_tensors(shape, layout, shape.moe_layers[number], moe_grouped_gemm)
    if last:
        tensors.append(Tensor(shape.hidden_size))
        if not (shape.tie_word_embeddings and first):
            tensors.append(Tensor(table))
    return tensors


def _layer_tensors(shape: ModelShape, layout: ParallelLayout, has_experts: bool, grouped: bool) -> Iterator[Tensor]:
    hidden, tensor = shape.hidden_size, layout.tensor
    query = shape.num_attention_heads * shape.head_dim
    norms = [hidden, hidden, shape.head_dim, shape.head_dim]
    yield from map(Tensor, [*norms, shape.qkv_rows * hidden // tensor, query * hidden // tensor])
    if not has_experts:
        yield Tensor(2 * shape.ffn_hidden_size * hidden // tensor)
        yield Tensor(shape.ffn_hidden_size * hidden // tensor)
        return
    yield Tensor(shape.num_experts * hidden)
    own = shape.num_experts // layout.expert
    width = shape.moe_ffn_hidden_size // layout.expert_tensor
    for size in (2 * width * hidden, width * hidden):
        yield from [Tensor(own * size, True)] if grouped else [Tensor(size, True)] * own


def adapter_tensors(
    shape: ModelShape, layout: ParallelLayout, stage: int, chunk: int, lora_rank: int
) -> Iterator[Tensor]:
    """The LoRA adapters of one chunk (Hu et al. 2021): A [rank, in] and B [out, rank] beside each linear layer.

    Tensor parallel splits B of a layer whose rows are split (QKV, fc1) and A of one whose columns are (output of
    attention, fc2); every expert has adapters of its own.
    """
    hidden, tensor = shape.hidden_size, layout.tensor
    query = shape.num_attention_heads * shape.head_dim
    for number in layout.chunk_layers(stage, chunk):
        pairs = [(hidden, shape.qkv_rows // tensor), (query // tensor, hidden)]
        width, copies, is_expert = shape.ffn_hidden_size // tensor, 1, False
        if shape.moe_layers[number]:
            width, is_expert = shape.moe_ffn_hidden_size // layout.expert_tensor, True
            copies = shape.num_experts // layout.expert
        yield from (Tensor(lora_rank * size) for pair in pairs for size in pair)
        yield from [
            Tensor(lora_rank * size, is_expert) for size in (hidden, 2 * width, width, hidden)
        ] * copies  # fmt: skip


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
    whole = StateBytes(trained=0, frozen=0, weights=0, gradients=0, master_weights=0, moments=0)
    for chunk in range(layout.virtual_pipeline):
        tensors = chunk_tensors(shape, layout, stage, chunk, settings.moe_grouped_gemm)
        frozen = 0
        if settings.train_type == "lora":
            frozen = sum(tensor.size for tensor in tensors)
            tensors = list(adapter_tensors(shape, layout, stage, chunk, settings.lora_rank))
        part = _trained(tensors, layout, settings)
        whole = StateBytes(
            trained=whole.trained + part.trained,
            frozen=whole.frozen + frozen,
            weights=whole.weights + part.weights + frozen * settings.element_bytes,
            gradients=whole.gradients + part.gradients,
            master_weights=whole.master_weights + part.master_weights,
            moments=whole.moments + part.moments,
        )
    on_device = 1 - settings.optimizer_offload_fraction
    return replace(
        whole, master_weights=round(whole.master_weights * on_device), moments=round(whole.moments * on_device)
    )


def _trained(tensors: list[Tensor], layout: ParallelLayout, settings: Settings) -> StateBytes:
    dense = [tensor.size for tensor in tensors if not tensor.is_expert]
    experts = [tensor.size for tensor in tensors if tensor.is_expert]
    if layout.expert == 1 and layout.expert_tensor == layout.tensor:  # the same ranks share both: one buffer
        dense, experts = dense + experts, []
    buffers = ((dense, layout.data * layout.context), (experts, layout.expert_data))
    padded = sum(padded_buffer(sizes, ranks) for sizes, ranks in buffers)
    share = sum(padded_buffer(sizes, ranks) // ranks for sizes, ranks in buffers)
    return StateBytes(
        trained=sum(tensor.size for tensor in tensors),
        frozen=0,
        weights=padded * settings.element_bytes,
        gradients=padded * settings.gradient_bytes,
        master_weights=share * settings.master_bytes,
        moments=share * settings.moment_bytes,
    )


def padded_buffer(sizes: Iterable[int], ranks: int) -> int:
    """Elements of a gradient buffer that holds parameters of these sizes and is cut over so many ranks."""
    aligned = sum(_up(size, _PARAMETER_MULTIPLE) for size in sizes)
    return _up(aligned, math.lcm(ranks, _BUFFER_MULTIPLE))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
