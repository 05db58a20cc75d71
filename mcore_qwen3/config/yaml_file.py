"""A flat YAML file of flags: the user's own, or one of those that come with the package."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml

from mcore_qwen3.errors import ConfigError

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def find_config(name: str) -> Path:
    """The file that ``--config`` names: a path, or else a name without folder and ending, such as qwen3-30b-a3b-sft.

    Raises ConfigError where there is neither.
    """
    path = Path(name)
    if path.exists():
        return path
    packaged = {file.stem: file for file in sorted(CONFIGS.glob("*.yaml"))}
    if name in packaged:
        return packaged[name]
    near = difflib.get_close_matches(name, packaged, n=3, cutoff=0.5)
    raise ConfigError(
        "--config names a YAML file, or a configuration that comes with the package",
        seen=f"no file {name}",
        fix="the path" + (f", or one of {', '.join(near)}" if near else f"; configurations: {CONFIGS}"),
    )


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
        with find_config(path).open(encoding="utf-8") as file:
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
