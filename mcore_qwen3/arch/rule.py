"""A rule that sizes obey."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A rule, whether it holds, and the sizes that a user would change to mend it (names of `Degrees`)."""

    text: str
    seen: str
    holds: bool
    knobs: tuple[str, ...] = ()
