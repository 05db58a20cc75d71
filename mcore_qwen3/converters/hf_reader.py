"""HFSource: a virtual Megatron checkpoint over the safetensors files of a Hugging Face model."""

from __future__ import annotations

import io
import itertools
import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mcore_qwen3.arch.shape import ModelShape
from mcore_qwen3.converters import fp8
from mcore_qwen3.converters.files import bytes_of, read_into
from mcore_qwen3.converters.source import Bounds, Entry, WeightSource, name_some
from mcore_qwen3.converters.table import HF_EMBEDDING, HF_HEAD, Part, Rule, fill_name, name_table
from mcore_qwen3.errors import ConversionError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": fp8.DTYPE,
}


# Where only some columns are wanted, whole rows are read in blocks of about this size.
_BLOCK_BYTES = 16 * 2**20
Columns = tuple[slice, ...]


@dataclass(frozen=True)
class _Tensor:
    """One tensor of the files: the open file, where its bytes begin, its shape and dtype."""

    file: io.FileIO
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, index: tuple[int, ...], first: int, columns: Columns, out: torch.Tensor) -> None:
        """Fill `out`, contiguous and of this dtype, with rows from `first` on and the given columns.

        Args:
            index: place on the axes in front of the rows, as in a packed tensor.
            first: first row.
            columns: one slice, or none for a vector.
            out: as many rows as are wanted.

        Raises:
            ConversionError: the file ends too early.
        """
        row_shape = self.shape[len(index) + 1 :]
        row_bytes = math.prod(row_shape) * self.dtype.itemsize
        row = first + (index[0] * self.shape[1] if index else 0)
        if all(piece == slice(0, size) for piece, size in zip(columns, row_shape, strict=True)):
            return self._read_bytes(self.start + row * row_bytes, out)
        step = max(1, _BLOCK_BYTES // row_bytes)
        for done in range(0, len(out), step):
            block = torch.empty((min(step, len(out) - done), *row_shape), dtype=self.dtype)
            self._read_bytes(self.start + (row + done) * row_bytes, block)
            out[done : done + len(block)].copy_(block[(slice(None), *columns)])

    def _read_bytes(self, offset: int, out: torch.Tensor) -> None:
        if read_into(self.file.fileno(), offset, bytes_of(out)) != out.nbytes:
            raise ConversionError(
                "a safetensors file must be whole", seen=f"{self.file.name} ends early", fix="fetch this file again"
            )


class HFSource(WeightSource):
    """Torch_dist keys and slices over a Hugging Face directory. Nothing is held: each read copies the bytes it needs.

    The headers alone are checked at construction: every tensor of the model is there, with its shape, and no other.
    Both layouts of experts are read: one tensor for each expert, and transformers 5's two packed tensors a layer. A
    tied model may carry a copy of its embedding as `lm_head.weight`; it is compared wherever the embedding is read.
    Weights quantised to FP8 in blocks are shown, and read, in the dtype of the model.

    Args:
        directory: holds `model.safetensors`, or `model.safetensors.index.json` and the files it names.
        shape: the model these files must fit.

    Raises:
        ConversionError: files missing, damaged or at odds with their index; tensors missing, stray, or of a wrong shape
            or dtype.
    """

    def __init__(self, directory: str | Path, shape: ModelShape) -> None:
        self.directory = Path(directory)
        self._tensors = _open_tensors(self.directory)
        table = name_table(shape)
        self._packed = any(
            fill_name(part.packed.name, (0,)) in self._tensors for rule in table for part in rule.parts if part.packed
        )
        self._rules = {rule.key: rule for rule in table}
        self._shape, self._dtype = shape, getattr(torch, shape.torch_dtype)
        self._tied_head = shape.tie_word_embeddings and HF_HEAD in self._tensors
        self._check_tensors(table)
        entries = {rule.key: Entry(rule.shape, self._key_dtype(rule)) for rule in table}
        super().__init__(entries, self._tensors)

    def recipe(self) -> Callable[[], WeightSource]:
        return partial(HFSource, self.directory, self._shape)

    def close(self) -> None:
        for tensor in self._tensors.values():
            tensor.file.close()
        self._tensors = {}

    def _check_tensors(self, table: tuple[Rule, ...]) -> None:
        """Compare names and shapes of the files with the model's."""
        expected = {name: shape for rule in table for name, shape in self._hf_tensors(rule)}
        if self._tied_head:
            expected[HF_HEAD] = expected[HF_EMBEDDING]
        expected |= self._fp8_factors(expected)
        missing = expected.keys() - self._tensors.keys()
        if missing:
            raise ConversionError(
                "the files must hold every tensor of the model",
                seen=f"{name_some(missing)} missing in {self.directory}",
                fix="fetch the model again, or correct config.json if it does not describe these weights",
            )
        stray = self._tensors.keys() - expected.keys()
        if stray:
            raise ConversionError(
                "every tensor of the files must have its place in the model",
                seen=f"{name_some(stray)} in {self.directory}",
                fix="give a plain Qwen3 or Qwen3-MoE checkpoint whose config.json describes its weights",
            )
        wrong = [name for name, shape in expected.items() if self._tensors[name].shape != shape]
        if wrong:
            name, found = wrong[0], self._tensors[wrong[0]].shape
            raise ConversionError(
                "every tensor must have the shape that config.json gives it",
                seen=f"{name} has {found}, the model needs {expected[name]}; {len(wrong)} wrong in all",
                fix="correct config.json, or fetch the weights that belong to it",
            )

    def _fp8_factors(self, expected: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the block factors that the quantised ones among these tensors need."""
        quantised = {
            n: shape for n, shape in expected.items() if n in self._tensors and self._tensors[n].dtype == fp8.DTYPE
        }
        for name, shape in quantised.items():
            if len(shape) != 2:
                raise ConversionError(
                    "only matrices may be quantised", seen=f"{name} in {self.directory} is F8_E4M3 of shape {shape}"
                )
        return {name + fp8.SCALE_SUFFIX: fp8.scale_shape(shape) for name, shape in quantised.items()}

    def _hf_tensors(self, rule: Rule) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the HF tensors behind one key, in the layout of these files."""
        for part in rule.parts:
            if self._packed and part.packed:
                layers, experts = rule.stacked
                for layer in range(layers):
                    yield fill_name(part.packed.name, (layer,)), (experts, part.packed.rows, *rule.columns)
            else:
                for index in itertools.product(*(range(size) for size in rule.stacked)):
                    yield fill_name(part.name, index), (part.rows, *rule.columns)

    def _key_dtype(self, rule: Rule) -> torch.dtype:
        """The one dtype of all tensors behind a key."""
        dtypes: dict[torch.dtype, str] = {}
        for name, _ in self._hf_tensors(rule):
            stored = self._tensors[name].dtype
            dtypes.setdefault(self._dtype if stored == fp8.DTYPE else stored, name)
        if self._tied_head and rule.parts[0].name == HF_EMBEDDING:
            dtypes.setdefault(self._tensors[HF_HEAD].dtype, HF_HEAD)
        if len(dtypes) > 1:
            raise ConversionError(
                "tensors that are stacked into one must have one dtype",
                seen=", ".join(f"{name} is {dtype}" for dtype, name in dtypes.items()),
                fix="save the model in one dtype",
            )
        return next(iter(dtypes))

    def _fill(self, key: str, bounds: Bounds, out: torch.Tensor) -> None:
        rule = self._rules[key]
        depth = len(rule.stacked)
        rows, columns = bounds[depth], tuple(slice(low, high) for low, high in bounds[depth + 1 :])
        segments = list(rule.segments(*rows))
        for index in itertools.product(*(range(low, high) for low, high in bounds[:depth])):
            unit = out[tuple(number - low for number, (low, _) in zip(index, bounds[:depth], strict=True))]
            for segment in segments:
                first = segment.unit_row - rows[0]
                target = unit[first : first + segment.rows]
                self._read_part(rule.parts[segment.part], index, segment.part_row, columns, target)
        if self._tied_head and rule.parts[0].name == HF_EMBEDDING:
            self._compare_head(out, rows[0], columns)

    def _read_part(self, part: Part, index: tuple[int, ...], first: int, columns: Columns, out: torch.Tensor) -> None:
        """Fill `out` with rows of one part from row `first` on."""
        if self._packed and part.packed:
            name, first, place = fill_name(part.packed.name, index[:1]), first + part.packed.first_row, index[1:]
        else:
            name, place = fill_name(part.name, index), ()
        self.used_tensors.add(name)
        tensor = self._tensors[name]
        if tensor.dtype != fp8.DTYPE:
            return tensor.read(place, first, columns, out)
        values = torch.empty(out.shape, dtype=fp8.DTYPE)
        tensor.read(place, first, columns, values)
        self.used_tensors.add(name + fp8.SCALE_SUFFIX)
        factors = self._tensors[name + fp8.SCALE_SUFFIX]
        selection = (slice(first, first + len(out)), *columns)
        rows, needed = fp8.scale_slices(selection)
        scale = torch.empty((rows.stop - rows.start, needed.stop - needed.start), dtype=factors.dtype)
        factors.read((), rows.start, (needed,), scale)
        out.copy_(fp8.dequantise(values, scale, selection, self._dtype))

    def _compare_head(self, embedding: torch.Tensor, first: int, columns: Columns) -> None:
        """Refuse a tied model whose `lm_head.weight` is not its embedding, bit for bit."""
        self.used_tensors.add(HF_HEAD)
        head = torch.empty_like(embedding)
        self._tensors[HF_HEAD].read((), first, columns, head)
        if not torch.equal(head.view(torch.uint8), embedding.view(torch.uint8)):
            raise ConversionError(
                f"in a tied model {HF_HEAD} must equal {HF_EMBEDDING} bit for bit",
                seen=f"they differ in {self.directory}",
                fix="set tie_word_embeddings to false in config.json if the model has an output layer of its own",
            )


def _open_tensors(directory: Path) -> dict[str, _Tensor]:
    """Every tensor of the directory's files by name; each file is opened, and its header read, once."""
    weight_map = _weight_map(directory)
    tensors: dict[str, _Tensor] = {}
    for file in [SINGLE_FILE] if weight_map is None else sorted(set(weight_map.values())):
        found = _open_file(directory / file)
        if weight_map is not None:
            promised = {name for name, home in weight_map.items() if home == file}
            if promised != found.keys():
                raise ConversionError(
                    f"{INDEX_FILE} must name exactly the tensors that each file holds",
                    seen=f"{name_some(promised ^ found.keys())} of {file} in one but not the other",
                    fix="fetch the index and its files again, from one revision",
                )
        tensors.update(found)
    return tensors


def _open_file(path: Path) -> dict[str, _Tensor]:
    if not path.is_file():
        raise ConversionError("a weight file is missing", seen=path, fix="fetch the model again")
    try:
        with safe_open(path, framework="pt") as handle:  # checks the header, and that the file is as long as it says
            views = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (no mapping)
        file = io.FileIO(path)
        size = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(size))
    except (SafetensorError, OSError) as error:
        raise ConversionError(
            "a safetensors file must be whole", seen=f"{path}: {error}", fix="fetch this file again"
        ) from error
    return {
        name: _Tensor(
            file, 8 + size + header[name]["data_offsets"][0], tuple(view.get_shape()), _dtype(name, view, path)
        )
        for name, view in views.items()
    }


def _dtype(name: str, view: Any, path: Path) -> torch.dtype:
    spelled = view.get_dtype()
    if spelled not in _DTYPES:
        raise ConversionError(
            f"weights must be of dtype {', '.join(_DTYPES)}",
            seen=f"{name} in {path} is {spelled}",
            fix="give the unquantised release of the model",
        )
    return _DTYPES[spelled]


def _weight_map(directory: Path) -> dict[str, str] | None:
    """Tensor name to file name from the index, or None for a model in a single file."""
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.is_file() and index.is_file():
        raise ConversionError(
            "a model directory holds one set of weights",
            seen=f"both {SINGLE_FILE} and {INDEX_FILE} in {directory}",
            fix="remove the one that does not belong to the model",
        )
    if single.is_file():
        return None
    if not index.is_file():
        raise ConversionError(
            f"a Hugging Face model directory must hold {SINGLE_FILE} or {INDEX_FILE}",
            seen=f"neither in {directory}",
            fix="fetch the model in safetensors format",
        )
    return read_weight_map(index)


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name to file name, from an index that names nothing outside its own directory.

    Raises:
        ConversionError: not an index, or it names another place.
    """
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = set(weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(
            'the index must be JSON with a "weight_map" of tensor names to file names',
            seen=f"{index}: {error!r}",
            fix="fetch the index again",
        ) from error
    for file in files:
        if not isinstance(file, str) or Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise ConversionError(
                "the index may only name safetensors files in its own directory",
                seen=f"{file!r} in {index}",
                fix="do not use this checkpoint unless you know where it comes from",
            )
    return weight_map
