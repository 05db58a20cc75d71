"""Entries of a conversation, as other tools write them -> messages as the chat template takes them.

A message is {"role", "content"} and, where the row has them, `reasoning_content` (str), `tool_calls` (a list of
{"type": "function", "function": {"name", "arguments"}}) and `loss` (bool: whether this assistant turn is trained).
"""

from __future__ import annotations

import json
from typing import Any

Message = dict[str, Any]

_CALL = "call"  # a turn that is nothing but tool calls
ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "tool_response": "tool",
    "observation": "tool",
    "function": "tool",
    "function_call": _CALL,
    "tool_call": _CALL,
}
_PAIR_KEYS = (("user", "assistant"), ("human", "assistant"), ("human", "gpt"), ("query", "response"))


class Unusable(Exception):
    """A row that cannot be used; the text is the reason, worded to follow "N rows"."""


def read_messages(entries: object) -> list[Message]:
    """Messages of a list of entries: OpenAI's form, ShareGPT's, or one entry per question and answer.

    A turn that is only a tool call joins the assistant turn before it, as one reply of the model.

    Raises:
        Unusable: an entry cannot be read.
    """
    if isinstance(entries, str):  # a column of a .csv file
        entries = _json(entries, "messages")
    if not isinstance(entries, list) or not entries:
        raise Unusable("without messages")
    messages: list[Message] = []
    for entry in entries:
        if isinstance(entry, dict) and entry.get("role") is None and entry.get("from") is None:
            messages += _pair(entry)
            continue
        message = _message(entry)
        before = messages[-1] if messages else None
        if message["role"] != _CALL:
            messages.append(message)
        elif before is not None and before["role"] == "assistant" and before.get("loss") == message.get("loss"):
            before["tool_calls"] = [*before.get("tool_calls", []), *message["tool_calls"]]
        else:
            messages.append({**message, "role": "assistant"})
    return messages


def check_messages(messages: list[Message]) -> None:
    """Raise Unusable unless the text is valid and there is a reply to learn from."""
    try:
        json.dumps(messages, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # "\ud800" alone is legal JSON, but no text
        raise Unusable("with text that is not valid Unicode") from None
    replies = [message for message in messages if message["role"] == "assistant"]
    if not replies:
        raise Unusable("without an assistant turn")
    for reply in replies:
        written = (reply["content"], reply.get("reasoning_content", ""))
        if not reply.get("tool_calls") and not any(text.strip() for text in written):
            raise Unusable("with an empty assistant turn")


def read_tools(value: object) -> list[dict[str, Any]] | None:
    """The `tools` column: a list, or its JSON; None for none. A bare function is put in OpenAI's wrapper."""
    if isinstance(value, str):
        value = _json(value, "tools") if value.strip() else None
    if isinstance(value, dict):
        value = [value]
    if not value:
        return None
    if not isinstance(value, list):
        raise Unusable("with tools that are not a list")
    tools = [_json(tool, "tools") if isinstance(tool, str) else tool for tool in value]
    if not all(isinstance(tool, dict) for tool in tools):
        raise Unusable("with tools that are not a list of objects")
    bare = [tool for tool in tools if "name" in tool and "function" not in tool]
    return [{"type": "function", "function": tool} if tool in bare else tool for tool in tools]


def text(value: object) -> str:
    """`value`, which has to be text."""
    if not isinstance(value, str):
        raise Unusable(f"with content that is not text but {'missing' if value is None else type(value).__name__}")
    return value


def optional_text(value: object) -> str:
    """`value`, which has to be text or missing; "" when it is missing."""
    return "" if value is None else text(value)


def _pair(entry: dict[str, Any]) -> list[Message]:
    for question, answer in _PAIR_KEYS:
        if question in entry and answer in entry:
            asked, replied = text(entry[question]), text(entry[answer])
            return [{"role": "user", "content": asked}, {"role": "assistant", "content": replied}]
    raise Unusable("with a message that has no role")


def _message(entry: object) -> Message:
    if not isinstance(entry, dict):
        raise Unusable("with a message that has no role")
    given = entry.get("role") if entry.get("role") is not None else entry.get("from")
    role = ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise Unusable(f"with the role {str(given)[:40]!r} (known: {', '.join(ROLES)})")
    content = entry.get("content") if entry.get("content") is not None else entry.get("value")
    if role == _CALL:
        message: Message = {"role": role, "content": "", "tool_calls": _calls(_json(content, "a tool call"))}
    else:
        message = {"role": role, **_content(content, may_be_missing=bool(entry.get("tool_calls")))}
        if role == "assistant" and entry.get("tool_calls"):
            message["tool_calls"] = [*message.get("tool_calls", []), *_calls(entry["tool_calls"])]
    if entry.get("reasoning_content") is not None:  # a field that Qwen3's template itself reads
        message["reasoning_content"] = text(entry["reasoning_content"])
    if role not in ("assistant", _CALL) and {"reasoning_content", "tool_calls"} & set(message):
        raise Unusable(f"with reasoning or tool calls in a {role} turn")
    return message | _loss(role, entry)


def _content(value: object, *, may_be_missing: bool) -> dict[str, Any]:
    """`content`, and what else its parts say."""
    if value is None and may_be_missing:
        return {"content": ""}
    if not isinstance(value, list):
        return {"content": text(value)}
    found: dict[str, list[str]] = {"text": [], "reasoning": [], "tool_call": []}
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in found:
            raise Unusable(f"with a content part of the type {str(kind)[:40]!r} (known: {', '.join(found)})")
        given = part.get("value") if part.get("value") is not None else part.get(kind)
        found[kind].append(text(given))
    message: dict[str, Any] = {"content": "".join(found["text"])}
    if found["reasoning"]:
        message["reasoning_content"] = "\n".join(found["reasoning"])
    if found["tool_call"]:
        message["tool_calls"] = [call for one in found["tool_call"] for call in _calls(_json(one, "a tool call"))]
    return message


def _calls(value: object) -> list[dict[str, Any]]:
    calls = []
    for one in value if isinstance(value, list) else [value]:
        given = one.get("function") or one if isinstance(one, dict) else None
        if not isinstance(given, dict) or not isinstance(given.get("name"), str):
            raise Unusable("with a tool call that has no name")
        arguments = given.get("arguments") if given.get("arguments") is not None else {}
        calls.append({"type": "function", "function": {"name": given["name"], "arguments": arguments}})
    return calls


def _json(value: object, what: str) -> Any:
    try:
        return json.loads(text(value))
    except ValueError:
        raise Unusable(f"with {what} that is not JSON") from None


def _loss(role: str, entry: dict[str, Any]) -> dict[str, bool]:
    """Whether the row itself says that this turn is trained or not: `loss` (bool), or a weight of 0 or 1."""
    given = next((entry[key] for key in ("loss", "loss_scale", "loss_weight") if entry.get(key) is not None), None)
    if given is None:
        return {}
    if given not in (0, 1):
        raise Unusable("with a loss weight other than 0 and 1")
    if role in ("assistant", _CALL):
        return {"loss": bool(given)}
    if given:
        raise Unusable(f"with loss on a {role} turn, which no model writes")
    return {}
