"""Rows -> conversations: lists of {"role", "content"} messages as the chat template takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_qwen3.data.rows import Row
from mcore_qwen3.data.tally import Tally
from mcore_qwen3.errors import DataError

Message = dict[str, str]
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that can be rendered and hold at least one assistant turn; `place` is the row's file:line."""

    messages: list[Message]
    place: str


@dataclass(frozen=True, slots=True)
class FileConversations:
    """What one file gave: the name of its form, its number of rows, the usable ones, and why others were dropped."""

    form: str
    rows: int
    conversations: list[Conversation]
    dropped: Tally


class _Unusable(Exception):
    """A row that cannot be used; the text is the reason, worded to follow "N rows"."""


@dataclass(frozen=True, slots=True)
class _Form:
    name: str
    columns: tuple[str, ...]  # a file has this form when a row has all of them
    read: Callable[[dict[str, Any]], list[Message]]


def read_conversations(name: str, rows: Sequence[Row]) -> FileConversations:
    """Turn the rows of the file `name` into conversations. The form is detected once per file.

    A row that cannot be used is dropped and counted with its reason and first place.

    Raises:
        DataError: no form fits the columns, or no row of the file can be used.
    """
    form = _detect(name, rows)
    dropped = Tally()
    conversations = []
    for row in rows:
        try:
            messages = form.read(row.fields)
            _check(messages)
        except _Unusable as unusable:
            dropped.add(str(unusable), row.place)
        else:
            conversations.append(Conversation(messages, row.place))
    if not conversations:
        raise DataError(
            f"a data file has at least one usable row (form {form.name})", seen=f"{dropped}", fix=f"the rows of {name}"
        )
    return FileConversations(form.name, len(rows), conversations, dropped)


def _detect(name: str, rows: Sequence[Row]) -> _Form:
    for row in rows:
        for form in _FORMS:
            if all(row.fields.get(column) is not None for column in form.columns):
                return form
    known = "; ".join(f"{form.name} ({', '.join(form.columns)})" for form in _FORMS)
    raise DataError(
        f"a data file has the columns of a known form: {known}",
        seen=f"{name} with {', '.join(map(str, rows[0].fields))}",
        fix="rename its columns",
    )


def _check(messages: list[Message]) -> None:
    for message in messages:
        for text in message.values():
            try:
                text.encode()
            except UnicodeEncodeError:  # "\ud800" alone is legal JSON, but no text
                raise _Unusable("with text that is not valid Unicode") from None
        if message["role"] == "assistant" and not any(v.strip() for k, v in message.items() if k != "role"):
            raise _Unusable("with an empty assistant turn")
    if not any(message["role"] == "assistant" for message in messages):
        raise _Unusable("without an assistant turn")


def _from_messages(fields: dict[str, Any]) -> list[Message]:
    given = fields.get("messages")
    if not isinstance(given, list) or not given:
        raise _Unusable("without messages")
    if fields.get("tools"):
        raise _Unusable("with tools or tool calls, which are not read yet")
    return [_message(entry) for entry in given]


def _message(entry: object) -> Message:
    if not isinstance(entry, dict) or "role" not in entry:
        raise _Unusable("with a message that has no role")
    if entry.get("tool_calls"):
        raise _Unusable("with tools or tool calls, which are not read yet")
    role = entry["role"]
    if role not in ROLES:
        raise _Unusable(f"with the role {str(role)[:40]!r} (known: {', '.join(ROLES)})")
    message = {"role": role, "content": _text(entry.get("content"))}
    if entry.get("reasoning_content") is not None:  # a field that Qwen3's template itself reads
        message["reasoning_content"] = _text(entry["reasoning_content"])
    return message


def _from_alpaca(fields: dict[str, Any]) -> list[Message]:
    asked = [_text(fields.get("instruction")), _optional_text(fields.get("input"))]
    return _from_turns(fields, "\n".join(part for part in asked if part), _text(fields.get("output")))


def _from_query(fields: dict[str, Any]) -> list[Message]:
    return _from_turns(fields, _text(fields.get("query")), _text(fields.get("response")))


def _from_turns(fields: dict[str, Any], asked: str, answer: str) -> list[Message]:
    """System text, then the pairs of `history`, then the last question and answer."""
    messages = []
    system = _optional_text(fields.get("system"))
    if system:
        messages.append({"role": "system", "content": system})
    for turn in [*_history(fields.get("history")), (asked, answer)]:
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    return messages


def _history(value: object) -> list[tuple[str, str]]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in value):
        raise _Unusable("with a history that is not a list of [question, answer]")
    return [(_text(question), _text(answer)) for question, answer in value]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _Unusable(f"with content that is not text but {'missing' if value is None else type(value).__name__}")
    return value


def _optional_text(value: object) -> str:
    return "" if value is None else _text(value)


_FORMS = (
    _Form("messages", ("messages",), _from_messages),
    _Form("alpaca", ("instruction", "output"), _from_alpaca),
    _Form("query/response", ("query", "response"), _from_query),
)
