"""The Qwen3 models by name, so that a run can be planned before its weights are fetched."""

from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path

from mcore_qwen3.arch import ModelShape, read_model_shape, read_shape_file
from mcore_qwen3.errors import ConfigError

# Of each size: hidden, layers, heads, key-value heads, MLP width, tied embeddings, expert width, experts.
# The released config.json files hold these numbers; models with experts send a token to 8 of them.
_SIZES: dict[str, tuple[int, int, int, int, int, bool, int, int]] = {
    "0.6B": (1024, 28, 16, 8, 3072, True, 0, 0),
    "1.7B": (2048, 28, 16, 8, 6144, True, 0, 0),
    "4B": (2560, 36, 32, 8, 9728, True, 0, 0),
    "8B": (4096, 36, 32, 8, 12288, False, 0, 0),
    "14B": (5120, 40, 40, 8, 17408, False, 0, 0),
    "32B": (5120, 64, 64, 8, 25600, False, 0, 0),
    "30B-A3B": (2048, 48, 32, 4, 6144, False, 768, 128),
    "235B-A22B": (4096, 94, 64, 4, 12288, False, 1536, 128),
    "Coder-30B-A3B": (2048, 48, 32, 4, 5472, False, 768, 128),
    "Coder-480B-A35B": (6144, 62, 96, 8, 8192, False, 2560, 160),
}
_END_OF_TURN, _END_OF_TEXT = 151645, 151643
# Model -> (size, base of RoPE, longest position, token that ends a text).
_CHAT = (1e6, 40960, _END_OF_TURN)
_BASE = (1e6, 32768, _END_OF_TEXT)
_MODELS: dict[str, tuple[str, float, int, int]] = {
    **{size: (size, *_CHAT) for size in _SIZES if not size.startswith("Coder")},
    **{f"{size}-Base": (size, *_BASE) for size in ("0.6B", "1.7B", "4B", "8B", "14B", "30B-A3B")},
    **{
        f"{size}-{kind}-2507": (size, theta, 262144, _END_OF_TURN)
        for size, theta in (("4B", 5e6), ("30B-A3B", 1e7), ("235B-A22B", 5e6))
        for kind in ("Instruct", "Thinking")
    },
    **{
        f"{size}-Instruct": (size, 1e7, 262144, _END_OF_TURN)
        for size in ("Coder-30B-A3B", "Coder-480B-A35B")
    },
}  # fmt: skip


def model_names() -> tuple[str, ...]:
    """Every model that has a name here, such as "Qwen3-30B-A3B-Base"."""
    return tuple(f"Qwen3-{name}" for name in _MODELS)


def find_model(model: str) -> ModelShape:
    """The shape of a model.

    Args:
        model: a name of `model_names`, in any case, with or without "Qwen/" and "Qwen3-"; or the path of a `config.json`,
            of a Hugging Face directory or of a Megatron checkpoint.

    Raises:
        ConfigError: there is no such name and no such path, or what lies there cannot be read.
    """
    path = Path(model)
    if path.is_dir():
        return read_model_shape(path)
    if path.is_file():
        return read_shape_file(path)
    return _named_shape(_known(model))


def load_name(model: str) -> str:
    """What `--load` takes for a model: its directory, or for a name the id under which a hub has it, Qwen/Qwen3-8B.

    Raises:
        ConfigError: see `find_model`.
    """
    path = Path(model)
    if path.is_file():
        return str(path.parent)
    return model if path.is_dir() else f"Qwen/Qwen3-{_known(model)}"


def _known(model: str) -> str:
    known = {name.lower(): name for name in _MODELS}
    name = model.lower().removeprefix("qwen/").removeprefix("qwen3-")
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        names = [f"Qwen3-{known[candidate]}" for candidate in near] or model_names()
        raise ConfigError(
            "a model is the name of a Qwen3 model, a config.json, or the directory of a checkpoint",
            seen=f"{model}: no such name, file or directory",
            fix=", ".join(names),
        )
    return known[name]


def _named_shape(name: str) -> ModelShape:
    size, theta, positions, end = _MODELS[name]
    hidden, layers, heads, groups, ffn, tied, expert_ffn, experts = _SIZES[size]
    dense = ModelShape(
        model_type="qwen3",
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=groups,
        head_dim=128,
        ffn_hidden_size=ffn,
        vocab_size=151936,
        max_position_embeddings=positions,
        rms_norm_eps=1e-6,
        rope_theta=theta,
        tie_word_embeddings=tied,
        initializer_range=0.02,
        torch_dtype="bfloat16",
        eos_token_id=(end,),
    )
    if not experts:
        return dense
    return replace(
        dense,
        model_type="qwen3_moe",
        num_experts=experts,
        moe_router_topk=8,
        moe_ffn_hidden_size=expert_ffn,
        norm_topk_prob=True,
        moe_layers=(True,) * layers,
    )
