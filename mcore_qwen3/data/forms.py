"""Rows -> conversations, or raw texts: the form of a file is detected from its columns, once a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_qwen3.data.messages import (
    Message,
    Unusable,
    check_messages,
    optional_text,
    read_messages,
    read_tools,
    text,
)
from mcore_qwen3.data.rows import Row
from mcore_qwen3.data.tally import Tally
from mcore_qwen3.errors import DataError

LISTS = ("messages", "conversations", "conversation")
QUERIES = ("query", "instruction", "prompt", "question", "problem", "input")
RESPONSES = ("response", "output", "answer", "solution", "completion", "target")
_MEDIA = ("images", "videos", "audios", "image", "video", "audio")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that can be rendered and hold at least one assistant turn; `place` is the row's file:line.

    `tools` are the functions that the model is offered. `rejected` is the other side of a preference pair: the same
    prompt, system text included, and the reply that was not preferred. `tag` names the language of the row, if it does.
    """

    messages: list[Message]
    place: str
    tools: list[dict[str, Any]] | None = None
    rejected: list[Message] | None = None
    tag: str | None = None


@dataclass(frozen=True, slots=True)
class Document:
    """Raw text for continued pre-training."""

    text: str
    place: str


Item = Conversation | Document


@dataclass(frozen=True, slots=True)
class FileRows:
    """What one file gave: the name of its form, its number of rows, the usable ones, and why others were dropped."""

    form: str
    rows: int
    items: list[Item]
    dropped: Tally


@dataclass(frozen=True, slots=True)
class _Form:
    name: str
    read: Callable[[Row], Item]


def read_conversations(name: str, rows: Sequence[Row]) -> FileRows:
    """Turn the rows of the file `name` into conversations.

    A row that cannot be used is dropped and counted with its reason and first place.

    Raises:
        DataError: no form fits the columns, or no row of the file can be used.
    """
    form = next((found for row in rows if (found := _chat_form(name, row.fields)) is not None), None)
    if form is None:
        known = (
            f"{' or '.join(LISTS)}; a question ({', '.join(QUERIES)}) with an answer ({', '.join(RESPONSES)}); "
            "chosen and rejected"
        )
        if any(isinstance(row.fields.get("text"), str) for row in rows):
            raise DataError(
                "megatron sft takes chat rows", seen=f"{name} has raw text", fix="megatron pt trains on text"
            )
        raise DataError(
            f"a data file has the columns of a known form: {known}",
            seen=f"{name} with {', '.join(map(str, rows[0].fields))}",
            fix='--columns \'{"your name": "query"}\' renames columns',
        )
    return _read(name, rows, form)


def read_documents(name: str, rows: Sequence[Row]) -> FileRows:
    """Turn the rows of the file `name` into raw texts.

    Raises:
        DataError: no row has the column text, or no row can be used.
    """
    if not any(isinstance(row.fields.get("text"), str) for row in rows):
        raise DataError(
            "megatron pt takes raw text: a .txt file, or rows with the column text",
            seen=f"{name} with {', '.join(map(str, rows[0].fields))}",
            fix='megatron sft for chat rows, or --columns \'{"your name": "text"}\'',
        )
    return _read(name, rows, _Form("text", _document))


def _read(name: str, rows: Sequence[Row], form: _Form) -> FileRows:
    dropped = Tally()
    items: list[Item] = []
    for row in rows:
        try:
            items.append(form.read(row))
        except Unusable as unusable:
            dropped.add(str(unusable), row.place)
    if not items:
        raise DataError(
            f"a data file has at least one usable row (form {form.name})", seen=f"{dropped}", fix=f"the rows of {name}"
        )
    return FileRows(form.name, len(rows), items, dropped)


def _document(row: Row) -> Document:
    content = text(row.fields.get("text"))
    if not content.strip():
        raise Unusable("without text")
    try:
        content.encode()
    except UnicodeEncodeError:
        raise Unusable("with text that is not valid Unicode") from None
    return Document(content, row.place)


def _chat_form(name: str, fields: dict[str, Any]) -> _Form | None:
    """The form that these columns have, or None. Pairs are looked for first: their columns come on top of others."""
    column = next((key for key in LISTS if fields.get(key) is not None), None)
    if fields.get("chosen_messages") is not None and fields.get("rejected_messages") is not None:
        return _Form("pairs (chosen_messages, rejected_messages)", _whole_pair("chosen_messages", "rejected_messages"))
    query = _one_of(name, fields, QUERIES)
    if fields.get("chosen") is not None and fields.get("rejected") is not None:
        return _Form(f"pairs ({column or query or 'chosen'}, chosen, rejected)", _pair_of_replies(column, query))
    if column is not None:
        rejected = next((key for key in ("rejected_messages", "rejected_response") if fields.get(key) is not None), "")
        labelled = " with labels" if isinstance(fields.get("label"), bool) else ""
        return _Form(
            f"{column}{f' with {rejected}' if rejected else ''}{labelled}", _conversation(lambda f: f.get(column))
        )
    response = _one_of(name, {**fields, "input": None}, RESPONSES)
    if fields.get("instruction") is not None and response is not None:
        return _Form("alpaca", _conversation(lambda f: _turns(f, _instruction(f), f.get(response))))
    if query is not None and response is not None:
        shown = f"{query}/{response}"
        return _Form(shown, _conversation(lambda f: _turns(f, text(f.get(query)), f.get(response))))
    return None


def _one_of(name: str, fields: dict[str, Any], names: Sequence[str]) -> str | None:
    """The column that stands for names[0]: itself, else the one alias there is."""
    found = [key for key in names if fields.get(key) is not None]
    if len(found) <= 1 or found[0] == names[0]:
        return found[0] if found else None
    if found[0] == "instruction":  # alpaca: `input` goes with it
        return found[0]
    raise DataError(
        f"one column of a file stands for {names[0]}",
        seen=f"{', '.join(found)} in {name}",
        fix=f'--columns \'{{"{found[0]}": "{names[0]}"}}\' names the one to take',
    )


def _conversation(entries: Callable[[dict[str, Any]], object]) -> Callable[[Row], Conversation]:
    def read(row: Row) -> Conversation:
        fields = row.fields
        _refuse_media(fields)
        if fields.get("label") is False:
            raise Unusable("labelled false: a reply that is not wanted")
        messages = _with_system(fields, read_messages(entries(fields)))
        rejected = None
        if fields.get("rejected_messages") is not None:
            rejected = _with_system(fields, read_messages(fields["rejected_messages"]))
        elif fields.get("rejected_response") is not None:
            rejected = [*messages[:-1], {"role": "assistant", "content": text(fields["rejected_response"])}]
        return _checked(row, messages, rejected)

    return read


def _whole_pair(chosen: str, rejected: str) -> Callable[[Row], Conversation]:
    def read(row: Row) -> Conversation:
        sides = [_with_system(row.fields, read_messages(row.fields.get(key))) for key in (chosen, rejected)]
        return _checked(row, *sides)

    return read


def _pair_of_replies(column: str | None, query: str | None) -> Callable[[Row], Conversation]:
    def read(row: Row) -> Conversation:
        fields = row.fields
        prompt: list[Message] = []
        if column is not None:
            prompt = read_messages(fields.get(column))
        elif query is not None and isinstance(fields.get(query), list):
            prompt = read_messages(fields[query])
        elif query is not None:
            prompt = [*_history(fields.get("history")), {"role": "user", "content": text(fields.get(query))}]
        sides = [_with_system(fields, _continued(prompt, fields.get(side))) for side in ("chosen", "rejected")]
        return _checked(row, *sides)

    return read


def _continued(prompt: list[Message], reply: object) -> list[Message]:
    """The prompt and a reply; a list that starts with no assistant turn is the whole conversation itself."""
    if isinstance(reply, str):
        return [*prompt, {"role": "assistant", "content": reply}]
    turns = read_messages([reply] if isinstance(reply, dict) else reply)
    return [*prompt, *turns] if turns[0]["role"] == "assistant" else turns


def _checked(row: Row, messages: list[Message], rejected: list[Message] | None = None) -> Conversation:
    _refuse_media(row.fields)
    check_messages(messages)
    if rejected is not None:
        check_messages(rejected)
        if messages[:-1] != rejected[:-1]:
            raise Unusable("with a chosen and a rejected side that differ before the last reply")
    tag = row.fields.get("tag")
    return Conversation(
        messages, row.place, read_tools(row.fields.get("tools")), rejected, tag if isinstance(tag, str) else None
    )


def _refuse_media(fields: dict[str, Any]) -> None:
    if any(fields.get(key) for key in _MEDIA):
        raise Unusable("with images, audio or video")


def _instruction(fields: dict[str, Any]) -> str:
    asked = [text(fields.get("instruction")), optional_text(fields.get("input"))]
    return "\n".join(part for part in asked if part)


def _turns(fields: dict[str, Any], asked: str, answer: object) -> list[Message]:
    """The pairs of `history`, then the last question and answer."""
    last = [{"role": "user", "content": asked}, {"role": "assistant", "content": text(answer)}]
    return [*_history(fields.get("history")), *last]


def _history(value: object) -> list[Message]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in value):
        raise Unusable("with a history that is not a list of [question, answer]")
    turns: Iterable[tuple[str, object]] = (
        pair for turn in value for pair in zip(("user", "assistant"), turn, strict=True)
    )
    return [{"role": role, "content": text(said)} for role, said in turns]


def _with_system(fields: dict[str, Any], messages: list[Message]) -> list[Message]:
    """The messages, behind the row's system text where they do not begin with one."""
    given = optional_text(fields.get("system")) or optional_text(fields.get("system_prompt"))
    if not given or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": given}, *messages]
