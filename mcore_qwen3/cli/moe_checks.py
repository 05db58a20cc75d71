"""Rules between the flags of a MoE model, its shape and its device."""

from __future__ import annotations

from mcore_qwen3.arch import ModelShape, ParallelLayout
from mcore_qwen3.config import RunConfig
from mcore_qwen3.errors import ConfigError


def check_moe(config: RunConfig, shape: ModelShape, layout: ParallelLayout, device: str) -> None:
    """Refuse what megatron-core 0.19.2 cannot do with a MoE model; a dense model has nothing to refuse.

    Raises:
        ConfigError: a rule is broken.
    """
    if not shape.is_moe:
        return
    shape.check_router()
    flags = config.model
    if flags.moe_router_enable_expert_bias:
        raise ConfigError(
            "balancing by an expert bias is for sigmoid router scores; Qwen3's are softmax",
            seen="--moe_router_enable_expert_bias true",
            fix="drop the flag and balance with --moe_aux_loss_coeff",
        )
    selective = flags.recompute_granularity == "selective"
    if selective and "moe_act" in flags.recompute_modules and not flags.moe_grouped_gemm:
        raise ConfigError(
            "recomputing moe_act needs grouped experts",
            seen="--recompute_modules moe_act, --moe_grouped_gemm false",
            fix="--moe_grouped_gemm true, or --recompute_modules moe",
        )
    if flags.moe_token_dispatcher_type == "flex":
        _check_flex(config, layout, device)


def _check_flex(config: RunConfig, layout: ParallelLayout, device: str) -> None:
    flags = config.model
    rules = (
        (
            config.numerics.moe_flex_dispatcher_backend != "none",
            "needs a library",
            "--moe_flex_dispatcher_backend none (which --moe_enable_deepep false means)",
        ),
        (device == "cuda", "runs on GPUs only, with DeepEP", f"device {device}"),
        (layout.expert * layout.expert_tensor > 1, "needs EP x expert-TP above 1", "EP 1 x expert-TP 1"),
        (flags.moe_router_dtype == "fp32", "needs a router in fp32", f"--moe_router_dtype {flags.moe_router_dtype}"),
        (
            not flags.moe_pad_expert_input_to_capacity,
            "cannot pad experts to their capacity",
            "--moe_pad_expert_input_to_capacity true",
        ),
    )
    for holds, rule, seen in rules:
        if not holds:
            raise ConfigError(
                f"the token dispatcher flex {rule}",
                seen=f"--moe_token_dispatcher_type flex, {seen}",
                fix="--moe_token_dispatcher_type alltoall, or allgather",
            )
