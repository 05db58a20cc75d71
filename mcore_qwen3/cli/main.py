"""``megatron <subcommand> ...``: finds the subcommand, and turns every error a user can mend into one line."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Mapping, Sequence

from mcore_qwen3 import __version__
from mcore_qwen3.errors import McoreQwen3Error

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # what a shell returns for SIGINT

# subcommand: (module with run(argv) -> exit code, one line for the usage)
Commands = Mapping[str, tuple[str, str]]
COMMANDS = {
    "sft": ("mcore_qwen3.cli.sft", "fine-tune on chat rows"),
    "pt": ("mcore_qwen3.cli.pt", "continue pre-training on raw text"),
    "data": ("mcore_qwen3.cli.data", "prepare rows, show what is trained, and count"),
    "submit": ("mcore_qwen3.cli.submit", "run any of these commands as a job of SLURM or PAI-DLC"),
    "compare": ("mcore_qwen3.cli.compare", "train a few steps here and in a plain transformers loop: do the two agree"),
    "plan": ("mcore_qwen3.cli.plan", "find a layout for a number of GPUs: will it fit, and how fast"),
    "doctor": ("mcore_qwen3.cli.doctor", "look at machine, packages, network and disk: what would make a run fail"),
    "export": ("mcore_qwen3.cli.export", "write a checkpoint in Hugging Face form (convert mcore2hf)"),
    "report": ("mcore_qwen3.cli.report", "one HTML page of runs: curves, settings, expert load, events"),
    "convert": ("mcore_qwen3.cli.convert", "convert checkpoints, or compare two: the script convert"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name); returns the exit code. ``--help`` raises SystemExit(0)."""
    return dispatch("megatron", COMMANDS, list(sys.argv[1:] if argv is None else argv))


def dispatch(program: str, commands: Commands, words: list[str]) -> int:
    """Run the subcommand that the first word names; errors that a user can mend are one line on stderr."""
    if not words:
        print(_usage(program, commands), file=sys.stderr)
        return EXIT_USER_ERROR
    command, *rest = words
    if command in ("-h", "--help"):
        print(_usage(program, commands))
        return 0
    if command == "--version":
        print(f"mcore-qwen3 {__version__}")
        return 0
    if command not in commands:
        near = difflib.get_close_matches(command, commands, n=1, cutoff=0.0)
        hint = f"nearest: {near[0]}; all: {', '.join(commands)}"
        print(f"{program}: error: unknown subcommand; seen: {command}; change: {hint}", file=sys.stderr)
        return EXIT_USER_ERROR
    try:
        run = importlib.import_module(commands[command][0]).run
        return run(rest)
    except McoreQwen3Error as error:
        print(f"{program} {command}: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _usage(program: str, commands: Commands) -> str:
    lines = [f"usage: {program} <subcommand> [--config FILE.yaml] [--flag value ...]", ""]
    lines += [f"  {name:<8} {text}" for name, (_, text) in commands.items()]
    lines += ["", f"{program} <subcommand> --help lists its flags; {program} --version names the version."]
    return "\n".join(lines)
