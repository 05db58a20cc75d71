"""The model's own tokenizer and chat template: conversations -> text with trained spans -> ids with a loss mask.

The text is the tokenizer's own Jinja template, byte for byte, rendered in transformers' sandbox over the whole
conversation. What is trained is read off that text: of every assistant turn, all that the template wrote between the
header `<|im_start|>assistant\\n` and the end token, and the end token; not the header, not the newline after the end
token. A think block that the template adds (Qwen3's hybrid template gives the last turn an empty one) is part of the
turn as the model has to write it, so it is trained too. Rendering prefixes instead would give other text: that template
drops the thinking of earlier turns.

Content may hold text that looks like a header or an end token. Such a conversation is rendered a second time with the
look-alikes replaced by as many private-use characters: whatever marks are left were written by the template, at the
same places as in the real text.

`tokenizers` and transformers' renderer are imported on first use, and transformers' tokenizer classes never: they
import torch, which takes seconds. A test holds the ids equal to `apply_chat_template`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mcore_qwen3.data.messages import Message
from mcore_qwen3.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
HEADER = f"{TURN_START}assistant\n"
_TURN = re.compile(f"{re.escape(HEADER)}(.*?{re.escape(TURN_END)})", re.DOTALL)
_PRIVATE_USE = range(0xE000, 0xF900)


class TemplateRefused(Exception):
    """The chat template raised an error for one conversation; the text says why."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the template writes it, and the [start, end) characters of it that are trained, in order."""

    text: str
    spans: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ChatFiles:
    """What a tokenizer folder says, read without importing a tokenizer."""

    tokenizer_json: Path
    template: str
    special_tokens: dict[str, str]  # eos_token, pad_token, ...: templates may name them


@dataclass(frozen=True, slots=True)
class ChatTokenizer:
    """A tokenizer and its chat template. `end_token_id` is the token that ends an assistant turn."""

    files: ChatFiles
    backend: Tokenizer
    pad_token_id: int
    end_token_id: int

    def render(self, messages: list[Message]) -> Rendered:
        """The conversation's text and trained spans.

        Raises:
            TemplateRefused: the template raised an error for these messages.
            DataError: the trained spans cannot be told from the text.
        """
        text = self._render(messages)
        shadow = text
        if any(mark in value for message in messages for value in message.values() for mark in (TURN_START, TURN_END)):
            shadow = self._render_without_marks(messages, text)
        spans = [match.span(1) for match in _TURN.finditer(shadow)]
        turns = sum(message["role"] == "assistant" for message in messages)
        if len(spans) != turns:
            raise DataError(
                f"the chat template writes every assistant turn as {HEADER!r} ... {TURN_END}",
                seen=f"{len(spans)} such turns for {turns} assistant messages",
                fix="use the chat template of a Qwen3 model",
            )
        return Rendered(text, spans)

    def encode(self, rendered: Sequence[Rendered]) -> Iterable[tuple[np.ndarray, np.ndarray]]:
        """Token ids (int32) and trained marks (uint8, 1 = trained) of each text, equal in length.

        A token is trained when its first character lies in a trained span. So a token that joins the header's newline
        to newlines at the start of a reply is not trained: after the header the model could not write it.
        """
        encodings = self.backend.encode_batch([one.text for one in rendered], add_special_tokens=False)
        for one, encoding in zip(rendered, encodings, strict=True):
            ids = np.array(encoding.ids, dtype=np.int32)
            starts = np.fromiter((start for start, _ in encoding.offsets), dtype=np.int64, count=len(ids))
            mask = np.zeros(len(ids), dtype=np.uint8)
            for first, last in np.searchsorted(starts, np.array(one.spans, dtype=np.int64)):
                mask[first:last] = 1
            yield ids, mask

    def _render(self, messages: list[Message]) -> str:
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, _ = render_jinja_template(
                conversations=[messages], chat_template=self.files.template, **self.files.special_tokens
            )
        except TemplateError as error:
            raise TemplateRefused(str(error)) from None
        return texts[0]

    def _render_without_marks(self, messages: list[Message], text: str) -> str:
        """The text with the same characters at the same places, but look-alike marks in content covered.

        Raises:
            DataError: covering them changed anything else, so that places would not be the same.
        """
        unused = (chr(code) for code in _PRIVATE_USE if chr(code) not in text)
        covers = {mark: next(unused) * len(mark) for mark in (TURN_START, TURN_END)}
        covered = []
        for message in messages:
            values = dict(message)
            for key, value in values.items():
                for mark, cover in covers.items():
                    value = value.replace(mark, cover)
                values[key] = value
            covered.append(values)
        shadow = self._render(covered)
        restored = shadow
        for mark, cover in covers.items():
            restored = restored.replace(cover, mark)
        if restored != text:
            raise DataError(
                f"the chat template writes {TURN_START} and {TURN_END} inside content as they are",
                seen=f"{text[:80]!r}...",
                fix="remove these marks from the content, or use the chat template of a Qwen3 model",
            )
        return shadow


def read_chat_files(folder: Path) -> ChatFiles:
    """Find tokenizer.json and the chat template (chat_template.jinja, else the one in tokenizer_config.json).

    Raises:
        DataError: either is missing or cannot be read.
    """
    tokenizer_json = folder / "tokenizer.json"
    if not tokenizer_json.is_file():
        raise DataError("the tokenizer is a folder with tokenizer.json", seen=f"none in {folder}", fix="copy it there")
    config_file = folder / "tokenizer_config.json"
    try:
        config: dict[str, Any] = json.loads(config_file.read_bytes()) if config_file.is_file() else {}
    except ValueError as error:
        raise DataError("tokenizer_config.json is JSON", seen=f"{config_file}: {error}") from None
    template_file = folder / "chat_template.jinja"
    template = config.get("chat_template")
    if template_file.is_file():
        template = template_file.read_text(encoding="utf-8")
    elif isinstance(template, list):  # named templates; the one without a task is called default
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    if not isinstance(template, str):
        raise DataError(
            "the tokenizer has a chat template (chat_template.jinja, or chat_template in tokenizer_config.json)",
            seen=f"none in {folder}",
            fix="copy it from the model's own repository",
        )
    named = {key: value for key, value in config.items() if key.endswith("_token") and isinstance(value, str | dict)}
    special = {key: value if isinstance(value, str) else value["content"] for key, value in named.items()}
    return ChatFiles(tokenizer_json, template, special)


def load_tokenizer(folder: Path) -> ChatTokenizer:
    """Load the tokenizer and try its chat template on one conversation.

    Raises:
        DataError: a file is missing, the vocabulary has no turn marks, or the template does not write turns with them.
    """
    from tokenizers import Tokenizer

    files = read_chat_files(folder)
    try:
        backend = Tokenizer.from_file(str(files.tokenizer_json))
    except Exception as error:  # tokenizers raises plain Exception for a file it cannot read
        raise DataError("tokenizer.json can be read", seen=f"{files.tokenizer_json}: {error}") from None
    backend.no_truncation()  # a saved tokenizer.json may hold limits of its own
    backend.no_padding()
    end = backend.token_to_id(TURN_END)
    if end is None or backend.token_to_id(TURN_START) is None:
        raise DataError(f"the vocabulary holds {TURN_START} and {TURN_END}", seen=f"{files.tokenizer_json} without")
    pad = backend.token_to_id(files.special_tokens["pad_token"]) if "pad_token" in files.special_tokens else None
    tokenizer = ChatTokenizer(files, backend, pad_token_id=0 if pad is None else pad, end_token_id=end)
    try:
        tokenizer.render([{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}])
    except TemplateRefused as error:
        raise DataError(
            "the chat template renders a question and an answer", seen=error, fix=f"the template in {folder}"
        ) from None
    return tokenizer
