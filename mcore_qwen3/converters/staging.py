"""Directories that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mcore_qwen3.errors import ConversionError


@contextmanager
def staged_directory(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty sibling directory to write into; when the block ends well it is flushed and becomes `target`.

    When the block fails, the sibling is removed and nothing else has changed.

    Args:
        target: the final path. Parents are made.
        overwrite: put the new directory in place of an existing one, which is removed last.

    Raises:
        ConversionError: the target exists (and `overwrite` is false), or the disk is full or not writable.
    """
    if target.exists() and not overwrite:
        raise ConversionError(
            "an existing directory is not written over", seen=target, fix="give a path that does not exist yet"
        )
    mark = uuid.uuid4().hex[:8]
    staging, former = (target.with_name(f".{target.name}.{mark}.{kind}") for kind in ("new", "old"))
    try:
        staging.mkdir(parents=True)
        yield staging
        flush_tree(staging)
        if target.exists():
            target.rename(former)
        staging.rename(target)
        flush(target.parent)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if former.exists() and not target.exists():
            former.rename(target)
        if isinstance(error, OSError):
            raise ConversionError(
                "the output must be writable and have room", seen=error, fix="give another path, or free some space"
            ) from error
        raise
    shutil.rmtree(former, ignore_errors=True)


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
