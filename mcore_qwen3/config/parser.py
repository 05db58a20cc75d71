"""Command line and YAML file -> settings. Precedence: defaults < file < flags."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from mcore_qwen3.config.aliases import Alias
from mcore_qwen3.config.flags import Flag
from mcore_qwen3.config.run import iter_flags, sections, with_values
from mcore_qwen3.config.values import convert
from mcore_qwen3.config.yaml_file import read_flat_yaml
from mcore_qwen3.errors import ConfigError

_METAVARS = {"int": "N", "float": "X", "bool": "true|false", "str": "TEXT", "list": "TEXT", "ints": "N", "floats": "X"}
_NARGS = {"bool": "?", "list": "+", "ints": "+", "floats": "+"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Command[Config]:
    """What a subcommand reads.

    Attributes:
        program: the words that start it, for messages.
        root: the class of its settings.
        aliases: other names of its flags.
        check: raises ConfigError for settings that break a rule.
        words: flags whose values may also stand without their names, in this order.
    """

    program: str
    root: type[Config]
    aliases: Mapping[str, Alias]
    check: Callable[[Config], None]
    words: tuple[str, ...] = ()

    def flags(self) -> dict[str, Flag]:
        """Every flag by name."""
        return {flag.name: flag for flag in iter_flags(self.root, self.aliases)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsed[Config]:
    """A command line that was read and checked.

    ``explicit`` holds the names of the fields that the user set, on the command line or in the file (null in a file
    sets nothing). ``notes`` are lines to print once: which other name was read as which flag.
    """

    command: str
    config: Config
    explicit: frozenset[str]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Setting:
    """One value as the user wrote it: ``spelling`` is a field's name or an alias, ``where`` is for messages."""

    spelling: str
    raw: Any
    where: str


def parse_command[Config](argv: list[str], command: Command[Config]) -> Parsed[Config]:
    """Read the words after the command's own.

    ``--help`` prints and raises SystemExit(0). Whatever cannot be read, or breaks a rule that needs no more than the
    values, is one ConfigError.
    """
    flag_settings, files = _read_command_line(argv, command)
    file_settings = [setting for path in files for setting in _read_file(path, command)]
    values = _typed(file_settings, command) | _typed(flag_settings, command)
    aliases = command.aliases
    notes = [_alias_note(s, aliases) for s in (*file_settings, *flag_settings) if s.spelling in aliases]
    config = with_values(command.root(), values)
    command.check(config)
    name = command.program.split()[-1]
    return Parsed(command=name, config=config, explicit=frozenset(values), notes=tuple(dict.fromkeys(notes)))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"the command line cannot be read: {message}")


class _Collect(argparse.Action):
    """Keeps each use of a flag with its spelling; conversion and contradictions are looked at afterwards."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.settings.append((str(option_string).removeprefix("--"), values))


def build_parser(command: Command[Any]) -> argparse.ArgumentParser:
    """The argparse parser of a command, with one help group a section."""
    words = "".join(f" {name.upper()}" for name in command.words)
    parser = _Parser(
        prog=command.program,
        usage=f"{command.program}{words} [--config FILE.yaml] [--flag value ...]",
        description="Flags and YAML keys have the same names. Defaults < --config file < flags.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=116),
    )
    parser.add_argument("--config", action=_Collect, metavar="FILE", help="YAML file of flags")
    groups = {
        name: parser.add_argument_group(str(cls.__doc__).rstrip(".")) for name, cls in sections(command.root).items()
    }
    for flag in command.flags().values():
        _add_flag(groups[flag.section], flag.name, flag, _help_text(flag))
        for alias in flag.aliases:
            _add_flag(groups[flag.section], alias, _as_spelled(flag, alias, command.aliases), argparse.SUPPRESS)
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


def _as_spelled(flag: Flag, spelling: str, aliases: Mapping[str, Alias]) -> Flag:
    """``flag`` with the form it has under ``spelling``: true or false, where the alias translates its values."""
    alias = aliases.get(spelling)
    return flag if alias is None or alias.values is None else dataclasses.replace(flag, type="bool", choices=())


def _read_command_line(argv: list[str], command: Command[Any]) -> tuple[list[_Setting], list[str]]:
    """(settings in the order of the line, the one file that --config names, or none)."""
    known, unknown = build_parser(command).parse_known_args(_normalised(argv), argparse.Namespace(settings=[]))
    unknown_flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    if unknown_flags:
        raise _unknown_names(unknown_flags, [word.lstrip("-") for word in unknown_flags], command)
    if len(unknown) > len(command.words):
        raise ConfigError(
            "a word belongs to no flag", seen=" ".join(unknown[len(command.words) :]), fix="write --flag value"
        )
    files = [value for name, value in known.settings if name == "config"]
    if len(files) > 1:
        raise ConfigError("--config is given more than once", seen=", ".join(files), fix="name one file")
    settings = [_Setting(name, raw, f"--{name}") for name, raw in known.settings if name != "config"]
    settings += [_Setting(name, word, name.upper()) for name, word in zip(command.words, unknown, strict=False)]
    return settings, files


def _read_file(path: str, command: Command[Any]) -> list[_Setting]:
    content = {name.replace("-", "_"): value for name, value in read_flat_yaml(path).items()}
    unknown = sorted(set(content) - _known_names(command))
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


def _known_names(command: Command[Any]) -> set[str]:
    return command.flags().keys() | command.aliases.keys()


def _unknown_names(shown: list[str], names: list[str], command: Command[Any]) -> ConfigError:
    """Every unknown name at once, each with its nearest neighbours."""
    hints = []
    for name in names:
        near = difflib.get_close_matches(name, sorted(_known_names(command)), n=3, cutoff=0.6)
        hints.append(f"nearest to {name}: {', '.join('--' + n for n in near)}" if near else f"nothing is near {name}")
    rule = f"unknown flag{'s' if len(names) > 1 else ''}"
    return ConfigError(rule, seen=", ".join(shown), fix="; ".join([*hints, f"all: {command.program} --help"]))


def _typed(settings: Iterable[_Setting], command: Command[Any]) -> dict[str, Any]:
    """Field name -> value; two different values for one field, under whatever names, are refused."""
    flags = command.flags()
    found: dict[str, tuple[Any, _Setting]] = {}
    for setting in settings:
        field, value = _field_and_value(setting, flags, command.aliases)
        earlier = found.setdefault(field, (value, setting))
        if earlier[0] != value:
            fix = f"write --{field} a b" if flags[field].type in ("list", "ints") else "keep one of them"
            seen = " and ".join(f"{s.where} {_words(s.raw)}" for s in (earlier[1], setting))
            raise ConfigError(f"{field} is given twice with different values", seen=seen, fix=fix)
    return {field: value for field, (value, _) in found.items()}


def _field_and_value(setting: _Setting, flags: dict[str, Flag], aliases: Mapping[str, Alias]) -> tuple[str, Any]:
    alias = aliases.get(setting.spelling)
    flag = flags[alias.field if alias else setting.spelling]
    value = convert(_as_spelled(flag, setting.spelling, aliases), setting.raw, setting.where)
    return flag.name, alias.values[value] if alias and alias.values else value


def _alias_note(setting: _Setting, aliases: Mapping[str, Alias]) -> str:
    alias = aliases[setting.spelling]
    if alias.values is None:
        return f"--{setting.spelling} is read as --{alias.field}"
    value = alias.values[str(setting.raw).lower() == "true"]
    return f"--{setting.spelling} {_words(setting.raw)} is read as --{alias.field} {value}"


def _words(raw: Any) -> str:
    if isinstance(raw, list):
        return " ".join(map(str, raw))
    return str(raw).lower() if isinstance(raw, bool) else str(raw)
