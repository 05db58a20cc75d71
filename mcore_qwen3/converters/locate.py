"""Finds what a path given by the user holds: a Hugging Face model, a Megatron checkpoint, or one iteration of it."""

from __future__ import annotations

from pathlib import Path

from mcore_qwen3.arch.shape import TRACKER, ModelShape, find_config_file, iteration_directory
from mcore_qwen3.converters.data_only import METADATA_FILE
from mcore_qwen3.converters.hf_reader import HFSource
from mcore_qwen3.converters.source import WeightSource
from mcore_qwen3.converters.torch_dist import TorchDistSource
from mcore_qwen3.errors import ConversionError

# What every torch_dist directory holds, whichever megatron-core wrote it; `.metadata` is written after the data.
_COMPLETE = ("metadata.json", METADATA_FILE)


def is_hf_dir(path: str | Path) -> bool:
    """Whether a directory is a Hugging Face model: it holds `config.json` itself."""
    return (Path(path) / "config.json").is_file()


def resolve_iteration_dir(path: str | Path) -> Path:
    """The directory of one complete iteration.

    Args:
        path: a checkpoint directory, whose tracker file names the iteration ("release" or a number), or an iteration
            directory itself.

    Raises:
        ConversionError: nothing there, or an iteration not written to its end; the message names the missing file.
        ConfigError: the tracker file names no iteration, or one that does not exist.
    """
    root = Path(path)
    if not root.is_dir():
        raise ConversionError("a checkpoint must be a directory on this machine", seen=f"no directory {root}")
    iteration = iteration_directory(root) if (root / TRACKER).is_file() else root
    missing = [name for name in _COMPLETE if not (iteration / name).is_file()]
    if not missing:
        return iteration
    if iteration == root and len(missing) == len(_COMPLETE):
        raise ConversionError(
            f"a checkpoint directory must hold {TRACKER}, an iteration directory {' and '.join(_COMPLETE)}",
            seen=f"none of them in {root}",
            fix="give the directory that was passed to --save, or one complete iteration in it",
        )
    raise ConversionError(
        "an iteration must have been written to its end",
        seen=f"no {' and no '.join(missing)} in {iteration}",
        fix="give another iteration, or correct the tracker file",
    )


def hf_side_dir(path: str | Path) -> Path:
    """Where config.json, generation_config.json and the tokenizer files of a model lie.

    That is the Hugging Face directory itself, or `hf/` in the iteration of a Megatron checkpoint.

    Raises:
        ConfigError: there is no config.json in either place.
    """
    return find_config_file(path).parent


def open_source(path: str | Path, shape: ModelShape) -> WeightSource:
    """The weights in a directory, whichever format it has.

    Args:
        path: a Hugging Face model, a Megatron checkpoint directory, or one iteration of it.
        shape: the model they must fit.

    Raises:
        ConversionError, ConfigError: the directory is missing, incomplete, unsafe, or of another model.
    """
    if is_hf_dir(path):
        return HFSource(path, shape)
    return TorchDistSource(resolve_iteration_dir(path), shape)
