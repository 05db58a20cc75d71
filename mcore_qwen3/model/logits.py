"""Logits of a checkpoint by this project's own model, on one rank: what the quickstart and parity checks compare."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mcore_qwen3.arch.layout import resolve_layout
from mcore_qwen3.arch.shape import ModelShape
from mcore_qwen3.model.build import Qwen3Model, build_model
from mcore_qwen3.model.config import ModelOptions
from mcore_qwen3.model.context_parallel import PackedRow
from mcore_qwen3.model.weights import Source, read_weights


def model_for_logits(shape: ModelShape, source: Source) -> Qwen3Model:
    """An fp32 model on one rank in evaluation mode; the groups of a one-rank layout must exist."""
    layout = resolve_layout(1, tensor=1, pipeline=1, expert=1, shape=shape)
    model = build_model(shape, layout, ModelOptions())
    read_weights(model, source)
    return model.eval()


@torch.no_grad()
def packed_logits(model: Qwen3Model, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Run sequences as one packed row.

    Args:
        model: from `model_for_logits`.
        sequences: token ids, each sequence alone in its own segment.

    Returns:
        fp32 logits [length, vocabulary] of each sequence.
    """
    lengths = [len(sequence) for sequence in sequences]
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    longest = max(lengths)
    packed = PackedRow(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    tokens = torch.tensor([token for sequence in sequences for token in sequence])[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    logits = model(tokens, positions, None, packed_seq_params=packed)
    return list(logits[0, :, : model.true_vocab_size].float().split(lengths))
