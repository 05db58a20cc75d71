"""Rows of every form: what each becomes, and which form a file is taken to have."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mcore_qwen3.data.forms import Conversation, Document, FileRows, read_conversations, read_documents
from mcore_qwen3.data.rows import Row
from mcore_qwen3.errors import DataError

USER, REPLY = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object"}}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def read(*rows: dict[str, Any]) -> FileRows:
    return read_conversations("a.jsonl", [Row(f"a.jsonl:{line}", row) for line, row in enumerate(rows, start=1)])


def one(row: dict[str, Any]) -> Conversation:
    (item,) = read(row).items
    assert isinstance(item, Conversation)
    return item


def said(messages: list[dict[str, Any]] | None) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages or []]


def test_sharegpt_with_tool_calls_and_results() -> None:
    call = json.dumps({"name": "f", "arguments": {"x": 1}})
    found = one(
        {
            "conversations": [
                {"from": "human", "value": "Q"},
                {"from": "function_call", "value": call},
                {"from": "function_call", "value": f"[{call}]"},
                {"from": "observation", "value": "seen"},
                {"from": "gpt", "value": "A"},
            ],
            "tools": json.dumps([TOOL]),
            "system": "S",
        }
    )
    assert said(found.messages) == [
        ("system", "S"), ("user", "Q"), ("assistant", ""), ("tool", "seen"), ("assistant", "A"),
    ]  # fmt: skip
    assert found.messages[2]["tool_calls"] == [CALL, CALL]  # calls that follow each other are one turn
    assert found.tools == [{"type": "function", "function": TOOL}]


def test_openai_tool_calls() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
    wrapped = {"type": "function", "function": TOOL}
    found = one(
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "T"},
                {"role": "tool", "tool_call_id": "1", "content": "seen"},
                REPLY,
            ],
            "tools": [wrapped, json.dumps(TOOL)],
        }
    )
    assert found.messages[1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "T",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}],  # the text as it was
    }
    assert found.tools == [wrapped, wrapped]
    for nothing in ("", "[]", [], None):
        assert one({"messages": [USER, REPLY], "tools": nothing}).tools is None


def test_content_parts() -> None:
    parts = [
        {"type": "reasoning", "value": "T"},
        {"type": "text", "text": "A"},
        {"type": "text", "value": "B"},
        {"type": "tool_call", "value": json.dumps({"name": "f", "arguments": {"x": 1}})},
    ]
    found = one({"messages": [USER, {"role": "assistant", "content": parts}]})
    assert found.messages[1] == {
        "role": "assistant", "content": "AB", "reasoning_content": "T", "tool_calls": [CALL],
    }  # fmt: skip
    image = {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}
    report = str(read({"messages": [USER, REPLY]}, {"messages": [image, REPLY]}).dropped)
    assert "1 row with a content part of the type 'image_url' (known: text, reasoning, tool_call)" in report


def test_loss_marks() -> None:
    entries = [USER, {**REPLY, "loss": False}, USER, {**REPLY, "loss_weight": 1.0}, {**USER, "loss_weight": 0.0}, REPLY]
    messages = one({"messages": entries}).messages
    assert [message.get("loss") for message in messages] == [None, False, None, True, None, None]


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"query": "Q", "response": "A"}, "query/response"),
        ({"prompt": "Q", "completion": "A"}, "prompt/completion"),
        ({"question": "Q", "answer": "A", "metadata": {"x": 1}}, "question/answer"),
        ({"problem": "Q", "solution": "A"}, "problem/solution"),
        ({"input": "Q", "target": "A"}, "input/target"),
        ({"input": "Q", "output": "A"}, "input/output"),
        ({"instruction": "Q", "response": "A"}, "alpaca"),
        ({"query": "Q", "prompt": "x", "response": "A", "answer": "y"}, "query/response"),  # the name itself wins
        ({"conversation": [{"human": "Q", "assistant": "A"}]}, "conversation"),
        ({"messages": [{"role": "human", "value": "Q"}, {"role": "bot", "value": "A"}]}, "messages"),
        (
            {"conversations": json.dumps([{"from": "user", "value": "Q"}, {"from": "gpt", "value": "A"}])},
            "conversations",
        ),
    ],
)
def test_other_names(row: dict[str, Any], form: str) -> None:
    found = read(row)
    assert found.form == form
    assert said(one(row).messages) == [("user", "Q"), ("assistant", "A")]


def test_two_columns_for_one_thing_are_refused() -> None:
    with pytest.raises(DataError, match="one column of a file stands for response") as caught:
        read({"problem": "Q", "solution": "A", "answer": "7"})
    assert "answer, solution in a.jsonl" in str(caught.value) and "--columns" in str(caught.value)


PROMPT = [{"from": "system", "value": "S"}, {"from": "human", "value": "Q"}]
SAID = [("system", "S"), ("user", "Q")]


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": PROMPT, "chosen": {"from": "gpt", "value": "A"}, "rejected": {"from": "gpt", "value": "B"}},
        {"system": "S", "prompt": "Q", "chosen": "A", "rejected": "B"},
        {"system": "S", "query": "Q", "response": "A", "messages": None, "chosen": "A", "rejected": "B"},
        {
            "system_prompt": "S",
            "messages": [{**USER, "content": "Q"}, {**REPLY, "content": "A"}],
            "rejected_response": "B",
        },
        {"chosen": [*PROMPT, {"from": "gpt", "value": "A"}], "rejected": [*PROMPT, {"from": "gpt", "value": "B"}]},
        {
            "system": "S",
            "prompt": "Q",
            "chosen": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}],
            "rejected": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "B"}],
        },
        {
            "chosen_messages": [*PROMPT, {"from": "gpt", "value": "A"}],
            "rejected_messages": [*PROMPT, {"from": "gpt", "value": "B"}],
        },
    ],
)
def test_both_sides_of_a_pair_share_the_prompt(row: dict[str, Any]) -> None:  # known fault B29
    found = one(row)
    assert said(found.messages) == [*SAID, ("assistant", "A")]
    assert said(found.rejected) == [*SAID, ("assistant", "B")]
    assert found.rejected is not None and found.messages[:-1] == found.rejected[:-1]


def test_pairs_that_are_none() -> None:
    other = [{"from": "human", "value": "other"}, {"from": "gpt", "value": "B"}]
    same = {"prompt": "Q", "chosen": "A", "rejected": "B"}
    report = str(read(same, {"prompt": "Q", "chosen": "A", "rejected": other}).dropped)
    assert "1 row with a chosen and a rejected side that differ before the last reply (first at a.jsonl:2)" in report


def test_labelled_rows() -> None:
    found = read(*({"messages": [USER, REPLY], "label": label} for label in (True, False, True)))
    assert (found.form, len(found.items)) == ("messages with labels", 2)
    assert str(found.dropped) == "1 row labelled false: a reply that is not wanted (first at a.jsonl:2)"


def test_six_rows_of_uneven_roles() -> None:  # known fault B28
    found = read(
        {"messages": [{"role": "system", "content": "S"}, USER, REPLY]},
        {"messages": [USER, REPLY]},
        {"messages": [USER, USER, REPLY]},
        {"messages": [USER, REPLY, USER]},
        {"messages": []},
        {"messages": [USER, {**REPLY, "content": ""}]},
    )
    assert (found.rows, len(found.items)) == (6, 4)
    assert str(found.dropped) == (
        "1 row without messages (first at a.jsonl:5), 1 row with an empty assistant turn (first at a.jsonl:6)"
    )


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([USER, {"from": "function_call", "value": "f(1)"}], "with a tool call that is not JSON"),
        ([USER, {**REPLY, "tool_calls": [{"function": {}}]}], "with a tool call that has no name"),
        (
            [{**USER, "tool_calls": [CALL]}, {**USER, "reasoning_content": "x"}, REPLY],
            "with reasoning or tool calls in a user",
        ),
        ("no json", "with messages that is not JSON"),
    ],
)
def test_rows_that_cannot_be_read(entries: Any, reason: str) -> None:
    assert f"1 row {reason}" in str(read({"messages": [USER, REPLY]}, {"messages": entries}).dropped)


def test_raw_text() -> None:
    rows = [
        Row("a:1", {"text": "one"}),
        Row("a:2", {"text": " "}),
        Row("a:3", {"text": 3}),
        Row("a:4", {"text": "\ud800"}),
    ]
    found = read_documents("a", rows)
    assert (found.form, found.items) == ("text", [Document("one", "a:1")])
    assert str(found.dropped) == (
        "1 row without text (first at a:2), 1 row with content that is not text but int (first at a:3), "
        "1 row with text that is not valid Unicode (first at a:4)"
    )
    with pytest.raises(DataError, match=r"megatron pt takes raw text.*seen: a with messages"):
        read_documents("a", [Row("a:1", {"messages": [USER, REPLY]})])
    with pytest.raises(DataError, match="megatron pt trains on text"):
        read({"text": "one"})
