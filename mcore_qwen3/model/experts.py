"""The experts of one rank as two stacked weights, multiplied in one grouped call.

Shapes: T tokens routed to this rank's experts, sorted by expert; E local experts; F expert width / expert-TP; H hidden.
Megatron's SequentialMLP (`--moe_grouped_gemm false`) computes the same from the same checkpoint entries.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch.nn.functional import grouped_mm, silu

from mcore_qwen3.runtime.device import current_device


def grouped_matmul_fits(inner: int, outer: int, dtype: torch.dtype) -> bool:
    """True if torch's grouped_mm takes [T, inner] x [E, inner, outer]: rows must be multiples of 16 bytes."""
    return all(size * dtype.itemsize % 16 == 0 for size in (inner, outer))


def multiply_by_expert(hidden_TI: torch.Tensor, weight_EOI: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """Multiply each expert's tokens by the transpose of its weight.

    Args:
        hidden_TI: tokens sorted by expert.
        weight_EOI: one [out, in] matrix an expert.
        counts_E: tokens of each expert, summing to T.

    Returns:
        [T, out].
    """
    _, outer, inner = weight_EOI.shape
    on_gpu_in_fp32 = hidden_TI.is_cuda and hidden_TI.dtype == torch.float32  # the CUDA kernel is bf16 only
    if grouped_matmul_fits(inner, outer, hidden_TI.dtype) and not on_gpu_in_fp32 and hidden_TI.shape[0] > 0:
        ends_E = counts_E.to(hidden_TI.device).cumsum(0).to(torch.int32)
        return grouped_mm(hidden_TI, weight_EOI.transpose(1, 2), offs=ends_E)
    parts = hidden_TI.split(counts_E.tolist())
    return torch.cat([part @ weight.T for part, weight in zip(parts, weight_EOI, strict=True)])


class _ContiguousGradient(torch.autograd.Function):
    """Identity whose gradient is contiguous: grouped_mm's backward refuses expanded (stride 0) gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.contiguous()


def _swiglu(both_TF: torch.Tensor, probs_T: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up * probability; runs in the probabilities' dtype (fp32 by default), then back to the weights'."""
    gate_TF, up_TF = both_TF.chunk(2, dim=-1)
    return (silu(gate_TF) * up_TF * probs_T.unsqueeze(-1)).to(both_TF.dtype)


class GroupedExperts(MegatronModule):
    """SwiGLU experts: fc2(silu(gate) * up * probability).

    Attributes:
        weight1: [E, 2F, H], gate rows then up rows.
        weight2: [E, H, F].
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        name: str | None = None,
    ) -> None:
        super().__init__(config=config)
        self.num_local_experts = num_local_experts
        self.ep_group, self.tp_group, self.dp_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        self.recompute_activation = config.recompute_granularity == "selective" and "moe_act" in (
            config.recompute_modules or ()
        )
        assert config.moe_ffn_hidden_size is not None
        width = config.moe_ffn_hidden_size // self.tp_group.size()
        factory = {"dtype": config.params_dtype, "device": current_device()}
        self.weight1 = torch.nn.Parameter(torch.empty(num_local_experts, 2 * width, config.hidden_size, **factory))
        self.weight2 = torch.nn.Parameter(torch.empty(num_local_experts, config.hidden_size, width, **factory))
        own_groups = (
            config.expert_model_parallel_size > 1
            or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        )
        for weight, axis in ((self.weight1, 1), (self.weight2, 2)):
            # Megatron reads these two marks: which ranks share the gradient, and that every shard counts in the norm.
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=axis, stride=1)
            weight.allreduce = not own_groups  # type: ignore[attr-defined]

    def forward(
        self, hidden_TH: torch.Tensor, tokens_per_expert: torch.Tensor, probs_T: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Run the experts on tokens sorted by expert; returns ([T, H], None), None standing for the missing bias."""
        counts_E = torch.as_tensor(tokens_per_expert)
        both_TF = multiply_by_expert(hidden_TH, self.weight1, counts_E)
        if not self.recompute_activation:
            output_TH = multiply_by_expert(_swiglu(both_TF, probs_T), self.weight2, counts_E)
            return _ContiguousGradient.apply(output_TH), None
        again = CheckpointWithoutOutput()
        inner_TF = again.checkpoint(_swiglu, both_TF, probs_T)
        output_TH = _ContiguousGradient.apply(multiply_by_expert(inner_TF, self.weight2, counts_E))
        again.discard_output_and_register_recompute(output_TH)
        return output_TH, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """The entries of a sequence of experts: `experts.linear_fc1.weight` and `experts.linear_fc2.weight`."""
        lead = len(sharded_offsets)
        replica: ReplicaId = (0, 0, self.dp_group.rank())
        expert_axis = (lead, self.ep_group.rank(), self.ep_group.size())
        tp_rank, tp_size = self.tp_group.rank(), self.tp_group.size()

        def shard(
            key: str, data: torch.Tensor, split_axis: tuple[int, int, int], replica_id: ReplicaId
        ) -> ShardedTensor:
            return ShardedTensor.from_rank_offsets(
                key, data, *sharded_offsets, expert_axis, split_axis, replica_id=replica_id, prepend_axis_num=lead
            )

        @torch.no_grad()
        def gate_and_up(
            key: str, data: torch.Tensor, replica_id: ReplicaId, flattened_range: slice | None
        ) -> list[ShardedTensor]:
            gate, up = data.chunk(2, dim=1)
            return [
                shard(key, gate, (lead + 1, tp_rank, 2 * tp_size), replica_id),
                shard(key, up, (lead + 1, tp_size + tp_rank, 2 * tp_size), replica_id),
            ]

        @torch.no_grad()
        def join(parts: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat(parts, dim=1)

        key1, key2 = f"{prefix}experts.linear_fc1.weight", f"{prefix}experts.linear_fc2.weight"
        return {
            f"{prefix}weight1": ShardedTensorFactory(key1, self.weight1.detach(), gate_and_up, join, replica),
            f"{prefix}weight2": shard(key2, self.weight2.detach(), (lead + 2, tp_rank, tp_size), replica),
        }
