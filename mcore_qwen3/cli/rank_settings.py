"""The flags of a run as the settings that the packages of a training rank take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mcore_qwen3.arch import row_multiple
from mcore_qwen3.cli.resolve import ResolvedRun, train_iters
from mcore_qwen3.config import RunConfig, decay_iters, learning_rate_factors, warmup_iters
from mcore_qwen3.model.config import ModelOptions
from mcore_qwen3.model.provider import choose_modules
from mcore_qwen3.runtime.device import Device
from mcore_qwen3.train.freezing import Freezing
from mcore_qwen3.train.optimizer import DataParallelSettings, OptimizerSettings
from mcore_qwen3.train.schedule import LearningRate, WeightDecay

Say = Callable[[str], None]


def model_options(run: ResolvedRun, device: Device, say: Say) -> ModelOptions:
    """The run's choices about the model, as the model package takes them."""
    flags, numerics = run.config.model, run.config.numerics
    modules, reason = choose_modules(flags.transformer_impl, device.is_cuda)
    say(f"modules: {modules} ({reason}); {'bf16' if flags.bf16 else 'fp32'}")
    if device.is_cuda and modules == "torch" and flags.attention_backend in ("fused", "unfused"):
        say(f"--attention_backend {flags.attention_backend} has no effect: the torch modules have one attention")
    return ModelOptions(
        modules=modules,
        on_cuda=device.is_cuda,
        bf16=bool(flags.bf16),
        attention_backend=flags.attention_backend,
        moe_grouped_gemm=flags.moe_grouped_gemm,
        moe_aux_loss_coeff=flags.moe_aux_loss_coeff,
        moe_router_load_balancing_type=flags.moe_router_load_balancing_type,
        moe_z_loss_coeff=flags.moe_z_loss_coeff,
        moe_router_dtype=flags.moe_router_dtype,
        moe_expert_capacity_factor=flags.moe_expert_capacity_factor,
        moe_pad_expert_input_to_capacity=flags.moe_pad_expert_input_to_capacity,
        moe_token_drop_policy=flags.moe_token_drop_policy,
        moe_token_dispatcher_type=flags.moe_token_dispatcher_type,
        overlap_moe_expert_parallel_comm=numerics.overlap_moe_expert_parallel_comm,
        tp_comm_overlap=numerics.tp_comm_overlap,
        moe_flex_dispatcher_backend=numerics.moe_flex_dispatcher_backend,
        moe_permute_fusion=numerics.moe_permute_fusion,
        cross_entropy_loss_fusion=flags.cross_entropy_loss_fusion,
        cross_entropy_fusion_impl=numerics.cross_entropy_fusion_impl,
        fp8_format=numerics.fp8_format,
        fp8_recipe=numerics.fp8_recipe,
        recompute_granularity=flags.recompute_granularity,
        recompute_modules=flags.recompute_modules,
        recompute_method=flags.recompute_method,
        recompute_num_layers=flags.recompute_num_layers,
    )


def userbuffer_sizes(run: ResolvedRun) -> dict[str, Any]:
    """What `start_userbuffers` takes; rows are packed, so every micro-batch has this many tokens."""
    layout, config = run.layout, run.config
    multiple = row_multiple(layout.tensor, layout.sequence_parallel, layout.context)
    assert config.data.max_length is not None, "resolve() fills max_length in"
    row = -(-config.data.max_length // multiple) * multiple
    return {
        "tokens": row * config.train.micro_batch_size // layout.context,
        "hidden_size": run.shape.hidden_size,
        "tensor": layout.tensor,
        "fp8": config.numerics.fp8_format is not None,
    }


def data_parallel_settings(config: RunConfig) -> DataParallelSettings:
    """How gradients are reduced and parameters gathered."""
    flags = config.numerics
    return DataParallelSettings(
        overlap_grad_reduce=flags.overlap_grad_reduce,
        overlap_param_gather=flags.overlap_param_gather,
        main_grads_dtype=flags.main_grads_dtype,
    )


def optimizer_settings(config: RunConfig) -> OptimizerSettings:
    """The optimizer and what its state is kept in."""
    flags, numerics = config.optim, config.numerics
    return OptimizerSettings(
        optimizer=flags.optimizer,
        weight_decay=flags.weight_decay,
        adam_beta1=flags.adam_beta1,
        adam_beta2=flags.adam_beta2,
        adam_eps=flags.adam_eps,
        sgd_momentum=flags.sgd_momentum,
        clip_grad=flags.clip_grad,
        lr_mult=learning_rate_factors(flags),
        use_precision_aware_optimizer=numerics.use_precision_aware_optimizer,
        main_grads_dtype=numerics.main_grads_dtype,
        main_params_dtype=numerics.main_params_dtype,
        exp_avg_dtype=numerics.exp_avg_dtype,
        exp_avg_sq_dtype=numerics.exp_avg_sq_dtype,
        optimizer_cpu_offload=numerics.optimizer_cpu_offload,
        optimizer_offload_fraction=numerics.optimizer_offload_fraction,
        fp8_recipe=numerics.fp8_recipe if numerics.fp8_format else None,
    )


def dataset_names(config: RunConfig) -> tuple[str, ...]:
    """The entries of --dataset whose losses are told apart, each under a name of its own; none where that is not asked for."""
    if not config.tracking.log_loss_per_dataset:
        return ()
    entries = config.data.dataset
    repeated = [entries[:place].count(entry) for place, entry in enumerate(entries)]
    return tuple(f"{entry} ({times + 1})" if times else entry for entry, times in zip(entries, repeated, strict=True))


def freezing(config: RunConfig) -> Freezing:
    """What stays as it is."""
    flags = config.optim
    return Freezing(
        freeze_parameters=flags.freeze_parameters,
        freeze_parameters_regex=flags.freeze_parameters_regex,
        freeze_parameters_ratio=flags.freeze_parameters_ratio,
        trainable_parameters=flags.trainable_parameters,
        trainable_parameters_regex=flags.trainable_parameters_regex,
    )


def schedules(config: RunConfig) -> tuple[LearningRate, WeightDecay]:
    """The learning rate and the weight decay over the run, whose steps are known."""
    flags = config.optim
    rate = LearningRate(
        lr=flags.lr,
        min_lr=flags.min_lr,
        style=flags.lr_decay_style,
        warmup_iters=warmup_iters(config),
        decay_iters=decay_iters(config),
        warmup_init=flags.lr_warmup_init,
        wsd_decay_iters=flags.lr_wsd_decay_iters or 0,
        wsd_decay_style=flags.lr_wsd_decay_style,
    )
    if flags.weight_decay_incr_style == "constant":
        return rate, WeightDecay(start=flags.weight_decay, end=flags.weight_decay)
    assert flags.start_weight_decay is not None and flags.end_weight_decay is not None, "checked where flags are read"
    return rate, WeightDecay(
        start=flags.start_weight_decay,
        end=flags.end_weight_decay,
        style=flags.weight_decay_incr_style,
        iters=train_iters(config),
    )
