"""`scripts/find_python.sh`: which Python builds the environment, and what is said when there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BASH = "/bin/bash"


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{BASH}\n{text}\n")
    path.chmod(0o755)
    return path


def good_python(path: Path) -> Path:
    """A Python that fits, under any name."""
    return program(path, f'exec "{sys.executable}" "$@"')


def find(repo_root: Path, path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BASH, str(repo_root / "scripts" / "find_python.sh")],
        env={"PATH": str(path), **environment},
        capture_output=True,
        text=True,
        timeout=50,
    )


@pytest.fixture
def bin_dir(tmp_path: Path) -> Path:
    """A PATH of our own: an old python3, and a pyenv shim that refuses to run."""
    program(tmp_path / "bin" / "python3", "exit 1")
    program(tmp_path / "bin" / "python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    return tmp_path / "bin"


def test_none_is_an_error_that_says_what_to_install(bin_dir: Path, repo_root: Path) -> None:
    done = find(repo_root, bin_dir)
    assert (done.returncode, done.stdout) == (1, "")
    assert "No Python >= 3.12" in done.stderr
    assert "uv python install 3.12" in done.stderr


@pytest.mark.parametrize("name", ["python3.12", "python3.13", "python3.14", "python3"])
def test_found_on_path(name: str, bin_dir: Path, repo_root: Path) -> None:
    good_python(bin_dir / name)
    done = find(repo_root, bin_dir)
    assert (done.returncode, done.stdout.strip()) == (0, sys.executable)


def test_found_through_uv(bin_dir: Path, tmp_path: Path, repo_root: Path) -> None:
    found = good_python(tmp_path / "uv" / "python3")
    program(bin_dir / "uv", f'[ "$1 $2 $UV_PYTHON_DOWNLOADS" = "python find never" ] && echo "{found}"')
    assert find(repo_root, bin_dir).stdout.strip() == sys.executable


def test_found_through_pyenv(bin_dir: Path, tmp_path: Path, repo_root: Path) -> None:
    good_python(tmp_path / "pyenv" / "versions" / "3.13.7" / "bin" / "python3")
    program(tmp_path / "pyenv" / "versions" / "3.12.1" / "bin" / "python3", "exit 1")  # broken
    program(bin_dir / "pyenv", f'[ "$1" = root ] && echo "{tmp_path / "pyenv"}"')
    assert find(repo_root, bin_dir).stdout.strip() == sys.executable


def test_a_named_one_is_taken_or_refused(bin_dir: Path, tmp_path: Path, repo_root: Path) -> None:
    good = good_python(tmp_path / "mine")
    assert find(repo_root, bin_dir, PYTHON=str(good)).stdout.strip() == sys.executable
    good_python(bin_dir / "python3.14")
    done = find(repo_root, bin_dir, PYTHON=str(bin_dir / "python3"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "is not a Python >= 3.12" in done.stderr
