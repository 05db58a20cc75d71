"""The files beside the weights: copied byte for byte, and config.json changed only where it must be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mcore_qwen3.errors import ConversionError

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
# Weights in any format, and code: an export holds its own weights, and nothing that could be run.
_WEIGHTS = (
    ".safetensors",
    ".index.json",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".distcp",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
)
_LEFT_BEHIND = (*_WEIGHTS, ".py")


def copy_side_files(source: str | Path, target: str | Path) -> tuple[str, ...]:
    """Copy config, generation config, tokenizer, template, licence and the like, byte for byte.

    Args:
        source: a Hugging Face directory; its subdirectories, hidden files, weight files and code stay behind.
        target: where to; made if missing.

    Returns:
        The names of the files copied.

    Raises:
        ConversionError: no config.json in `source`.
    """
    source, target = Path(source), Path(target)
    if not (source / CONFIG_FILE).is_file():
        raise ConversionError(
            "the files beside the weights must include config.json",
            seen=f"none in {source}",
            fix="give the directory of the model as it was published",
        )
    names = sorted(
        path.name
        for path in source.iterdir()
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_LEFT_BEHIND)
    )
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        (target / name).write_bytes((source / name).read_bytes())
    return tuple(names)


def adapt_configs(directory: Path, *, dtype: str, vocab_size: int, end_token_id: int | None) -> tuple[str, ...]:
    """Bring the copied config files of an export in line with its weights, changing nothing else.

    Args:
        directory: holds config.json, and generation_config.json or not.
        dtype: the dtype of the exported weights, such as "bfloat16".
        vocab_size: the rows of the exported embedding.
        end_token_id: the chat template's end token, to be among the tokens that end generation.

    Returns:
        One line for each change made.
    """
    changes = _edit(
        directory / CONFIG_FILE,
        _official_spelling,
        _unquantised,
        lambda config: _set(config, "torch_dtype", dtype),
        lambda config: _set(config, "vocab_size", vocab_size),
        lambda config: _add_end_token(config, end_token_id),
    )
    if (directory / GENERATION_FILE).is_file():
        changes += _edit(directory / GENERATION_FILE, lambda config: _add_end_token(config, end_token_id))
    return changes


_Edit = Callable[[dict[str, Any]], tuple[dict[str, Any], list[str]]]


def _edit(path: Path, *edits: _Edit) -> tuple[str, ...]:
    """Apply edits to a JSON file; without any change the file keeps its bytes."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConversionError("a config file must be valid JSON", seen=f"{path}: {error}") from error
    changes: list[str] = []
    for edit in edits:
        config, made = edit(config)
        changes += made
    if changes:
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return tuple(f"{path.name}: {change}" for change in changes)


def _official_spelling(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """transformers 5's names turned into those of the published files, in place.

    Where both are written the official one stays: ModelShape has refused a file in which they differ.
    """
    spelled: dict[str, Any] = {}
    changes = []
    for name, value in config.items():
        official = _respell(name, value)
        if official is None:
            spelled[name] = value
            continue
        spelled |= {key: new for key, new in official.items() if key not in config}
        changes.append(f"{name} written as {' and '.join(official)}")
    return spelled, changes


def _respell(name: str, value: Any) -> dict[str, Any] | None:
    """A key of transformers 5 under its official name or names, or None for any other key."""
    if name == "dtype":
        return {"torch_dtype": value}
    if name == "num_local_experts":
        return {"num_experts": value}
    if name == "rope_parameters":
        scaling = {key: part for key, part in value.items() if key != "rope_theta"}
        plain = scaling.get("rope_type", "default") == "default"
        theta = {"rope_theta": value["rope_theta"]} if "rope_theta" in value else {}
        return theta | {"rope_scaling": None if plain else scaling}
    return None


def _unquantised(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Weights are never written quantised."""
    if config.get("quantization_config") is None:
        return config, []
    return {key: value for key, value in config.items() if key != "quantization_config"}, [
        "quantization_config removed"
    ]


def _set(config: dict[str, Any], name: str, value: Any) -> tuple[dict[str, Any], list[str]]:
    if config.get(name) == value:
        return config, []
    before = f"changed from {config[name]!r} to" if name in config else "set to"
    return config | {name: value}, [f"{name} {before} {value!r}"]


def _add_end_token(config: dict[str, Any], token: int | None) -> tuple[dict[str, Any], list[str]]:
    present = config.get("eos_token_id")
    tokens = present if isinstance(present, list) else [] if present is None else [present]
    if token is None or token in tokens:
        return config, []
    return _set(config, "eos_token_id", [*tokens, token])
