"""The doctor's part in a rank, with a fault planted in one of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcore_qwen3.cli import doctor_rank
from mcore_qwen3.cli.doctor_checks import Finding
from mcore_qwen3.config import DOCTOR, parse_command
from mcore_qwen3.runtime.device import choose_device


def collectives(broken: str | None = None) -> list[Finding]:
    """What is found where rank 1's operation of this name gives it other numbers."""
    real = getattr(dist, broken or "all_reduce")

    def lie(output: torch.Tensor | list[torch.Tensor], *args: object, **more: object) -> None:
        real(output, *args, **more)
        (output[0] if isinstance(output, list) else output).add_(1)

    with pytest.MonkeyPatch.context() as patch:
        if broken and dist.get_rank() == 1:
            patch.setattr(dist, broken, lie)
        return doctor_rank.collectives(choose_device("cpu"))


def shared(folders: list[str]) -> list[Finding]:
    """What is found where each rank is on a node of its own and has this --save."""
    rank = dist.get_rank()
    config = parse_command(["--save", str(Path(folders[rank]))], DOCTOR).config
    return doctor_rank._shared(config, doctor_rank.gathered({"place": f"node {rank}"}))
