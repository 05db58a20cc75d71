"""Prepare data once: files -> cache folder of samples and rows, or the folder that an earlier call made."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mcore_qwen3.data.cache import cache_key, file_digest, open_or_build, read_manifest, write_rows, write_samples
from mcore_qwen3.data.messages import FileConversations, read_conversations
from mcore_qwen3.data.order import permutation
from mcore_qwen3.data.pack import one_a_row, pack
from mcore_qwen3.data.rows import DataFile, local_files, read_rows
from mcore_qwen3.data.tally import counted
from mcore_qwen3.data.template import TURN_END, read_chat_files
from mcore_qwen3.errors import DataError

if TYPE_CHECKING:
    from mcore_qwen3.data.encode import Encoded, Encoder

TRAIN, VALIDATION = "train", "validation"
TRAINED_RULE = (
    "trained tokens: what the chat template writes as assistant turns, think blocks (empty ones too) "
    f"and the end token {TURN_END} included"
)
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareRequest:
    """What to prepare. Fields are named as the flags are.

    `row_multiple`: every row that is given to the model is a multiple of it (1 without sequence parallel).
    `sample_multiple`: so is every sample in a row, by padding of its own (1 without context parallel).
    `seed` decides which rows `split_dataset_ratio` takes for validation, nothing else.
    """

    dataset: tuple[str, ...]
    val_dataset: tuple[str, ...] = ()
    split_dataset_ratio: float = 0.0
    max_length: int
    packing: bool = False
    truncation_strategy: str = "delete"
    dataset_num_proc: int = 1
    tokenizer_dir: Path
    cache_dir: Path
    seed: int = 42
    row_multiple: int = 1
    sample_multiple: int = 1


@dataclass(frozen=True, slots=True)
class SplitInfo:
    """The size of a split. A row is a pack, or one sample without packing; steps count rows."""

    name: str
    samples: int
    rows: int
    tokens: int
    trained_tokens: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """Prepared data: the cache folder (`data/cache.py` says what is in it) and its facts.

    `report` is for people, one line each. `largest_token_id` has to be below the model's vocabulary size.
    """

    path: Path
    train: SplitInfo
    validation: SplitInfo | None
    packing: bool
    max_length: int
    row_multiple: int
    sample_multiple: int
    pad_token_id: int
    largest_token_id: int
    report: tuple[str, ...]

    @property
    def full_row_length(self) -> int:
        """Tokens of a packed row, padding included: max_length rounded up to both multiples."""
        return _full_row_length(self.max_length, self.row_multiple, self.sample_multiple)


def prepare(request: PrepareRequest) -> Prepared:
    """Read, render, encode, mark, cut and pack the data, unless a cache folder with just this is there already.

    Several processes may call it at once: one builds, the others take what it built.

    Raises:
        DataError: a file, row form, tokenizer or template that cannot be used; no trained token in the whole data;
            a cache folder that cannot be written.
    """
    if not request.dataset:
        raise DataError("training needs data", seen="no --dataset", fix="name at least one file")
    if request.val_dataset and request.split_dataset_ratio:
        _LOGGER.info("split_dataset_ratio %s has no effect: --val_dataset is given", request.split_dataset_ratio)
    files = {TRAIN: local_files(request.dataset), VALIDATION: local_files(request.val_dataset)}
    folder, built = open_or_build(
        request.cache_dir, cache_key(_key_facts(request, files)), lambda folder: _build(folder, request, files)
    )
    prepared = load_prepared(folder)
    origin = "built now" if built else "reused"
    return dataclasses.replace(prepared, report=(*prepared.report, f"prepared data: {folder} ({origin})"))


def _full_row_length(max_length: int, row_multiple: int, sample_multiple: int) -> int:
    return _rounded_up(max_length, math.lcm(row_multiple, sample_multiple))


def _rounded_up(number: Any, multiple: int) -> Any:
    """An int, or an integer array, rounded up to a multiple."""
    return -(-number // multiple) * multiple


def load_prepared(folder: Path) -> Prepared:
    """The prepared data in `folder`, as `prepare` returned it (its `path`), without reading any data file.

    Raises:
        DataError: the folder is not complete.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise DataError("prepared data has a manifest and all its files", seen=folder, fix="prepare it again")
    facts = {key: value for key, value in manifest.items() if key != "files"}
    splits = {name: SplitInfo(**facts[name]) if facts[name] else None for name in (TRAIN, VALIDATION)}
    return Prepared(**{**facts, **splits, "path": folder, "report": tuple(facts["report"])})


def _key_facts(request: PrepareRequest, files: dict[str, list[DataFile]]) -> dict[str, Any]:
    chat = read_chat_files(request.tokenizer_dir)
    split = None
    if request.split_dataset_ratio and not request.val_dataset:
        split = [request.split_dataset_ratio, request.seed]
    return {
        "data": {name: [[file.path.suffix.lower(), file_digest(file.path)] for file in files[name]] for name in files},
        "tokenizer": file_digest(chat.tokenizer_json),
        "template": [chat.template, chat.special_tokens],
        "max_length": request.max_length,
        "truncation_strategy": request.truncation_strategy,
        "packing": request.packing,
        "row_multiple": request.row_multiple,
        "sample_multiple": request.sample_multiple,
        "split": split,
    }


def _build(folder: Path, request: PrepareRequest, files: dict[str, list[DataFile]]) -> dict[str, Any]:
    """Fill the cache folder; returns the manifest. All files are read before the tokenizer is imported."""
    sources = {name: [read_conversations(file.name, read_rows(file)) for file in files[name]] for name in files}
    from mcore_qwen3.data.encode import Encoder, LengthRule

    rule = LengthRule(request.max_length, request.truncation_strategy)
    with Encoder(request.tokenizer_dir, rule, request.dataset_num_proc) as encoder:
        report, encoded = [], []
        sizes = {}
        for name in (TRAIN, VALIDATION):
            lines, parts = _encode_files(name, encoder, files[name], sources[name])
            report += lines
            encoded += parts
            sizes[name] = sum(len(piece) for part in parts for piece in part.lengths)
        pad_token_id = encoder.pad_token_id
    ids = [piece for part in encoded for piece in part.ids]
    lengths = np.concatenate([piece for part in encoded for piece in part.lengths])
    write_samples(folder, ids, (piece for part in encoded for piece in part.mask), [lengths])
    trained = np.load(folder / "trained.npy")
    splits: dict[str, Any] = {TRAIN: None, VALIDATION: None}
    for name, members in _split(request, sizes).items():
        splits[name], line = _write_split(folder, request, name, members, lengths, trained)
        report.append(line)
    return {
        **splits,
        "packing": request.packing,
        "max_length": request.max_length,
        "row_multiple": request.row_multiple,
        "sample_multiple": request.sample_multiple,
        "pad_token_id": pad_token_id,
        "largest_token_id": int(max(piece.max() for piece in ids if len(piece))),
        "report": [*report, TRAINED_RULE],
    }


def _encode_files(
    split: str, encoder: Encoder, files: Sequence[DataFile], sources: Sequence[FileConversations]
) -> tuple[list[str], list[Encoded]]:
    """Encode the files of one split: a report line and the samples of each.

    Raises:
        DataError: none of the files gave a sample.
    """
    lines, parts = [], []
    for file, source in zip(files, sources, strict=True):
        _LOGGER.info("%s: encoding %s", file.name, counted(len(source.conversations), "conversation"))
        encoded = encoder.encode(source.conversations)
        kept = len(source.conversations) - encoded.dropped.total
        line = f"{file.name}: form {source.form}, {counted(source.rows, 'row')}, {kept:,} kept"
        if encoded.cut:
            line += f" ({encoded.cut:,} of them cut to max_length)"
        lines.append("; ".join([line, *(f"dropped {one}" for one in (source.dropped, encoded.dropped) if one.total)]))
        parts.append(encoded)
    if files and not any(len(piece) for part in parts for piece in part.lengths):
        raise DataError(
            f"the {split} data has at least one trained token",
            seen="; ".join(lines),
            fix="--max_length, --truncation_strategy, or the data",
        )
    return lines, parts


def _split(request: PrepareRequest, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Which samples (numbered over all files, training files first) each split holds, in data order.

    A validation file is never split and makes `split_dataset_ratio` void. Else round(ratio * samples) samples, at
    least 1, go to validation.

    Raises:
        DataError: the ratio leaves nothing to train on.
    """
    number = sizes[TRAIN]
    train = np.arange(number)
    if sizes[VALIDATION]:
        return {TRAIN: train, VALIDATION: np.arange(number, number + sizes[VALIDATION])}
    if not request.split_dataset_ratio:
        return {TRAIN: train}
    taken = max(1, round(request.split_dataset_ratio * number))
    if taken >= number:
        raise DataError(
            "split_dataset_ratio leaves samples to train on",
            seen=f"{request.split_dataset_ratio} of {counted(number, 'sample')}",
            fix="a smaller ratio, or more data",
        )
    shuffled = permutation(number, request.seed, "split")
    return {TRAIN: np.sort(shuffled[taken:]), VALIDATION: np.sort(shuffled[:taken])}


def _write_split(
    folder: Path, request: PrepareRequest, name: str, members: np.ndarray, lengths: np.ndarray, trained: np.ndarray
) -> tuple[dict[str, Any], str]:
    """Form the rows of a split and write them: its SplitInfo as a dict, and its report line."""
    number = len(members)
    if request.packing:
        # In units of the padded sample, so that a row never overflows once its samples are padded.
        padded = _rounded_up(lengths[members], request.sample_multiple)
        order, starts = pack(padded, _rounded_up(request.max_length, request.sample_multiple))
    else:
        order, starts = one_a_row(number)
    write_rows(folder, name, members[order], starts)
    info = SplitInfo(
        name, number, len(starts) - 1, int(lengths[members].sum()), int(trained[members].sum(dtype=np.int64))
    )
    share = 100 * info.trained_tokens / info.tokens
    line = f"{name}: {counted(number, 'sample')}, {info.tokens:,} tokens, {share:.1f} % trained, "
    if request.packing:
        row_length = _full_row_length(request.max_length, request.row_multiple, request.sample_multiple)
        fill = 100 * info.tokens / (info.rows * row_length)
        line += f"{counted(info.rows, 'pack')} of {row_length:,} tokens, {fill:.1f} % full"
    else:
        line += f"not packed, longest {int(lengths[members].max()):,} tokens"
    return dataclasses.asdict(info), line
