"""The cache of prepared data: one folder per key, complete or absent, safe for processes that prepare at once.

Files in <cache>/<key>:

    manifest.json     what the folder holds; read first, and trusted only if every file has its size
    ids.npy           int32  [tokens]        all samples end to end
    mask.npy          uint8  [tokens]        1 = this token is a trained target
    offsets.npy       int64  [samples + 1]   where each sample starts
    trained.npy       int32  [samples]       trained targets of each sample
    places.txt        one line a sample      the file and line (or row) that it comes from
    <split>_samples.npy, <split>_rows.npy    rows of samples, as `pack.pack` returns them
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from mcore_qwen3.errors import DataError

FORMAT_VERSION = 4
MANIFEST = "manifest.json"
PLACES = "places.txt"
_LOGGER = logging.getLogger(__name__)


def file_digest(path: Path) -> str:
    """sha256 of the file's bytes, in hex."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def cache_key(facts: dict[str, Any]) -> str:
    """The key of everything that decides what is in the folder: 32 hex digits of the sha256 over `facts` as JSON."""
    text = json.dumps({"format_version": FORMAT_VERSION, **facts}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a complete folder, or None: no folder, no manifest, or a file that is missing or cut short."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
        complete = all((folder / name).stat().st_size == size for name, size in manifest["files"].items())
    except (OSError, ValueError):
        return None
    return manifest if complete else None


def open_or_build(cache_dir: Path, key: str, build: Callable[[Path], dict[str, Any]]) -> tuple[Path, bool]:
    """The complete folder of `key`, and whether it was built by this call.

    One process builds at a time, the others wait and then take its folder; the lock of a process that dies is released
    by the system. `build` fills the folder it is given and returns the manifest; the folder appears under its name
    only when it is complete.

    Raises:
        DataError: the cache folder cannot be written.
    """
    folder = cache_dir / key
    if read_manifest(folder) is not None:
        return folder, False
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / f"{key}.lock", folder):
            if read_manifest(folder) is not None:
                return folder, False
            for left in cache_dir.glob(f"{key}.building-*"):  # of a process that died: the lock is ours
                shutil.rmtree(left)
            building = cache_dir / f"{key}.building-{os.getpid()}"
            building.mkdir()
            try:
                manifest = build(building)
                files = sorted(building.iterdir())
                sizes = {file.name: file.stat().st_size for file in files}
                # The same rows may lie in another folder on another node: where they come from is no part of the sum.
                sums = "".join(f"{file.name} {file_digest(file)}\n" for file in files if file.name != PLACES)
                digest = hashlib.sha256(sums.encode()).hexdigest()
                (building / MANIFEST).write_text(json.dumps({**manifest, "digest": digest, "files": sizes}, indent=1))
                if folder.exists():  # not complete, else it would have been taken
                    shutil.rmtree(folder)
                building.rename(folder)
            finally:
                shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        raise DataError(
            "the cache of prepared data can be written", seen=error, fix="--data_cache_path, or make room there"
        ) from error
    return folder, True


def write_samples(
    folder: Path, ids: Iterable[np.ndarray], mask: Iterable[np.ndarray], lengths: Iterable[np.ndarray]
) -> None:
    """Write the arrays of at least one sample from pieces: int32 ids, uint8 marks, int64 lengths (each > 0)."""
    mask_all = _joined(mask, np.uint8)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(_joined(lengths, np.int64))])
    np.save(folder / "ids.npy", _joined(ids, np.int32))
    np.save(folder / "mask.npy", mask_all)
    np.save(folder / "offsets.npy", offsets)
    np.save(folder / "trained.npy", np.add.reduceat(mask_all, offsets[:-1], dtype=np.int32))


def write_places(folder: Path, places: Iterable[str]) -> None:
    """Write where each sample comes from."""
    with (folder / PLACES).open("w", encoding="utf-8", newline="\n") as handle:
        handle.writelines(f"{place}\n" for place in places)


def write_rows(folder: Path, split: str, samples: np.ndarray, starts: np.ndarray) -> None:
    """Write the rows of a split, as `pack.pack` returns them."""
    np.save(folder / f"{split}_samples.npy", samples)
    np.save(folder / f"{split}_rows.npy", starts)


def _joined(pieces: Iterable[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *pieces])


@contextmanager
def _locked(path: Path, folder: Path) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _LOGGER.info("another process is preparing %s: waiting for it", folder)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
