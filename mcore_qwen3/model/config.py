"""ModelShape and the run's flags -> megatron's TransformerConfig."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_qwen3.arch.layout import ParallelLayout
from mcore_qwen3.arch.shape import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """What a run chooses about the model beyond its shape; names as the flags.

    Attributes:
        modules: "torch" or "transformer_engine".
        on_cuda: True on a GPU.
        bf16: bf16 parameters with fp32 gradients and optimizer; False = fp32 throughout.
    """

    modules: str = "torch"
    on_cuda: bool = False
    bf16: bool = False
    attention_backend: str = "auto"
    moe_grouped_gemm: bool = True
    moe_aux_loss_coeff: float = 0.0
    moe_router_load_balancing_type: str = "aux_loss"
    moe_z_loss_coeff: float | None = None
    moe_router_dtype: str = "fp32"
    moe_expert_capacity_factor: float | None = None
    moe_pad_expert_input_to_capacity: bool = False
    moe_token_drop_policy: str = "probs"
    moe_token_dispatcher_type: str = "alltoall"
    tp_comm_overlap: bool = False
    overlap_moe_expert_parallel_comm: bool = False
    moe_flex_dispatcher_backend: str = "deepep"
    moe_permute_fusion: bool = False
    cross_entropy_loss_fusion: bool = True
    cross_entropy_fusion_impl: str = "native"
    fp8_format: str | None = None
    fp8_recipe: str = "delayed"
    recompute_granularity: str = "none"
    recompute_modules: tuple[str, ...] = ("core_attn",)
    recompute_method: str | None = None
    recompute_num_layers: int | None = None

    @property
    def params_dtype(self) -> torch.dtype:
        """Dtype of parameters and activations."""
        return torch.bfloat16 if self.bf16 else torch.float32


def _moe_settings(shape: ModelShape, options: ModelOptions) -> dict:
    """Routing as transformers does it: softmax over all experts, top-k, renormalised if norm_topk_prob.

    Softmax after top-k equals softmax, top-k, renormalise; so megatron's pre-softmax is the negation of norm_topk_prob.
    """
    return {
        "num_moe_experts": shape.num_experts,
        "moe_router_topk": shape.moe_router_topk,
        "moe_ffn_hidden_size": shape.moe_ffn_hidden_size,
        "moe_router_pre_softmax": not shape.norm_topk_prob,
        "moe_router_score_function": "softmax",
        "moe_router_load_balancing_type": options.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": options.moe_aux_loss_coeff,
        "moe_z_loss_coeff": options.moe_z_loss_coeff,
        "moe_router_dtype": None if options.moe_router_dtype == "none" else options.moe_router_dtype,
        "moe_expert_capacity_factor": options.moe_expert_capacity_factor,
        "moe_pad_expert_input_to_capacity": options.moe_pad_expert_input_to_capacity,
        "moe_token_drop_policy": options.moe_token_drop_policy,
        "moe_token_dispatcher_type": options.moe_token_dispatcher_type,
        "overlap_moe_expert_parallel_comm": options.overlap_moe_expert_parallel_comm,
        "moe_flex_dispatcher_backend": options.moe_flex_dispatcher_backend,
        "moe_permute_fusion": options.moe_permute_fusion,
        "moe_grouped_gemm": options.moe_grouped_gemm,
        # A list makes megatron save layer by layer, so only a mixed model gets one.
        "moe_layer_freq": [int(has_experts) for has_experts in shape.moe_layers] if shape.is_mixed else 1,
    }


def _recompute_settings(shape: ModelShape, options: ModelOptions) -> dict:
    """Megatron refuses the modules of experts in a dense model; here they do nothing, and the run says so."""
    full = options.recompute_granularity == "full"
    modules = [name for name in options.recompute_modules if shape.is_moe or name not in ("moe", "moe_act")]
    return {
        "recompute_granularity": None if options.recompute_granularity == "none" else options.recompute_granularity,
        "recompute_modules": modules if options.recompute_granularity == "selective" else None,
        "recompute_method": options.recompute_method if full else None,
        "recompute_num_layers": options.recompute_num_layers if full else None,
    }


def _layout_settings(layout: ParallelLayout) -> dict:
    """Sizes of the groups and the cut into stages."""
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        "num_layers_in_last_pipeline_stage": layout.last_stage_layers,
        "account_for_embedding_in_pipeline_split": layout.account_for_embedding,
        "account_for_loss_in_pipeline_split": layout.account_for_loss,
        "pipeline_model_parallel_layout": layout.pipeline_layout,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "sequence_parallel": layout.sequence_parallel,
    }


def transformer_config(shape: ModelShape, layout: ParallelLayout, options: ModelOptions) -> TransformerConfig:
    """Build megatron's configuration; every field that this project depends on is given, none is left to a default."""
    te = options.modules == "transformer_engine"
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_hidden_size,
        layernorm_epsilon=shape.rms_norm_eps,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=shape.initializer_range,
        perform_initialization=False,  # every parameter is read from the checkpoint, and that is checked
        params_dtype=options.params_dtype,
        pipeline_dtype=options.params_dtype,
        bf16=options.bf16,
        **_layout_settings(layout),
        tp_comm_overlap=options.tp_comm_overlap,
        calculate_per_token_loss=True,
        # An interleaved schedule on GPUs overlaps its sends, as Megatron wants it; gloo has no batched send and receive.
        overlap_p2p_comm=options.on_cuda and layout.virtual_pipeline > 1,
        batch_p2p_comm=options.on_cuda and layout.virtual_pipeline == 1,
        deallocate_pipeline_outputs=True,
        **_recompute_settings(shape, options),
        # Megatron's fused form rounds the logits' gradient to bf16 whatever the run's dtype: not in an fp32 run.
        cross_entropy_loss_fusion=options.cross_entropy_loss_fusion and options.bf16,
        cross_entropy_fusion_impl=options.cross_entropy_fusion_impl,
        fp8=options.fp8_format,
        fp8_recipe=options.fp8_recipe,
        attention_backend=AttnBackend[options.attention_backend],
        attention_softmax_in_fp32=True,
        bias_activation_fusion=options.on_cuda,
        bias_dropout_fusion=options.on_cuda,
        masked_softmax_fusion=False,
        apply_rope_fusion=te,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        transformer_impl="transformer_engine" if te else "local",
        **(_moe_settings(shape, options) if shape.is_moe else {}),
    )
