"""Writes a Megatron torch_dist checkpoint from any source of weights, one chunk at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mcore_qwen3.arch.shape import TRACKER, ModelShape
from mcore_qwen3.converters.dtypes import cast_notes, check_finite, written_dtype
from mcore_qwen3.converters.nodes import run_team, shared_staging
from mcore_qwen3.converters.parts import Report, Team, split_evenly
from mcore_qwen3.converters.side_files import copy_side_files
from mcore_qwen3.converters.source import Entry, WeightSource
from mcore_qwen3.converters.staging import check_space
from mcore_qwen3.converters.table import EMBEDDING, name_table
from mcore_qwen3.converters.torch_dist import TorchDistSource
from mcore_qwen3.converters.torch_dist_writer import Chunk, merge_parts, write_common, write_part
from mcore_qwen3.errors import ConversionError

RELEASE = "release"
# Large enough for full speed. Below 32 MiB glibc uses the same memory again for every chunk; above, each one costs a page
# fault for every 4 KiB.
CHUNK_BYTES = 30 * 2**20


@dataclass(frozen=True)
class Piece:
    """A rectangle of a global tensor, to be written as one chunk."""

    key: str
    global_shape: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True)
class McoreReport:
    """What a conversion wrote: the directory, its global tensors, chunks and bytes, the source tensors used, and notes."""

    path: Path
    num_keys: int
    num_chunks: int
    num_bytes: int
    num_source_tensors: int
    notes: tuple[str, ...]


def plan_mcore(
    entries: dict[str, Entry],
    shape: ModelShape,
    *,
    dtype: torch.dtype | None = None,
    keep_router: bool = True,
    vocab_size: int | None = None,
) -> list[Piece]:
    """The chunks of a checkpoint, in the order of the layers.

    Args:
        entries: the source's keys.
        shape: the model.
        dtype: of the result; None keeps each key's.
        keep_router: leave an fp32 router as it is.
        vocab_size: rows of embedding and output layer; those past the model's own are zeros.

    Raises:
        ConversionError: fewer rows than the model's vocabulary.
    """
    if vocab_size is not None and vocab_size < shape.vocab_size:
        raise ConversionError(
            "a Megatron checkpoint holds at least the model's vocabulary",
            seen=f"--vocab_size {vocab_size}, vocab_size {shape.vocab_size} in config.json",
            fix="pad here; rows are cut when the model is converted to Hugging Face",
        )
    pieces = []
    for rule in name_table(shape):
        whole = (vocab_size or rule.rows, *rule.columns) if rule.vocabulary else rule.shape
        kept = written_dtype(rule.key, entries[rule.key].dtype, dtype, keep_router=keep_router)
        sizes = _chunk_sizes(whole, kept.itemsize)
        for starts in _starts(whole, sizes):
            end = tuple(min(size, total - start) for size, total, start in zip(sizes, whole, starts, strict=True))
            pieces.append((rule.stacked, Piece(rule.key, whole, starts, end, kept)))
    ordered = sorted(pieces, key=lambda pair: pair[1].starts[0] if pair[0] else -1)  # neighbours in the source's files
    return [piece for _, piece in ordered]


def _chunk_sizes(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Whole inner axes as far as they fit, then a divisor of the next axis, then single steps."""
    sizes = [1] * len(shape)
    room = max(1, CHUNK_BYTES // itemsize)
    for axis in range(len(shape) - 1, -1, -1):
        if shape[axis] <= room:
            sizes[axis] = shape[axis]
            room //= shape[axis]
            continue
        dividing = next(count for count in range(room, 0, -1) if shape[axis] % count == 0)
        sizes[axis] = dividing if dividing * 2 > room else room
        break
    return tuple(sizes)


def _starts(shape: tuple[int, ...], sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    starts: list[tuple[int, ...]] = [()]
    for total, size in zip(shape, sizes, strict=True):
        starts = [(*start, at) for start in starts for at in range(0, total, size)]
    return starts


@dataclass(frozen=True)
class _Job:
    """What one part does."""

    recipe: Callable[[], WeightSource]
    pieces: list[Piece]
    directory: Path
    part: int
    finite: bool


def write_mcore(
    source: WeightSource,
    dst: str | Path,
    side_dir: str | Path,
    shape: ModelShape,
    pieces: list[Piece],
    *,
    facts: dict[str, Any],
    run_config: str,
    finite: bool = False,
    overwrite: bool = False,
    team: Team | None = None,
) -> McoreReport:
    """Write `<dst>/release` and its tracker; memory stays near one chunk a worker.

    Args:
        source: the weights.
        dst: the new directory.
        side_dir: config.json, generation_config.json and the tokenizer; copied to `release/hf` byte for byte.
        shape: the model.
        pieces: of `plan_mcore`.
        facts: what `conversion.json` says beside the counts.
        run_config: text of `run_config.yaml`.
        finite: refuse weights that are infinite or no number.
        overwrite: replace an existing directory.
        team: workers and nodes.

    Raises:
        ConversionError: `dst` exists or cannot be written, or the weights do not fit the model. Nothing is left behind.
    """
    dst, team = Path(dst), team or Team()
    check_space(dst, sum(piece.nbytes for piece in pieces))
    with shared_staging(dst, team, overwrite=overwrite) as staging:
        release = staging / RELEASE
        release.mkdir(exist_ok=True)
        runs = split_evenly(pieces, [piece.nbytes for piece in pieces], team.parts)
        jobs = [_Job(source.recipe(), run, release, part, finite) for part, run in enumerate(runs)]
        results, complete = run_team(_write, jobs, staging, team, pieces)
        used = {name for result in results for name in result["used"]}
        report = _report(dst, source, pieces, len(used))
        if complete:
            source.check_all_used(used)
            chunks = [Chunk(p.key, p.global_shape, p.starts, p.sizes, p.dtype) for p in pieces]
            merge_parts(release, chunks, [written for result in results for written in result["written"]])
            copy_side_files(side_dir, release / "hf")
            TorchDistSource(release, shape).close()  # what was written can be read
            (release / "conversion.json").write_text(_facts(report, pieces, facts), encoding="utf-8")
            (release / "run_config.yaml").write_text(run_config, encoding="utf-8")
            write_common(release, 0)
            (staging / TRACKER).write_text(RELEASE)
    return report


def _facts(report: McoreReport, pieces: list[Piece], facts: dict[str, Any]) -> str:
    counts = {
        "source_tensors_used": report.num_source_tensors,
        "tensors_written": report.num_keys,
        "chunks_written": report.num_chunks,
        "bytes": report.num_bytes,
        "vocabulary_rows": next(piece.global_shape[0] for piece in pieces if piece.key == EMBEDDING),
        "notes": list(report.notes),
    }
    return json.dumps(facts | counts, indent=2) + "\n"


def _report(dst: Path, source: WeightSource, pieces: list[Piece], used: int) -> McoreReport:
    written = {piece.key: piece.dtype for piece in pieces}
    return McoreReport(
        path=dst,
        num_keys=len(written),
        num_chunks=len(pieces),
        num_bytes=sum(piece.nbytes for piece in pieces),
        num_source_tensors=used,
        notes=cast_notes({key: entry.dtype for key, entry in source.entries().items()}, written),
    )


def _write(job: _Job, report: Report) -> dict[str, Any]:
    """One part: its chunks into one file."""
    with job.recipe() as source:
        chunks = [
            Chunk(p.key, p.global_shape, p.starts, p.sizes, p.dtype, partial(_values, source, p, job.finite))
            for p in job.pieces
        ]
        written = write_part(job.directory, chunks, job.part, report)
        return {"written": written, "used": sorted(source.used_tensors)}


def _values(source: WeightSource, piece: Piece, finite: bool) -> torch.Tensor:
    """The values of a chunk; vocabulary rows past the source's are zeros."""
    stored = source.entries()[piece.key].shape
    stops = [min(start + size, total) for start, size, total in zip(piece.starts, piece.sizes, stored, strict=True)]
    slices = tuple(slice(min(start, stop), stop) for start, stop in zip(piece.starts, stops, strict=True))
    values = source.read(piece.key, slices)
    if finite:
        check_finite(values, piece.key)
    values = values.to(piece.dtype)
    if tuple(values.shape) == piece.sizes:
        return values
    padded = torch.zeros(piece.sizes, dtype=piece.dtype)
    padded[tuple(slice(0, size) for size in values.shape)] = values
    return padded
