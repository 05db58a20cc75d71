"""The official config.json of each Qwen3 model, rebuilt from its facts, and two tiny models; for the tests beside it."""

from __future__ import annotations

import json
from typing import Any

_COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_MOE: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
}
_CODER: dict[str, Any] = {
    "max_position_embeddings": 262144,
    "qkv_bias": False,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.0,
    "shared_expert_intermediate_size": 0,
    "use_qk_norm": True,
}


def dense(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, tie: bool, **changes: Any) -> dict[str, Any]:
    """A dense model's config.json with the official keys."""
    return _COMMON | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "max_window_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "tie_word_embeddings": tie,
        **changes,
    }


def moe(
    hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, expert_ffn: int, **changes: Any
) -> dict[str, Any]:
    """A MoE model's config.json with the official keys."""
    base = dense(hidden, layers, heads, kv_heads, ffn, False) | _MOE
    return base | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": expert_ffn,
        **changes,
    }


def official_text(config: dict[str, Any]) -> str:
    """The file as it is released: keys in alphabetical order, two spaces, no newline at the end."""
    return json.dumps(config, indent=2, sort_keys=True)


OFFICIAL: dict[str, dict[str, Any]] = {
    "0.6B": dense(1024, 28, 16, 8, 3072, True),
    "1.7B": dense(2048, 28, 16, 8, 6144, True),
    "4B": dense(2560, 36, 32, 8, 9728, True),
    "8B": dense(4096, 36, 32, 8, 12288, False),
    "14B": dense(5120, 40, 40, 8, 17408, False),
    "32B": dense(5120, 64, 64, 8, 25600, False),
    "30B-A3B": moe(2048, 48, 32, 4, 6144, 768),
    "235B-A22B": moe(4096, 94, 64, 4, 12288, 1536),
    # Not checked byte for byte against the released file: no sum of it is known.
    "Coder-480B-A35B": moe(6144, 62, 96, 8, 8192, 2560, num_experts=160, **_CODER),
}

# Hidden 16 with four heads of 8, so that head_dim is not hidden / heads.
D2 = dense(16, 2, 4, 2, 32, True, head_dim=8, vocab_size=101, bos_token_id=0, eos_token_id=1)
M2 = moe(
    16, 2, 4, 2, 32, 8, head_dim=8, vocab_size=101, bos_token_id=0, eos_token_id=1, num_experts=4, num_experts_per_tok=2
)
