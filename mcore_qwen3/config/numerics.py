"""What numbers are kept in, where they lie, and what is done beside each other. Most of it needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mcore_qwen3.config.flags import flag
from mcore_qwen3.config.optim import OptimFlags
from mcore_qwen3.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class NumericsFlags:
    """Numerics and memory: dtypes of the optimizer, offload, fp8, and messages beside computation."""

    overlap_grad_reduce: bool = flag(False, "reduce gradients while the backward pass goes on")
    overlap_param_gather: bool = flag(
        False, "gather updated parameters while the forward pass goes on; needs overlap_grad_reduce"
    )
    overlap_moe_expert_parallel_comm: bool = flag(
        False,
        "compute one micro-batch while tokens of another travel to their experts (EP above 1, bf16; one more micro-batch "
        "in memory)",
    )
    tp_comm_overlap: bool = flag(
        False, "send tensor-parallel messages beside products (GPU with transformer-engine, TP above 1, packed rows)"
    )
    use_precision_aware_optimizer: bool = flag(
        False, "let the dtypes below be other than fp32 (GPU with transformer-engine)"
    )
    main_grads_dtype: str = flag(
        "fp32", "with it: gradient buffers, which are reduced in it too", choices=("fp32", "bf16")
    )
    main_params_dtype: str = flag("fp32", "with it: the optimizer's own weights", choices=("fp32", "fp16"))
    exp_avg_dtype: str = flag("fp32", "with it: the first moment", choices=("fp32", "bf16", "fp16", "fp8"))
    exp_avg_sq_dtype: str = flag("fp32", "with it: the second moment", choices=("fp32", "bf16", "fp16", "fp8"))
    optimizer_cpu_offload: bool = flag(False, "with it: keep optimizer state in host memory and update there")
    optimizer_offload_fraction: float = flag(
        1.0, "with optimizer_cpu_offload: share of the state that goes", at_least=0, at_most=1
    )
    fp8_format: str | None = flag(
        None, "products of matrices in fp8 (GPU with transformer-engine); unset: bf16", choices=("e4m3", "hybrid")
    )
    fp8_recipe: str = flag(
        "delayed",
        "with fp8_format: how scales are found; mxfp8 needs Blackwell",
        choices=("delayed", "tensorwise", "blockwise", "mxfp8"),
    )
    cross_entropy_fusion_impl: str = flag(
        "native",
        "with cross_entropy_loss_fusion: megatron's form or transformer-engine's",
        choices=("native", "te"),
    )
    moe_flex_dispatcher_backend: str = flag(
        "deepep", "library of the token dispatcher flex, which needs one", choices=("deepep", "hybridep", "none")
    )
    moe_permute_fusion: bool = flag(False, "sort tokens by expert in one fused step (GPU with transformer-engine)")


# Options of transformer-engine's modules: flag -> value that asks for nothing.
_OF_TRANSFORMER_ENGINE = {
    "tp_comm_overlap": False,
    "use_precision_aware_optimizer": False,
    "fp8_format": None,
    "cross_entropy_fusion_impl": "native",
    "moe_permute_fusion": False,
}


def check_numerics(numerics: NumericsFlags, optim: OptimFlags) -> None:
    """Raise ConfigError for the first broken rule that needs no more than the values."""
    if numerics.overlap_param_gather and not numerics.overlap_grad_reduce:
        raise ConfigError(
            "overlap_param_gather goes with overlap_grad_reduce",
            seen="--overlap_param_gather true, --overlap_grad_reduce false",
            fix="--overlap_grad_reduce true, or neither",
        )
    lower = [name for name in DTYPE_FLAGS if getattr(numerics, name) != "fp32"]
    if lower and not numerics.use_precision_aware_optimizer:
        raise ConfigError(
            "dtypes of the optimizer other than fp32 need the precision-aware optimizer",
            seen=" ".join(f"--{name} {getattr(numerics, name)}" for name in lower),
            fix="--use_precision_aware_optimizer true, or fp32",
        )
    if numerics.optimizer_cpu_offload and not numerics.use_precision_aware_optimizer:
        raise ConfigError(
            "the offload is a part of the precision-aware optimizer",
            seen="--optimizer_cpu_offload true, --use_precision_aware_optimizer false",
            fix="--use_precision_aware_optimizer true (its dtypes may stay fp32), or --optimizer_cpu_offload false",
        )
    if numerics.use_precision_aware_optimizer and optim.optimizer != "adam":
        raise ConfigError(
            "the precision-aware optimizer is Adam",
            seen=f"--use_precision_aware_optimizer true --optimizer {optim.optimizer}",
            fix="--optimizer adam, or --use_precision_aware_optimizer false",
        )


DTYPE_FLAGS = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def needs_transformer_engine(numerics: NumericsFlags) -> Iterator[str]:
    """The options in use that transformer-engine's modules alone have, as written on a command line."""
    for name, off in _OF_TRANSFORMER_ENGINE.items():
        value = getattr(numerics, name)
        if value != off:
            yield f"--{name} {str(value).lower() if isinstance(value, bool) else value}"
