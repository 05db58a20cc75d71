"""The script itself: usage, subcommands, version, and how an error leaves."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mcore_qwen3 import __version__
from mcore_qwen3.cli import main as main_module
from mcore_qwen3.cli.main import main

HEAVY = "{'torch', 'megatron', 'transformers', 'numpy', 'datasets'}"


def test_no_words_is_the_usage_and_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: megatron <subcommand>" in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "sft" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mcore-qwen3 {__version__}\n"


def test_unknown_subcommand_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stf", "--load", "m"]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and "unknown subcommand; seen: stf" in text and "nearest: sft" in text


def test_error_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "--lrr", "1"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("megatron sft: error: unknown flag; seen: --lrr; change: nearest to lrr: --lr")
    assert err.count("\n") == 1


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("mcore_qwen3.cli.sft.run", interrupted)
    assert main(["sft"]) == 130


def test_fault_of_the_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(argv: list[str]) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr("mcore_qwen3.cli.sft.run", broken)
    with pytest.raises(ZeroDivisionError):
        main(["sft"])


def test_the_script_of_the_wheel_is_main(repo_root: Path) -> None:
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    assert project["scripts"]["megatron"] == f"{main_module.__name__}:main"


def test_help_imports_no_heavy_library(repo_root: Path) -> None:
    code = (
        "import sys\nfrom mcore_qwen3.cli.main import main\n"
        "try:\n    main(['sft', '--help'])\n"
        "except SystemExit as stop:\n    assert stop.code == 0\n"
        f"print(sorted({HEAVY} & {{name.partition('.')[0] for name in sys.modules}}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=repo_root, capture_output=True, text=True, check=True)
    assert "--tensor_model_parallel_size" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
