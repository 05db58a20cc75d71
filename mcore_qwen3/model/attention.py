"""Core attention on torch's scaled_dot_product_attention: causal within each sample of a packed row, grouped KV heads.

Shapes: T tokens of the row, N query heads of this rank, G KV heads of this rank, D head_dim.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch.nn.functional import scaled_dot_product_attention


class PackedAttention(MegatronModule):
    """Block-diagonal causal attention over one packed row.

    Every sample of the row (a segment of `cu_seqlens_q`) attends to itself alone. On a GPU in half precision this is torch's
    variable-length flash kernel; elsewhere each segment is one causal call, so the cost is the sum of squared lengths.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **_unused: Any,
    ) -> None:
        super().__init__(config=config)
        assert config.kv_channels is not None
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query_TND: torch.Tensor,
        key_TGD: torch.Tensor,
        value_TGD: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: PackedSeqParams,
        **_unused: Any,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query_TND: queries with rotary embedding applied.
            key_TGD: keys, likewise.
            value_TGD: values.
            attention_mask: unused; the segments are the mask.
            packed_seq_params: `cu_seqlens_q` int32 [segments + 1], first 0, last T.

        Returns:
            [T, N * D].
        """
        if query_TND.is_cuda and query_TND.dtype in (torch.bfloat16, torch.float16):
            context_TND = self._flash(query_TND, key_TGD, value_TGD, packed_seq_params)
        else:
            context_TND = self._each_segment(query_TND, key_TGD, value_TGD, packed_seq_params)
        return context_TND.flatten(1)

    def _flash(
        self, query_TND: torch.Tensor, key_TGD: torch.Tensor, value_TGD: torch.Tensor, packed: PackedSeqParams
    ) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        context = varlen_attn(
            query_TND,
            key_TGD,
            value_TGD,
            packed.cu_seqlens_q,
            packed.cu_seqlens_kv,
            packed.max_seqlen_q,
            packed.max_seqlen_kv,
            scale=self.softmax_scale,
            window_size=(-1, 0),  # causal
            enable_gqa=True,
        )
        assert isinstance(context, torch.Tensor)
        return context

    def _each_segment(
        self, query_TND: torch.Tensor, key_TGD: torch.Tensor, value_TGD: torch.Tensor, packed: PackedSeqParams
    ) -> torch.Tensor:
        repeat = query_TND.shape[1] // key_TGD.shape[1]
        key_TND = key_TGD.repeat_interleave(repeat, dim=1) if repeat > 1 else key_TGD
        value_TND = value_TGD.repeat_interleave(repeat, dim=1) if repeat > 1 else value_TGD
        lengths = packed.cu_seqlens_q.diff().tolist()
        segments = zip(query_TND.split(lengths), key_TND.split(lengths), value_TND.split(lengths), strict=True)
        contexts = [
            scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                k.transpose(0, 1)[None],
                v.transpose(0, 1)[None],
                is_causal=True,
                scale=self.softmax_scale,
            )[0].transpose(0, 1)
            for q, k, v in segments
        ]
        return torch.cat(contexts)
