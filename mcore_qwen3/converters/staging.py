"""Directories that appear whole or not at all, whatever kills the process that writes them."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mcore_qwen3.errors import ConversionError

# Held by the process that writes a staging directory; the system lets go of it when that process ends, however it ends.
_LOCK = ".lock"


@contextmanager
def staged_directory(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty sibling directory to write into; when the block ends well it is flushed and becomes `target`.

    When the block fails, the sibling is removed and nothing else has changed. What an earlier process left that was
    killed in the middle is removed first.

    Args:
        target: the final path. Parents are made.
        overwrite: put the new directory in place of an existing one, which is removed last.

    Raises:
        ConversionError: the target exists (and `overwrite` is false), another process is writing it, or the disk is
            full or not writable.
    """
    staging, former = staging_path(target), target.with_name(f".{target.name}.old")
    lock = None
    try:
        _clear_stale(target, staging, former)
        if target.exists() and not overwrite:
            raise ConversionError(
                "an existing directory is not written over",
                seen=target,
                fix="give a path that does not exist yet, or --overwrite true",
            )
        staging.mkdir(parents=True)
        lock = _lock(staging)
        yield staging
        (staging / _LOCK).unlink()
        flush_tree(staging)
        if target.exists():
            target.rename(former)
        staging.rename(target)
        flush(target.parent)
    except BaseException as error:
        if lock is not None:
            shutil.rmtree(staging, ignore_errors=True)
        if former.exists() and not target.exists():
            former.rename(target)
        if isinstance(error, OSError):
            raise ConversionError(
                "the output must be writable and have room", seen=error, fix="give another path, or free some space"
            ) from error
        raise
    finally:
        if lock is not None:
            os.close(lock)
    shutil.rmtree(former, ignore_errors=True)


def staging_path(target: Path) -> Path:
    """Where `staged_directory` writes before the directory gets its name."""
    return target.with_name(f".{target.name}.new")


def _clear_stale(target: Path, staging: Path, former: Path) -> None:
    """Undo what a killed process left: its unfinished directory goes, a directory that it had moved away comes back."""
    if staging.exists():
        lock = _lock(staging)
        if lock is None:
            raise ConversionError(
                "two processes cannot write one directory",
                seen=f"another one is writing {staging}",
                fix="wait for it, or give another path",
            )
        shutil.rmtree(staging)
        os.close(lock)
    if former.exists() and not target.exists():
        former.rename(target)
    elif former.exists():
        shutil.rmtree(former)


def _lock(staging: Path) -> int | None:
    """Take the lock of a staging directory: a file descriptor that holds it, or None while another process does.

    A file system without locks gives no protection against a second writer, but all the rest works.
    """
    descriptor = os.open(staging / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(descriptor)
            return None
    return descriptor


def flush(path: Path) -> None:
    """Wait until the disk holds a file, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(directory: Path) -> None:
    """Wait until the disk holds every file of a tree, and their names."""
    for root, _, files in os.walk(directory):
        for name in files:
            flush(Path(root, name))
        flush(Path(root))


def check_space(target: Path, nbytes: int) -> None:
    """Refuse a job that the disk has no room for, before its first byte.

    Args:
        target: the directory to be written.
        nbytes: bytes of its weights.

    Raises:
        ConversionError: less is free.
    """
    place = target.absolute().parent
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < nbytes:
        raise ConversionError(
            "the disk must have room for the result",
            seen=f"{free:,} bytes free in {place}, {nbytes:,} needed",
            fix="free some space, or give another path",
        )
