"""`scripts/setup_slurm.sh`: it installs where it can, and stops nobody who cannot; in CI that is a fault."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

BASH = "/bin/bash"


def program(folder: Path, name: str, text: str = "") -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!{BASH}\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A PATH of our own: root, no SLURM, and nothing to wait for."""
    program(tmp_path / "bin", "id", "echo 0")
    program(tmp_path / "bin", "sleep")
    return tmp_path / "bin"


def set_up(machine: Path, repo_root: Path, **environ: str) -> tuple[int, str]:
    """(exit code, screen)"""
    done = subprocess.run(
        [BASH, str(repo_root / "scripts" / "setup_slurm.sh")],
        env={"PATH": str(machine), "DAEMON_FOLDERS": str(machine), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=50,
    )
    return done.returncode, done.stdout


def apt(machine: Path, text: str) -> None:
    """An apt-get that writes down its words."""
    program(machine, "apt-get", f'echo "$@" >> {machine}/calls; {text}')


def test_what_is_there_is_left_alone(machine: Path, repo_root: Path) -> None:
    for name in ("munged", "slurmctld", "slurmd", "sbatch", "srun"):
        program(machine, name)
    apt(machine, "exit 1")
    assert set_up(machine, repo_root) == (0, "") and not (machine / "calls").exists()


@pytest.mark.parametrize("ci", [{}, {"CI": "true"}])
@pytest.mark.parametrize("who", ["0", "1000"])
def test_without_root_or_apt_nothing_is_tried(machine: Path, repo_root: Path, who: str, ci: dict[str, str]) -> None:
    program(machine, "id", f"echo {who}")
    if who == "1000":
        apt(machine, "exit 1")
    code, screen = set_up(machine, repo_root, **ci)
    assert code == 0 and "will skip" in screen and not (machine / "calls").exists()


def test_as_root_it_is_installed_also_at_the_second_try(machine: Path, repo_root: Path) -> None:
    apt(machine, f'[ "$(wc -l < {machine}/calls)" -gt 1 ]')
    program(machine, "wc", 'n=0; while read -r _; do n=$((n + 1)); done; echo "$n"')
    code, screen = set_up(machine, repo_root, CI="true")
    assert code == 0 and "will skip" not in screen
    calls = (machine / "calls").read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["update", "update", "install"]
    assert calls[-1].endswith("slurm-wlm munge")


@pytest.mark.parametrize(("ci", "expected"), [({}, 0), ({"CI": "true"}, 1)])
def test_what_apt_says_is_shown_and_counts_in_ci(
    machine: Path, repo_root: Path, ci: dict[str, str], expected: int
) -> None:
    apt(machine, "echo 'E: no such archive' >&2; exit 100")
    code, screen = set_up(machine, repo_root, **ci)
    assert code == expected and "E: no such archive" in screen and "will skip" in screen
