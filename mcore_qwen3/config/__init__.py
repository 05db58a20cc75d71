"""Every setting of a run as frozen dataclasses: from flags and YAML, and back to YAML. Imports no torch."""

from mcore_qwen3.config.checks import check_schedule, decay_iters, greater_is_better, warmup_iters
from mcore_qwen3.config.commands import (
    COMPARE,
    DATA,
    DOCTOR,
    EXPORT,
    HF2MCORE,
    MCORE2HF,
    PLAN,
    REPORT,
    SUBMIT,
    TRAINING,
    VERIFY,
    ParsedRun,
    find_command,
    parse_args,
)
from mcore_qwen3.config.compare import CompareConfig, compared_run, idle_flags
from mcore_qwen3.config.convert import Hf2McoreConfig, Mcore2HfConfig, VerifyConfig, shard_bytes
from mcore_qwen3.config.data import DataFlags, renamed_columns
from mcore_qwen3.config.doctor import DoctorConfig
from mcore_qwen3.config.effects import Facts, flags_without_effect
from mcore_qwen3.config.flags import Flag
from mcore_qwen3.config.inspect import InspectConfig
from mcore_qwen3.config.numerics import needs_transformer_engine
from mcore_qwen3.config.optim import freezes, learning_rate_factors
from mcore_qwen3.config.parser import Command, Parsed, parse_command
from mcore_qwen3.config.plan import PlanConfig
from mcore_qwen3.config.run import RunConfig, iter_flags, to_flat_dict, to_yaml, with_values
from mcore_qwen3.config.submit import SubmitConfig, ranks_per_node, signal_seconds, time_minutes

__all__ = [
    "COMPARE",
    "DATA",
    "DOCTOR",
    "EXPORT",
    "HF2MCORE",
    "MCORE2HF",
    "PLAN",
    "REPORT",
    "SUBMIT",
    "TRAINING",
    "VERIFY",
    "Command",
    "CompareConfig",
    "DataFlags",
    "DoctorConfig",
    "Facts",
    "Flag",
    "Hf2McoreConfig",
    "InspectConfig",
    "Mcore2HfConfig",
    "Parsed",
    "ParsedRun",
    "PlanConfig",
    "RunConfig",
    "SubmitConfig",
    "VerifyConfig",
    "check_schedule",
    "compared_run",
    "decay_iters",
    "find_command",
    "flags_without_effect",
    "freezes",
    "greater_is_better",
    "idle_flags",
    "iter_flags",
    "learning_rate_factors",
    "needs_transformer_engine",
    "parse_args",
    "parse_command",
    "ranks_per_node",
    "renamed_columns",
    "shard_bytes",
    "signal_seconds",
    "time_minutes",
    "to_flat_dict",
    "to_yaml",
    "warmup_iters",
    "with_values",
]
