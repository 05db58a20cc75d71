"""What is trained: where the weights come from and how the layers are computed."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_qwen3.config.flags import flag


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFlags:
    """Model: the weights to start from and how the layers are computed."""

    load: str | None = flag(
        None, "checkpoint to start from: a Hugging Face folder, a hub's OWNER/NAME, or an mcore folder"
    )
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
    moe_router_load_balancing_type: str = flag(
        "aux_loss",
        "what the balance loss averages over: a micro-batch (aux_loss), each row (seq_aux_loss), all ranks and "
        "micro-batches of a step so far (global_aux_loss); none: no balance loss",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
    )
    moe_z_loss_coeff: float | None = flag(None, "weight of the loss on large router logits; unset: none", at_least=0)
    moe_router_dtype: str = flag(
        "fp32", "arithmetic of the router; none: as the model", choices=("none", "fp32", "fp64")
    )
    moe_router_enable_expert_bias: bool = flag(
        False, "balance by a bias on the scores; refused: Megatron has it for sigmoid scores only, Qwen3's are softmax"
    )
    moe_expert_capacity_factor: float | None = flag(
        None, "most tokens an expert takes, as a multiple of an even share; the others are dropped; unset: no limit"
    )
    moe_pad_expert_input_to_capacity: bool = flag(False, "pad every expert's input to its capacity")
    moe_token_drop_policy: str = flag(
        "probs",
        "which tokens stay when an expert is full: the most probable (probs) or the first (position)",
        choices=("probs", "position"),
    )
    moe_token_dispatcher_type: str = flag(
        "alltoall",
        "how tokens reach the ranks of their experts; flex needs a GPU and DeepEP",
        choices=("allgather", "alltoall", "flex"),
    )
    cross_entropy_loss_fusion: bool = flag(True, "compute the cross entropy in one fused step")
    recompute_granularity: str = flag(
        "none",
        "activations computed again in backward: none, selective (recompute_modules) or full (whole layers)",
        choices=("none", "selective", "full"),
    )
    recompute_modules: tuple[str, ...] = flag(
        ("core_attn",),
        "with selective: the parts computed again; moe_act and moe act on layers with experts, mlp on the others",
        choices=("core_attn", "moe_act", "layernorm", "moe", "mlp"),
    )
    recompute_method: str | None = flag(
        None,
        "with full: uniform (chunks of recompute_num_layers) or block (the first ones of a stage); unset: uniform",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = flag(
        None, "with full: layers a chunk (uniform) or layers a stage (block); unset: 1", at_least=1
    )
