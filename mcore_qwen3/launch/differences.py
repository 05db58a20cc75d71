"""A table of what should be the same everywhere and is not."""

from __future__ import annotations

from collections.abc import Mapping

_MOST_ROWS = 20
_MOST_LETTERS = 60  # of a value


def table_of_differences(facts: Mapping[str, Mapping[str, str]]) -> str:
    """Who differs in what; "" where all agree.

    Args:
        facts: place, such as `node 1 on gpu-7`, -> what is true there, by name. A name that a place lacks counts as `-`.

    Returns:
        A head with the places, those that agree together, then one line for each name in which they differ.
    """
    names = dict.fromkeys(name for there in facts.values() for name in there)
    differing = [name for name in names if len({there.get(name, "-") for there in facts.values()}) > 1]
    if not differing:
        return ""
    groups: dict[tuple[str, ...], list[str]] = {}
    for place, there in facts.items():
        groups.setdefault(tuple(there.get(name, "-") for name in differing), []).append(place)
    rows = [["", *(_places(places) for places in groups.values())]]
    rows += [
        [name, *(_short(values[number]) for values in groups)] for number, name in enumerate(differing[:_MOST_ROWS])
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    more = len(differing) - _MOST_ROWS
    return "\n".join(f"  {line}" for line in [*lines, *([f"and {more} more"] if more > 0 else [])])


def _places(places: list[str]) -> str:
    return ", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")


def _short(value: str) -> str:
    return value if len(value) <= _MOST_LETTERS else f"{value[: _MOST_LETTERS - 3]}..."
