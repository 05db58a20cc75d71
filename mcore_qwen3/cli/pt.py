"""``megatron pt``: continued pre-training on raw text; the flow of ``sft``, another kind of rows."""

from __future__ import annotations

from mcore_qwen3.cli import sft


def run(argv: list[str]) -> int:
    """The words after ``megatron pt`` -> exit code."""
    return sft.run(argv, "pt")
