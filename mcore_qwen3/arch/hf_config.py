"""A Hugging Face `config.json` read in full: every key is used, known to be harmless, or refused by name.

Nothing is passed over in silence, because a key that changes the model and is not read gives a model that trains well
and answers wrongly. Two spellings are read: the one in the official files, and the one that transformers 5 writes
(`rope_parameters`, `num_local_experts`, `dtype`). The keys that fix the shapes of the weights, and rope_theta, must be
there; any other key that is left out means what it means to transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_qwen3.arch.hf_values import bad_value, typed
from mcore_qwen3.arch.rope import rope_scaling, rope_theta
from mcore_qwen3.errors import ConfigError

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
DTYPES = ("bfloat16", "float16", "float32")

_REQUIRED = object()


@dataclass(frozen=True)
class _Field:
    """One field of ModelShape: its spellings in `config.json`, its type, and its value when it is left out."""

    keys: tuple[str, ...]
    kind: type
    default: Any = _REQUIRED


_COMMON_FIELDS = {
    "num_layers": _Field(("num_hidden_layers",), int),
    "hidden_size": _Field(("hidden_size",), int),
    "num_attention_heads": _Field(("num_attention_heads",), int),
    "num_query_groups": _Field(("num_key_value_heads",), int),
    "ffn_hidden_size": _Field(("intermediate_size",), int),
    "vocab_size": _Field(("vocab_size",), int),
    "max_position_embeddings": _Field(("max_position_embeddings",), int, 32768),
    "rms_norm_eps": _Field(("rms_norm_eps",), float, 1e-6),
    "tie_word_embeddings": _Field(("tie_word_embeddings",), bool, False),
    "initializer_range": _Field(("initializer_range",), float, 0.02),
    # Where no dtype is written, float32 keeps the value of every weight.
    "torch_dtype": _Field(("torch_dtype", "dtype"), str, "float32"),
}
_MOE_FIELDS = {
    "num_experts": _Field(("num_experts", "num_local_experts"), int),
    "moe_router_topk": _Field(("num_experts_per_tok",), int),
    "moe_ffn_hidden_size": _Field(("moe_intermediate_size",), int),
    # The released MoE models write true; transformers reads a missing key as false.
    "norm_topk_prob": _Field(("norm_topk_prob",), bool, False),
}
# Which layers have experts; `_moe_layers` reads them.
_MOE_SPECIAL = {"decoder_sparse_step", "mlp_only_layers"}
_FIELDS = {"qwen3": _COMMON_FIELDS, "qwen3_moe": _COMMON_FIELDS | _MOE_FIELDS}

# Keys that need more than a type check; `translate` reads each of them.
_SPECIAL = {
    "model_type", "architectures", "head_dim", "eos_token_id", "layer_types",
    "rope_theta", "rope_parameters", "rope_scaling", "quantization_config",
}  # fmt: skip

# Keys that do not change what is trained, whatever their value.
_HARMLESS = {
    "transformers_version", "_name_or_path", "name_or_path", "tokenizer_class", "unsloth_version", "unsloth_fixed",
    "use_cache", "return_dict", "output_hidden_states", "output_attentions", "output_router_logits",
    "bos_token_id", "pad_token_id", "id2label", "label2id", "_attn_implementation", "_attn_implementation_autoset",
    "router_aux_loss_coef",  # training takes its coefficient from --moe_aux_loss_coeff
    "sliding_window", "max_window_layers",  # without effect while use_sliding_window is false, which is checked
}  # fmt: skip

# Keys that may only have a value under which they do nothing: (values allowed, why not another).
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "attention_bias": ((False, None), "attention without biases is what is built"),
    "qkv_bias": ((False, None), "attention without biases is what is built"),
    "mlp_bias": ((False, None), "an MLP without biases is what is built"),
    "attention_dropout": ((0, None), "there is no dropout"),
    "hidden_act": (("silu",), "SwiGLU is the only activation"),
    "use_qk_norm": ((True,), "query and key are always normalised"),
    "use_sliding_window": ((False, None), "attention is always over the whole sequence"),
    "partial_rotary_factor": ((1, None), "RoPE turns every channel of a head"),
    "decoder_sparse_step": ((1, None), "a dense model has no experts"),
    "mlp_only_layers": (([], None), "a dense model has no experts"),
    "shared_expert_intermediate_size": ((0, None), "there is no shared expert"),
    "auto_map": ((None,), "code that comes with a checkpoint is never run"),
}


def translate(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The keyword arguments of ModelShape for the contents of one `config.json`.

    Args:
        config: the parsed file.
        source: its path, for messages.

    Raises:
        ConfigError: a key is missing, of the wrong type, unknown, or has a value that is not supported.
    """
    model_type = _model_type(config, source)
    fields = _FIELDS[model_type]
    _refuse_what_is_not_read(config, fields, source)
    missing = [f.keys[0] for f in fields.values() if f.default is _REQUIRED and not any(k in config for k in f.keys)]
    if not any(config.get(key) for key in ("rope_theta", "rope_parameters", "rope_scaling")):
        missing.append("rope_theta")
    if missing:
        raise ConfigError(
            f"{source} lacks keys that a {model_type} model needs",
            seen=", ".join(missing) + " missing",
            fix="add them with the values the weights were made with",
        )
    shape = {name: _read(config, field, source) for name, field in fields.items()}
    if shape["torch_dtype"] not in DTYPES:
        raise bad_value(source, "torch_dtype", shape["torch_dtype"], "one of " + ", ".join(DTYPES))
    _check_layer_types(config, shape["num_layers"], source)
    _check_quantization(config, source)
    return shape | {
        "model_type": model_type,
        "head_dim": _head_dim(config, model_type, shape, source),
        "rope_theta": rope_theta(config, source),
        "rope_scaling": rope_scaling(config, source),
        "moe_layers": _moe_layers(config, model_type, shape, source),
        "eos_token_id": _eos_token_id(config, source),
    }


def _model_type(config: Mapping[str, Any], source: str) -> str:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise ConfigError(
            f"{source}: model_type must be one of {', '.join(ARCHITECTURES)}",
            seen=f"model_type = {model_type!r}" if "model_type" in config else "no model_type",
            fix="use a Qwen3 or Qwen3-MoE text model",
        )
    architectures = config.get("architectures")
    if architectures not in (None, [ARCHITECTURES[model_type]]):
        raise bad_value(source, "architectures", architectures, f"[{ARCHITECTURES[model_type]!r}] for {model_type}")
    return model_type


def _refuse_what_is_not_read(config: Mapping[str, Any], fields: Mapping[str, _Field], source: str) -> None:
    read = _SPECIAL | _HARMLESS | {key for field in fields.values() for key in field.keys}
    if config["model_type"] == "qwen3_moe":
        read |= _MOE_SPECIAL
    for key, value in config.items():
        if key in read:
            continue
        if key in _NEUTRAL:
            allowed, why = _NEUTRAL[key]
            if value not in allowed:
                raise bad_value(source, key, value, repr(allowed[0]), why)
        elif value:  # an unknown key that is null, false, 0 or empty switches nothing on
            raise ConfigError(
                f"{source}: unknown key {key!r} for model_type {config['model_type']}; it might change the model",
                seen=f"{key} = {value!r}",
                fix="remove the key if the weights do not depend on it, else use another model",
            )


def _read(config: Mapping[str, Any], field: _Field, source: str) -> Any:
    values = {key: config[key] for key in field.keys if key in config}
    if not values:
        return field.default
    if any(value != next(iter(values.values())) for value in values.values()):
        raise ConfigError(
            f"{source}: {' and '.join(values)} are two spellings of one key and must agree",
            seen=", ".join(f"{key} = {value!r}" for key, value in values.items()),
            fix="keep the right one",
        )
    key, value = next(iter(values.items()))
    return typed(value, field.kind, key, source)


def _head_dim(config: Mapping[str, Any], model_type: str, shape: Mapping[str, Any], source: str) -> int:
    """As transformers 5.24: without the key 128 for a dense model, hidden_size // num_attention_heads for a MoE one."""
    if "head_dim" in config:
        return typed(config["head_dim"], int, "head_dim", source)
    if model_type == "qwen3":
        return 128
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    if heads < 1 or hidden % heads:
        raise ConfigError(
            f"{source}: without head_dim, hidden_size must be a multiple of num_attention_heads",
            seen=f"hidden_size {hidden}, num_attention_heads {heads}",
            fix="add head_dim",
        )
    return hidden // heads


def _moe_layers(config: Mapping[str, Any], model_type: str, shape: Mapping[str, Any], source: str) -> tuple[bool, ...]:
    """As transformers 5.24: every decoder_sparse_step-th layer has experts, but for those in mlp_only_layers."""
    if model_type == "qwen3":
        return (False,) * shape["num_layers"]
    step = typed(config.get("decoder_sparse_step", 1), int, "decoder_sparse_step", source)
    if step < 1:
        raise bad_value(source, "decoder_sparse_step", step, "1 or more")
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise bad_value(source, "mlp_only_layers", dense, "a list of layer numbers")
    dense = {typed(layer, int, "mlp_only_layers", source) for layer in dense}
    layers = tuple(
        layer not in dense and shape["num_experts"] > 0 and (layer + 1) % step == 0
        for layer in range(shape["num_layers"])
    )
    if shape["num_experts"] > 0 and shape["num_layers"] > 0 and not any(layers):
        raise ConfigError(
            f"{source}: a qwen3_moe model needs a layer with experts",
            seen=f"{shape['num_layers']} layers, decoder_sparse_step {step}, mlp_only_layers {sorted(dense)}",
            fix="correct the two keys; a model whose layers are all dense is model_type qwen3",
        )
    return layers


def _eos_token_id(config: Mapping[str, Any], source: str) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    return tuple(typed(token, int, "eos_token_id", source) for token in ids)


def _check_layer_types(config: Mapping[str, Any], num_layers: int, source: str) -> None:
    layer_types = config.get("layer_types")
    if layer_types is not None and layer_types != ["full_attention"] * num_layers:
        wanted = f"'full_attention' for each of the {num_layers} layers"
        raise bad_value(source, "layer_types", layer_types, wanted, "attention is always over the whole sequence")


def _check_quantization(config: Mapping[str, Any], source: str) -> None:
    """FP8 in blocks of 128 x 128 is read; the weights are dequantised on the way in."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return
    form = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    if not isinstance(quantization, dict) or any(quantization.get(key) != value for key, value in form.items()):
        why = "other quantised weights are not read; take the bf16 release of the model"
        raise bad_value(source, "quantization_config", quantization, f"null, or hold {form}", why)
