"""From environment variables to supervised rank processes. Standard library only: no torch is imported here."""

from __future__ import annotations

from mcore_qwen3.launch.attempt import Limits
from mcore_qwen3.launch.environment import PLATFORMS, LaunchPlan, expected_ranks, is_rank, resolve_environment
from mcore_qwen3.launch.gpus import count_gpus
from mcore_qwen3.launch.heartbeat import Heartbeat
from mcore_qwen3.launch.rank_report import (
    SUPERVISED,
    on_stop_request,
    rank_main,
    restarted,
    started_at,
    started_now,
)
from mcore_qwen3.launch.signals import StopSignals
from mcore_qwen3.launch.supervisor import run
from mcore_qwen3.launch.torchrun import torchrun_command

__all__ = [
    "PLATFORMS",
    "SUPERVISED",
    "Heartbeat",
    "LaunchPlan",
    "Limits",
    "StopSignals",
    "count_gpus",
    "expected_ranks",
    "is_rank",
    "on_stop_request",
    "rank_main",
    "resolve_environment",
    "restarted",
    "run",
    "started_at",
    "started_now",
    "torchrun_command",
]
