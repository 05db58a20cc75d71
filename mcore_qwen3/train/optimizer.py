"""Data parallel wrapper and distributed optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module, MegatronModule

from mcore_qwen3.errors import McoreQwen3Error

# The parts of the model that this rank holds: one, or several under an interleaved pipeline.
Chunks = list[DistributedDataParallel]


class NonFiniteError(McoreQwen3Error):
    """A loss or gradient that is not a number or infinite; the weights were not touched."""


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
        check_for_nan_in_grad=False,  # checked once on the global norm, before the update
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


def update(optimizer: ChainedOptimizer, lr: float) -> float:
    """Clip and apply the gradients that the schedule has left ready.

    Args:
        optimizer: the optimizer.
        lr: learning rate of this step.

    Returns:
        The gradient's norm before clipping, over all parameters of the model, each counted once.

    Raises:
        NonFiniteError: the norm is not finite; raised on every rank, nothing was updated.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_mult"]
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        raise NonFiniteError(
            "the gradient norm must be finite",
            seen=norm,
            fix="lower --lr, lengthen --lr_warmup_iters or look at the rows of this step; the weights were not changed",
        )
    success, _, _ = optimizer.step()
    assert success
    return norm


def zero_gradients(chunks: Chunks, optimizer: ChainedOptimizer) -> None:
    """Start a step with empty gradient buffers."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


def trainable_parameters(models: Sequence[torch.nn.Module]) -> int:
    """Number of parameters of this rank that receive gradients."""
    return sum(parameter.numel() for model in models for parameter in model.parameters() if parameter.requires_grad)
