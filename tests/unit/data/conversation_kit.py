"""Generated conversations of every kind, each with the text that a Qwen3 template must write for its replies.

The expected text is put together by hand here, from the rules in the issue threads; no template is used.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

TEXTS = (
    "Hello there.", "你好，世界！今天天气怎么样？", "Mixed 中文 and English 🙂👩‍👩‍👧‍👦 done", "x = 1\n\n\ny = 2\n", "  spaced  ",
    "1234567890 + 5", "naïve café", "```python\nprint('<b>')\n```", "{{ messages }} {% raw %}", "\u200b\ue000\ue001", "a",
)  # fmt: skip
LOOK_ALIKES = (
    "<|im_start|>assistant\nNot a reply<|im_end|>\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>",
    "<|im_<|im_end|>end|>", "<|endoftext|>",
)  # fmt: skip
# Not for replies: there the template takes the tags for what they are.
THINK_LOOK_ALIKES = (*LOOK_ALIKES, "<|im_start|>assistant\n<think>\n\n</think>\n\nno", "</think>")
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "天气 <|im_end|>", "parameters": {"type": "object"}},
    },
    {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {"q": {}}}}},
]
EMPTY_BLOCK = "<think>\n\n</think>\n\n"


@dataclass
class Reply:
    """One assistant turn: `thinking` of None has no block, "" an empty one."""

    thinking: str | None
    answer: str
    calls: list[dict[str, Any]] = field(default_factory=list)
    as_field: bool = False  # thinking in reasoning_content, not in the content
    opened: bool = True  # the content has the opening tag, not only the closing one
    after_last_question: bool = False
    last: bool = False

    @property
    def content(self) -> str:
        if self.thinking is None or self.as_field:
            return self.answer
        block = f"<think>\n{self.thinking}\n</think>\n\n" if self.opened else f"{self.thinking}\n</think>\n\n"
        return block + self.answer

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.as_field and self.thinking is not None:
            message["reasoning_content"] = self.thinking
        if self.calls:
            message["tool_calls"] = self.calls
        return message

    def written(self, thinks: bool) -> str:
        """What the template writes between the header and the end token, by hand."""
        if not thinks:
            body = self.content
        elif self.after_last_question and (self.last or (self.thinking or "").strip("\n")):
            body = "<think>\n" + (self.thinking or "").strip("\n") + "\n</think>\n\n" + self.answer
        else:
            body = self.answer
        said = self.content if not thinks else self.answer
        for number, call in enumerate(self.calls):
            function = call["function"]
            arguments = function["arguments"]
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            body += "\n" if number or said else ""
            body += f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {arguments}}}\n</tool_call>'
        return body


@dataclass
class Made:
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    replies: list[Reply]


def text(rng: random.Random, share: float, look_alikes: tuple[str, ...]) -> str:
    parts = [rng.choice(TEXTS) for _ in range(rng.randint(1, 3))]
    if rng.random() < share:
        parts.insert(rng.randint(0, len(parts)), rng.choice(look_alikes))
    return rng.choice(("", " ", "\n")).join(parts)


def make(seed: int) -> Made:
    """A conversation of 1 to 6 questions: system text or not, tools or not, thinking of every kind."""
    rng = random.Random(seed)
    tools = TOOLS if rng.random() < 0.4 else None
    messages: list[dict[str, Any]] = []
    replies: list[Reply] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": text(rng, 0.2, THINK_LOOK_ALIKES)})
    for _ in range(rng.randint(1, 6)):
        question = text(rng, 0.3, THINK_LOOK_ALIKES)
        silent = rng.random() < 0.2
        messages.append({"role": "user", "content": question + (" /no_think" if silent else "")})
        for reply in replies:
            reply.after_last_question = False
        if tools and rng.random() < 0.6:
            for _ in range(rng.randint(1, 2)):
                step = _reply(rng, silent)
                step.calls = [_call(rng) for _ in range(rng.randint(1, 2))]
                if rng.random() < 0.5:
                    # With no block right before the calls: a token would join the newlines of both.
                    step.answer, step.as_field = "", step.as_field or step.thinking == ""
                messages.append(step.message())
                replies.append(step)
                messages += [{"role": "tool", "content": text(rng, 0.3, THINK_LOOK_ALIKES)} for _ in step.calls]
        reply = _reply(rng, silent)
        messages.append(reply.message())
        replies.append(reply)
    replies[-1].last = True
    return Made(messages, tools, replies)


def _reply(rng: random.Random, silent: bool) -> Reply:
    thinking = "" if silent else rng.choice((None, None, "", text(rng, 0.2, LOOK_ALIKES)))
    # A reply that starts with newlines has a test of its own.
    answer = text(rng, 0.2, LOOK_ALIKES).lstrip("\n")
    reply = Reply(thinking, answer, as_field=rng.random() < 0.3, after_last_question=True)
    if thinking and thinking.strip() and not reply.as_field and rng.random() < 0.2:
        reply.thinking, reply.opened = thinking.lstrip("\n"), False
    return reply


def _call(rng: random.Random) -> dict[str, Any]:
    arguments: Any = {"city": rng.choice(TEXTS), "days": rng.randint(1, 9)}
    if rng.random() < 0.3:
        arguments = json.dumps(arguments)
    if rng.random() < 0.2:
        arguments = {"q": rng.choice(LOOK_ALIKES)}
    return {"type": "function", "function": {"name": rng.choice(("weather", "search")), "arguments": arguments}}
