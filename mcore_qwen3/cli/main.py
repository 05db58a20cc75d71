"""``megatron <subcommand> ...``: finds the subcommand, and turns every error a user can mend into one line."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

from mcore_qwen3 import __version__
from mcore_qwen3.errors import McoreQwen3Error

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # what a shell returns for SIGINT

# subcommand: (module with run(argv) -> exit code, one line for the usage)
COMMANDS = {"sft": ("mcore_qwen3.cli.sft", "fine-tune on chat rows")}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name); returns the exit code. ``--help`` raises SystemExit(0)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        print(_usage(), file=sys.stderr)
        return EXIT_USER_ERROR
    command, *rest = words
    if command in ("-h", "--help"):
        print(_usage())
        return 0
    if command == "--version":
        print(f"mcore-qwen3 {__version__}")
        return 0
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1, cutoff=0.0)
        hint = f"nearest: {near[0]}; all: {', '.join(COMMANDS)}"
        print(f"megatron: error: unknown subcommand; seen: {command}; change: {hint}", file=sys.stderr)
        return EXIT_USER_ERROR
    try:
        run = importlib.import_module(COMMANDS[command][0]).run
        return run(rest)
    except McoreQwen3Error as error:
        print(f"megatron {command}: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _usage() -> str:
    lines = ["usage: megatron <subcommand> [--config FILE.yaml] [--flag value ...]", ""]
    lines += [f"  {name:<8} {text}" for name, (_, text) in COMMANDS.items()]
    lines += ["", "megatron <subcommand> --help lists its flags; megatron --version names the version."]
    return "\n".join(lines)
