"""From environment variables to supervised rank processes. Standard library only: no torch is imported here."""

from __future__ import annotations

from mcore_qwen3.launch.attempt import Limits
from mcore_qwen3.launch.check_in import Company, check_in, code_facts, decline
from mcore_qwen3.launch.differences import table_of_differences
from mcore_qwen3.launch.environment import PLATFORMS, LaunchPlan, expected_ranks, is_rank, resolve_environment
from mcore_qwen3.launch.gpus import count_gpus, visible_gpus
from mcore_qwen3.launch.heartbeat import Heartbeat
from mcore_qwen3.launch.rank_log import log_to
from mcore_qwen3.launch.rank_report import (
    EXPECTED_RANKS,
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
    "EXPECTED_RANKS",
    "PLATFORMS",
    "SUPERVISED",
    "Company",
    "Heartbeat",
    "LaunchPlan",
    "Limits",
    "StopSignals",
    "check_in",
    "code_facts",
    "count_gpus",
    "decline",
    "expected_ranks",
    "is_rank",
    "log_to",
    "on_stop_request",
    "rank_main",
    "resolve_environment",
    "restarted",
    "run",
    "started_at",
    "started_now",
    "table_of_differences",
    "torchrun_command",
    "visible_gpus",
]
