"""Every setting of a run as frozen dataclasses: from flags and YAML, and back to YAML. Imports no torch."""

from mcore_qwen3.config.checks import decay_iters, warmup_iters
from mcore_qwen3.config.effects import Facts, flags_without_effect
from mcore_qwen3.config.flags import Flag
from mcore_qwen3.config.parser import ParsedRun, parse_args
from mcore_qwen3.config.run import RunConfig, iter_flags, to_flat_dict, to_yaml, with_values

__all__ = [
    "Facts",
    "Flag",
    "ParsedRun",
    "RunConfig",
    "decay_iters",
    "flags_without_effect",
    "iter_flags",
    "parse_args",
    "to_flat_dict",
    "to_yaml",
    "warmup_iters",
    "with_values",
]
