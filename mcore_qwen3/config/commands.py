"""The subcommands: which settings each one reads."""

from __future__ import annotations

from typing import Any

from mcore_qwen3.config.aliases import ALIASES, CONVERT_ALIASES, DATA_ALIASES
from mcore_qwen3.config.checks import check
from mcore_qwen3.config.compare import CompareConfig, check_compare
from mcore_qwen3.config.convert import Hf2McoreConfig, Mcore2HfConfig, VerifyConfig, check_conversion, check_verify
from mcore_qwen3.config.doctor import DoctorConfig
from mcore_qwen3.config.inspect import InspectConfig, check_inspect
from mcore_qwen3.config.parser import Command, Parsed, parse_command
from mcore_qwen3.config.plan import PlanConfig, check_plan
from mcore_qwen3.config.report import ReportConfig, check_report
from mcore_qwen3.config.run import RunConfig
from mcore_qwen3.config.submit import SubmitConfig, check_submit

ParsedRun = Parsed[RunConfig]

HF2MCORE = Command(
    program="convert hf2mcore",
    root=Hf2McoreConfig,
    aliases=CONVERT_ALIASES,
    check=check_conversion,
    words=("src", "dst"),
)
MCORE2HF = Command(
    program="convert mcore2hf",
    root=Mcore2HfConfig,
    aliases=CONVERT_ALIASES,
    check=check_conversion,
    words=("src", "dst"),
)
EXPORT = Command(
    program="megatron export",
    root=Mcore2HfConfig,
    aliases=CONVERT_ALIASES,
    check=check_conversion,
    words=("src", "dst"),
)
DATA = Command(program="megatron data", root=InspectConfig, aliases=DATA_ALIASES, check=check_inspect)
PLAN = Command(program="megatron plan", root=PlanConfig, aliases=ALIASES, check=check_plan)
COMPARE = Command(program="megatron compare", root=CompareConfig, aliases=ALIASES, check=check_compare)
REPORT = Command(program="megatron report", root=ReportConfig, aliases={}, check=check_report, words=("runs",))
VERIFY = Command(program="convert verify", root=VerifyConfig, aliases={}, check=check_verify, words=("a", "b"))

DOCTOR = Command(
    program="megatron doctor",
    root=DoctorConfig,
    aliases={},
    check=lambda config: None,  # what cannot run is what it finds
)
SUBMIT = Command(
    program="megatron submit",
    root=SubmitConfig,
    aliases={},
    check=check_submit,
    then=" COMMAND [its own --flag value ...]",
)
TRAINING = ("sft", "pt")
_OTHERS: dict[tuple[str, ...], Command[Any]] = {
    ("data",): DATA,
    ("doctor",): DOCTOR,
    ("plan",): PLAN,
    ("export",): EXPORT,
    ("convert", "hf2mcore"): HF2MCORE,
    ("convert", "mcore2hf"): MCORE2HF,
    ("convert", "verify"): VERIFY,
}


def parse_args(argv: list[str], command: str) -> ParsedRun:
    """Read the words after ``megatron <command>``, where the command trains a model.

    ``--help`` prints and raises SystemExit(0). Whatever cannot be read, or breaks a rule that needs no more than the
    values, is one ConfigError.
    """
    return parse_command(argv, _training(command))


def find_command(words: list[str]) -> tuple[Command[Any], list[str]] | None:
    """(what the words after ``megatron`` call, the words that are left), or None where they call nothing."""
    if words and words[0] in TRAINING:
        return _training(words[0]), words[1:]
    for names, command in _OTHERS.items():
        if tuple(words[: len(names)]) == names:
            return command, words[len(names) :]
    return None


def _training(command: str) -> Command[RunConfig]:
    return Command(
        program=f"megatron {command}",
        root=RunConfig,
        aliases=ALIASES,
        check=lambda config: check(config, command),
    )
