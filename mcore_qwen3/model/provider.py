"""Which modules the model is made of: torch's own (anywhere) or transformer-engine's (CUDA)."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP

from mcore_qwen3.errors import ConfigError
from mcore_qwen3.model.attention import PackedAttention
from mcore_qwen3.model.experts import GroupedExperts
from mcore_qwen3.model.norm import RMSNorm


class TorchSpecProvider(BackendSpecProvider):
    """Portable modules: they run on CPU and on any GPU, without transformer-engine or apex."""

    def column_parallel_linear(self) -> type:
        """Megatron's own linear layer, rows split."""
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """Megatron's own linear layer, columns split."""
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        """Norm and linear are two modules here."""
        return False

    def column_parallel_layer_norm_linear(self) -> None:
        """No fused module."""
        return None

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        """RMSNorm in every place; Qwen3 has no other norm."""
        return RMSNorm

    def core_attention(self) -> type:
        """Packed causal attention on torch."""
        return PackedAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        """Stacked experts in one grouped call, or megatron's one module an expert."""
        if moe_use_grouped_gemm:
            return GroupedExperts
        submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear, activation_func=None)
        return partial(SequentialMLP, submodules=submodules)

    def activation_func(self) -> None:
        """The activation named in the configuration is called as a function."""
        return None


def choose_modules(wanted: str, on_cuda: bool) -> tuple[str, str]:
    """Resolve `--transformer_impl` (auto | torch | transformer_engine).

    Returns:
        The choice, "torch" or "transformer_engine", and the reason for the log.

    Raises:
        ConfigError: transformer-engine was asked for where it cannot run.
    """
    importable = importlib.util.find_spec("transformer_engine") is not None
    if wanted == "transformer_engine" and not (importable and on_cuda):
        raise ConfigError(
            "--transformer_impl transformer_engine needs a GPU and the transformer-engine package",
            seen=f"device {'cuda' if on_cuda else 'cpu'}, package {'found' if importable else 'not found'}",
            fix="use --transformer_impl torch, or pip install 'mcore-qwen3[gpu]' on the GPU nodes",
        )
    if wanted == "auto":
        if importable and on_cuda:
            return "transformer_engine", "auto: a GPU is in use and transformer-engine is installed"
        why = "transformer-engine is not installed" if on_cuda else "transformer-engine runs on CUDA only"
        return "torch", f"auto: {why}"
    return wanted, "asked for by --transformer_impl"


def spec_provider(modules: str) -> BackendSpecProvider:
    """The provider for a choice of `choose_modules`; transformer-engine is imported only here."""
    if modules == "transformer_engine":
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        return TESpecProvider()
    return TorchSpecProvider()
