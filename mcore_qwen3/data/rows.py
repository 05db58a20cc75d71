"""Local data files -> rows. Nothing slow is imported: a bad file is refused at once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_qwen3.errors import DataError

RULE = "a dataset is a local .jsonl, .json or .parquet file"
SUFFIXES = (".jsonl", ".json", ".parquet")


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


def local_files(names: Sequence[str]) -> list[DataFile]:
    """The files that `names` name, in order.

    Raises:
        DataError: a name is no local file, or its suffix is not one that can be read.
    """
    files = []
    for name in names:
        path = Path(name).expanduser()
        if path.is_dir():
            raise DataError(RULE, seen=f"{name} is a folder", fix="name the files in it")
        if not path.is_file():
            raise DataError(RULE, seen=f"no file {name}", fix="correct the path, or download the dataset first")
        if path.suffix.lower() not in SUFFIXES:
            raise DataError(RULE, seen=f"{name} ends in {path.suffix!r}", fix="convert it, or rename it to what it is")
        try:
            path.open("rb").close()
        except OSError as error:
            raise DataError(RULE + " that can be read", seen=error, fix="its permissions") from None
        files.append(DataFile(name, path))
    return files


def read_rows(file: DataFile) -> list[Row]:
    """All rows of `file`, in order.

    Raises:
        DataError: the file has no rows, or a row is not a JSON object (the place is named).
    """
    suffix = file.path.suffix.lower()
    if suffix == ".parquet":
        rows = list(_parquet_rows(file))
    elif suffix == ".json" and _starts_with_bracket(file.path):
        rows = list(_array_rows(file))
    else:
        rows = list(_line_rows(file))
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


def _parquet_rows(file: DataFile) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        number = 0
        for batch in pyarrow.parquet.ParquetFile(file.path).iter_batches():
            for value in batch.to_pylist():
                number += 1
                yield Row(f"{file.name}:row {number}", value)
    except pyarrow.ArrowException as error:
        raise DataError("a .parquet file can be read by pyarrow", seen=f"{file.name}: {error}") from None


def _row(place: str, value: object) -> Row:
    if not isinstance(value, dict):
        raise DataError(
            "a row is a JSON object", seen=f"{place}: a {type(value).__name__}", fix="make it {...} or remove it"
        )
    return Row(place, value)
