"""One value as the user wrote it -> the typed value of a flag, or one clear error."""

from __future__ import annotations

import math
from typing import Any

from mcore_qwen3.config.flags import Flag
from mcore_qwen3.errors import ConfigError

_BOOLEANS = {"true": True, "false": False}


def convert(flag: Flag, raw: Any, where: str) -> Any:
    """The value of ``flag``, from a command line word (a text, or a list of texts) or from what YAML parsed.

    Texts are read alike in both: YAML 1.1 takes 1e-5 (no dot) for a text. ``where`` names the flag as the user
    spelled it. Raises ConfigError that names the flag, the value and the expected form.
    """
    if flag.type == "list":
        items = [raw] if isinstance(raw, str) else raw
        if isinstance(items, list) and all(_is_item(flag, item) for item in items):
            return tuple(items)
        raise _wrong(flag, raw, where)
    if flag.type in ("ints", "floats"):
        return _numbers(flag, raw, where)
    value = _from_text(flag, raw, where) if isinstance(raw, str) else _from_yaml(flag, raw, where)
    if isinstance(value, int | float) and not isinstance(value, bool) and not _in_limits(flag, value):
        raise _wrong(flag, raw, where)
    return value


def _is_item(flag: Flag, item: object) -> bool:
    return isinstance(item, str) and item != "" and (not flag.choices or item in flag.choices)


def _numbers(flag: Flag, raw: Any, where: str) -> tuple[int | float, ...]:
    items = raw if isinstance(raw, list) else [raw]
    try:
        numbers = tuple(int(str(item)) if flag.type == "ints" else float(item) for item in items)
    except (TypeError, ValueError):
        raise _wrong(flag, raw, where) from None
    if not all(_in_limits(flag, number) for number in numbers):
        raise _wrong(flag, raw, where)
    return numbers


def _from_text(flag: Flag, text: str, where: str) -> Any:
    if flag.type == "str" and text and (not flag.choices or text in flag.choices):
        return text
    if flag.type == "bool" and text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    if flag.type in ("int", "float"):
        try:
            return int(text) if flag.type == "int" else float(text)
        except ValueError:
            pass
    raise _wrong(flag, text, where)


def _from_yaml(flag: Flag, value: Any, where: str) -> Any:
    if flag.type == "bool" and isinstance(value, bool):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        if flag.type == "float":
            return float(value)
        if flag.type == "int" and isinstance(value, int):
            return value
        if flag.type == "str" and not flag.choices:
            return str(value)  # a folder named 42
    raise _wrong(flag, value, where)


def _in_limits(flag: Flag, number: int | float) -> bool:
    return (
        math.isfinite(number)
        and (flag.at_least is None or number >= flag.at_least)
        and (flag.at_most is None or number <= flag.at_most)
        and (flag.below is None or number < flag.below)
    )


def _wrong(flag: Flag, value: object, where: str) -> ConfigError:
    return ConfigError(f"{where} needs {flag.form}", seen=repr(value))
