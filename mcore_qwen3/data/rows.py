"""Data files -> rows. Nothing slow is imported: a bad file is refused at once."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_qwen3.errors import DataError


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file that exists. `name` is what the user wrote; messages use it."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file, and where it is: `file:line`, or `file:row N` (from 1) where the form has no lines."""

    place: str
    fields: dict[str, Any]


def read_rows(file: DataFile) -> list[Row]:
    """All rows of `file`, in order.

    Raises:
        DataError: the file has no rows, or a row is not a JSON object (the place is named).
    """
    suffix = file.path.suffix.lower()
    if suffix == ".json" and _starts_with_bracket(file.path):
        rows = list(_array_rows(file))
    else:
        rows = list(_READERS[suffix](file))
    if not rows:
        raise DataError("a data file has at least one row", seen=f"{file.name} has none", fix="remove it or fill it")
    return rows


def _starts_with_bracket(path: Path) -> bool:
    with path.open("rb") as handle:
        return handle.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _line_rows(file: DataFile) -> Iterator[Row]:
    with file.path.open("rb") as handle:
        for number, line in enumerate(handle, start=1):
            if not line.strip():
                continue
            place = f"{file.name}:{number}"
            try:
                value = json.loads(line)
            except ValueError as error:  # no JSON, or no UTF-8
                shown = line[:60].decode("utf-8", errors="replace").strip()
                raise DataError(
                    "each line of a data file is one JSON object",
                    seen=f"{place}: {error} in {shown!r}",
                    fix="mend or remove that line",
                ) from None
            yield _row(place, value)


def _array_rows(file: DataFile) -> Iterator[Row]:
    content = file.path.read_bytes()
    try:
        values = json.loads(content)
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError):
            line = error.lineno
        else:  # bytes that are no UTF-8
            line = content.count(b"\n", 0, getattr(error, "start", 0)) + 1
        raise DataError(
            "a .json file is a list of objects, or one object a line",
            seen=f"{file.name}:{line}: {error}",
            fix="mend the file there",
        ) from None
    for number, value in enumerate(values, start=1):
        yield _row(f"{file.name}:row {number}", value)


def _text_rows(file: DataFile) -> Iterator[Row]:
    """Each line that is not blank is a row with the column text."""
    with file.path.open("rb") as handle:
        for number, line in enumerate(handle, start=1):
            place = f"{file.name}:{number}"
            try:
                content = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise DataError("a .txt file is UTF-8", seen=f"{place}: {error}", fix="convert it to UTF-8") from None
            if content.strip():
                yield Row(place, {"text": content})


def _csv_rows(file: DataFile) -> Iterator[Row]:
    """Columns by the first line; an empty field is a missing one. The place is the line where a row ends."""
    csv.field_size_limit(1 << 30)  # the default refuses fields of more than 128 KB
    with file.path.open(encoding="utf-8-sig", newline="") as handle:
        reader = csv.DictReader(handle, strict=True)
        try:
            for fields in reader:
                place = f"{file.name}:{reader.line_num}"
                if None in fields:
                    raise DataError(
                        "a .csv row has no more fields than the first line has names",
                        seen=place,
                        fix='put fields that hold commas or line breaks in "quotes"',
                    )
                yield Row(place, {name: value if value != "" else None for name, value in fields.items()})
        except (csv.Error, UnicodeDecodeError) as error:
            seen = f"{file.name}:{reader.line_num + 1}: {error}"
            raise DataError("a .csv file is UTF-8 with quoted fields", seen=seen, fix="mend the file there") from None


def _parquet_rows(file: DataFile) -> Iterator[Row]:
    import pyarrow.parquet

    return _arrow_batches(file, lambda: pyarrow.parquet.ParquetFile(file.path).iter_batches())


def _arrow_rows(file: DataFile) -> Iterator[Row]:
    import pyarrow

    def batches() -> Iterator[Any]:
        with pyarrow.memory_map(str(file.path)) as mapped:
            try:
                yield from pyarrow.ipc.open_stream(mapped)  # what the `datasets` library writes
            except pyarrow.ArrowInvalid:
                reader = pyarrow.ipc.open_file(mapped)  # Arrow's file format (Feather)
                yield from (reader.get_batch(number) for number in range(reader.num_record_batches))

    return _arrow_batches(file, batches)


def _arrow_batches(file: DataFile, batches: Callable[[], Iterator[Any]]) -> Iterator[Row]:
    import pyarrow

    number = 0
    try:
        for batch in batches():
            for value in batch.to_pylist():
                number += 1
                yield Row(f"{file.name}:row {number}", value)
    except pyarrow.ArrowException as error:
        rule = f"a {file.path.suffix} file can be read by pyarrow"
        raise DataError(rule, seen=f"{file.name}: {error}", fix="write the file again") from None


def _row(place: str, value: object) -> Row:
    if not isinstance(value, dict):
        raise DataError(
            "a row is a JSON object", seen=f"{place}: a {type(value).__name__}", fix="make it {...} or remove it"
        )
    return Row(place, value)


_READERS: dict[str, Callable[[DataFile], Iterator[Row]]] = {
    ".jsonl": _line_rows,
    ".json": _line_rows,
    ".txt": _text_rows,
    ".csv": _csv_rows,
    ".parquet": _parquet_rows,
    ".arrow": _arrow_rows,
}
SUFFIXES = tuple(_READERS)
