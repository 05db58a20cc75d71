"""The layer spec of Qwen3 and Qwen3-MoE, one for both providers, with one set of checkpoint keys."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from mcore_qwen3.model.router import BalancedRouter


def layer_spec(config: TransformerConfig, provider: BackendSpecProvider, *, moe: bool) -> ModuleSpec:
    """One decoder layer: norm, attention with query and key norms, norm, then experts (`moe`) or one MLP.

    Where the provider fuses norm and linear (transformer-engine), the norm's weight lives inside the linear layer; the key
    map below gives the separate norms of the torch modules the same names on disk. A MoE layer's second norm is separate in
    both and keeps its name.
    """
    fused = provider.fuse_layernorm_and_linear()
    norm, qk_norm = (
        provider.layer_norm(rms_norm=True, has_residual=True),
        provider.layer_norm(rms_norm=True, for_qk=True),
    )
    column, row = provider.column_parallel_linear(), provider.row_parallel_linear()
    norm_column = provider.column_parallel_layer_norm_linear() if fused else column
    if moe:
        experts = provider.grouped_mlp_modules(config.moe_grouped_gemm)
        mlp = partial(MoELayer, submodules=MoESubmodules(experts=experts, router=BalancedRouter))
    else:
        mlp = partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=norm_column, linear_fc2=row))
    keys = {} if fused else {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if not fused and not moe:
        keys["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    attention = SelfAttentionSubmodules(
        linear_qkv=norm_column,
        core_attention=provider.core_attention(),
        linear_proj=row,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    submodules = TransformerLayerSubmodules(
        input_layernorm=IdentityOp if fused else norm,
        self_attention=ModuleSpec(
            module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
        ),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=norm if moe or not fused else IdentityOp,
        mlp=mlp,
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=keys,
    )
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def block_spec(
    config: TransformerConfig, provider: BackendSpecProvider, moe_layers: Sequence[bool], chunk: int | None = None
) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage (or of one of its chunks) and the final norm.

    Args:
        config: megatron's configuration.
        provider: the modules.
        moe_layers: for each layer of the whole model, whether it has experts.
        chunk: which of the stage's chunks, under an interleaved pipeline.
    """
    first, count = get_transformer_layer_offset(config, vp_stage=chunk), get_num_layers_to_build(config, vp_stage=chunk)
    specs = {moe: layer_spec(config, provider, moe=moe) for moe in set(moe_layers)}
    layers = [specs[moe] for moe in moe_layers[first : first + count]]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=provider.layer_norm(rms_norm=True))
