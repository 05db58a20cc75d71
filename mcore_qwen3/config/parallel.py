"""How the model is spread over the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_qwen3.config.flags import flag


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelFlags:
    """Layout: how the model is spread over the ranks; what is left over is data parallel."""

    tensor_model_parallel_size: int = flag(1, "ranks that share every matrix (TP)", at_least=1)
    pipeline_model_parallel_size: int = flag(1, "stages that share the layers (PP)", at_least=1)
    context_parallel_size: int = flag(1, "ranks that share every row of tokens (CP)", at_least=1)
    virtual_pipeline_model_parallel_size: int | None = flag(
        None, "model chunks a stage, run interleaved (shorter pipeline bubble, more messages); unset: 1", at_least=1
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None, "layers of the first stage; unset: as many as the others", at_least=1
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None, "layers of the last stage; unset: as many as the others", at_least=1
    )
    pipeline_model_parallel_layout: str | None = flag(
        None,
        "layers of every model chunk, as Megatron writes them, instead of the flags above and below: 'Et*3|t*5L' is an "
        "embedding and 3 layers, then 5 layers and the output",
    )
    account_for_embedding_in_pipeline_split: bool = flag(
        False, "count the embedding as one layer when the layers are shared out"
    )
    account_for_loss_in_pipeline_split: bool = flag(
        False, "count the output layer and the loss as one layer when the layers are shared out"
    )
    expert_model_parallel_size: int = flag(1, "ranks that share the experts of a layer (EP)", at_least=1)
    expert_tensor_parallel_size: int | None = flag(
        None, "ranks that share every expert matrix (ETP); unset: 1 (Megatron itself would take TP)", at_least=1
    )
    sequence_parallel: bool = flag(
        False, "share the sequence over the TP ranks outside the matrices; switched on for MoE with TP > 1"
    )
