"""Reads weights and optimizer state of a Megatron torch_dist directory with torch alone."""

from __future__ import annotations

import bisect
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from mcore_qwen3.arch.shape import ModelShape
from mcore_qwen3.converters.check_sums import verify_tensor
from mcore_qwen3.converters.data_only import EntryReader, load_plain, read_metadata
from mcore_qwen3.converters.source import Bounds, Entry, WeightSource, name_some
from mcore_qwen3.converters.table import LAYERS, Rule, key_aliases, name_table
from mcore_qwen3.errors import ConversionError

# Megatron's optimizer state; several chained optimizers put a number in front.
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
_SINGLE_LAYER = re.compile(re.escape(LAYERS) + r"(\d+)\.(.+)")
Stored = dict[str, tuple[str, ...]]
# What the last chunks read may take, so that many small slices of one chunk cost one read.
_CACHE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class _Chunk:
    """A stored piece of a key's tensor: where it begins, its sizes, its shape in the file, and where its bytes lie.

    Where every layer is stored under a name of its own, the first axis, the layer, is not in the file's shape.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stored_sizes: tuple[int, ...]
    info: _StorageInfo


class _Chunks:
    """The chunks of one tensor, found by where they begin on one axis, then on the next."""

    def __init__(self, chunks: list[_Chunk], axis: int = 0) -> None:
        by_start: dict[int, list[_Chunk]] = {}
        for chunk in chunks:
            by_start.setdefault(chunk.offsets[axis], []).append(chunk)
        self._axis = axis
        self._starts = sorted(by_start)
        self._longest = max(chunk.sizes[axis] for chunk in chunks)
        last = axis + 1 == len(chunks[0].offsets)
        self._inner = [by_start[start] if last else _Chunks(by_start[start], axis + 1) for start in self._starts]

    def overlapping(self, bounds: Bounds) -> Iterator[tuple[_Chunk, Bounds]]:
        """Chunks that share elements with the slice, and what they share, in global coordinates."""
        for chunk in self._near(bounds):
            shared = tuple(
                (max(low, offset), min(high, offset + size))
                for (low, high), offset, size in zip(bounds, chunk.offsets, chunk.sizes, strict=True)
            )
            if all(low < high for low, high in shared):
                yield chunk, shared

    def _near(self, bounds: Bounds) -> Iterator[_Chunk]:
        """Chunks that begin before the slice ends, and no further before it than the longest chunk reaches."""
        low, high = bounds[self._axis]
        first = bisect.bisect_right(self._starts, low - self._longest)
        last = bisect.bisect_left(self._starts, high)
        for inner in self._inner[first:last]:
            yield from inner._near(bounds) if isinstance(inner, _Chunks) else inner


class _StoredSource(WeightSource):
    """Chosen tensors of a torch_dist directory. Only chunks that overlap a read are opened; nothing is executed.

    Args:
        directory: holds the `.distcp` files.
        metadata: the directory's `.metadata`.
        stored: for each key, the name it is stored under, or the names of its layers.
        shapes: for each key, the shape to show: the stored one, or one of fewer rows.

    Raises:
        ConversionError: the chunks of a tensor do not make it up.
    """

    def __init__(self, directory: Path, metadata: Metadata, stored: Stored, shapes: dict[str, tuple[int, ...]]) -> None:
        self.directory = directory
        self._stored = stored
        self._reader = EntryReader(directory)
        tensors = _stored_tensors(metadata)
        self._chunks: dict[str, _Chunks] = {}
        entries = {}
        for key, names in stored.items():
            chunks = []
            for number, name in enumerate(names):
                one_layer = len(tensors[name].size) < len(shapes[key])
                at = (number,) if one_layer else ()
                chunks += self._find_chunks(at, name, tensors[name], metadata.storage_data)
            self._chunks[key] = _Chunks(chunks)
            entries[key] = Entry(shapes[key], _one_dtype(names, tensors))
        self._cache: OrderedDict[tuple[str, int], torch.Tensor] = OrderedDict()
        self._cached_bytes = 0
        super().__init__(entries, (name for names in stored.values() for name in names))

    def close(self) -> None:
        self._cache.clear()
        self._cached_bytes = 0
        self._reader.close()

    def _find_chunks(
        self, at: tuple[int, ...], name: str, entry: TensorStorageMetadata, places: dict[MetadataIndex, _StorageInfo]
    ) -> list[_Chunk]:
        """Chunks of one stored tensor; `at` is its layer where it holds no more than one."""
        chunks = []
        for chunk in entry.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            info = places.get(MetadataIndex(name, offsets))
            inside = len(offsets) == len(sizes) == len(entry.size) and all(
                low >= 0 and low + size <= whole for low, size, whole in zip(offsets, sizes, entry.size, strict=True)
            )
            if info is None or not inside:
                raise self._incomplete(name)
            chunks.append(_Chunk((*at, *offsets), (*(1 for _ in at), *sizes), sizes, info))
        if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(entry.size):
            raise self._incomplete(name)
        return chunks

    def _fill(self, key: str, bounds: Bounds, out: torch.Tensor) -> None:
        filled = 0
        for chunk, shared in self._chunks[key].overlapping(bounds):
            source = tuple(slice(low - at, high - at) for (low, high), at in zip(shared, chunk.offsets, strict=True))
            target = tuple(slice(low - at, high - at) for (low, high), (at, _) in zip(shared, bounds, strict=True))
            out[target].copy_(self._load(chunk, out.dtype)[source])
            filled += math.prod(high - low for low, high in shared)
        if filled != out.numel():
            raise self._incomplete(self._stored[key][0])
        names = self._stored[key]
        self.used_tensors.update(names if len(names) == 1 else names[slice(*bounds[0])])

    def _load(self, chunk: _Chunk, dtype: torch.dtype) -> torch.Tensor:
        place = (chunk.info.relative_path, chunk.info.offset)
        if place in self._cache:
            self._cache.move_to_end(place)
            return self._cache[place]
        where = f"{self.directory / chunk.info.relative_path} at byte {chunk.info.offset}"
        stream = self._reader.read(chunk.info)
        tensor = load_plain(stream, where)
        if not isinstance(tensor, torch.Tensor) or (tuple(tensor.shape), tensor.dtype) != (chunk.stored_sizes, dtype):
            raise ConversionError("a stored chunk must be a tensor of the shape and dtype in .metadata", seen=where)
        verify_tensor(tensor, stream, where)
        tensor = tensor.reshape(chunk.sizes)
        self._cache[place] = tensor
        self._cached_bytes += tensor.nbytes
        while len(self._cache) > 1 and self._cached_bytes > _CACHE_BYTES:
            self._cached_bytes -= self._cache.popitem(last=False)[1].nbytes
        return tensor

    def _incomplete(self, name: str) -> ConversionError:
        return ConversionError(
            "the chunks of a tensor must cover it exactly once",
            seen=f"{name} in {self.directory}",
            fix="give a complete checkpoint",
        )


class TorchDistSource(_StoredSource):
    """Model weights of one iteration directory; optimizer state and `_extra_state` are passed over.

    Vocabulary rows that Megatron padded are not shown.

    Args:
        iteration_dir: holds `.metadata` and the `.distcp` files it names.
        shape: the model these files must fit.

    Raises:
        ConversionError: damaged or unsafe files; tensors missing, stray, incomplete or of a wrong shape.
    """

    def __init__(self, iteration_dir: str | Path, shape: ModelShape) -> None:
        directory = Path(iteration_dir)
        metadata = read_metadata(directory)
        tensors = _stored_tensors(metadata)
        sizes = {name: tuple(entry.size) for name, entry in tensors.items() if not _is_other_state(name)}
        table = name_table(shape)
        stored = _by_key(sizes, shape)
        _check_tensors(table, stored, sizes, directory)
        self._shape = shape
        super().__init__(directory, metadata, stored, {rule.key: rule.shape for rule in table})

    def recipe(self) -> Callable[[], WeightSource]:
        return partial(TorchDistSource, self.directory, self._shape)


class OptimizerSource(_StoredSource):
    """Optimizer state of one iteration directory, under the names and with the shapes it is stored with.

    Args:
        iteration_dir: holds `.metadata` and the `.distcp` files it names.

    Raises:
        ConversionError: damaged or unsafe files, or incomplete tensors.
    """

    def __init__(self, iteration_dir: str | Path) -> None:
        directory = Path(iteration_dir)
        metadata = read_metadata(directory)
        # A single number, such as a step that some optimizers store, is no state of a weight.
        tensors = {name: entry for name, entry in _stored_tensors(metadata).items() if entry.size}
        sizes = {name: tuple(entry.size) for name, entry in tensors.items() if _OPTIMIZER.match(name)}
        super().__init__(directory, metadata, {name: (name,) for name in sizes}, sizes)

    def recipe(self) -> Callable[[], WeightSource]:
        return partial(OptimizerSource, self.directory)


def _stored_tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Every tensor of a directory; bytes entries left out."""
    entries = metadata.state_dict_metadata.items()
    return {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}


def _is_other_state(name: str) -> bool:
    return name.endswith("_extra_state") or _OPTIMIZER.match(name) is not None


def _by_key(sizes: Iterable[str], shape: ModelShape) -> Stored:
    """The stored names behind each key: under another spelling of it, or with one name for each layer.

    Megatron names layers one by one when it takes them to be of different kinds, as with a `moe_layer_freq` list. Where they
    are (`shape.is_mixed`), these names are the keys; elsewhere they are put together.
    """
    names = set(sizes)
    stored: Stored = {name: (name,) for name in names} if shape.is_mixed else _layers_together(names, shape)
    for alias, key in key_aliases(shape).items():
        if alias in stored and key not in stored:
            stored[key] = stored.pop(alias)
    return stored


def _layers_together(names: set[str], shape: ModelShape) -> Stored:
    """Names of single layers behind the key of all of them; other names behind themselves."""
    stored: Stored = {}
    for name in sorted(names):
        single = _SINGLE_LAYER.fullmatch(name)
        key = LAYERS + single[2] if single else name
        if single is None:
            stored[name] = (name,)
        elif key not in names and key not in stored:
            stored[key] = tuple(f"{LAYERS}{layer}.{single[2]}" for layer in range(shape.num_layers))
    strays = names - {name for found in stored.values() for name in found}
    return stored | {name: (name,) for name in strays}


def _one_dtype(names: tuple[str, ...], tensors: dict[str, TensorStorageMetadata]) -> torch.dtype:
    dtypes = {tensors[name].properties.dtype: name for name in names}
    if len(dtypes) > 1:
        seen = ", ".join(f"{name} is {dtype}" for dtype, name in dtypes.items())
        raise ConversionError("a tensor must have one dtype in all layers", seen=seen)
    return next(iter(dtypes))


def _check_tensors(table: tuple[Rule, ...], stored: Stored, sizes: dict[str, tuple[int, ...]], directory: Path) -> None:
    """Compare keys and shapes of a directory with the model's."""
    rules = {rule.key: rule for rule in table}
    missing = (rules.keys() - stored.keys()) | {
        name for names in stored.values() for name in names if name not in sizes
    }
    stray = stored.keys() - rules.keys()
    if missing or stray:
        found = [f"{name_some(names)} {what}" for names, what in ((missing, "missing"), (stray, "unknown")) if names]
        raise ConversionError(
            "the checkpoint must hold exactly the tensors of the model",
            seen=f"{'; '.join(found)} in {directory}",
            fix="give the checkpoint and the config.json of one model",
        )
    for key, rule in rules.items():
        for name in stored[key]:
            size = sizes[name]
            one_of_all = _SINGLE_LAYER.fullmatch(name) and not _SINGLE_LAYER.fullmatch(key)
            wanted = rule.shape[1:] if one_of_all else rule.shape
            fits = size[1:] == wanted[1:] and size[0] >= rule.rows if rule.vocabulary else size == wanted
            if not fits:
                raise ConversionError(
                    "every tensor must have the shape that config.json gives it",
                    seen=f"{name} has {size}, the model needs {wanted} in {directory}",
                    fix="give the checkpoint and the config.json of one model",
                )
