"""The script ``convert``, which is ``megatron convert``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mcore_qwen3.cli.main import dispatch

CONVERSIONS = {
    "hf2mcore": ("mcore_qwen3.cli.convert_hf2mcore", "Hugging Face -> Megatron torch_dist"),
    "mcore2hf": ("mcore_qwen3.cli.convert_mcore2hf", "Megatron torch_dist -> Hugging Face"),
    "verify": ("mcore_qwen3.cli.convert_verify", "compare two checkpoints bit for bit"),
}


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name); returns the exit code."""
    return dispatch("convert", CONVERSIONS, list(sys.argv[1:] if argv is None else argv))
