"""``RunConfig``: the sections together, as a flat dictionary and as YAML."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from mcore_qwen3.config.aliases import ALIASES, Alias, aliases_by_field
from mcore_qwen3.config.checkpoint import CheckpointFlags
from mcore_qwen3.config.data import DataFlags
from mcore_qwen3.config.flags import Flag, section_flags
from mcore_qwen3.config.launch import LaunchFlags
from mcore_qwen3.config.model import ModelFlags
from mcore_qwen3.config.numerics import NumericsFlags
from mcore_qwen3.config.optim import OptimFlags
from mcore_qwen3.config.parallel import ParallelFlags
from mcore_qwen3.config.tracking import TrackingFlags
from mcore_qwen3.config.train import TrainFlags


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Every setting of a run. A field's name is its flag, its YAML key, and unique over all sections."""

    model: ModelFlags = field(default_factory=ModelFlags)
    parallel: ParallelFlags = field(default_factory=ParallelFlags)
    data: DataFlags = field(default_factory=DataFlags)
    train: TrainFlags = field(default_factory=TrainFlags)
    optim: OptimFlags = field(default_factory=OptimFlags)
    numerics: NumericsFlags = field(default_factory=NumericsFlags)
    tracking: TrackingFlags = field(default_factory=TrackingFlags)
    checkpoint: CheckpointFlags = field(default_factory=CheckpointFlags)
    launch: LaunchFlags = field(default_factory=LaunchFlags)


def sections(root: type) -> dict[str, type]:
    """Section name -> its dataclass, of a class of settings such as `RunConfig`."""
    return typing.get_type_hints(root)


def iter_flags(root: type = RunConfig, aliases: Mapping[str, Alias] = ALIASES) -> Iterator[Flag]:
    """Every flag of a class of settings, section by section, in the order of declaration."""
    other_names = aliases_by_field(aliases)
    for section, cls in sections(root).items():
        yield from section_flags(section, cls, other_names)


def with_values[Config](config: Config, values: Mapping[str, Any]) -> Config:
    """A copy of ``config`` with the flags named in ``values`` set; a name that is no flag is a KeyError."""
    section_of = {flag.name: flag.section for flag in iter_flags(type(config))}
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        by_section.setdefault(section_of[name], {})[name] = value
    changed = {
        section: dataclasses.replace(getattr(config, section), **changes) for section, changes in by_section.items()
    }
    return dataclasses.replace(config, **changed)  # type: ignore[type-var]


def to_flat_dict(config: object) -> dict[str, Any]:
    """Flag name -> value; lists as Python lists, so that JSON and YAML can hold it."""
    flat = {flag.name: getattr(getattr(config, flag.section), flag.name) for flag in iter_flags(type(config))}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in flat.items()}


def to_yaml(config: object) -> str:
    """YAML that ``--config`` reads back to equal settings; a comment line heads each section."""
    flat = to_flat_dict(config)
    parts = []
    for section in sections(type(config)):
        values = {flag.name: flat[flag.name] for flag in iter_flags(type(config)) if flag.section == section}
        parts.append(f"# {section}\n" + yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
    return "\n".join(parts)
