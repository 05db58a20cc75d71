"""Counts of rows that cannot be used, by reason, each with the first place where it was seen."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 row`, `1,200 rows`: a number with its noun; the plural is formed with s."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


class Tally:
    """Dropped rows by reason. A reason is worded to follow "N rows", such as "without trained tokens"."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._first: dict[str, str] = {}

    def add(self, reason: str, place: str) -> None:
        """Count one row that was dropped for `reason` at `place` (file:line)."""
        self._counts[reason] = self._counts.get(reason, 0) + 1
        self._first.setdefault(reason, place)

    @property
    def total(self) -> int:
        return sum(self._counts.values())

    def entries(self) -> list[dict[str, str | int]]:
        """The same as data: reason, rows, and the first place of each, the most frequent first."""
        by_count = sorted(self._counts.items(), key=lambda item: -item[1])
        return [{"reason": reason, "rows": n, "first": self._first[reason]} for reason, n in by_count]

    def __str__(self) -> str:
        """For example "2 rows without messages (first at a.jsonl:3), 1 row without trained tokens (...)"."""
        return ", ".join(
            f"{counted(int(one['rows']), 'row')} {one['reason']} (first at {one['first']})" for one in self.entries()
        )
