"""Whether what a run is to be tracked with is there. No torch."""

from __future__ import annotations

import importlib.util

from mcore_qwen3.config import RunConfig
from mcore_qwen3.errors import ConfigError


def check_trackers(config: RunConfig, world_size: int) -> None:
    """Refuse a tracker whose package is missing, and traces of ranks that there are not.

    Raises:
        ConfigError: names them.
    """
    missing = [name for name in config.tracking.report_to if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            "what report_to names must be installed",
            seen=f"no package {', '.join(missing)}",
            fix=f"pip install {' '.join(missing)}, or a --report_to without",
        )
    if config.tracking.profile_step_start is not None:
        beyond = [rank for rank in config.tracking.profile_ranks if rank >= world_size]
        if beyond:
            raise ConfigError(
                "profile_ranks are ranks of the run",
                seen=f"--profile_ranks {' '.join(map(str, beyond))}, {world_size} ranks",
                fix=f"0 to {world_size - 1}",
            )
