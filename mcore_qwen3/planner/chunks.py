"""Bytes that one model chunk keeps for one micro-batch, and how many micro-batches a stage holds at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mcore_qwen3.arch import ModelShape, ParallelLayout
from mcore_qwen3.planner.activations import (
    checkpoint_rows,
    embedding_rows,
    head_rows,
    kept_rows,
    layer_rows,
    shared_rows,
    tokens_of,
    total_bytes,
)
from mcore_qwen3.planner.settings import Settings

# Gradients of a layer's own values during its backward, as a share of what the layer keeps: half of them live at once,
# and a tenth for what is not kept at all. A guess: no trace of a GPU stands behind it.
BACKWARD_SHARE = 0.6


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkBytes:
    """One chunk and micro-batch. `kept` from forward to backward, without the softmax of the vocabulary; `recomputed` the
    most that is computed again at one time; `backward` gradients that live during the backward of one layer."""

    kept: float
    recomputed: float
    backward: float


def stage_chunks(shape: ModelShape, layout: ParallelLayout, settings: Settings, stage: int) -> list[ChunkBytes]:
    """What the layers of each chunk of a stage, and the embedding or head where it has them, keep for one micro-batch.

    Args:
        shape: the model.
        layout: a layout resolved for it.
        settings: the run's.
        stage: pipeline rank.
    """
    seen = one_stage(layout)
    kinds = [chunk_kind(shape, layout, stage, chunk) for chunk in range(layout.virtual_pipeline)]
    found = {kind: _chunk_bytes(shape, seen, settings, kind) for kind in set(kinds)}
    return [found[kind] for kind in kinds]


@dataclass(frozen=True, slots=True)
class ChunkKind:
    """What makes chunks of one layout equal: their layers (True: with experts), and the ends of the model in them."""

    layers: tuple[bool, ...]
    is_first: bool
    is_last: bool


def chunk_kind(shape: ModelShape, layout: ParallelLayout, stage: int, chunk: int) -> ChunkKind:
    """The kind of one chunk of one stage."""
    if shape.is_mixed:
        layers = tuple(shape.moe_layers[number] for number in layout.chunk_layers(stage, chunk))
    else:
        layers = (shape.is_moe,) * layout.stages[stage][chunk]
    first, last = stage == chunk == 0, stage == layout.pipeline - 1 and chunk == layout.virtual_pipeline - 1
    return ChunkKind(layers, first, last)


@functools.lru_cache(maxsize=4096)
def one_stage(layout: ParallelLayout) -> ParallelLayout:
    """What a layer's activations see of a layout: TP, CP, expert-TP, and whether other ranks have experts too. Layouts that
    differ in the rest share a cache."""
    whole = (sum(map(sum, layout.stages)),)
    return replace(
        layout, world_size=1, pipeline=1, data=1, expert=min(layout.expert, 2), expert_data=1, stages=(whole,), virtual_pipeline=1,
        first_stage_layers=None, last_stage_layers=None, account_for_embedding=False, account_for_loss=False, pipeline_layout=None,
        notes=(),
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _chunk_bytes(shape: ModelShape, layout: ParallelLayout, settings: Settings, chunk: ChunkKind) -> ChunkBytes:
    kinds = chunk.layers
    tokens = tokens_of(shape, layout, settings)
    whole = {kind: total_bytes(layer_rows(shape, layout, settings, kind), tokens) for kind in set(kinds)}
    part = {kind: total_bytes(kept_rows(shape, layout, settings, kind), tokens) for kind in set(kinds)}
    kept = total_bytes(shared_rows(shape, layout, settings), tokens)
    groups = _groups(kinds, settings)
    for group in groups:
        if group.is_recomputed:
            kept += total_bytes(checkpoint_rows(shape, settings), tokens)
        else:
            kept += sum(part[kind] for kind in group.kinds)
    if chunk.is_first:
        kept += total_bytes(embedding_rows(layout), tokens)
    if chunk.is_last:
        kept += total_bytes(head_rows(shape, layout, settings), tokens)
    again = [
        sum(whole[kind] for kind in group.kinds)
        if group.is_recomputed
        else max(whole[kind] - part[kind] for kind in group.kinds)
        for group in groups
    ]
    largest = max(whole.values(), default=0.0)
    return ChunkBytes(kept=kept, recomputed=max(again, default=0.0), backward=BACKWARD_SHARE * largest)


@dataclass(frozen=True, slots=True)
class _Group:
    """Layers that are handled together, by whether each has experts."""

    kinds: tuple[bool, ...]
    is_recomputed: bool


def _groups(kinds: Sequence[bool], settings: Settings) -> list[_Group]:
    """megatron-core 0.19.2, core/transformer/transformer_block.py: `uniform` cuts all layers of a chunk into groups of
    recompute_num_layers, `block` computes the first recompute_num_layers again, one by one."""
    if settings.recompute_granularity != "full":
        return [_Group((kind,), False) for kind in kinds]
    number = settings.recompute_num_layers or 1
    if settings.recompute_method == "block":
        return [_Group((kind,), place < number) for place, kind in enumerate(kinds)]
    return [_Group(tuple(kinds[start : start + number]), True) for start in range(0, len(kinds), number)]


def in_flight(layout: ParallelLayout, num_microbatches: int, stage: int) -> list[int]:
    """Micro-batches of each model chunk that a stage holds at the fullest moment of its schedule.

    megatron-core 0.19.2, core/pipeline_parallel/schedules.py. One chunk (1F1B): PP - stage, the one in work included.
    Interleaved: 2 (PP - stage - 1) + (chunks - 1) PP + 1 passes, which go through the chunks in turns of PP micro-batches.

    Args:
        layout: PP and the number of chunks.
        num_microbatches: micro-batches of a step.
        stage: pipeline rank.
    """
    behind, chunks = layout.pipeline - stage - 1, layout.virtual_pipeline
    if chunks == 1:
        return [min(behind + 1, num_microbatches)]
    passes = min(2 * behind + (chunks - 1) * layout.pipeline + 1, num_microbatches * chunks)
    held = [0] * chunks
    for number in range(passes):
        held[number // layout.pipeline % chunks] += 1
    return held
