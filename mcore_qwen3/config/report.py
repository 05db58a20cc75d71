"""Settings of `megatron report`."""

from __future__ import annotations

from dataclasses import dataclass, field

from mcore_qwen3.config.flags import flag
from mcore_qwen3.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class PageFlags:
    """Page: which runs it shows, and where it goes."""

    runs: tuple[str, ...] = flag((), "save folders or their train_log.jsonl; the words without a flag")
    output: str = flag("report.html", "file to write; an older one is replaced")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportConfig:
    """Settings of `megatron report`."""

    page: PageFlags = field(default_factory=PageFlags)


def check_report(config: ReportConfig) -> None:
    """Raise ConfigError where no run is named."""
    if not config.page.runs:
        raise ConfigError("megatron report needs at least one run", fix="megatron report SAVE_FOLDER [SAVE_FOLDER ...]")
