"""What a tokenizer folder says, read without importing a tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_qwen3.errors import DataError


@dataclass(frozen=True, slots=True)
class ChatFiles:
    """The files of a tokenizer folder."""

    tokenizer_json: Path
    template: str
    special_tokens: dict[str, str]  # eos_token, pad_token, ...: templates may name them


def read_chat_files(folder: Path) -> ChatFiles:
    """Find tokenizer.json and the chat template (chat_template.jinja, else the one in tokenizer_config.json).

    Raises:
        DataError: either is missing or cannot be read.
    """
    tokenizer_json = tokenizer_file(folder)
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


def tokenizer_file(folder: Path) -> Path:
    """The folder's tokenizer.json; raises DataError where there is none."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise DataError("the tokenizer is a folder with tokenizer.json", seen=f"none in {folder}", fix="copy it there")
    return file
