"""Which characters of a rendered conversation are trained.

The rules that narrow it compose by "and": a character is trained when its turn is chosen by `loss_scale` (or by the
row's own `loss`) and it is not part of an empty think block that is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_qwen3.data.messages import Message

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
THINK_END = "</think>"
EMPTY_THINK = f"<think>\n\n{THINK_END}\n\n"
_PRIVATE_USE = range(0xE000, 0xF900)

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRule:
    """What of a conversation is rendered and trained. Fields are named as the flags are.

    loss_scale: default (every assistant turn), last_round (those after the last user message), all (every token).
    ignore_empty_think: an empty think block at the start of a turn is not trained.
    preserve_thinking: earlier turns keep their thinking, which Qwen3's hybrid template drops.
    enable_thinking: false: thinking is removed from every turn, and the empty block, part of the prompt then, is not
        trained.
    system: the system text of rows that have none.
    """

    loss_scale: str = "default"
    ignore_empty_think: bool = True
    preserve_thinking: bool = False
    enable_thinking: bool = True
    system: str | None = None

    @property
    def skips_empty_think(self) -> bool:
        return self.ignore_empty_think or not self.enable_thinking

    def sentence(self) -> str:
        """The rule in one sentence, for the log."""
        chosen = {
            "default": "every assistant turn with its end token",
            "last_round": "the assistant turns after the last user message, with their end tokens",
            "all": "every token, prompts included",
        }[self.loss_scale]
        block = "is not trained" if self.skips_empty_think else "is trained"
        if not self.enable_thinking:
            thinking = "thinking is removed from every turn"
        elif self.preserve_thinking:
            thinking = "thinking of earlier turns is kept"
        else:
            thinking = "thinking of earlier turns is what the chat template makes of it"
        return f"trained tokens: {chosen}; an empty think block {block}; {thinking}; a row's own loss marks win"


def trained_spans(text: str, turns: Sequence[Span], messages: Sequence[Message], rule: TrainRule) -> list[Span]:
    """The [start, end) characters that are trained, in order.

    Args:
        text: the rendered conversation.
        turns: what the template wrote for each assistant message, its end token included, in order.
        messages: the messages; as many assistant ones as `turns`.
    """
    replies = [(index, message) for index, message in enumerate(messages) if message["role"] == "assistant"]
    last_user = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=-1)
    cut = []
    if rule.skips_empty_think:
        cut = [(start, start + len(EMPTY_THINK)) for start, _ in turns if text.startswith(EMPTY_THINK, start)]
    if rule.loss_scale == "all":
        cut += [turn for turn, (_, message) in zip(turns, replies, strict=True) if message.get("loss") is False]
        return _without([(0, len(text))], sorted(cut))
    chosen = []
    for turn, (index, message) in zip(turns, replies, strict=True):
        wanted = message.get("loss")
        if wanted is None:
            wanted = rule.loss_scale == "default" or index > last_user
        if wanted:
            chosen.append(turn)
    return _without(chosen, cut)


def _without(spans: Sequence[Span], cut: Sequence[Span]) -> list[Span]:
    """`spans` less `cut`; both in order and free of overlaps, but a cut may hold another one at its start."""
    left = []
    for start, end in spans:
        for cut_start, cut_end in cut:
            if cut_end > start and cut_start < end:
                if cut_start > start:
                    left.append((start, cut_start))
                start = max(start, cut_end)
        if start < end:
            left.append((start, end))
    return left


def thinking_and_answer(message: Message) -> tuple[str, str]:
    """The thinking of an assistant message ("" for none) and the rest, as Qwen3's template tells them apart."""
    content = message["content"]
    if isinstance(message.get("reasoning_content"), str):
        return message["reasoning_content"].strip("\n"), content
    if THINK_END not in content:
        return "", content
    thinking = content.split(THINK_END)[0].rstrip("\n").split("<think>")[-1].strip("\n")
    return thinking, content.split(THINK_END)[-1].lstrip("\n")


def without_thinking(messages: Sequence[Message]) -> list[Message]:
    """The messages, no assistant turn with thinking."""
    plain = []
    for message in messages:
        if message["role"] == "assistant":
            answer = thinking_and_answer(message)[1]
            message = {key: value for key, value in message.items() if key != "reasoning_content"}
            message["content"] = answer
        plain.append(message)
    return plain


def strings(value: Any) -> Iterator[str]:
    """Every text inside a value made of dicts, lists and plain values; keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from strings(key)
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)


def covers_for(text: str, marks: Sequence[str]) -> dict[str, str]:
    """For each mark as many private-use characters that `text` does not hold."""
    unused = (chr(code) for code in _PRIVATE_USE if chr(code) not in text)
    return {mark: next(unused) * len(mark) for mark in marks}


def replaced(value: Any, by: dict[str, str]) -> Any:
    """The value with texts replaced inside every text of it; keys too."""
    if isinstance(value, str):
        for old, new in by.items():
            value = value.replace(old, new)
        return value
    if isinstance(value, dict):
        return {replaced(key, by): replaced(inner, by) for key, inner in value.items()}
    if isinstance(value, list):
        return [replaced(inner, by) for inner in value]
    return value
