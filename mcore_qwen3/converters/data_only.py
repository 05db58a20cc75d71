"""Nothing in a checkpoint is executed: its pickles are opened by allow-list before anything else may read them.

A torch_dist directory holds three kinds of pickle: `.metadata`, which torch and Megatron load without any limit; "bytes
entries" inside the data files, which Megatron loads without any limit; and `common.pt`.
"""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import re
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from mcore_qwen3.converters.files import read_into
from mcore_qwen3.errors import ConversionError

METADATA_FILE = ".metadata"
COMMON_FILE = "common.pt"
# A checkpoint of many ranks has more files than a process may open by default (1024).
_MAX_OPEN_FILES = 256
_UNTRUSTED = "do not use this checkpoint unless you know where it comes from"


class _Inert:
    """Stands in for classes that Megatron once put into metadata as empty markers."""


_DCP_MODULE = "torch.distributed.checkpoint.metadata"
_ALLOWED: dict[tuple[str, str], Any] = {
    (_DCP_MODULE, "Metadata"): dcp.Metadata,
    (_DCP_MODULE, "MetadataIndex"): dcp.MetadataIndex,
    (_DCP_MODULE, "StorageMeta"): dcp.StorageMeta,
    (_DCP_MODULE, "TensorStorageMetadata"): dcp.TensorStorageMetadata,
    (_DCP_MODULE, "BytesStorageMetadata"): dcp.BytesStorageMetadata,
    (_DCP_MODULE, "ChunkStorageMetadata"): dcp.ChunkStorageMetadata,
    (_DCP_MODULE, "TensorProperties"): dcp.TensorProperties,
    (_DCP_MODULE, "_MEM_FORMAT_ENCODING"): dcp._MEM_FORMAT_ENCODING,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    # Where the checkpoint was written; a pure path cannot touch the disk. Python 3.13 moved the class.
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): _Inert,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"): _Inert,
}


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles what torch's own checkpoint writer puts into `.metadata`, and refuses everything else by name."""

    def __init__(self, path: Path, stream: io.BufferedIOBase) -> None:
        super().__init__(stream)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise ConversionError(
            "checkpoint metadata may only hold plain data",
            seen=f"{self._path} asks for {module}.{name}",
            fix=_UNTRUSTED,
        )


def read_metadata(iteration_dir: Path) -> dcp.Metadata:
    """The `.metadata` of a torch_dist directory, read by allow-list and checked for form.

    Raises:
        ConversionError: missing, damaged, holding anything but plain data, or pointing outside the directory.
    """
    path = iteration_dir / METADATA_FILE
    try:
        with path.open("rb") as stream:
            metadata = _MetadataUnpickler(path, stream).load()
        _check_form(metadata, path)
    except ConversionError:
        raise
    except FileNotFoundError as error:
        raise ConversionError(
            "a complete torch_dist checkpoint holds .metadata",
            seen=f"none in {iteration_dir}",
            fix="give a complete iteration; this one was not written to its end",
        ) from error
    except Exception as error:  # a damaged pickle can raise anything
        raise ConversionError(
            "checkpoint metadata must be readable", seen=f"{path}: {error!r}", fix="copy the checkpoint again"
        ) from error
    return metadata


def check_data_only(iteration_dir: str | Path) -> None:
    """Refuse a torch_dist directory that would run code when Megatron loads it. Call it before every such load.

    `.metadata` is read by allow-list; `common.pt` and every bytes entry are opened with `weights_only`.

    Raises:
        ConversionError: with the file and the class it asks for.
    """
    directory = Path(iteration_dir)
    metadata = read_metadata(directory)
    common = directory / COMMON_FILE
    if common.is_file():
        load_plain(io.BytesIO(common.read_bytes()), str(common))
    reader = EntryReader(directory)
    for index, info in metadata.storage_data.items():
        # Tensor entries are always loaded with weights_only, by torch's reader and by ours.
        if not isinstance(metadata.state_dict_metadata.get(index.fqn), dcp.TensorStorageMetadata):
            load_plain(reader.read(info), f"{directory / info.relative_path}, entry {index.fqn}")
    reader.close()


class _Window(io.BufferedIOBase):
    """Bytes [start, start + length) of an open file, read straight into the memory that asks for them."""

    def __init__(self, stream: io.BufferedReader, start: int, length: int) -> None:
        self._descriptor, self._start, self._length, self._at = stream.fileno(), start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted = max(0, min(len(view), self._length - self._at))
        done = read_into(self._descriptor, self._start + self._at, view[:wanted])
        self._at += done
        return done

    def read(self, size: int | None = -1) -> bytes:
        wanted = self._length - self._at if size is None or size < 0 else size
        data = bytearray(max(0, min(wanted, self._length - self._at)))
        return bytes(data[: self.readinto(data)])


class EntryReader:
    """Reads stored entries of a torch_dist directory as bytes and keeps the files it reads from open.

    Args:
        directory: the iteration directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: OrderedDict[str, io.BufferedReader] = OrderedDict()

    def read(self, info: _StorageInfo) -> io.BufferedIOBase:
        """The bytes of one entry, as a stream over the file.

        Raises:
            ConversionError: the file is missing or too short.
        """
        path = self._directory / info.relative_path
        try:
            stream = self._stream(info.relative_path)
            size = os.fstat(stream.fileno()).st_size
        except OSError as error:
            raise ConversionError(
                "a checkpoint data file must be readable", seen=error, fix="copy the checkpoint again"
            ) from error
        if size < info.offset + info.length:
            raise ConversionError(
                "a checkpoint data file must be whole",
                seen=f"{path} ends at byte {size}, an entry needs it up to {info.offset + info.length}",
                fix="copy this file again",
            )
        return _Window(stream, info.offset, info.length)

    def close(self) -> None:
        """Close the files."""
        while self._open:
            self._open.popitem()[1].close()

    def _stream(self, file: str) -> io.BufferedReader:
        if file not in self._open:
            if len(self._open) >= _MAX_OPEN_FILES:
                self._open.popitem(last=False)[1].close()
            self._open[file] = (self._directory / file).open("rb")
        return self._open[file]


def load_plain(stream: io.BufferedIOBase, place: str) -> Any:
    """What `torch.save` wrote to a stream, if it is nothing but tensors and plain Python data.

    Args:
        stream: the saved bytes.
        place: file (and entry), for messages.

    Raises:
        ConversionError: it asks for any other class, or is damaged.
    """
    try:
        # The storage as it was read, in host memory, wherever the tensor lived when it was saved.
        return torch.load(cast(IO[bytes], stream), map_location=lambda storage, _: storage, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConversionError(
            "a checkpoint may only hold tensors and plain data",
            seen=f"{place} {_trouble(stream, error)}",
            fix=_UNTRUSTED,
        ) from error
    except Exception as error:  # damaged data can raise anything
        reason = (str(error) or repr(error)).splitlines()[0]
        raise ConversionError(
            "checkpoint data must be readable", seen=f"{place}: {reason}", fix="copy the checkpoint again"
        ) from error


def _trouble(stream: io.BufferedIOBase, error: Exception) -> str:
    """What a refused pickle asks for, as far as that can be told without running it."""
    named = re.findall(r"GLOBAL ([\w.]+)", str(error))[:1]
    if not named and zipfile.is_zipfile(stream):
        stream.seek(0)
        named = torch.serialization.get_unsafe_globals_in_checkpoint(cast(IO[bytes], stream))
    return f"asks for {', '.join(named)}" if named else "is damaged or holds something else"


def _check_form(metadata: object, path: Path) -> None:
    """Refuse metadata whose parts are not what their readers take them for."""
    if not isinstance(metadata, dcp.Metadata):
        raise ConversionError("checkpoint metadata must be torch's", seen=f"{path} holds a {type(metadata).__name__}")
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata):
            raise ConversionError("checkpoint metadata must describe tensors or bytes", seen=f"{key} in {path}")
    for index, info in metadata.storage_data.items():
        file = info.relative_path
        if not isinstance(index, dcp.MetadataIndex) or not isinstance(info, _StorageInfo) or not isinstance(file, str):
            raise ConversionError("checkpoint metadata must say where each entry lies", seen=f"{index} in {path}")
        if Path(file).name != file or info.offset < 0 or info.length < 0:
            raise ConversionError(
                "checkpoint metadata may only name places in files of its own directory",
                seen=f"{file!r} in {path}",
                fix=_UNTRUSTED,
            )
        if info.transform_descriptors:
            raise ConversionError(
                "checkpoint entries must be stored plainly",
                seen=f"{index.fqn}: {info.transform_descriptors} in {path}",
                fix="write the checkpoint without compression or other transforms",
            )
