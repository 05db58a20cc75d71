"""Logits of any checkpoint by this project's own model, in this process: for the quickstart and parity checks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from mcore_qwen3.arch import ModelShape, read_model_shape, resolve_layout
from mcore_qwen3.converters import open_source
from mcore_qwen3.runtime import groups
from mcore_qwen3.runtime.device import cpu


def checkpoint_logits(
    path: str | Path, sequences: Sequence[Sequence[int]], shape: ModelShape | None = None
) -> list[torch.Tensor]:
    """fp32 logits on CPU, one rank. The process becomes a rank of its own: megatron's CPU stand-ins are installed.

    Args:
        path: a Hugging Face or mcore directory.
        shape: the model, where the directory does not hold its config.json.
        sequences: token ids; they run as one packed row, each alone in its segment.

    Returns:
        [length, vocabulary] of each sequence.

    Raises:
        ConfigError, ConversionError: the directory cannot be read, or does not fit its config.json.
    """
    device = cpu()
    groups.prepare_megatron(device)
    groups.start_process_group(device)
    shape = shape or read_model_shape(path)
    groups.start_model_parallel(resolve_layout(1, tensor=1, pipeline=1, expert=1, shape=shape))
    from mcore_qwen3.model.logits import model_for_logits, packed_logits

    with open_source(path, shape) as source:
        model = model_for_logits(shape, source)
    return packed_logits(model, sequences)
