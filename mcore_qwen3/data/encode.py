"""Conversations -> samples: token ids and trained marks, cut to the length limit, in one or several processes."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mcore_qwen3.data.messages import Conversation, Message
from mcore_qwen3.data.tally import Tally
from mcore_qwen3.data.template import ChatTokenizer, Rendered, TemplateRefused, load_tokenizer
from mcore_qwen3.errors import DataError

CHUNK_ROWS = 128  # rows handed to a process, and to the tokenizer, at once
NO_TRAINED_TOKENS = "without trained tokens"


@dataclass(frozen=True, slots=True)
class LengthRule:
    """The most tokens of a sample, and what happens to a longer one: deleted, or cut at its right or left end."""

    max_length: int
    truncation_strategy: str  # delete | right | left


@dataclass(slots=True)
class Encoded:
    """Samples laid end to end: int32 `ids` and uint8 `mask` in pieces, int64 `lengths` in pieces, one a sample.

    `mask` is 1 where the token is a target that is trained. A sample's first token never is: nothing predicts it.
    `cut` counts samples that were shortened; `dropped` rows that gave no sample.
    """

    ids: list[np.ndarray] = field(default_factory=list)
    mask: list[np.ndarray] = field(default_factory=list)
    lengths: list[np.ndarray] = field(default_factory=list)
    cut: int = 0
    dropped: Tally = field(default_factory=Tally)


@dataclass(slots=True)
class _Chunk:
    """What a process gives back: kept samples, and the reason for each conversation (by its index) not kept."""

    ids: np.ndarray
    mask: np.ndarray
    lengths: np.ndarray
    cut: int
    reasons: list[tuple[int, str]]


def fit(ids: np.ndarray, mask: np.ndarray, rule: LengthRule) -> tuple[np.ndarray, np.ndarray] | str:
    """Cut one sample by the rule: its ids and mask, or the reason to drop it, worded to follow "N rows".

    The first token that is left is never a target, so it is unmarked.
    """
    if len(ids) > rule.max_length:
        if rule.truncation_strategy == "delete":
            return f"longer than max_length {rule.max_length}"
        kept = slice(rule.max_length) if rule.truncation_strategy == "right" else slice(-rule.max_length, None)
        ids, mask = ids[kept], mask[kept]
    mask = mask.copy()
    mask[:1] = 0
    return (ids, mask) if mask.any() else NO_TRAINED_TOKENS


class Encoder:
    """Encodes conversations with `processes` processes (1 = this one). Use as a context manager.

    The tokenizer is loaded here first, so that its faults are raised once and in this process.
    """

    def __init__(self, tokenizer_dir: Path, rule: LengthRule, processes: int) -> None:
        self._tokenizer = load_tokenizer(tokenizer_dir)
        self._rule = rule
        self._pool: ProcessPoolExecutor | None = None
        if processes > 1:
            # Spawned, not forked: the tokenizer's threads do not survive a fork.
            self._pool = ProcessPoolExecutor(
                processes, multiprocessing.get_context("spawn"), _start_process, (tokenizer_dir, rule)
            )

    def __enter__(self) -> Encoder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    @property
    def pad_token_id(self) -> int:
        return self._tokenizer.pad_token_id

    def encode(self, conversations: Sequence[Conversation]) -> Encoded:
        """All samples of `conversations`, in their order, whatever the number of processes.

        Raises:
            DataError: the template's turns cannot be found in its text, or a process died.
        """
        encoded = Encoded()
        starts = range(0, len(conversations), CHUNK_ROWS)
        chunks = ([one.messages for one in conversations[start : start + CHUNK_ROWS]] for start in starts)
        for start, chunk in zip(starts, self._encode_all(chunks), strict=True):
            encoded.ids.append(chunk.ids)
            encoded.mask.append(chunk.mask)
            encoded.lengths.append(chunk.lengths)
            encoded.cut += chunk.cut
            for index, reason in chunk.reasons:
                encoded.dropped.add(reason, conversations[start + index].place)
        return encoded

    def _encode_all(self, chunks: Iterator[list[list[Message]]]) -> Iterator[_Chunk]:
        if self._pool is None:
            for chunk in chunks:
                yield _encode_chunk(self._tokenizer, self._rule, chunk)
            return
        try:
            yield from self._pool.map(_encode_in_process, chunks)
        except BrokenProcessPool:
            raise DataError(
                "every data process lives to the end",
                seen="one was killed or could not start (out of memory?)",
                fix="a lower --dataset_num_proc",
            ) from None


def _encode_chunk(tokenizer: ChatTokenizer, rule: LengthRule, conversations: list[list[Message]]) -> _Chunk:
    reasons: list[tuple[int, str]] = []
    rendered: list[tuple[int, Rendered]] = []
    for index, messages in enumerate(conversations):
        try:
            rendered.append((index, tokenizer.render(messages)))
        except TemplateRefused as refused:
            reasons.append((index, f"refused by the chat template: {refused}"))
    kept: list[tuple[np.ndarray, np.ndarray]] = []
    cut = 0
    encodings = tokenizer.encode([one for _, one in rendered])
    for (index, _), (ids, mask) in zip(rendered, encodings, strict=True):
        fitted = fit(ids, mask, rule)
        if isinstance(fitted, str):
            reasons.append((index, fitted))
            continue
        cut += len(fitted[0]) < len(ids)
        kept.append(fitted)
    return _Chunk(
        ids=np.concatenate([ids for ids, _ in kept]) if kept else np.zeros(0, np.int32),
        mask=np.concatenate([mask for _, mask in kept]) if kept else np.zeros(0, np.uint8),
        lengths=np.array([len(ids) for ids, _ in kept], dtype=np.int64),
        cut=cut,
        reasons=sorted(reasons),
    )


_process_state: tuple[ChatTokenizer, LengthRule] | None = None


def _start_process(tokenizer_dir: Path, rule: LengthRule) -> None:
    global _process_state
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core a process, as --dataset_num_proc says
    _process_state = (load_tokenizer(tokenizer_dir), rule)


def _end_with_parent() -> None:
    """A killed parent closes no queue: its processes would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a child process"
    parent.join()
    os._exit(1)


def _encode_in_process(conversations: list[list[Message]]) -> _Chunk:
    assert _process_state is not None, "the initializer has run"
    tokenizer, rule = _process_state
    return _encode_chunk(tokenizer, rule, conversations)
