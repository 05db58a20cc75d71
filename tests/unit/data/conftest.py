"""Loading the real tokenizer takes a second, and these tests prepare data dozens of times: each file is loaded once."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3.data import template

_load = template._load_backend


@functools.cache
def _loaded(file: Path, size: int, changed_ns: int) -> Any:
    return _load(file)


@pytest.fixture(autouse=True)
def tokenizer_files_are_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process; a file that has changed is loaded again."""

    def load(file: Path) -> Any:
        stat = file.stat()
        return _loaded(file, stat.st_size, stat.st_mtime_ns)

    monkeypatch.setattr(template, "_load_backend", load)
