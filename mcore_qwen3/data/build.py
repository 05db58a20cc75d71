"""What `prepare` does when there is no cache folder yet: read, encode, choose, split, pack, write."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mcore_qwen3.data.cache import write_places, write_rows, write_samples
from mcore_qwen3.data.forms import Conversation, FileRows, Item, read_conversations, read_documents
from mcore_qwen3.data.mix import chosen_below, interleave, with_copies
from mcore_qwen3.data.order import permutation
from mcore_qwen3.data.pack import PACKERS, one_a_row
from mcore_qwen3.data.request import TRAIN, VALIDATION, PrepareRequest, SplitInfo, rounded_up
from mcore_qwen3.data.rows import DataFile, Row, read_rows
from mcore_qwen3.data.sources import LOCAL, Source
from mcore_qwen3.data.tally import Tally, counted
from mcore_qwen3.errors import DataError

if TYPE_CHECKING:
    from mcore_qwen3.data.encode import Encoded, Encoder

RAW_TEXT_RULE = "trained tokens: every token of the raw text and the end-of-text token behind it; no chat template"
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Read:
    """A source whose rows were read: `rows` are one a file (none where it is ready-made), `usable` over all files."""

    source: Source
    rows: list[FileRows]
    usable: int


@dataclass(slots=True)
class _Samples:
    """The samples of one source, encoded, and for people its lines and table."""

    read: _Read
    encoded: list[Encoded]
    lines: list[str]
    table: list[dict[str, Any]]

    @property
    def number(self) -> int:
        return sum(len(piece) for part in self.encoded for piece in part.lengths)


def build(folder: Path, request: PrepareRequest, sources: dict[str, list[Source]]) -> dict[str, Any]:
    """Fill the cache folder; returns the manifest. All files are read before the tokenizer is imported.

    Raises:
        DataError: as `prepare` says.
    """
    read = _read_all(request, sources)
    from mcore_qwen3.data.encode import CodecSettings, Encoder, LengthRule

    rule = LengthRule(request.max_length, request.truncation_strategy)
    settings = CodecSettings(request.tokenizer_dir, None if request.raw_text else request.rule)
    with Encoder(settings, rule, request.dataset_num_proc) as encoder:
        samples = {name: [_encode(request, encoder, one) for one in read[name]] for name in read}
        pad_token_id = encoder.pad_token_id
    for name, of in samples.items():
        _check_any(name, of)
    encoded = [part for of in samples.values() for one in of for part in one.encoded]
    ids = [piece for part in encoded for piece in part.ids]
    lengths = np.concatenate([piece for part in encoded for piece in part.lengths])
    write_samples(folder, ids, (piece for part in encoded for piece in part.mask), [lengths])
    write_places(folder, (place for part in encoded for place in part.places))
    trained = np.load(folder / "trained.npy")
    report = [line for of in samples.values() for one in of for line in one.lines]
    splits: dict[str, Any] = {TRAIN: None, VALIDATION: None}
    for name, members in _members(request, samples).items():
        splits[name], line = _write_split(folder, request, name, members, lengths, trained)
        report.append(line)
    return {
        **splits,
        "packing": request.packing,
        "max_length": request.max_length,
        "row_multiple": request.row_multiple,
        "sample_multiple": request.sample_multiple,
        "pad_token_id": pad_token_id,
        "dataset_samples": [one.number for one in samples[TRAIN]],
        "largest_token_id": int(max(piece.max() for piece in ids if len(piece))),
        "table": [entry for of in samples.values() for one in of for entry in one.table],
        "report": [*report, RAW_TEXT_RULE if request.raw_text else request.rule.sentence()],
    }


def _read_all(request: PrepareRequest, sources: dict[str, list[Source]]) -> dict[str, list[_Read]]:
    used: set[str] = set()
    read = {name: [_read(request, source, used) for source in of] for name, of in sources.items()}
    missing = sorted(set(request.columns) - used)
    if missing:
        raise DataError("columns renames columns that the data has", seen=f"none called {', '.join(missing)}")
    return read


def _read(request: PrepareRequest, source: Source, used: set[str]) -> _Read:
    if source.indexed:
        if not request.raw_text:
            raise DataError("ready-made token ids (.bin and .idx) are for megatron pt", seen=source.name)
        return _Read(source, [], 0)
    found = []
    for file in source.files:
        rows = [Row(row.place, _renamed(row.fields, request, used)) for row in read_rows(file)]
        found.append((read_documents if request.raw_text else read_conversations)(file.name, rows))
        _stop_if_strict(request, file, found[-1].dropped)
    usable = sum(len(one.items) for one in found)
    if source.number is not None and source.number < usable:
        found = _some_of(found, chosen_below(usable, source.number, request.seed, source.name))
    return _Read(source, found, usable)


def _renamed(fields: dict[str, Any], request: PrepareRequest, used: set[str]) -> dict[str, Any]:
    if not request.columns:
        return fields
    hit = {old: new for old, new in request.columns.items() if old in fields}
    used.update(hit)
    kept = {name: value for name, value in fields.items() if name not in hit}
    return kept | {new: fields[old] for old, new in hit.items()}


def _some_of(files: Sequence[FileRows], chosen: np.ndarray) -> list[FileRows]:
    """The files with only those usable rows that `chosen` (numbered over all files, in order) names."""
    left, start = [], 0
    for one in files:
        end = start + len(one.items)
        mine = chosen[(chosen >= start) & (chosen < end)] - start
        left.append(dataclasses.replace(one, items=[one.items[index] for index in mine.tolist()]))
        start = end
    return left


def _encode(request: PrepareRequest, encoder: Encoder, read: _Read) -> _Samples:
    """Encode the files of one source."""
    samples = _Samples(read, [], [], [])
    if read.source.indexed:
        from mcore_qwen3.data.indexed import read_documents as read_indexed  # imports megatron

        encoded, documents = read_indexed(read.source.files[0].path, encoder.rule)
        samples.read = dataclasses.replace(read, usable=documents)
        _describe(samples, read.source.name, "indexed (.bin, .idx)", documents, documents, [encoded.dropped], encoded)
        return samples
    for file, rows in zip(read.source.files, read.rows, strict=True):
        _LOGGER.info("%s: encoding %s", file.name, counted(len(rows.items), "row"))
        items, notes = _filled(request, rows.items)
        if not encoder.writes_reasoning and request.rule.enable_thinking:
            notes += _lost_reasoning(items)
        encoded = encoder.encode(items)
        _stop_if_strict(request, file, encoded.dropped)
        _describe(samples, file.name, rows.form, rows.rows, len(items), [rows.dropped, encoded.dropped], encoded)
        samples.lines += notes
    return samples


def _filled(request: PrepareRequest, items: list[Item]) -> tuple[list[Item], list[str]]:
    """The rows with their placeholders filled in, and a line for placeholders that stay open."""
    filled: list[Item] = []
    missing: set[str] = set()
    number = 0
    for item in items:
        if isinstance(item, Conversation):
            places = request.identity.open_places(item)
            missing.update(places)
            number += bool(places)
            item = request.identity.fill(item)
        filled.append(item)
    if not missing:
        return filled, []
    flags = " and ".join(sorted(missing))
    return filled, [f"  {counted(number, 'row')} with placeholders that stay as they are: {flags} not given"]


def _lost_reasoning(items: Sequence[Item]) -> list[str]:
    """A line for rows with `reasoning_content`, for a chat template that does not write it."""
    number = sum(
        isinstance(item, Conversation) and any("reasoning_content" in message for message in item.messages)
        for item in items
    )
    return [f"  {counted(number, 'row')} with reasoning_content, which this chat template leaves out"] if number else []


def _describe(
    samples: _Samples, name: str, form: str, rows: int, items: int, dropped: list[Tally], encoded: Encoded
) -> None:
    """Append a file's samples, its report line and its table entry."""
    kept = items - dropped[-1].total
    source = samples.read.source
    origin = "" if source.origin == LOCAL else f" from {source.origin}"
    line = f"{name}{origin}: form {form}, {counted(rows, 'row')}, {kept:,} kept"
    if encoded.cut:
        line += f" ({encoded.cut:,} of them cut to max_length)"
    if source.number is not None:
        line += f" (#{source.number:,} of the source's {samples.read.usable:,} usable rows)"
    samples.encoded.append(encoded)
    samples.lines.append("; ".join([line, *(f"dropped {one}" for one in dropped if one.total)]))
    reasons = [entry for one in dropped for entry in one.entries()]
    samples.table.append(
        {"name": name, "form": form, "origin": source.origin, "rows": rows, "kept": kept, "cut": encoded.cut}
        | {"dropped": reasons}
    )


def _stop_if_strict(request: PrepareRequest, file: DataFile, dropped: Tally) -> None:
    if request.strict and dropped.total:
        raise DataError("with --strict true every row is used", seen=f"{file.name}: {dropped}", fix="mend those rows")


def _check_any(name: str, samples: Sequence[_Samples]) -> None:
    if samples and not any(one.number for one in samples):
        raise DataError(
            f"the {name} data has at least one trained token",
            seen="; ".join(line for one in samples for line in one.lines),
            fix="--max_length, --truncation_strategy, or the data",
        )


def _members(request: PrepareRequest, samples: dict[str, list[_Samples]]) -> dict[str, np.ndarray]:
    """Which samples (numbered over all files, training files first) each split holds, in data order.

    A validation file is never split and makes `split_dataset_ratio` void. Else round(ratio * samples) samples, at
    least 1, go to validation, and none of their copies is trained on.

    Raises:
        DataError: the ratio leaves nothing to train on.
    """
    start, parts = 0, {}
    for name, of in samples.items():
        parts[name] = [
            _source_members(request, one, start + before) for one, before in zip(of, _starts(of), strict=True)
        ]
        start += sum(one.number for one in of)
    shares = request.interleave_prob
    train = interleave(parts[TRAIN], shares, request.seed) if shares else np.concatenate(parts[TRAIN])
    if parts[VALIDATION]:
        return {TRAIN: train, VALIDATION: np.concatenate(parts[VALIDATION])}
    if not request.split_dataset_ratio:
        return {TRAIN: train}
    numbers = np.unique(train)
    taken = max(1, round(request.split_dataset_ratio * len(numbers)))
    if taken >= len(numbers):
        raise DataError(
            "split_dataset_ratio leaves samples to train on",
            seen=f"{request.split_dataset_ratio} of {counted(len(numbers), 'sample')}",
            fix="a smaller ratio, or more data",
        )
    chosen = np.sort(numbers[permutation(len(numbers), request.seed, "split")[:taken]])
    return {TRAIN: train[~np.isin(train, chosen)], VALIDATION: chosen}


def _starts(of: Sequence[_Samples]) -> list[int]:
    return [0, *np.cumsum([one.number for one in of]).tolist()][: len(of)]


def _source_members(request: PrepareRequest, samples: _Samples, start: int) -> np.ndarray:
    wanted, usable = samples.read.source.number, samples.read.usable
    if wanted is None or (wanted <= usable and not samples.read.source.indexed):
        return np.arange(start, start + samples.number)
    if wanted < usable:  # ready-made samples are not chosen before they are read
        return start + chosen_below(samples.number, wanted, request.seed, samples.read.source.name)
    return start + with_copies(samples.number, usable, wanted, request.seed, samples.read.source.name)


def _write_split(
    folder: Path, request: PrepareRequest, name: str, members: np.ndarray, lengths: np.ndarray, trained: np.ndarray
) -> tuple[dict[str, Any], str]:
    """Form the rows of a split and write them: its SplitInfo as a dict, and its report line."""
    number = len(members)
    if request.packing:
        # In units of the padded sample, so that a row never overflows once its samples are padded.
        padded = rounded_up(lengths[members], request.sample_multiple)
        capacity = rounded_up(request.max_length, request.sample_multiple)
        order, starts = PACKERS[request.packing_strategy](padded, capacity)
    else:
        order, starts = one_a_row(number)
    write_rows(folder, name, members[order], starts)
    info = SplitInfo(
        name, number, len(starts) - 1, int(lengths[members].sum()), int(trained[members].sum(dtype=np.int64))
    )
    share = 100 * info.trained_tokens / info.tokens
    line = f"{name}: {counted(number, 'sample')}, {info.tokens:,} tokens, {share:.1f} % trained, "
    if request.packing:
        fill = 100 * info.tokens / (info.rows * request.row_length)
        line += f"{counted(info.rows, 'pack')} of {request.row_length:,} tokens, {fill:.1f} % full"
    else:
        line += f"not packed, longest {int(lengths[members].max()):,} tokens"
    return dataclasses.asdict(info), line
