"""config.json of a model that has a name, for tests that read one."""

from __future__ import annotations

from mcore_qwen3.arch import ModelShape


def hf_config(shape: ModelShape) -> dict[str, object]:
    """config.json of a model, official spelling."""
    config: dict[str, object] = {
        "model_type": shape.model_type,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_query_groups,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn_hidden_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "initializer_range": shape.initializer_range,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "eos_token_id": shape.eos_token_id[0],
    }
    if shape.is_moe:
        config |= {
            "num_experts": shape.num_experts,
            "num_experts_per_tok": shape.moe_router_topk,
            "moe_intermediate_size": shape.moe_ffn_hidden_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config
