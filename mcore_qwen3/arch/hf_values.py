"""One value of a `config.json`: its type, and the error that names it."""

from __future__ import annotations

from typing import Any

from mcore_qwen3.errors import ConfigError

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def bad_value(source: str, key: str, value: Any, wanted: str, why: str | None = None) -> ConfigError:
    """The error for a key whose value is not supported."""
    return ConfigError(
        f"{source}: {key} must be {wanted}" + (f" ({why})" if why else ""),
        seen=f"{key} = {value!r}",
        fix="use a checkpoint that fits, or correct the key if it does not describe the weights",
    )


def typed(value: Any, kind: type, key: str, source: str) -> Any:
    """The value as int, float, bool or str.

    Raises:
        ConfigError: it is of another type.
    """
    # bool is a subclass of int, but true is no layer count; a whole number is a good float.
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise bad_value(source, key, value, _WORDS[kind])
    return value
