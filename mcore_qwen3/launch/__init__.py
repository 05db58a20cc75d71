"""From environment variables to supervised rank processes. Standard library only: no torch is imported here."""

from __future__ import annotations

from mcore_qwen3.launch.environment import LaunchPlan, count_gpus, is_rank, resolve_environment
from mcore_qwen3.launch.rank_report import on_stop_request, rank_main
from mcore_qwen3.launch.supervisor import run
from mcore_qwen3.launch.torchrun import torchrun_command

__all__ = [
    "LaunchPlan",
    "count_gpus",
    "is_rank",
    "on_stop_request",
    "rank_main",
    "resolve_environment",
    "run",
    "torchrun_command",
]
