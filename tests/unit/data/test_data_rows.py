"""Files -> rows -> conversations: every form, every reason to drop a row, every refusal."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from mcore_qwen3.data.forms import Conversation, FileRows, read_conversations
from mcore_qwen3.data.rows import DataFile, read_rows
from mcore_qwen3.data.sources import find_sources
from mcore_qwen3.errors import DataError

USER, REPLY = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def local_files(path: Path) -> tuple[DataFile, ...]:
    (source,) = find_sources([str(path)])
    return source.files


def rows_of(path: Path) -> FileRows:
    (file,) = local_files(path)
    return read_conversations(path.name, read_rows(file))


def messages_of(found: FileRows) -> list[list[dict[str, Any]]]:
    return [one.messages for one in found.items if isinstance(one, Conversation)]


def read(path: Path) -> tuple[FileRows, list[list[dict[str, Any]]]]:
    found = rows_of(path)
    return found, messages_of(found)


ROWS = [{"messages": [USER, REPLY]}, {"messages": [{"role": "system", "content": "你好 🙂"}, USER, REPLY]}]


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", ROWS)
    write_lines(tmp_path / "b.json", ROWS)  # one object a line under another suffix
    (tmp_path / "c.json").write_text("\ufeff \n" + json.dumps(ROWS, indent=2), encoding="utf-8")
    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    with pyarrow.ipc.new_stream(tmp_path / "e.arrow", table.schema) as writer:
        writer.write_table(table)
    with pyarrow.ipc.new_file(tmp_path / "f.arrow", table.schema) as writer:
        writer.write_table(table)
    with (tmp_path / "g.csv").open("w", encoding="utf-8", newline="") as handle:
        writer = csv.DictWriter(handle, ["messages", "empty"])
        writer.writeheader()
        writer.writerows({"messages": json.dumps(row["messages"])} for row in ROWS)
    expected = [row["messages"] for row in ROWS]
    for name in ("a.jsonl", "b.json", "c.json", "d.parquet", "e.arrow", "f.arrow", "g.csv"):
        got, messages = read(tmp_path / name)
        assert messages == expected, name
        assert (got.form, got.rows, got.dropped.total) == ("messages", 2, 0)


def test_places_are_lines_or_row_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(["", json.dumps(ROWS[0]), "  ", json.dumps(ROWS[1])]))
    (tmp_path / "b.json").write_text(json.dumps(ROWS))
    for name, places in (("a.jsonl", ["a.jsonl:2", "a.jsonl:4"]), ("b.json", ["b.json:row 1", "b.json:row 2"])):
        (file,) = local_files(tmp_path / name)
        assert [row.place.removeprefix(f"{tmp_path}/") for row in read_rows(file)] == places


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", b'{"messages": []}\n{"messages": [}\n', "a.jsonl:2"),
        ("a.jsonl", b'{"a": "\xff\xfe"}\n', "a.jsonl:1"),
        ("a.jsonl", b'{"a": 1}\n\n[1]\n', "a.jsonl:3: a list"),
        ("a.json", b'[\n{"a": 1},\n{"a" 2}]', "a.json:3"),
        ("a.json", b'[\n{"a": 1},\n"\xff"]', "a.json:3"),
        ("a.json", b'[{"a": 1}, 2]', "a.json:row 2: a int"),
        ("a.json", b'{\n"a": 1\n}', "a.json:1"),
        ("a.parquet", b"PAR1 and then not", "a.parquet"),
        ("a.arrow", b"no arrow", "a.arrow"),
        ("a.csv", b'a,b\n1,2\n"x,\n', "a.csv:3"),
        ("a.csv", b"a,b\n1,2,3\n", "a.csv:2"),
        ("a.csv", b"a,b\n", "has none"),
        ("a.txt", b"fine\n\xff\n", "a.txt:2"),
        ("a.jsonl", b"", "has none"),
        ("a.json", b"[]", "has none"),
    ],
)
def test_a_broken_file_is_refused_with_its_place(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(content)
    (file,) = local_files(tmp_path / name)
    with pytest.raises(DataError) as caught:
        read_rows(file)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_a_name_that_is_no_local_data_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("x")
    (tmp_path / "empty").mkdir()
    for name in (str(tmp_path / "a.yaml"), str(tmp_path / "empty"), str(tmp_path / "no.jsonl"), "data/no.jsonl", "x"):
        with pytest.raises(DataError, match=r"a dataset is a local file \(.jsonl, .json, .txt") as caught:
            find_sources([name])
        assert name in str(caught.value)


def test_a_broken_line_is_refused_before_any_tokenizer_is_imported(tmp_path: Path, qwen3_tokenizer_dir: Path) -> None:
    write_lines(tmp_path / "a.jsonl", ROWS)
    with (tmp_path / "a.jsonl").open("a") as handle:
        handle.write("not json\n")
    code = f"""
import sys
from pathlib import Path
from mcore_qwen3.data.prepare import PrepareRequest, prepare
from mcore_qwen3.errors import DataError
try:
    prepare(PrepareRequest(dataset=({str(tmp_path / "a.jsonl")!r},), max_length=8,
                           tokenizer_dir=Path({str(qwen3_tokenizer_dir)!r}), cache_dir=Path({str(tmp_path / "c")!r})))
except DataError as error:
    print(error)
print([name for name in ("torch", "tokenizers", "transformers", "pyarrow") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    refusal, imported = done.stdout.splitlines()
    assert "a.jsonl:3" in refusal
    assert imported == "[]"


def test_alpaca_rows(tmp_path: Path) -> None:
    rows = [
        {"instruction": "Add", "input": "1 2", "output": "3"},
        {"instruction": "Hi", "input": "", "output": "Yo"},
        {"instruction": "Q2", "output": "A2", "system": "Be brief", "history": [["Q1", "A1"]]},
        {"instruction": "Q", "input": None, "output": "A", "system": None, "history": None},
    ]
    got, messages = read(write_lines(tmp_path / "a.jsonl", rows))
    assert got.form == "alpaca"
    assert [[(m["role"], m["content"]) for m in one] for one in messages] == [
        [("user", "Add\n1 2"), ("assistant", "3")],
        [("user", "Hi"), ("assistant", "Yo")],
        [("system", "Be brief"), ("user", "Q1"), ("assistant", "A1"), ("user", "Q2"), ("assistant", "A2")],
        [("user", "Q"), ("assistant", "A")],
    ]


def test_query_rows(tmp_path: Path) -> None:
    rows = [{"query": "Q2", "response": "A2", "system": "S", "history": [["Q1", "A1"]]}]
    got, messages = read(write_lines(tmp_path / "a.jsonl", rows))
    assert got.form == "query/response"
    assert [m["content"] for m in messages[0]] == ["S", "Q1", "A1", "Q2", "A2"]


def test_reasoning_content_is_kept_and_other_fields_are_not(tmp_path: Path) -> None:
    reply = {"role": "assistant", "content": "R", "reasoning_content": "T", "tool_calls": None, "id": 7}
    _, messages = read(write_lines(tmp_path / "a.jsonl", [{"messages": [USER, reply], "id": 1}]))
    assert messages[0][1] == {"role": "assistant", "content": "R", "reasoning_content": "T"}


def test_unusable_rows_are_counted_by_reason_with_the_first_place(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"messages": [USER, REPLY]},
        {"messages": []},
        {"messages": None},
        {"messages": [USER]},
        {"messages": [USER, {"role": "assistant", "content": " \n"}]},
        {"messages": [USER, {"role": "critic", "content": "x"}, REPLY]},
        {"messages": [USER, {"role": "assistant", "content": [{"type": "text"}]}]},
        {"messages": [USER, {"role": "assistant", "content": None}]},
        {"messages": ["Hi"]},
        {"messages": [USER, REPLY], "tools": "[{"},
        {"messages": [USER, {**REPLY, "tool_calls": [{"id": "f"}]}]},
        {"messages": [USER, REPLY], "images": ["a.png"]},
        {"messages": [USER, {**REPLY, "loss": 0.5}]},
        {"messages": [{**USER, "loss": True}, REPLY]},
        {"other": 1},
    ]
    path = write_lines(tmp_path / "a.jsonl", rows)
    path.write_text(path.read_text() + '{"messages": [{"role": "assistant", "content": "\\ud800"}]}\n')
    got, messages = read(path)
    assert messages == [[USER, REPLY]]
    assert (got.rows, got.dropped.total) == (16, 15)
    report = str(got.dropped).replace(f"{tmp_path}/", "")
    assert report.startswith("3 rows without messages (first at a.jsonl:2)")
    for part in (
        "1 row without an assistant turn (first at a.jsonl:4)",
        "1 row with an empty assistant turn (first at a.jsonl:5)",
        "1 row with the role 'critic' (known: system, user, human, assistant, gpt, bot, tool,",
        "2 rows with content that is not text but missing (first at a.jsonl:7)",
        "1 row with a message that has no role (first at a.jsonl:9)",
        "1 row with tools that is not JSON (first at a.jsonl:10)",
        "1 row with a tool call that has no name (first at a.jsonl:11)",
        "1 row with images, audio or video (first at a.jsonl:12)",
        "1 row with a loss weight other than 0 and 1 (first at a.jsonl:13)",
        "1 row with loss on a user turn, which no model writes (first at a.jsonl:14)",
        "1 row with text that is not valid Unicode (first at a.jsonl:16)",
    ):
        assert part in report
    # Allowed as they are: two users in a row, no question, a question without an answer at the end.
    odd = [[USER, USER, REPLY], [REPLY], [USER, REPLY, USER]]
    got, messages = read(write_lines(tmp_path / "b.jsonl", [{"messages": messages} for messages in odd]))
    assert messages == odd


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"instruction": "Q", "output": ""}, "with an empty assistant turn"),
        ({"instruction": "Q", "output": 3}, "with content that is not text but int"),
        ({"instruction": None, "output": "A"}, "with content that is not text but missing"),
        ({"instruction": "Q", "output": "A", "system": 1}, "with content that is not text but int"),
        ({"instruction": "Q", "output": "A", "history": [["x"]]}, "with a history that is not a list"),
    ],
)
def test_unusable_alpaca_rows(tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    got, messages = read(write_lines(tmp_path / "a.jsonl", [{"instruction": "Q", "output": "A"}, fields]))
    assert len(messages) == 1
    assert f"1 row {reason}" in str(got.dropped)


def test_a_file_without_a_usable_row_or_known_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="at least one usable row") as caught:
        read(write_lines(tmp_path / "a.jsonl", [{"messages": [USER]}, {"messages": [USER]}]))
    assert "2 rows without an assistant turn" in str(caught.value)
    with pytest.raises(DataError, match="known form") as caught:
        read(write_lines(tmp_path / "a.jsonl", [{"left": "x", "right": "y"}]))
    assert "left, right" in str(caught.value)
