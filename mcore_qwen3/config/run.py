"""``RunConfig``: the sections together, as a flat dictionary and as YAML."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from mcore_qwen3.config.aliases import aliases_by_field
from mcore_qwen3.config.checkpoint import CheckpointFlags
from mcore_qwen3.config.data import DataFlags
from mcore_qwen3.config.flags import Flag, section_flags
from mcore_qwen3.config.launch import LaunchFlags
from mcore_qwen3.config.model import ModelFlags
from mcore_qwen3.config.optim import OptimFlags
from mcore_qwen3.config.parallel import ParallelFlags
from mcore_qwen3.config.train import TrainFlags


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Every setting of a run. A field's name is its flag, its YAML key, and unique over all sections."""

    model: ModelFlags = field(default_factory=ModelFlags)
    parallel: ParallelFlags = field(default_factory=ParallelFlags)
    data: DataFlags = field(default_factory=DataFlags)
    train: TrainFlags = field(default_factory=TrainFlags)
    optim: OptimFlags = field(default_factory=OptimFlags)
    checkpoint: CheckpointFlags = field(default_factory=CheckpointFlags)
    launch: LaunchFlags = field(default_factory=LaunchFlags)


SECTIONS: dict[str, type] = typing.get_type_hints(RunConfig)


@functools.cache
def _flags() -> tuple[Flag, ...]:
    aliases = aliases_by_field()
    return tuple(flag for section, cls in SECTIONS.items() for flag in section_flags(section, cls, aliases))


def iter_flags() -> Iterator[Flag]:
    """Every flag, section by section, in the order of declaration."""
    yield from _flags()


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """A copy of ``config`` with the flags named in ``values`` set; a name that is no flag is a KeyError."""
    section_of = {flag.name: flag.section for flag in iter_flags()}
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        by_section.setdefault(section_of[name], {})[name] = value
    sections = {
        section: dataclasses.replace(getattr(config, section), **changes) for section, changes in by_section.items()
    }
    return dataclasses.replace(config, **sections)


def to_flat_dict(config: RunConfig) -> dict[str, Any]:
    """Flag name -> value; lists as Python lists, so that JSON and YAML can hold it."""
    flat = {flag.name: getattr(getattr(config, flag.section), flag.name) for flag in iter_flags()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in flat.items()}


def to_yaml(config: RunConfig) -> str:
    """YAML that ``--config`` reads back to an equal ``RunConfig``; a comment line heads each section."""
    flat = to_flat_dict(config)
    parts = []
    for section in SECTIONS:
        values = {flag.name: flat[flag.name] for flag in iter_flags() if flag.section == section}
        parts.append(f"# {section}\n" + yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
    return "\n".join(parts)
