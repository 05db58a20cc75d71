"""RMSNorm that tells megatron which parallel ranks see only a part of its input."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from mcore_qwen3.runtime.device import current_device


class RMSNorm(torch.nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich, 2019).

    With sequence parallel each tensor-parallel rank normalises only its part of the sequence, so the weight's gradient is
    partial: the mark `sequence_parallel` makes megatron sum it over the tensor-parallel group.

    Args:
        config: megatron's configuration; only `sequence_parallel` and `params_dtype` are read.
        hidden_size: length of the last axis (head_dim for the query and key norms).
        eps: added to the mean square.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_unused: Any) -> None:
        super().__init__()
        self.eps = eps
        device = current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise the last axis; shape and dtype stay."""
        return torch.nn.functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
