"""Real files of every form: detected, read and counted as the page about data says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mcore_qwen3.data.forms import Conversation, read_conversations, read_documents
from mcore_qwen3.data.rows import read_rows
from mcore_qwen3.data.sources import find_sources

TEXT_FILES = {"c4_demo.jsonl", "wiki_demo.txt"}


def counts_of_the_page(repo_root: Path) -> dict[str, list[str]]:
    """File -> its cells in the table of docs/data.md: command, form, rows, kept, dropped, ..."""
    section = (repo_root / "docs" / "data.md").read_text(encoding="utf-8").split("## Counts of real files\n")[1]
    lines = [line for line in section.splitlines() if re.match(r"\| [\w.]+\.(json|jsonl|txt) \|", line)]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in rows}


def test_every_file_has_a_line_in_the_page(material_dir: Path, repo_root: Path) -> None:
    files = {path.name for path in (material_dir / "data").iterdir()}
    assert files <= set(counts_of_the_page(repo_root))
    assert len(files) >= 13


@pytest.mark.parametrize("name", ["dpo_en_demo.json", "glaive_toolcall_zh_demo.json", "reason_tool_use_demo_50.jsonl"])
def test_what_rows_of_a_form_hold(material_dir: Path, name: str) -> None:
    (source,) = find_sources([str(material_dir / "data" / name)])
    items = read_conversations(name, read_rows(source.files[0])).items
    found = [one for one in items if isinstance(one, Conversation)]
    assert len(found) == len(items)
    if name.startswith("dpo"):
        assert all(one.rejected is not None and one.rejected[:-1] == one.messages[:-1] for one in found)
        assert sum(one.messages[0]["role"] == "system" for one in found) == 80  # the material's own count
    else:
        calls = [call for one in found for message in one.messages for call in message.get("tool_calls", [])]
        assert len(calls) > 30 and all(isinstance(call["function"]["name"], str) for call in calls)
        assert sum(one.tools is not None for one in found) > 30
    if name.startswith("reason"):
        assert all(any("reasoning_content" in message for message in one.messages) for one in found)


def test_forms_and_counts_are_those_of_the_page(material_dir: Path, repo_root: Path) -> None:
    page = counts_of_the_page(repo_root)
    for path in sorted((material_dir / "data").iterdir()):
        (source,) = find_sources([str(path)])
        read = read_documents if path.name in TEXT_FILES else read_conversations
        found = read(path.name, read_rows(source.files[0]))
        command, form, rows, kept, dropped = page[path.name][:5]
        assert (command == "pt") == (path.name in TEXT_FILES)
        assert (found.form, f"{found.rows:,}") == (form, rows)
        too_long = sum(int(number) for number in re.findall(r"(\d+) longer than", dropped))
        assert len(found.items) == int(kept.replace(",", "")) + too_long
