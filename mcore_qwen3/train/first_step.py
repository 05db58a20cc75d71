"""What the model computes at a step before its update: activations, weights and gradients, for a comparison elsewhere.

Nothing is compared here: each rank gives its parts with their places in the whole, whatever the layout.

Shapes: T tokens of a micro-batch, t of them on this rank, N heads, D head_dim, H hidden size, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import ChainedOptimizer

from mcore_qwen3.data.batches import StepBatch
from mcore_qwen3.data.micro_batch import MicroBatch
from mcore_qwen3.model.build import Qwen3Model, unwrapped
from mcore_qwen3.model.context_parallel import own_tokens
from mcore_qwen3.model.pieces import Piece, pieces
from mcore_qwen3.train.optimizer import Chunks, zero_gradients
from mcore_qwen3.train.snapshot import Activation, Part, Snapshot
from mcore_qwen3.train.step import forward_backward


def first_step(chunks: Chunks, optimizer: ChainedOptimizer, batch: StepBatch) -> Snapshot:
    """Run a step's forward and backward pass and forget it: the next step starts as without. Collective.

    Gradients are those of the mean loss over the step's trained tokens, before clipping.
    """
    models = [unwrapped(chunk) for chunk in chunks]
    weights = _parts(models, lambda piece: piece.parameter.detach())
    zero_gradients(chunks, optimizer)
    with recorded(models, batch.micro_batches[0]) as activations:
        forward_backward(chunks, batch)
    gather_gradients(chunks)
    gradients = _parts(models, lambda piece: getattr(piece.parameter, "main_grad", None))  # None where it is frozen
    zero_gradients(chunks, optimizer)
    return Snapshot(activations, weights, gradients)


def gather_gradients(chunks: Chunks) -> None:
    """Give every data-parallel rank all of the gradients that it holds parameters of. Collective.

    The distributed optimizer leaves each rank only its own part of the buffers reduced.
    """
    for buffer in [buffer for chunk in chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            parts = bucket.grad_data.chunk(group.size())
            dist.all_gather(list(parts), parts[group.rank()].clone(), group=group)


def _parts(models: list[Qwen3Model], values_of: Callable[[Piece], torch.Tensor | None]) -> list[Part]:
    """Of values that several ranks hold, the first copy alone."""
    parts = []
    for piece in [piece for model in models for piece in pieces(model)]:
        values = None if any(piece.copies) else values_of(piece)
        if values is not None:
            place = piece.global_block(piece.block)
            part = values[piece.block.slices].reshape(place.sizes)
            parts.append(Part(piece.key, place.starts, part.float().cpu().clone()))
    return parts


@contextmanager
def recorded(models: list[Qwen3Model], batch: MicroBatch) -> Iterator[list[Activation]]:
    """Record what the models give while the block runs; of each module the first time, which is `batch`."""
    recorder = _Recorder(models[0], batch)
    if parallel_state.get_data_parallel_rank() != 0:
        yield []
        return
    handles = [handle for model in models for handle in recorder.attach(model)]
    try:
        yield recorder.activations
    finally:
        for handle in handles:
            handle.remove()


class _Recorder:
    """Forward hooks on the modules of this rank."""

    def __init__(self, model: Qwen3Model, batch: MicroBatch) -> None:
        self.activations: list[Activation] = []
        self._seen: set[tuple[str, int]] = set()
        self._tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        ranks = parallel_state.get_context_parallel_world_size()
        self._own = torch.arange(batch.tokens.shape[1])
        if ranks > 1:
            self._own = own_tokens(batch.cu_seqlens, ranks, parallel_state.get_context_parallel_rank())
        # Between attention and MLP the tokens of a context-parallel rank are split again.
        self._split = self._own
        if model.config.sequence_parallel:
            self._split = self._own.chunk(parallel_state.get_tensor_model_parallel_world_size())[self._tensor_rank]

    def attach(self, model: Qwen3Model) -> Iterator[Any]:
        """Hang the hooks on a model; gives what removes them."""
        if model.pre_process:
            yield model.embedding.register_forward_hook(self._rows("embedding"))
        for layer in model.decoder.layers:
            number = layer.layer_number - 1
            attention = layer.self_attention
            yield attention.core_attention.register_forward_hook(self._core_attention(number), with_kwargs=True)
            yield attention.register_forward_hook(self._rows("attention", number))
            if hasattr(layer.mlp, "router"):
                yield layer.mlp.router.register_forward_hook(self._rows("router", number))
            yield layer.mlp.register_forward_hook(self._rows("mlp", number))
            yield layer.register_forward_hook(self._rows("layer", number))
        if model.post_process:
            yield model.decoder.final_layernorm.register_forward_hook(self._rows("final_norm"))
            yield model.register_forward_hook(self._losses)

    def _keep(self, kind: str, layer: int, tokens: torch.Tensor, values: torch.Tensor, first_head: int = 0) -> None:
        if (kind, layer) not in self._seen:
            self._seen.add((kind, layer))
            self.activations.append(Activation(kind, layer, tokens, first_head, values.detach().float().cpu().clone()))

    def _rows(self, kind: str, layer: int = -1) -> Callable[..., None]:
        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            self._keep(kind, layer, self._split, first.reshape(-1, first.shape[-1]))

        return hook

    def _core_attention(self, layer: int) -> Callable[..., None]:
        """Megatron hands query [t, N, D], key and value [t, G, D] of packed rows over by place, the rest by name."""

        def hook(module: torch.nn.Module, inputs: Any, named: dict[str, Any], output: torch.Tensor) -> None:
            for kind, values in zip(("query", "key", "value"), inputs, strict=False):
                self._keep(kind, layer, self._own, values, self._tensor_rank * values.shape[1])
            context = output.reshape(inputs[0].shape)
            self._keep("context", layer, self._own, context, self._tensor_rank * context.shape[1])

        return hook

    def _losses(self, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self._keep("loss", -1, self._own, output.flatten())
