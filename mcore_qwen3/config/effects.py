"""The one table of flags that do nothing in a run, so that each is said once instead of being ignored.

``sequence_parallel`` is not here: ``arch.resolve_layout`` switches it off at TP 1, and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mcore_qwen3.config.optim import freezes
from mcore_qwen3.config.run import RunConfig

# Flags of Megatron's that are taken so that its commands run, and that nothing here needs.
NEVER_USED = {
    "no_save_rng": "nothing in training draws random numbers (no dropout; the order of the data comes from the seed)",
    "no_load_rng": "checkpoints hold no random state",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What the flags alone do not tell.

    ``is_moe``: some layer has experts. ``has_mlp``: some layer has none.
    ``resumes``: steps and state of an earlier run are read. ``reads_load``: --load is read at all.
    ``evaluates``: there is validation data, given or split off. ``raw_text``: the command is pt.
    """

    is_moe: bool
    has_mlp: bool
    device: str
    resumes: bool
    reads_load: bool
    evaluates: bool
    raw_text: bool = False


@dataclass(frozen=True, slots=True)
class _Effect:
    """Flags that do nothing where ``idle`` holds; ``part`` are the values that do, where the others still act."""

    flags: tuple[str, ...]
    because: str
    idle: Callable[[RunConfig, Facts], bool]
    part: Callable[[RunConfig], tuple[str, ...]] = lambda config: ()


def _modules(*names: str) -> Callable[[RunConfig], tuple[str, ...]]:
    """Those of the modules to recompute that are among ``names``."""
    return lambda config: tuple(name for name in config.model.recompute_modules if name in names)


_OF_EXPERTS, _OF_MLP = _modules("moe_act", "moe"), _modules("mlp")


def _is_bf16(config: RunConfig, facts: Facts) -> bool:
    return facts.device == "cuda" if config.model.bf16 is None else config.model.bf16


_TABLE = (
    _Effect(
        ("moe_shared_expert_overlap",),
        "Qwen3 has no shared expert",
        lambda config, facts: facts.is_moe and config.model.moe_shared_expert_overlap,
    ),
    _Effect(
        (
            "moe_grouped_gemm",
            "moe_shared_expert_overlap",
            "moe_aux_loss_coeff",
            "moe_router_load_balancing_type",
            "moe_z_loss_coeff",
            "moe_router_dtype",
            "moe_router_enable_expert_bias",
            "moe_expert_capacity_factor",
            "moe_pad_expert_input_to_capacity",
            "moe_token_drop_policy",
            "moe_token_dispatcher_type",
            "moe_flex_dispatcher_backend",
            "moe_permute_fusion",
            "overlap_moe_expert_parallel_comm",
            "expert_tensor_parallel_size",
        ),
        "the model is dense",
        lambda config, facts: not facts.is_moe,
    ),
    _Effect(
        ("attention_backend",),
        "on CPU torch's scaled_dot_product_attention is used",
        lambda config, facts: facts.device == "cpu" and config.model.attention_backend != "auto",
    ),
    _Effect(
        ("recompute_method", "recompute_num_layers"),
        "recompute_granularity is not full",
        lambda config, facts: config.model.recompute_granularity != "full",
    ),
    _Effect(
        ("recompute_modules",),
        "recompute_granularity is not selective",
        lambda config, facts: config.model.recompute_granularity != "selective",
    ),
    _Effect(
        ("recompute_modules",),
        "the model is dense",
        lambda config, facts: not facts.is_moe and _OF_EXPERTS(config) != (),
        part=_OF_EXPERTS,
    ),
    _Effect(
        ("recompute_modules",),
        "every layer has experts",
        lambda config, facts: not facts.has_mlp and _OF_MLP(config) != (),
        part=_OF_MLP,
    ),
    _Effect(
        ("moe_aux_loss_coeff",),
        "moe_router_load_balancing_type is none",
        lambda config, facts: config.model.moe_router_load_balancing_type == "none",
    ),
    _Effect(
        ("moe_router_load_balancing_type",),
        "moe_aux_loss_coeff is 0",
        lambda config, facts: (
            config.model.moe_aux_loss_coeff == 0 and config.model.moe_router_load_balancing_type != "none"
        ),
    ),
    _Effect(
        ("moe_token_drop_policy",),
        "moe_expert_capacity_factor is unset, so no token is dropped",
        lambda config, facts: config.model.moe_expert_capacity_factor is None,
    ),
    _Effect(
        ("min_lr",),
        "lr_decay_style is constant",
        lambda config, facts: config.optim.lr_decay_style == "constant" and config.optim.min_lr > 0,
    ),
    _Effect(
        ("adam_beta1", "adam_beta2", "adam_eps"),
        "optimizer is sgd",
        lambda config, facts: config.optim.optimizer == "sgd",
    ),
    _Effect(("sgd_momentum",), "optimizer is adam", lambda config, facts: config.optim.optimizer == "adam"),
    _Effect(
        ("lr_warmup_init",),
        "there is no warm-up",
        lambda config, facts: not config.optim.lr_warmup_iters and not config.optim.lr_warmup_fraction,
    ),
    _Effect(
        ("lr_wsd_decay_iters", "lr_wsd_decay_style"),
        "lr_decay_style is not WSD",
        lambda config, facts: config.optim.lr_decay_style != "WSD",
    ),
    _Effect(
        ("weight_decay",),
        "weight_decay_incr_style is not constant: start_weight_decay and end_weight_decay are used",
        lambda config, facts: config.optim.weight_decay_incr_style != "constant",
    ),
    _Effect(
        ("trainable_parameters", "trainable_parameters_regex"),
        "nothing is frozen",
        lambda config, facts: not freezes(config.optim),
    ),
    _Effect(
        ("optimizer_offload_fraction",),
        "optimizer_cpu_offload is false",
        lambda config, facts: not config.numerics.optimizer_cpu_offload,
    ),
    _Effect(("fp8_recipe",), "fp8_format is unset", lambda config, facts: config.numerics.fp8_format is None),
    _Effect(
        ("cross_entropy_fusion_impl",),
        "cross_entropy_loss_fusion is false",
        lambda config, facts: not config.model.cross_entropy_loss_fusion,
    ),
    _Effect(
        ("moe_flex_dispatcher_backend",),
        "moe_token_dispatcher_type is not flex",
        lambda config, facts: facts.is_moe and config.model.moe_token_dispatcher_type != "flex",
    ),
    _Effect(
        ("packing_strategy",),
        "packing is off",
        lambda config, facts: not config.data.packing,
    ),
    _Effect(
        (
            "loss_scale",
            "ignore_empty_think",
            "preserve_thinking",
            "enable_thinking",
            "system",
            "model_name",
            "model_author",
        ),
        "megatron pt takes raw text, and trains every token of it",
        lambda config, facts: facts.raw_text,
    ),
    _Effect(
        ("ignore_empty_think",),
        "enable_thinking is false: the empty think block is the prompt's, and never trained",
        lambda config, facts: not config.data.enable_thinking,
    ),
    _Effect(
        ("split_dataset_ratio",),
        "val_dataset is given, so nothing is split off",
        lambda config, facts: bool(config.data.val_dataset) and config.data.split_dataset_ratio > 0,
    ),
    _Effect(
        (
            *("eval_interval", "eval_on_start", "val_dataset", "split_dataset_ratio"),
            *("metric_for_best_model", "greater_is_better"),
        ),
        "eval_iters is 0",
        lambda config, facts: config.train.eval_iters == 0,
    ),
    _Effect(
        ("eval_iters", "eval_interval", "eval_on_start", "metric_for_best_model", "greater_is_better"),
        "there is no validation data",
        lambda config, facts: not facts.evaluates and config.train.eval_iters != 0,
    ),
    _Effect(
        ("greater_is_better",),
        "metric_for_best_model is unset",
        lambda config, facts: config.checkpoint.metric_for_best_model is None,
    ),
    _Effect(
        ("no_load_optim", "use_checkpoint_opt_param_scheduler"),
        "no earlier run is continued",
        lambda config, facts: not facts.resumes,
    ),
    _Effect(
        ("cross_entropy_loss_fusion",),
        "megatron's fused form rounds gradients to bf16, so an fp32 run uses the plain one",
        lambda config, facts: config.model.cross_entropy_loss_fusion and not _is_bf16(config, facts),
    ),
    _Effect(
        ("tensorboard_dir",),
        "report_to does not name tensorboard",
        lambda config, facts: "tensorboard" not in config.tracking.report_to,
    ),
    _Effect(
        ("wandb_project", "wandb_exp_name"),
        "report_to does not name wandb",
        lambda config, facts: "wandb" not in config.tracking.report_to,
    ),
    _Effect(
        ("swanlab_project", "swanlab_exp_name"),
        "report_to does not name swanlab",
        lambda config, facts: "swanlab" not in config.tracking.report_to,
    ),
    _Effect(
        ("profile_ranks",),
        "profile_step_start is unset",
        lambda config, facts: config.tracking.profile_step_start is None,
    ),
    _Effect(
        ("finetune",),
        "an earlier run is continued, so --load is not read",
        lambda config, facts: not facts.reads_load,
    ),
)


def flags_without_effect(config: RunConfig, explicit: frozenset[str], facts: Facts) -> list[str]:
    """One line for each flag that the user set and that does nothing in this run, in the order of the table."""
    lines: dict[str, str] = {}
    for effect in _TABLE:
        if effect.idle(config, facts):
            for name in effect.flags:
                if name in explicit:
                    shown = " ".join([f"--{name}", *effect.part(config)])
                    lines.setdefault(name, f"{shown} has no effect in this run: {effect.because}")
    for name, because in NEVER_USED.items():
        if name in explicit:
            lines[name] = f"--{name} has no effect: {because}"
    return list(lines.values())
