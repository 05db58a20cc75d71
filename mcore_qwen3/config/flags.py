"""How a dataclass field declares a flag, and how a declared flag reads back."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_KINDS = {int: "int", float: "float", bool: "bool", str: "str"}


def flag(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    at_least: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Any:
    """A dataclass field that is also a flag and a YAML key of the same name.

    Args:
        default: value when neither flag nor file sets it.
        help: one sentence for ``--help``.
        choices: the only texts allowed, alone or in a list.
        at_least, at_most, below: limits of a number, checked when it is read.
    """
    metadata = {"help": help, "choices": choices, "at_least": at_least, "at_most": at_most, "below": below}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One flag as declared. ``type`` is int, float, bool, str, list (of str), ints, or floats; ``optional`` allows None."""

    name: str
    section: str
    type: str
    optional: bool
    default: Any
    help: str
    choices: tuple[str, ...]
    at_least: float | None
    at_most: float | None
    below: float | None
    aliases: tuple[str, ...]

    @property
    def form(self) -> str:
        """The expected form in words, such as ``a whole number of at least 1``."""
        if self.choices:
            return ("one or more of " if self.type == "list" else "one of ") + ", ".join(self.choices)
        words = {
            "int": "a whole number",
            "float": "a finite number",
            "bool": "true or false",
            "str": "a text",
            "list": "one or more texts",
            "ints": "one or more whole numbers",
            "floats": "one or more finite numbers",
        }[self.type]
        limits = [
            f"{text} {limit}"
            for text, limit in (("at least", self.at_least), ("at most", self.at_most), ("below", self.below))
            if limit is not None
        ]
        apart = ", separated by spaces" if self.type in ("list", "ints", "floats") else ""
        return words + (" of " + " and ".join(limits) if limits else "") + apart


def section_flags(section: str, cls: type, aliases: dict[str, tuple[str, ...]]) -> Iterator[Flag]:
    """The flags that the dataclass ``cls`` declares with :func:`flag`, in order."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind, optional = _kind(hints[field.name])
        yield Flag(
            name=field.name,
            section=section,
            type=kind,
            optional=optional,
            default=field.default,
            aliases=aliases.get(field.name, ()),
            **field.metadata,
        )


def _kind(hint: Any) -> tuple[str, bool]:
    """(type word, may be None) of an annotation; every annotation in use is listed here."""
    if hint in _KINDS:
        return _KINDS[hint], False
    if hint == tuple[str, ...]:
        return "list", False
    if hint == tuple[int, ...]:
        return "ints", False
    if hint == tuple[float, ...]:
        return "floats", False
    if isinstance(hint, types.UnionType):
        (inner,) = [arg for arg in typing.get_args(hint) if arg is not types.NoneType]
        return _KINDS[inner], True
    raise TypeError(f"a flag cannot have the type {hint}")
