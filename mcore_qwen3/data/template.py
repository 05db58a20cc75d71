"""The model's own tokenizer and chat template: conversations -> text with trained spans -> ids with a loss mask.

The text is the tokenizer's own Jinja template, byte for byte, rendered in transformers' sandbox over the whole
conversation. What is trained is read off that text: of every assistant turn, all that the template wrote between the
header `<|im_start|>assistant\\n` and the end token, and the end token; not the header, not the newline after the end
token; `marks.TrainRule` narrows it. Rendering prefixes instead would give other text: Qwen3's hybrid template drops the
thinking of earlier turns.

Content may hold text that looks like a header or an end token. Such a conversation is rendered a second time with the
look-alikes replaced by as many private-use characters: whatever marks are left were written by the template, at the
same places as in the real text. In the same way `preserve_thinking` hides a think block from the template, which then
leaves it where it stands.

`tokenizers` and transformers' renderer are imported on first use, and transformers' tokenizer classes never: they
import torch, which takes seconds. A test holds the ids equal to `apply_chat_template`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mcore_qwen3.data.chat_files import ChatFiles, read_chat_files, tokenizer_file
from mcore_qwen3.data.marks import (
    THINK_END,
    TURN_END,
    TURN_START,
    Span,
    TrainRule,
    covers_for,
    replaced,
    strings,
    thinking_and_answer,
    trained_spans,
    without_thinking,
)
from mcore_qwen3.data.messages import Message
from mcore_qwen3.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TEXT_END = "<|endoftext|>"
HEADER = f"{TURN_START}assistant\n"
_TURN = re.compile(f"{re.escape(HEADER)}(.*?{re.escape(TURN_END)})", re.DOTALL)
Tools = list[dict[str, Any]] | None
DEFAULT_RULE = TrainRule()


class TemplateRefused(Exception):
    """The chat template raised an error for one conversation; the text says why."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the template writes it, and the [start, end) characters of it that are trained, in order."""

    text: str
    spans: list[Span]


@dataclass(frozen=True, slots=True)
class ChatTokenizer:
    """A tokenizer and its chat template. `end_token_id` is the token that ends an assistant turn."""

    files: ChatFiles
    backend: Tokenizer
    pad_token_id: int
    end_token_id: int

    def render(self, messages: list[Message], tools: Tools = None, rule: TrainRule = DEFAULT_RULE) -> Rendered:
        """The conversation's text and trained spans.

        Raises:
            TemplateRefused: the template raised an error for these messages.
            DataError: the trained spans cannot be told from the text.
        """
        if rule.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": rule.system}, *messages]
        if not rule.enable_thinking:
            messages = without_thinking(messages)
        text, turns = self._turns(messages, tools, rule)
        if rule.preserve_thinking and rule.enable_thinking:
            text, turns = self._with_all_thinking(messages, tools, rule, text, turns)
        return Rendered(text, trained_spans(text, turns, messages, rule))

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
            for first, last in np.searchsorted(starts, np.array(one.spans, dtype=np.int64).reshape(-1, 2)):
                mask[first:last] = 1
            yield ids, mask

    @property
    def writes_reasoning(self) -> bool:
        """Whether the template writes the `reasoning_content` of a last turn; that of Instruct models does not."""
        word = "reasoning"
        turn: Message = {"role": "assistant", "content": "answer", "reasoning_content": word}
        return word in self._render([{"role": "user", "content": "question"}, turn], None, DEFAULT_RULE)

    def _turns(self, messages: list[Message], tools: Tools, rule: TrainRule) -> tuple[str, list[Span]]:
        """The text of the template, and where it wrote each assistant message, in order."""
        text = self._render(messages, tools, rule)
        shadow = text
        marks = (TURN_START, TURN_END)
        if any(mark in value for value in strings([messages, tools]) for mark in marks):
            shadow = self._render_without_marks(messages, tools, rule, text)
        turns = [match.span(1) for match in _TURN.finditer(shadow)]
        replies = sum(message["role"] == "assistant" for message in messages)
        if len(turns) != replies:
            raise DataError(
                f"the chat template writes every assistant turn as {HEADER!r} ... {TURN_END}",
                seen=f"{len(turns)} such turns for {replies} assistant messages",
                fix="use the chat template of a Qwen3 model",
            )
        return text, turns

    def _render(self, messages: list[Message], tools: Tools, rule: TrainRule) -> str:
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        options = {} if rule.enable_thinking else {"enable_thinking": False}
        try:
            texts, _ = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self.files.template,
                **self.files.special_tokens,
                **options,
            )
        except (TemplateError, TypeError) as error:  # TypeError: arguments that the template cannot write
            raise TemplateRefused(str(error)) from None
        return texts[0]

    def _with_all_thinking(
        self, messages: list[Message], tools: Tools, rule: TrainRule, text: str, turns: list[Span]
    ) -> tuple[str, list[Span]]:
        """The text with the thinking of those turns too where the template left it out."""
        cover = covers_for("".join([text, *strings([messages, tools])]), (THINK_END,))
        whole, spans = [], iter(turns)
        for message in messages:
            if message["role"] == "assistant":
                start, _ = next(spans)
                thinking, answer = thinking_and_answer(message)
                if thinking and not text.startswith("<think>", start):
                    message = {key: value for key, value in message.items() if key != "reasoning_content"}
                    message["content"] = f"<think>\n{thinking}\n{cover[THINK_END]}\n\n" + answer.lstrip("\n")
            whole.append(message)
        hidden, turns = self._turns(whole, tools, rule)
        return hidden.replace(cover[THINK_END], THINK_END), turns

    def _render_without_marks(self, messages: list[Message], tools: Tools, rule: TrainRule, text: str) -> str:
        """The text with the same characters at the same places, but look-alike marks in content covered.

        Raises:
            DataError: covering them changed anything else, so that places would not be the same.
        """
        covers = covers_for(text, (TURN_START, TURN_END))
        shadow = self._render(replaced(messages, covers), replaced(tools, covers), rule)
        if replaced(shadow, {cover: mark for mark, cover in covers.items()}) != text:
            raise DataError(
                f"the chat template writes {TURN_START} and {TURN_END} inside content as they are",
                seen=f"{text[:80]!r}...",
                fix="remove these marks from the content, or use the chat template of a Qwen3 model",
            )
        return shadow


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """A tokenizer for raw text: no template, no role marks, `end_token_id` behind each text."""

    backend: Tokenizer
    pad_token_id: int
    end_token_id: int

    def encode(self, texts: Sequence[str]) -> Iterable[np.ndarray]:
        """Token ids (int32) of each text and one end-of-text token."""
        for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False):
            yield np.array([*encoding.ids, self.end_token_id], dtype=np.int32)


def load_tokenizer(folder: Path) -> ChatTokenizer:
    """Load the tokenizer and try its chat template on one conversation.

    Raises:
        DataError: a file is missing, the vocabulary has no turn marks, or the template does not write turns with them.
    """
    files = read_chat_files(folder)
    backend = _load_backend(files.tokenizer_json)
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


def load_text_tokenizer(folder: Path) -> TextTokenizer:
    """Load the tokenizer for raw text; the folder needs no chat template.

    Raises:
        DataError: tokenizer.json is missing or cannot be read, or the vocabulary has no end-of-text token.
    """
    file = tokenizer_file(folder)
    backend = _load_backend(file)
    end = backend.token_to_id(TEXT_END)
    if end is None:
        raise DataError(f"the vocabulary holds {TEXT_END}", seen=f"{file} without", fix="a Qwen3 tokenizer")
    return TextTokenizer(backend, pad_token_id=end, end_token_id=end)


def _load_backend(file: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception for a file it cannot read
        raise DataError("tokenizer.json can be read", seen=f"{file}: {error}") from None
    backend.no_truncation()  # a saved tokenizer.json may hold limits of its own
    backend.no_padding()
    return backend
