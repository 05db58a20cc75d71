"""ModelShape: the numbers that define a Qwen3 or Qwen3-MoE model, read from a model directory."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_qwen3.arch.hf_config import translate
from mcore_qwen3.arch.rope import RopeScaling
from mcore_qwen3.errors import ConfigError

TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes and switches of one model, named by Megatron's terms where it has one.

    `head_dim` stands on its own: in most Qwen3 models num_attention_heads x head_dim is not hidden_size.
    `moe_layers` says of each layer whether it has experts (`moe_ffn_hidden_size`) or one MLP (`ffn_hidden_size`); left
    empty, all layers are alike: with experts where `num_experts` is above 0. `rope_scaling` is None where RoPE is not
    scaled; `rope_theta` is the base either way.

    Raises:
        ConfigError: the sizes do not make a model.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    initializer_range: float
    torch_dtype: str
    num_experts: int = 0
    moe_router_topk: int = 0
    moe_ffn_hidden_size: int = 0
    norm_topk_prob: bool = False
    moe_layers: tuple[bool, ...] = ()
    rope_scaling: RopeScaling | None = None
    eos_token_id: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        positive = [
            "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "head_dim", "ffn_hidden_size",
            "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "initializer_range",
        ]  # fmt: skip
        if self.model_type == "qwen3_moe":
            positive += ["num_experts", "moe_router_topk", "moe_ffn_hidden_size"]
        for name in positive:
            if not getattr(self, name) > 0:
                raise _geometry(f"{name} must be above 0", f"{name} = {getattr(self, name)}")
        if not self.moe_layers:
            object.__setattr__(self, "moe_layers", (self.num_experts > 0,) * self.num_layers)
        self._check_moe_layers()
        if self.num_attention_heads % self.num_query_groups:
            raise _geometry(
                "the query heads must be a multiple of the key-value heads",
                f"num_attention_heads {self.num_attention_heads}, num_key_value_heads {self.num_query_groups}",
            )
        if self.head_dim % 2:
            raise _geometry("head_dim must be even, RoPE turns channels in pairs", f"head_dim = {self.head_dim}")
        if self.moe_router_topk > self.num_experts:
            raise _geometry(
                "a token cannot go to more experts than there are",
                f"num_experts_per_tok {self.moe_router_topk}, num_experts {self.num_experts}",
            )
        if any(not 0 <= token < self.vocab_size for token in self.eos_token_id):
            raise _geometry(
                "eos_token_id must lie in the vocabulary",
                f"eos_token_id {list(self.eos_token_id)}, vocab_size {self.vocab_size}",
            )

    def _check_moe_layers(self) -> None:
        if len(self.moe_layers) != self.num_layers:
            raise _geometry("moe_layers must name every layer", f"{len(self.moe_layers)} of {self.num_layers} layers")
        if any(self.moe_layers) != (self.num_experts > 0):
            raise _geometry(
                "a model has experts if, and only if, one of its layers has them",
                f"num_experts {self.num_experts}, {sum(self.moe_layers)} layers with experts",
            )

    @property
    def is_moe(self) -> bool:
        """Whether any layer has experts."""
        return self.num_experts > 0

    @property
    def is_mixed(self) -> bool:
        """Whether some layers have experts and some do not."""
        return self.is_moe and False in self.moe_layers

    def check_router(self) -> None:
        """Refuse a model that can be converted but not run.

        Raises:
            ConfigError: with one expert a token, norm_topk_prob makes every probability 1: the router has no gradient, and
                megatron refuses it.
        """
        if self.moe_router_topk == 1 and self.norm_topk_prob:
            raise ConfigError(
                "one expert a token needs norm_topk_prob false: renormalised, its probability is always 1, and the router "
                "learns nothing",
                seen="num_experts_per_tok 1, norm_topk_prob true",
                fix="norm_topk_prob to false in config.json, or num_experts_per_tok to 2 or more",
            )

    @property
    def max_sequence_length(self) -> int:
        """The longest sequence the positions reach: with YaRN up to factor x the length of pre-training."""
        if self.rope_scaling is None:
            return self.max_position_embeddings
        stretched = int(self.rope_scaling.factor * self.rope_scaling.original_max_position_embeddings)
        return max(self.max_position_embeddings, stretched)

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused QKV weight: (query heads + 2 x key-value heads) x head_dim."""
        return (self.num_attention_heads + 2 * self.num_query_groups) * self.head_dim

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], source: str = "config.json") -> ModelShape:
        """The shape that the contents of a `config.json` describe.

        Args:
            config: the parsed file, in the official or in transformers 5's spelling.
            source: where it came from, for messages.

        Raises:
            ConfigError: a key is missing, wrong, unknown or not supported; the message names it.
        """
        return cls(**translate(config, source))


def read_model_shape(directory: str | Path) -> ModelShape:
    """The shape of the model in a directory.

    Args:
        directory: a Hugging Face directory, a Megatron checkpoint directory or one iteration inside it.

    Raises:
        ConfigError: there is no such directory, no readable `config.json` in it, or the model is not supported.
    """
    return read_shape_file(find_config_file(directory))


def read_shape_file(path: Path) -> ModelShape:
    """The shape that one `config.json` describes.

    Raises:
        ConfigError: the file is not readable JSON, or the model is not supported.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(
            "config.json must be valid JSON",
            seen=f"{path}, line {error.lineno}: {error.msg}",
            fix="correct the file or fetch it again",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("config.json must be a readable UTF-8 file", seen=f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError("config.json must hold one JSON object", seen=f"{path} holds a {type(config).__name__}")
    return ModelShape.from_hf_config(config, source=str(path))


def find_config_file(directory: str | Path) -> Path:
    """`config.json` of a Hugging Face directory, or the copy that a Megatron checkpoint carries under `hf/`.

    Raises:
        ConfigError: the directory or the file does not exist.
    """
    root = Path(directory)
    if not root.is_dir():
        raise ConfigError(
            "the model must be a directory on this machine",
            seen=f"{root} " + ("is a file" if root.exists() else "does not exist"),
            fix="give the path of a Hugging Face model or of a Megatron checkpoint",
        )
    if (root / "config.json").is_file():
        return root / "config.json"
    iteration = iteration_directory(root) if (root / TRACKER).is_file() else root
    if (iteration / "hf" / "config.json").is_file():
        return iteration / "hf" / "config.json"
    raise ConfigError(
        f"a model directory holds config.json (Hugging Face) or {TRACKER} (Megatron checkpoint)",
        seen=f"neither config.json nor hf/config.json in {iteration}",
        fix="give the directory that holds it",
    )


def replaced_path(iteration: Path) -> Path:
    """Where an iteration directory lies while a new one takes its place; only a kill in that moment leaves it there."""
    return iteration.with_name(f".{iteration.name}.replaced")


def iteration_directory(root: Path) -> Path:
    """The directory that the tracker file of a Megatron checkpoint names: `release` or `iter_0000200`.

    One that a killed run was about to replace is put back first.

    Raises:
        ConfigError: the tracker names neither a release nor an iteration, or that directory is not there.
    """
    tracker = root / TRACKER
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if text != "release" and not (text.isascii() and text.isdigit()):
        raise ConfigError(
            "the tracker file must hold an iteration number or the word release",
            seen=f"{tracker} holds {text[:80]!r}",
            fix="write the number of a complete iteration into it",
        )
    iteration = root / ("release" if text == "release" else f"iter_{int(text):07d}")
    if not iteration.is_dir():
        with contextlib.suppress(OSError):  # there is none, or another process was faster
            replaced_path(iteration).rename(iteration)
    if not iteration.is_dir():
        raise ConfigError(
            "the iteration that the tracker file names must exist",
            seen=f"{tracker} says {text}, {iteration} does not exist",
            fix="write the number of a complete iteration into the tracker file",
        )
    return iteration


def _geometry(rule: str, seen: str) -> ConfigError:
    return ConfigError(rule, seen=seen, fix="correct config.json")
