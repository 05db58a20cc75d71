"""How the model is spread over the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_qwen3.config.flags import flag


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelFlags:
    """Layout: how the model is spread over the ranks; what is left over is data parallel."""

    tensor_model_parallel_size: int = flag(1, "ranks that share every matrix (TP)", at_least=1)
    pipeline_model_parallel_size: int = flag(1, "stages that share the layers (PP)", at_least=1)
    expert_model_parallel_size: int = flag(1, "ranks that share the experts of a layer (EP)", at_least=1)
    expert_tensor_parallel_size: int | None = flag(
        None, "ranks that share every expert matrix (ETP); unset: 1 (Megatron itself would take TP)", at_least=1
    )
    sequence_parallel: bool = flag(
        False, "share the sequence over the TP ranks outside the matrices; switched on for MoE with TP > 1"
    )
