"""Does a converted directory load under another megatron-core? Run in an environment of its own (docs/convert.md).

    python benchmarks/convert_megatron_016.py HF_DIRECTORY MCORE_DIRECTORY

Builds megatron's own GPTModel from its local spec on CPU, fills its parameters with NaN, loads by `dist_checkpointing.load`,
and compares the sum of all values with the source's. For models that fit. megatron-core 0.16's local spec stores a MoE
layer's norm under another key than its transformer-engine spec; that one key is renamed in the request.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

from mcore_qwen3.arch.shape import ModelShape, read_model_shape
from mcore_qwen3.converters import open_source, resolve_iteration_dir

LOCAL_NORM, NORM = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"


def build(shape: ModelShape) -> GPTModel:
    """The model by megatron's own local modules."""
    experts = {
        "num_moe_experts": shape.num_experts,
        "moe_router_topk": shape.moe_router_topk,
        "moe_ffn_hidden_size": shape.moe_ffn_hidden_size,
        "moe_token_dispatcher_type": "allgather",
    }
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_hidden_size,
        layernorm_epsilon=shape.rms_norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        use_cpu_initialization=True,
        perform_initialization=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        **(experts if shape.is_moe else {}),
    )
    spec = get_gpt_layer_local_spec(num_experts=shape.num_experts or None, qk_layernorm=True, normalization="RMSNorm")
    return GPTModel(
        config,
        spec,
        vocab_size=shape.vocab_size,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
    )


def main() -> None:
    """Load, compare, say so."""
    hf, mcore = Path(sys.argv[1]), Path(sys.argv[2])
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29612")
    dist.init_process_group("gloo")
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    parallel_state.initialize_model_parallel()
    shape = read_model_shape(hf)
    model = build(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    asked = {key: entry for key, entry in model.sharded_state_dict().items() if not key.endswith("_extra_state")}
    for entry in asked.values():
        if shape.is_moe and getattr(entry, "key", "").endswith(LOCAL_NORM):
            entry.key = entry.key.replace(LOCAL_NORM, NORM)
    loaded = dist_checkpointing.load({"model": asked}, str(resolve_iteration_dir(mcore)))
    model.load_state_dict(loaded["model"], strict=False)
    empty = [name for name, parameter in model.named_parameters() if parameter.isnan().any()]
    mine = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
    with open_source(hf, shape) as source:
        wanted = sum(
            float(source.read(key, (slice(None),) * len(entry.shape)).double().sum())
            for key, entry in source.entries().items()
        )
    equal = abs(mine - wanted) <= 1e-9 * abs(wanted)
    print(f"megatron-core {megatron.core.__version__}: {len(list(model.parameters()))} parameters, not filled: {empty}")
    print(f"sum of all values {mine:.12g}, in the source {wanted:.12g}")
    sys.exit(0 if equal and not empty else 1)


if __name__ == "__main__":
    main()
