"""Conversations and texts -> samples: token ids and trained marks, cut to the length limit, in one or several processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np

from mcore_qwen3.data.forms import Conversation, Document, Item
from mcore_qwen3.data.marks import TrainRule
from mcore_qwen3.data.tally import Tally
from mcore_qwen3.data.template import Rendered, TemplateRefused, load_text_tokenizer, load_tokenizer
from mcore_qwen3.errors import DataError

CHUNK_ROWS = 128  # rows handed to a process, and to the tokenizer, at once
NO_TRAINED_TOKENS = "without trained tokens"
Marked = tuple[np.ndarray, np.ndarray]  # int32 ids, uint8 marks of trained tokens; equal in length


@dataclass(frozen=True, slots=True)
class LengthRule:
    """The most tokens of a sample, and what happens to a longer one: deleted, cut at an end, or split in several."""

    max_length: int
    truncation_strategy: str  # delete | right | left | split


@dataclass(slots=True)
class Encoded:
    """Samples laid end to end: int32 `ids` and uint8 `mask` in pieces, int64 `lengths` in pieces, one a sample.

    `mask` is 1 where the token is a target that is trained. A sample's first token never is: nothing predicts it.
    `places` says where each sample comes from.
    `cut` counts samples that were shortened; `dropped` rows that gave no sample. `split` gives several samples a row.
    """

    ids: list[np.ndarray] = field(default_factory=list)
    mask: list[np.ndarray] = field(default_factory=list)
    lengths: list[np.ndarray] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    cut: int = 0
    dropped: Tally = field(default_factory=Tally)


@dataclass(slots=True)
class _Chunk:
    """What a process gives back: kept samples with the index of each one's row, and the reason for each row not kept."""

    ids: np.ndarray
    mask: np.ndarray
    lengths: np.ndarray
    rows: list[int]
    cut: int
    reasons: list[tuple[int, str]]


def fit(ids: np.ndarray, mask: np.ndarray, rule: LengthRule) -> list[tuple[np.ndarray, np.ndarray]] | str:
    """Cut one sample by the rule: ids and mask of each part, or the reason to drop it, worded to follow "N rows".

    The first token of a part is never a target, so it is unmarked. `split` loses no token: a last part of one token
    is kept too.
    """
    limit = rule.max_length
    if len(ids) <= limit:
        parts = [slice(None)]
    elif rule.truncation_strategy == "delete":
        return f"longer than max_length {limit}"
    elif rule.truncation_strategy == "split":
        parts = [slice(start, start + limit) for start in range(0, len(ids), limit)]
    else:
        parts = [slice(limit) if rule.truncation_strategy == "right" else slice(-limit, None)]
    cut = [(ids[part], mask[part].copy()) for part in parts]
    for _, marks in cut:
        marks[:1] = 0
    return cut if any(marks.any() for _, marks in cut) else NO_TRAINED_TOKENS


@dataclass(frozen=True, slots=True)
class CodecSettings:
    """What a process needs to turn rows into ids: `rule` of None is raw text, without a chat template."""

    tokenizer_dir: Path
    rule: TrainRule | None


class ChatCodec:
    """Conversations -> ids and trained marks, by the model's chat template."""

    def __init__(self, tokenizer_dir: Path, rule: TrainRule) -> None:
        self._tokenizer = load_tokenizer(tokenizer_dir)
        self._rule = rule
        self.pad_token_id = self._tokenizer.pad_token_id

    @property
    def writes_reasoning(self) -> bool:
        return self._tokenizer.writes_reasoning

    def encode(self, items: Sequence[Item]) -> list[Marked | str]:
        """Ids and marks of each, or why the template refused it, in their order."""
        rendered: list[Rendered | str] = []
        for item in items:
            assert isinstance(item, Conversation)
            try:
                rendered.append(self._tokenizer.render(item.messages, item.tools, self._rule))
            except TemplateRefused as refused:
                rendered.append(f"refused by the chat template: {refused}")
        encoded = iter(self._tokenizer.encode([one for one in rendered if isinstance(one, Rendered)]))
        return [one if isinstance(one, str) else next(encoded) for one in rendered]


class TextCodec:
    """Raw texts -> ids and one end-of-text token, all of them trained."""

    def __init__(self, tokenizer_dir: Path) -> None:
        self._tokenizer = load_text_tokenizer(tokenizer_dir)
        self.pad_token_id = self._tokenizer.pad_token_id

    def encode(self, items: Sequence[Item]) -> list[Marked | str]:
        """Ids and marks of each, in their order."""
        texts = [item.text for item in items if isinstance(item, Document)]
        found: list[Marked | str] = []
        for ids in self._tokenizer.encode(texts):
            found.append((ids, np.ones(len(ids), np.uint8)))
        return found


def load_codec(settings: CodecSettings) -> ChatCodec | TextCodec:
    """The codec that the settings ask for; raises DataError for files that cannot be used."""
    if settings.rule is None:
        return TextCodec(settings.tokenizer_dir)
    return ChatCodec(settings.tokenizer_dir, settings.rule)


class _RememberingContext(SpawnContext):
    """Starts processes and keeps them: a broken pool does not tell how they ended.

    Spawned, not forked: the tokenizer's threads do not survive a fork.
    """

    def __init__(self) -> None:
        self.started: list[SpawnProcess] = []

    def Process(self, *args: Any, **options: Any) -> SpawnProcess:  # type: ignore[override]
        process = SpawnProcess(*args, **options)
        self.started.append(process)
        return process


class Encoder:
    """Encodes conversations or texts with `processes` processes (1 = this one). Use as a context manager.

    The tokenizer is loaded here first, so that its faults are raised once and in this process.
    """

    def __init__(self, settings: CodecSettings, rule: LengthRule, processes: int) -> None:
        self._codec = load_codec(settings)
        self._rule = rule
        self._pool: ProcessPoolExecutor | None = None
        self._context = _RememberingContext()
        if processes > 1:
            self._pool = ProcessPoolExecutor(processes, self._context, _start_process, (settings, rule))

    def __enter__(self) -> Encoder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    @property
    def rule(self) -> LengthRule:
        return self._rule

    @property
    def writes_reasoning(self) -> bool:
        """False where a chat template leaves `reasoning_content` out."""
        return not isinstance(self._codec, ChatCodec) or self._codec.writes_reasoning

    @property
    def pad_token_id(self) -> int:
        return self._codec.pad_token_id

    def encode(self, items: Sequence[Item]) -> Encoded:
        """All samples of `items`, in their order, whatever the number of processes.

        Raises:
            DataError: the template's turns cannot be found in its text, or a process died.
        """
        encoded = Encoded()
        starts = range(0, len(items), CHUNK_ROWS)
        chunks = (items[start : start + CHUNK_ROWS] for start in starts)
        for start, chunk in zip(starts, self._encode_all(chunks), strict=True):
            encoded.ids.append(chunk.ids)
            encoded.mask.append(chunk.mask)
            encoded.lengths.append(chunk.lengths)
            encoded.places += [items[start + index].place for index in chunk.rows]
            encoded.cut += chunk.cut
            for index, reason in chunk.reasons:
                encoded.dropped.add(reason, items[start + index].place)
        return encoded

    def _encode_all(self, chunks: Iterator[Sequence[Item]]) -> Iterator[_Chunk]:
        if self._pool is None:
            for chunk in chunks:
                yield _encode_chunk(self._codec, self._rule, chunk)
            return
        try:
            yield from self._pool.map(_encode_in_process, chunks)
        except BrokenProcessPool:
            self._pool.shutdown()  # ends the others, and waits for all exit codes
            raise DataError(
                "every data process lives to the end",
                seen=_first_death(self._context.started),
                fix="a lower --dataset_num_proc, or more memory",
            ) from None


def _first_death(processes: Sequence[SpawnProcess]) -> str:
    """What ended one of them; the pool ends the rest with SIGTERM."""
    for process in processes:
        code = process.exitcode
        if code and code != -signal.SIGTERM:
            if code == -signal.SIGKILL:
                return f"pid {process.pid} was killed by signal 9 (out of memory? the kernel's log, dmesg, names what it killed)"
            return (
                f"pid {process.pid} ended by signal {-code}"
                if code < 0
                else f"pid {process.pid} ended with exit code {code}"
            )
    return "one could not start, or was ended by SIGTERM"


def _encode_chunk(codec: ChatCodec | TextCodec, rule: LengthRule, items: Sequence[Item]) -> _Chunk:
    reasons: list[tuple[int, str]] = []
    kept: list[Marked] = []
    rows: list[int] = []
    cut = 0
    for index, one in enumerate(codec.encode(items)):
        fitted = one if isinstance(one, str) else fit(*one, rule)
        if isinstance(fitted, str):
            reasons.append((index, fitted))
            continue
        cut += len(fitted) > 1 or len(fitted[0][0]) < len(one[0])
        kept += fitted
        rows += [index] * len(fitted)
    return _Chunk(
        ids=np.concatenate([ids for ids, _ in kept]) if kept else np.zeros(0, np.int32),
        mask=np.concatenate([mask for _, mask in kept]) if kept else np.zeros(0, np.uint8),
        lengths=np.array([len(ids) for ids, _ in kept], dtype=np.int64),
        rows=rows,
        cut=cut,
        reasons=reasons,
    )


_process_state: tuple[ChatCodec | TextCodec, LengthRule] | None = None


def _start_process(settings: CodecSettings, rule: LengthRule) -> None:
    global _process_state
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core a process, as --dataset_num_proc says
    _process_state = (load_codec(settings), rule)


def _end_with_parent() -> None:
    """A killed parent closes no queue: its processes would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a child process"
    parent.join()
    os._exit(1)


def _encode_in_process(items: Sequence[Item]) -> _Chunk:
    assert _process_state is not None, "the initializer has run"
    codec, rule = _process_state
    return _encode_chunk(codec, rule, items)
