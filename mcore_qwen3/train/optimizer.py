"""Data parallel wrapper and distributed optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module, MegatronModule

from mcore_qwen3.model.build import Qwen3Model
from mcore_qwen3.model.pieces import pieces
from mcore_qwen3.runtime.device import current_device

# The parts of the model that this rank holds: one, or several under an interleaved pipeline.
Chunks = list[DistributedDataParallel]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamSettings:
    """AdamW; names as the flags."""

    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_grad: float = 1.0


def wrap_for_data_parallel(models: Sequence[MegatronModule]) -> Chunks:
    """Give the model's chunks fp32 gradient buffers, reduced over the data-parallel (or expert-data-parallel) ranks."""
    config = models[0].config
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        average_in_collective=False,
        check_for_nan_in_grad=False,  # seen in the global norm, before the update
    )
    chunks = [
        DistributedDataParallel(
            config=config,
            ddp_config=ddp_config,
            module=Float16Module(config, model) if config.bf16 else model,
            disable_bucketing=number > 0,
        )
        for number, model in enumerate(models)
    ]
    config.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync
    config.finalize_model_grads_func = finalize_model_grads
    return chunks


def build_optimizer(chunks: Chunks, settings: AdamSettings) -> ChainedOptimizer:
    """AdamW with state split over the data-parallel ranks; no decay on norms and other vectors (as Megatron)."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=0.0,  # set before every step from the schedule
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        clip_grad=settings.clip_grad,
        bf16=chunks[0].config.bf16,
        params_dtype=chunks[0].config.params_dtype,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(config, chunks)
    assert isinstance(optimizer, ChainedOptimizer)
    for group in optimizer.param_groups:  # megatron marks the groups and leaves the product to its scheduler
        group["weight_decay"] = settings.weight_decay * group["wd_mult"]
    return optimizer


def gradient_norm(optimizer: ChainedOptimizer) -> float:
    """The norm of the gradients that the schedule has left ready, before clipping. Collective.

    Over all parameters of the model, each counted once; the same on every rank, and not finite if any gradient is not.
    """
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def update(optimizer: ChainedOptimizer, lr: float) -> None:
    """Clip and apply the gradients; their norm must be finite. `lr` is the learning rate of this step."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_mult"]
    success, _, _ = optimizer.step()
    assert success


def zero_gradients(chunks: Chunks, optimizer: ChainedOptimizer) -> None:
    """Start a step with empty gradient buffers."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


def count_parameters(models: Sequence[Qwen3Model]) -> tuple[int, int]:
    """(trained, all) parameters of the whole model over all ranks, each once, without vocabulary padding. Collective."""
    counts = torch.zeros(2, dtype=torch.int64)
    for model in models:
        for piece in pieces(model):
            if any(piece.copies):
                continue
            place = piece.global_block(piece.block)
            sizes = list(place.sizes)
            if piece.is_vocabulary:
                sizes[0] = max(0, min(sizes[0], model.true_vocab_size - place.starts[0]))
            counts += math.prod(sizes) * torch.tensor([piece.parameter.requires_grad, 1])
    everyone = counts.to(current_device())
    dist.all_reduce(everyone)
    trained, total = everyone.tolist()
    return trained, total
