"""Writes a Hugging Face checkpoint from any source of weights, one tensor at a time."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from mcore_qwen3.arch.shape import ModelShape
from mcore_qwen3.converters.hf_reader import INDEX_FILE, SINGLE_FILE
from mcore_qwen3.converters.side_files import adapt_configs, copy_side_files
from mcore_qwen3.converters.source import WeightSource, name_some
from mcore_qwen3.converters.staging import staged_directory
from mcore_qwen3.converters.table import Rule, name_table, units
from mcore_qwen3.errors import ConversionError

_DTYPES = {"float32": (torch.float32, "F32"), "bfloat16": (torch.bfloat16, "BF16"), "float16": (torch.float16, "F16")}


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote.

    Attributes:
        path: the new directory.
        weight_files: names of the safetensors files.
        side_files: names of the files copied beside them.
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
class _Planned:
    """One tensor to write."""

    name: str
    shape: tuple[int, ...]
    nbytes: int


def write_hf(
    source: WeightSource,
    dst: str | Path,
    side_dir: str | Path,
    shape: ModelShape,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
    end_token_id: int | None = None,
    overwrite: bool = False,
) -> ExportReport:
    """Write safetensors files, their index, and the files beside them; memory stays near the largest tensor.

    Tensors have their official names, experts one by one; a tied model has no `lm_head.weight`. A model that fits one
    file has no index. The directory appears under its name only after everything was written, flushed and read back.

    Args:
        source: the weights.
        dst: the new directory.
        side_dir: holds config.json, generation_config.json and the tokenizer files; they are copied byte for byte,
            apart from the keys of the two config files that have to change.
        shape: the model.
        dtype: "bfloat16", "float16" or "float32" for all tensors; None is the dtype of the model's config.json.
        max_shard_bytes: most bytes of tensors in one file (a larger tensor gets a file of its own).
        end_token_id: the chat template's end token; added to eos_token_id where that lacks it.
        overwrite: replace an existing directory.

    Raises:
        ConversionError: `dst` exists or cannot be written, or the weights do not fit the model. Nothing is left behind.
    """
    dst = Path(dst)
    dtype = dtype or shape.torch_dtype
    if dtype not in _DTYPES:
        raise ConversionError(f"the export dtype must be one of {', '.join(_DTYPES)}", seen=dtype)
    table = name_table(shape)
    _check_source(source, table)
    shards = _plan(table, _DTYPES[dtype][0].itemsize, max_shard_bytes)
    with staged_directory(dst, overwrite=overwrite) as staging:
        side_files = copy_side_files(side_dir, staging)
        changes = adapt_configs(staging, dtype=dtype, vocab_size=shape.vocab_size, end_token_id=end_token_id)
        tensors = _hf_tensors(source, table, _DTYPES[dtype][0])
        for file, planned in shards.items():
            with _ShardWriter(staging / file, planned, _DTYPES[dtype][1]) as writer:
                for _ in planned:
                    writer.append(*next(tensors))
        if len(shards) > 1:
            _write_index(staging / INDEX_FILE, shards)
        source.check_all_used(source.used_tensors)
        _read_back(staging, shards, _DTYPES[dtype][1])
    everything = [tensor for planned in shards.values() for tensor in planned]
    return ExportReport(
        path=dst,
        weight_files=tuple(shards),
        side_files=side_files,
        num_tensors=len(everything),
        num_bytes=sum(tensor.nbytes for tensor in everything),
        changes=(*_casts(source, dtype), *changes),
    )


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


def _plan(table: tuple[Rule, ...], itemsize: int, max_shard_bytes: int) -> dict[str, list[_Planned]]:
    """File names, and the tensors of each in the order they will be written."""
    shards: list[list[_Planned]] = [[]]
    filled = 0
    for rule, index in units(table):
        for number in range(len(rule.parts)):
            shape = rule.hf_shape(number)
            tensor = _Planned(rule.hf_name(number, index), shape, torch.Size(shape).numel() * itemsize)
            if shards[-1] and filled + tensor.nbytes > max_shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(tensor)
            filled += tensor.nbytes
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    return {f"model-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards, start=1)}


def _hf_tensors(
    source: WeightSource, table: tuple[Rule, ...], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and contents of every HF tensor, in the order of the plan; one unit in memory at a time."""
    for rule, index in units(table):
        here = tuple(slice(number, number + 1) for number in index)
        whole = (slice(None),) * (1 + len(rule.columns))
        unit = source.read(rule.key, (*here, *whole)).reshape(rule.rows, *rule.columns).to(dtype)
        pieces: list[list[torch.Tensor]] = [[] for _ in rule.parts]
        for segment in rule.segments(0, rule.rows):
            pieces[segment.part].append(unit[segment.unit_row : segment.unit_row + segment.rows])
        for number, rows in enumerate(pieces):
            yield rule.hf_name(number, index), rows[0] if len(rows) == 1 else torch.cat(rows)


class _ShardWriter:
    """Writes one safetensors file front to back: the header from the plan, then each tensor's bytes as it comes.

    Format: 8 bytes little-endian header length, a JSON header padded with spaces to a multiple of 8, then the data.
    """

    def __init__(self, path: Path, planned: list[_Planned], dtype: str) -> None:
        self._expected = iter(planned)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for tensor in planned:
            span = [offset, offset + tensor.nbytes]
            header[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": span}
            offset += tensor.nbytes
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        self._file = path.open("wb")
        self._file.write(struct.pack("<Q", len(encoded)) + encoded)

    def append(self, name: str, tensor: torch.Tensor) -> None:
        """Write the next tensor; it must be the next one of the plan."""
        planned = next(self._expected)
        if (name, tuple(tensor.shape), tensor.nbytes) != (planned.name, planned.shape, planned.nbytes):
            raise RuntimeError(f"planned {planned}, got {name} of shape {tuple(tensor.shape)}")
        self._file.write(tensor.contiguous().view(torch.uint8).numpy().data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _write_index(path: Path, shards: dict[str, list[_Planned]]) -> None:
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for planned in shards.values() for tensor in planned)},
        "weight_map": {tensor.name: file for file, planned in shards.items() for tensor in planned},
    }
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _read_back(directory: Path, shards: dict[str, list[_Planned]], dtype: str) -> None:
    """Reopen each file and compare names, shapes and dtypes with the plan."""
    for file, planned in shards.items():
        try:
            with safe_open(directory / file, framework="pt") as handle:
                views = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (no mapping)
                found = {name: (tuple(view.get_shape()), view.get_dtype()) for name, view in views.items()}
        except SafetensorError as error:
            raise ConversionError("the files written must be readable", seen=f"{file}: {error}") from error
        if found != {tensor.name: (tensor.shape, dtype) for tensor in planned}:
            raise ConversionError("the files written must hold what was planned", seen=file, fix="check the disk")


def _casts(source: WeightSource, dtype: str) -> tuple[str, ...]:
    """A line for each dtype of the source that the export does not keep."""
    kept = _DTYPES[dtype][0]
    found = {entry.dtype for entry in source.entries().values()} - {kept}
    return tuple(
        f"weights cast from {str(other).removeprefix('torch.')} to {dtype}" for other in sorted(found, key=str)
    )
