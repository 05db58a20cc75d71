"""Command line and YAML file -> ``RunConfig``. Precedence: defaults < file < flags."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from mcore_qwen3.config.aliases import ALIASES
from mcore_qwen3.config.checks import check
from mcore_qwen3.config.flags import Flag
from mcore_qwen3.config.run import SECTIONS, RunConfig, iter_flags, with_values
from mcore_qwen3.config.values import convert
from mcore_qwen3.config.yaml_file import read_flat_yaml
from mcore_qwen3.errors import ConfigError

_METAVARS = {"int": "N", "float": "X", "bool": "true|false", "str": "TEXT", "list": "TEXT"}
_NARGS = {"bool": "?", "list": "+"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedRun:
    """A command line that was read and checked.

    ``explicit`` holds the names of the fields that the user set, on the command line or in the file (null in a file
    sets nothing). ``notes`` are lines to print once: which other name was read as which flag.
    """

    command: str
    config: RunConfig
    explicit: frozenset[str]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Setting:
    """One value as the user wrote it: ``spelling`` is a field's name or an alias, ``where`` is for messages."""

    spelling: str
    raw: Any
    where: str


def parse_args(argv: list[str], command: str) -> ParsedRun:
    """Read the words after ``megatron <command>``.

    ``--help`` prints and raises SystemExit(0). Whatever cannot be read, or breaks a rule that needs no more than the
    values, is one ConfigError.
    """
    flag_settings, files = _read_command_line(argv, command)
    file_settings = [setting for path in files for setting in _read_file(path, command)]
    values = _typed(file_settings) | _typed(flag_settings)
    notes = [_alias_note(setting) for setting in (*file_settings, *flag_settings) if setting.spelling in ALIASES]
    config = with_values(RunConfig(), values)
    check(config, command)
    return ParsedRun(command=command, config=config, explicit=frozenset(values), notes=tuple(dict.fromkeys(notes)))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"the command line cannot be read: {message}")


class _Collect(argparse.Action):
    """Keeps each use of a flag with its spelling; conversion and contradictions are looked at afterwards."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.settings.append((str(option_string).removeprefix("--"), values))


def build_parser(command: str) -> argparse.ArgumentParser:
    """The argparse parser of ``megatron <command>``, with one help group a section."""
    parser = _Parser(
        prog=f"megatron {command}",
        usage=f"megatron {command} [--config FILE.yaml] [--flag value ...]",
        description="Flags and YAML keys have the same names. Defaults < --config file < flags.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=116),
    )
    parser.add_argument("--config", action=_Collect, metavar="FILE", help="YAML file of flags")
    groups = {section: parser.add_argument_group(str(cls.__doc__).rstrip(".")) for section, cls in SECTIONS.items()}
    for flag in iter_flags():
        _add_flag(groups[flag.section], flag.name, flag, _help_text(flag))
        for alias in flag.aliases:
            _add_flag(groups[flag.section], alias, _as_spelled(flag, alias), argparse.SUPPRESS)
    return parser


def _add_flag(group: argparse._ArgumentGroup, name: str, flag: Flag, help_text: str) -> None:
    nargs = _NARGS.get(flag.type)
    metavar = "|".join(flag.choices) or _METAVARS[flag.type]
    const = "true" if nargs == "?" else None
    group.add_argument(f"--{name}", action=_Collect, nargs=nargs, const=const, metavar=metavar, help=help_text)


def _help_text(flag: Flag) -> str:
    notes = [f"also --{alias}" for alias in flag.aliases]
    if flag.default not in (None, ()):
        notes.insert(0, f"default: {str(flag.default).lower() if flag.type == 'bool' else flag.default}")
    return flag.help + (f" ({'; '.join(notes)})" if notes else "")


def _as_spelled(flag: Flag, spelling: str) -> Flag:
    """``flag`` with the form it has under ``spelling``: true or false, where the alias translates its values."""
    alias = ALIASES.get(spelling)
    return flag if alias is None or alias.values is None else dataclasses.replace(flag, type="bool", choices=())


def _read_command_line(argv: list[str], command: str) -> tuple[list[_Setting], list[str]]:
    """(settings in the order of the line, the one file that --config names, or none)."""
    known, unknown = build_parser(command).parse_known_args(_normalised(argv), argparse.Namespace(settings=[]))
    unknown_flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    if unknown_flags:
        raise _unknown_names(unknown_flags, [word.lstrip("-") for word in unknown_flags], command)
    if unknown:
        raise ConfigError("a word belongs to no flag", seen=" ".join(unknown), fix="write --flag value")
    files = [value for name, value in known.settings if name == "config"]
    if len(files) > 1:
        raise ConfigError("--config is given more than once", seen=", ".join(files), fix="name one file")
    settings = [_Setting(name, raw, f"--{name}") for name, raw in known.settings if name != "config"]
    return settings, files


def _read_file(path: str, command: str) -> list[_Setting]:
    content = {name.replace("-", "_"): value for name, value in read_flat_yaml(path).items()}
    unknown = sorted(set(content) - _known_names())
    if unknown:
        raise _unknown_names([f"{name} in {path}" for name in unknown], unknown, command)
    return [_Setting(name, value, f"{name} in {path}") for name, value in content.items() if value is not None]


def _normalised(argv: list[str]) -> list[str]:
    """``--a-b`` as ``--a_b``; ``--x -1e-6`` as ``--x=-1e-6``, because argparse takes that number for a flag."""
    words: list[str] = []
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            words.append("--" + name[2:].replace("-", "_") + equals + value)
        elif word.startswith("-") and _is_number(word) and words and words[-1].startswith("--"):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _known_names() -> set[str]:
    return {flag.name for flag in iter_flags()} | set(ALIASES)


def _unknown_names(shown: list[str], names: list[str], command: str) -> ConfigError:
    """Every unknown name at once, each with its nearest neighbours."""
    hints = []
    for name in names:
        near = difflib.get_close_matches(name, sorted(_known_names()), n=3, cutoff=0.6)
        hints.append(f"nearest to {name}: {', '.join('--' + n for n in near)}" if near else f"nothing is near {name}")
    rule = f"unknown flag{'s' if len(names) > 1 else ''}"
    return ConfigError(rule, seen=", ".join(shown), fix="; ".join([*hints, f"all: megatron {command} --help"]))


def _typed(settings: Iterable[_Setting]) -> dict[str, Any]:
    """Field name -> value; two different values for one field, under whatever names, are refused."""
    flags = {flag.name: flag for flag in iter_flags()}
    found: dict[str, tuple[Any, _Setting]] = {}
    for setting in settings:
        field, value = _field_and_value(setting, flags)
        earlier = found.setdefault(field, (value, setting))
        if earlier[0] != value:
            fix = f"write --{field} a b" if flags[field].type == "list" else "keep one of them"
            seen = " and ".join(f"{s.where} {_words(s.raw)}" for s in (earlier[1], setting))
            raise ConfigError(f"{field} is given twice with different values", seen=seen, fix=fix)
    return {field: value for field, (value, _) in found.items()}


def _field_and_value(setting: _Setting, flags: dict[str, Flag]) -> tuple[str, Any]:
    alias = ALIASES.get(setting.spelling)
    flag = flags[alias.field if alias else setting.spelling]
    value = convert(_as_spelled(flag, setting.spelling), setting.raw, setting.where)
    return flag.name, alias.values[value] if alias and alias.values else value


def _alias_note(setting: _Setting) -> str:
    alias = ALIASES[setting.spelling]
    if alias.values is None:
        return f"--{setting.spelling} is read as --{alias.field}"
    value = alias.values[str(setting.raw).lower() == "true"]
    return f"--{setting.spelling} {_words(setting.raw)} is read as --{alias.field} {value}"


def _words(raw: Any) -> str:
    if isinstance(raw, list):
        return " ".join(map(str, raw))
    return str(raw).lower() if isinstance(raw, bool) else str(raw)
