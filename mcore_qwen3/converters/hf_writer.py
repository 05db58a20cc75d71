"""Writes a Hugging Face checkpoint from any source of weights, one tensor at a time."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from mcore_qwen3.arch.shape import ModelShape
from mcore_qwen3.converters.dtypes import SPELLED, cast_notes, check_finite, dtype_named, written_dtype
from mcore_qwen3.converters.hf_reader import INDEX_FILE, SINGLE_FILE
from mcore_qwen3.converters.nodes import run_team, shared_staging
from mcore_qwen3.converters.parts import Report, Team, split_evenly
from mcore_qwen3.converters.side_files import adapt_configs, copy_side_files
from mcore_qwen3.converters.source import WeightSource, name_some
from mcore_qwen3.converters.staging import check_space
from mcore_qwen3.converters.table import Rule, name_table, units
from mcore_qwen3.errors import ConversionError

MAX_SHARD_BYTES = 5_000_000_000
# Rows of a tensor are read and written in blocks of at most this size; see CHUNK_BYTES.
_BLOCK_BYTES = 30 * 2**20


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote.

    Attributes:
        path: the new directory.
        weight_files: names of the safetensors files.
        side_files: names of the files copied beside them; node 0 alone copies any.
        num_tensors: tensors written.
        num_bytes: their size.
        changes: one line for each thing that differs from the source's side files or dtype.
    """

    path: Path
    weight_files: tuple[str, ...]
    side_files: tuple[str, ...]
    num_tensors: int
    num_bytes: int
    changes: tuple[str, ...]


@dataclass(frozen=True)
class Planned:
    """One HF tensor to write: its name, shape and dtype, and which part of which unit of which key it is."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    key: str
    index: tuple[int, ...]
    part: int

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


Shards = dict[str, list[Planned]]


@dataclass(frozen=True)
class _Job:
    """What one part does: files with their tensors."""

    recipe: Callable[[], WeightSource]
    shape: ModelShape
    shards: Shards
    directory: Path
    finite: bool


def write_hf(
    source: WeightSource,
    dst: str | Path,
    side_dir: str | Path,
    shape: ModelShape,
    *,
    dtype: str | None = None,
    keep_router: bool = True,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    end_token_id: int | None = None,
    finite: bool = False,
    overwrite: bool = False,
    team: Team | None = None,
) -> ExportReport:
    """Write safetensors files, their index, and the files beside them; memory stays near a chunk a worker.

    Tensors have their official names, experts one by one; a tied model has no `lm_head.weight`. A model that fits one
    file has no index. The directory appears under its name only after everything was written, flushed and read back.

    Args:
        source: the weights.
        dst: the new directory.
        side_dir: holds config.json, generation_config.json and the tokenizer files; they are copied byte for byte,
            apart from the keys of the two config files that have to change.
        shape: the model.
        dtype: "bfloat16", "float16" or "float32" for all tensors; None is the dtype of the model's config.json.
        keep_router: a router that the source holds in fp32 stays in fp32.
        max_shard_bytes: most bytes of tensors in one file (a larger tensor gets a file of its own).
        end_token_id: the chat template's end token; added to eos_token_id where that lacks it.
        finite: refuse weights that are infinite or no number.
        overwrite: replace an existing directory.
        team: workers and nodes.

    Raises:
        ConversionError: `dst` exists or cannot be written, or the weights do not fit the model. Nothing is left behind.
    """
    dst, team = Path(dst), team or Team()
    stored = {key: entry.dtype for key, entry in source.entries().items()}
    _check_source(source, name_table(shape))
    shards = plan_hf(
        stored,
        shape,
        dtype=dtype_named(dtype or shape.torch_dtype),
        keep_router=keep_router,
        max_shard_bytes=max_shard_bytes,
    )
    everything = [tensor for planned in shards.values() for tensor in planned]
    side_files: tuple[str, ...] = ()
    changes = cast_notes(stored, {tensor.key: tensor.dtype for tensor in everything})
    check_space(dst, sum(tensor.nbytes for tensor in everything))
    with shared_staging(dst, team, overwrite=overwrite) as staging:
        sizes = [sum(tensor.nbytes for tensor in planned) for planned in shards.values()]
        runs = split_evenly(list(shards), sizes, team.parts)
        jobs = [_Job(source.recipe(), shape, {file: shards[file] for file in files}, staging, finite) for files in runs]
        results, complete = run_team(_write, jobs, staging, team, shards)
        if complete:
            source.check_all_used({name for result in results for name in result["used"]})
            side_files = copy_side_files(side_dir, staging)
            changes += adapt_configs(
                staging, dtype=dtype or shape.torch_dtype, vocab_size=shape.vocab_size, end_token_id=end_token_id
            )
            if len(shards) > 1:
                _write_index(staging / INDEX_FILE, shards)
            _read_back(staging, shards)
    return ExportReport(
        path=dst,
        weight_files=tuple(shards),
        side_files=side_files,
        num_tensors=len(everything),
        num_bytes=sum(tensor.nbytes for tensor in everything),
        changes=changes,
    )


def plan_hf(
    stored: dict[str, torch.dtype],
    shape: ModelShape,
    *,
    dtype: torch.dtype | None,
    keep_router: bool = True,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Shards:
    """File names, and the tensors of each in the order they will be written.

    Args:
        stored: dtype of each key in the source.
        shape: the model.
        dtype: of the result; None keeps each key's.
        keep_router: leave an fp32 router as it is.
        max_shard_bytes: most bytes of tensors in one file.
    """
    shards: list[list[Planned]] = [[]]
    filled = 0
    for rule, index in units(name_table(shape)):
        kept = written_dtype(rule.key, stored[rule.key], dtype, keep_router=keep_router)
        for number in range(len(rule.parts)):
            tensor = Planned(rule.hf_name(number, index), rule.hf_shape(number), kept, rule.key, index, number)
            if shards[-1] and filled + tensor.nbytes > max_shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(tensor)
            filled += tensor.nbytes
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    return {f"model-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards, start=1)}


def _check_source(source: WeightSource, table: tuple[Rule, ...]) -> None:
    """Every key of the model in the source, with its shape, and no other."""
    offered = {key: entry.shape for key, entry in source.entries().items()}
    wanted = {rule.key: rule.shape for rule in table}
    differing = {key for key in offered.keys() | wanted.keys() if offered.get(key) != wanted.get(key)}
    if differing:
        raise ConversionError(
            "the weights must be those of the model to write",
            seen=f"{name_some(differing)} missing, unknown or of another shape",
            fix="give the checkpoint and the config.json of one model",
        )


def _write(job: _Job, report: Report) -> dict[str, Any]:
    """One part: its files, one after the other."""
    rules = {rule.key: rule for rule in name_table(job.shape)}
    with job.recipe() as source:
        for file, planned in job.shards.items():
            with _ShardWriter(job.directory / file, planned) as writer:
                for tensor in planned:
                    for block in _blocks(source, rules[tensor.key], tensor, job.finite):
                        writer.append(tensor.name, block)
                        report(block.nbytes)
        return {"used": sorted(source.used_tensors)}


def _blocks(source: WeightSource, rule: Rule, tensor: Planned, finite: bool) -> Iterator[torch.Tensor]:
    """The rows of one HF tensor, some at a time."""
    here = tuple(slice(number, number + 1) for number in tensor.index)
    columns = (slice(None),) * len(rule.columns)
    row_bytes = max(1, tensor.nbytes // tensor.shape[0])
    step = max(1, _BLOCK_BYTES // row_bytes)
    for segment in rule.segments(0, rule.rows):
        if segment.part != tensor.part:
            continue
        end = segment.unit_row + segment.rows
        for row in range(segment.unit_row, end, step):
            block = source.read(rule.key, (*here, slice(row, min(row + step, end)), *columns))
            if finite:
                check_finite(block, tensor.name)
            yield block.reshape(-1, *rule.columns).to(tensor.dtype)


class _ShardWriter:
    """Writes one safetensors file front to back: the header from the plan, then each tensor's bytes as they come.

    Format: 8 bytes little-endian header length, a JSON header padded with spaces to a multiple of 8, then the data.
    """

    def __init__(self, path: Path, planned: list[Planned]) -> None:
        self._missing = {tensor.name: tensor.nbytes for tensor in planned}
        self._order = [tensor.name for tensor in reversed(planned)]
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for tensor in planned:
            span = [offset, offset + tensor.nbytes]
            header[tensor.name] = {"dtype": SPELLED[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
            offset += tensor.nbytes
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        self._file = path.open("wb")
        self._file.write(struct.pack("<Q", len(encoded)) + encoded)

    def append(self, name: str, block: torch.Tensor) -> None:
        """Write the next rows of a tensor; tensors come in the order of the plan, each whole."""
        if self._order[-1] != name:
            raise RuntimeError(f"planned {self._order[-1]}, got {name}")
        self._file.write(block.contiguous().view(torch.uint8).numpy().data)
        self._missing[name] -= block.nbytes
        if self._missing[name] <= 0:
            self._order.pop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                if self._order or any(self._missing.values()):
                    raise RuntimeError(f"{len(self._order)} tensors of the plan are not whole")
                self._file.flush()
                os.fsync(self._file.fileno())


def _write_index(path: Path, shards: Shards) -> None:
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for planned in shards.values() for tensor in planned)},
        "weight_map": {tensor.name: file for file, planned in shards.items() for tensor in planned},
    }
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _read_back(directory: Path, shards: Shards) -> None:
    """Reopen each file and compare names, shapes and dtypes with the plan."""
    for file, planned in shards.items():
        try:
            with safe_open(directory / file, framework="pt") as handle:
                views = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (no mapping)
                found = {name: (tuple(view.get_shape()), view.get_dtype()) for name, view in views.items()}
        except SafetensorError as error:
            raise ConversionError("the files written must be readable", seen=f"{file}: {error}") from error
        if found != {tensor.name: (tensor.shape, SPELLED[tensor.dtype]) for tensor in planned}:
            raise ConversionError("the files written must hold what was planned", seen=file, fix="check the disk")
