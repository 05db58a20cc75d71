"""``megatron export SRC DST``: the same code as ``convert mcore2hf``."""

from __future__ import annotations

from mcore_qwen3.cli import convert_mcore2hf
from mcore_qwen3.config import EXPORT


def run(argv: list[str]) -> int:
    """The words after ``megatron export`` -> exit code."""
    return convert_mcore2hf.run(argv, EXPORT)
