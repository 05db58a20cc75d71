"""Buffers in which transformer-engine overlaps tensor-parallel messages with products (`--tp_comm_overlap`)."""

from __future__ import annotations

import importlib
from typing import Any


def start_userbuffers(*, tokens: int, hidden_size: int, tensor: int, fp8: bool) -> None:
    """Make them, once a process, before the model is built: its linear layers look for them in their first pass.

    Needs transformer-engine 2.7 or newer, where buffers are asked for by kinds of quantization.

    Args:
        tokens: of a micro-batch on the ranks of one tensor-parallel group together.
        hidden_size: of the model.
        tensor: TP size.
        fp8: whether the products are in fp8.
    """
    engine: Any = importlib.import_module("transformer_engine.pytorch.module.base")
    kinds = engine.UserBufferQuantizationMode
    engine.initialize_ub(
        shape=[tokens, hidden_size],
        tp_size=tensor,
        quantization_modes=[kinds.FP8 if fp8 else kinds.NONE],
        bootstrap_backend="nccl",
    )
