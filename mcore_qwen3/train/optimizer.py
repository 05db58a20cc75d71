"""Data parallel wrapper and distributed optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.transformer.module import Float16Module, MegatronModule

from mcore_qwen3.model.build import Qwen3Model, unwrapped
from mcore_qwen3.model.pieces import pieces
from mcore_qwen3.runtime.device import current_device
from mcore_qwen3.train.freezing import learning_rate_factors

# The parts of the model that this rank holds: one, or several under an interleaved pipeline.
Chunks = list[DistributedDataParallel]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}
"""What the flags call them; Megatron keeps fp8 moments as bytes with a scale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataParallelSettings:
    """How gradients are reduced and parameters gathered; names as the flags."""

    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    main_grads_dtype: str = "fp32"


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings:
    """Adam (AdamW) or SGD; names as the flags.

    `lr_mult`: pattern of parameter names -> factor of their learning rate.
    """

    optimizer: str = "adam"
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    sgd_momentum: float = 0.9
    clip_grad: float = 1.0
    lr_mult: dict[str, float] = field(default_factory=dict)
    use_precision_aware_optimizer: bool = False
    main_grads_dtype: str = "fp32"
    main_params_dtype: str = "fp32"
    exp_avg_dtype: str = "fp32"
    exp_avg_sq_dtype: str = "fp32"
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: float = 1.0
    fp8_recipe: str | None = None


def data_parallel_config(settings: DataParallelSettings) -> DistributedDataParallelConfig:
    """Megatron's configuration of the wrapper."""
    return DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=settings.main_grads_dtype == "fp32",
        overlap_grad_reduce=settings.overlap_grad_reduce,
        overlap_param_gather=settings.overlap_param_gather,
        average_in_collective=False,
        check_for_nan_in_grad=False,  # seen in the global norm, before the update
    )


def wrap_for_data_parallel(
    models: Sequence[MegatronModule], settings: DataParallelSettings = DataParallelSettings()
) -> Chunks:
    """Give the model's chunks gradient buffers, reduced over the data-parallel (or expert-data-parallel) ranks."""
    config, ddp_config = models[0].config, data_parallel_config(settings)
    chunks = [
        DistributedDataParallel(
            config=config,
            ddp_config=ddp_config,
            module=Float16Module(config, model) if config.bf16 else model,
            disable_bucketing=number > 0,
        )
        for number, model in enumerate(models)
    ]
    # What megatron's schedules call; one function where there is one chunk.
    config.no_sync_func = _each([chunk.no_sync for chunk in chunks])
    if settings.overlap_grad_reduce:
        config.grad_sync_func = _each([chunk.start_grad_sync for chunk in chunks])
    if settings.overlap_param_gather:
        config.param_sync_func = _each([chunk.start_param_sync for chunk in chunks])
    config.finalize_model_grads_func = finalize_model_grads
    return chunks


def _each(functions: list[Any]) -> Any:
    return functions if len(functions) > 1 else functions[0]


def optimizer_config(settings: OptimizerSettings, *, bf16: bool) -> OptimizerConfig:
    """Megatron's configuration of the optimizer.

    Raises:
        RuntimeError: megatron's own, for a precision-aware optimizer without transformer-engine.
    """
    return OptimizerConfig(
        optimizer=settings.optimizer,
        lr=0.0,  # set before every step from the schedule
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        sgd_momentum=settings.sgd_momentum,
        clip_grad=settings.clip_grad,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=True,
        use_precision_aware_optimizer=settings.use_precision_aware_optimizer,
        main_grads_dtype=DTYPES[settings.main_grads_dtype],
        main_params_dtype=DTYPES[settings.main_params_dtype],
        exp_avg_dtype=DTYPES[settings.exp_avg_dtype],
        exp_avg_sq_dtype=DTYPES[settings.exp_avg_sq_dtype],
        optimizer_cpu_offload=settings.optimizer_cpu_offload,
        optimizer_offload_fraction=settings.optimizer_offload_fraction if settings.optimizer_cpu_offload else 0.0,
        fp8_recipe=settings.fp8_recipe,
    )


def build_optimizer(chunks: Chunks, settings: OptimizerSettings) -> ChainedOptimizer:
    """The optimizer, its state split over the data-parallel ranks; no decay on norms and other vectors (as Megatron).

    Raises:
        ConfigError: a pattern of `lr_mult` that no parameter has, or two for one parameter.
    """
    config = optimizer_config(settings, bf16=chunks[0].config.bf16)
    overrides = megatron_optimizer.get_standard_config_overrides(config)
    factors = learning_rate_factors([unwrapped(chunk) for chunk in chunks], settings.lr_mult)
    for factor in sorted(set(settings.lr_mult.values())):
        overrides[_with_factor(factors, factor)] = {"lr_mult": factor}
    with _state_for_any_optimizer():
        optimizer = get_megatron_optimizer(config, chunks, overrides)
    assert isinstance(optimizer, ChainedOptimizer)
    for group in optimizer.param_groups:  # megatron marks the groups and leaves the product to its scheduler
        group["weight_decay"] = settings.weight_decay * group["wd_mult"]
    return optimizer


def _with_factor(factors: dict[torch.nn.Parameter, float], factor: float) -> ParamKey:
    mine = {parameter for parameter, own in factors.items() if own == factor}
    return ParamKey(predicate=ParamPredicate(name=f"lr_mult {factor}", fn=lambda parameter: parameter in mine))


@contextmanager
def _state_for_any_optimizer() -> Iterator[None]:
    """Let megatron's distributed optimizer take SGD.

    It refuses optimizers for whose state its own checkpoints have no names. Ours have (`optimizer_state`).
    """

    def build(optimizer: Any, config: Any, scaler: Any, init_state: Any, **rest: Any) -> DistributedOptimizer:
        return DistributedOptimizer(optimizer, config, scaler, init_state or (lambda *_: None), **rest)

    real = megatron_optimizer.DistributedOptimizer
    megatron_optimizer.DistributedOptimizer = build
    try:
        yield
    finally:
        megatron_optimizer.DistributedOptimizer = real


def gather_parameters(chunks: Chunks) -> None:
    """Complete the weights that the last update left to the coming forward pass (overlap_param_gather). Collective."""
    if chunks[0].ddp_config.overlap_param_gather:
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)


def gradient_norm(optimizer: ChainedOptimizer) -> float:
    """The norm of the gradients that the schedule has left ready, before clipping. Collective.

    Over all parameters of the model, each counted once; the same on every rank, and not finite if any gradient is not.
    """
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def update(optimizer: ChainedOptimizer, lr: float, weight_decay: float | None = None) -> None:
    """Clip and apply the gradients; their norm must be finite.

    Args:
        optimizer: with gradients.
        lr: the learning rate of this step, before the factors of parameter groups.
        weight_decay: of this step, likewise; None: as the optimizer was built.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_mult"]
        if weight_decay is not None:
            group["weight_decay"] = weight_decay * group["wd_mult"]
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
