"""On what the run runs, and whether it runs at all."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_qwen3.config.flags import flag


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchFlags:
    """Start: on what the run runs, and whether it runs at all."""

    device: str = flag("auto", "auto: cuda where a GPU is found, else cpu", choices=("auto", "cpu", "cuda"))
    dry_run: bool = flag(False, "print the resolved plan and stop")
