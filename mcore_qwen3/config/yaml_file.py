"""A flat YAML file of flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mcore_qwen3.errors import ConfigError


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys without a word; here they are refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise ConfigError("a key stands twice in a YAML file", seen=f"{', '.join(twice)} in {node.start_mark.name}")
        return super().construct_mapping(node, deep=deep)


def read_flat_yaml(path: str) -> dict[str, Any]:
    """The top-level mapping of the file; an empty file is an empty mapping.

    Raises ConfigError for a missing file, text that is no YAML, or a top level that is no mapping from names.
    """
    try:
        with Path(path).open(encoding="utf-8") as file:
            content = yaml.load(file, Loader=_UniqueKeyLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the --config file cannot be read", seen=f"{path} ({_reason(error)})") from None
    except yaml.YAMLError as error:
        raise ConfigError("the --config file is no YAML", seen=f"{path}: {_reason(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError("the --config file must be a list of 'name: value' lines", seen=path)
    return content


def _reason(error: Exception) -> str:
    """The error in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())
