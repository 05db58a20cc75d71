"""What a user can mend, said in one line: the rule that was broken, the value seen, what to change."""

from __future__ import annotations


class McoreQwen3Error(Exception):
    """Base of every error that a user can mend.

    Args:
        rule: the rule that was broken, as a sentence without a final stop.
        seen: the value or place that broke it.
        fix: what to change.
    """

    def __init__(self, rule: str, *, seen: object = None, fix: str | None = None) -> None:
        self.rule, self.seen, self.fix = rule, seen, fix
        parts = [rule]
        if seen is not None:
            parts.append(f"seen: {seen}")
        if fix is not None:
            parts.append(f"change: {fix}")
        super().__init__("; ".join(parts))


class ConfigError(McoreQwen3Error):
    """A flag, a configuration file, or a combination of them that cannot run."""


class DataError(McoreQwen3Error):
    """A data file or row that cannot be used."""


class ConversionError(McoreQwen3Error):
    """A checkpoint that cannot be read, written or matched to the model."""


class LaunchError(McoreQwen3Error):
    """The environment of the processes (nodes, ranks, addresses, signals) does not fit."""
