"""What is trained: where the weights come from and how the layers are computed."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_qwen3.config.flags import flag


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFlags:
    """Model: the weights to start from and how the layers are computed."""

    load: str | None = flag(None, "checkpoint to start from: a Hugging Face folder or an mcore folder")
    transformer_impl: str = flag(
        "auto",
        "modules: torch (runs anywhere) or transformer_engine (GPU only); auto takes the latter where it can run",
        choices=("auto", "torch", "transformer_engine"),
    )
    attention_backend: str = flag("auto", "attention kernel on a GPU", choices=("auto", "flash", "fused", "unfused"))
    bf16: bool | None = flag(None, "train in bfloat16; unset: true on a GPU, false on CPU (fp32)")
    moe_grouped_gemm: bool = flag(True, "all experts of a rank in one grouped product; false: one after the other")
    moe_shared_expert_overlap: bool = flag(False, "accepted for old commands; Qwen3 has no shared expert")
    moe_aux_loss_coeff: float = flag(
        0.0,
        "weight of the expert balance loss. Added once per MoE layer with shares that sum to 1, so that one "
        "coefficient presses layers/top-k times as hard as transformers' router_aux_loss_coef",
        at_least=0,
    )
    cross_entropy_loss_fusion: bool = flag(True, "compute the cross entropy in one fused step")
    recompute_granularity: str = flag(
        "none", "activations computed again in backward: none or full (whole layers)", choices=("none", "full")
    )
    recompute_method: str | None = flag(
        None,
        "with full: uniform (chunks of recompute_num_layers) or block (the first ones of a stage); unset: uniform",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = flag(
        None, "with full: layers a chunk (uniform) or layers a stage (block); unset: 1", at_least=1
    )
