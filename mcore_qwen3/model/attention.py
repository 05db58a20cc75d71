"""Core attention on torch: causal within each sample of a packed row, grouped KV heads, context parallel.

Shapes: T tokens of the row on this rank, N query heads of this rank, G KV heads of this rank, D head_dim.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch.nn.functional import scaled_dot_product_attention

from mcore_qwen3.model.context_parallel import PackedRow


class PackedAttention(MegatronModule):
    """Block-diagonal causal attention over one packed row.

    Every sample of the row (a segment of `cu_seqlens_q`) attends to itself alone. On a GPU in half precision this is torch's
    variable-length flash kernel; elsewhere each segment is one causal call, so the cost is the sum of squared lengths. Under
    context parallel, keys and values are gathered over its ranks (their gradients are scattered back by the same call).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_unused: Any,
    ) -> None:
        super().__init__(config=config)
        assert config.kv_channels is not None and pg_collection is not None
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query_TND: torch.Tensor,
        key_TGD: torch.Tensor,
        value_TGD: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: PackedRow,
        **_unused: Any,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query_TND: queries with rotary embedding applied.
            key_TGD: keys, likewise.
            value_TGD: values.
            attention_mask: unused; the segments are the mask.
            packed_seq_params: `cu_seqlens_q` int32 [segments + 1] over the whole row; `key_plan` under context parallel.

        Returns:
            [T, N * D].
        """
        plan = packed_seq_params.key_plan
        if plan is None:
            query_lengths = key_lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        else:
            query_lengths, key_lengths = plan.query_lengths, plan.key_lengths
            key_TGD, value_TGD = (
                gather_from_sequence_parallel_region(tensor, group=self.cp_group).index_select(0, plan.key_index)
                for tensor in (key_TGD, value_TGD)
            )
        attend = self._flash if query_TND.is_cuda and query_TND.dtype != torch.float32 else self._call_by_call
        return attend(query_TND, key_TGD, value_TGD, query_lengths, key_lengths).flatten(1)

    def _flash(
        self,
        query_TND: torch.Tensor,
        key_TGD: torch.Tensor,
        value_TGD: torch.Tensor,
        query_lengths: list[int],
        key_lengths: list[int],
    ) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        def borders(lengths: list[int]) -> torch.Tensor:
            return torch.tensor([0, *lengths], device=query_TND.device).cumsum(0).to(torch.int32)

        context = varlen_attn(
            query_TND,
            key_TGD,
            value_TGD,
            borders(query_lengths),
            borders(key_lengths),
            max(query_lengths),
            max(key_lengths),
            scale=self.softmax_scale,
            window_size=(-1, 0),  # causal; shorter queries stand at the end of their keys
            enable_gqa=True,
        )
        assert isinstance(context, torch.Tensor)
        return context

    def _call_by_call(
        self,
        query_TND: torch.Tensor,
        key_TGD: torch.Tensor,
        value_TGD: torch.Tensor,
        query_lengths: list[int],
        key_lengths: list[int],
    ) -> torch.Tensor:
        repeat = query_TND.shape[1] // key_TGD.shape[1]
        key_TND = key_TGD.repeat_interleave(repeat, dim=1) if repeat > 1 else key_TGD
        value_TND = value_TGD.repeat_interleave(repeat, dim=1) if repeat > 1 else value_TGD
        calls = zip(
            query_TND.split(query_lengths), key_TND.split(key_lengths), value_TND.split(key_lengths), strict=True
        )
        return torch.cat([self._attend(*call) for call in calls])

    def _attend(self, query_QND: torch.Tensor, key_KND: torch.Tensor, value_KND: torch.Tensor) -> torch.Tensor:
        """One call: query i sees keys 0 to K - Q + i."""
        queries, keys = len(query_QND), len(key_KND)
        mask = None
        if queries != keys:
            mask = torch.ones(queries, keys, dtype=torch.bool, device=query_QND.device).tril(keys - queries)
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query_QND, key_KND, value_KND))
        context = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale
        )
        return context[0].transpose(0, 1)
