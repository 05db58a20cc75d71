"""`megatron doctor`: each thing that would make a run fail gives exit code 2; the ranks' part is tested with real ranks."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3.cli import doctor, doctor_checks
from mcore_qwen3.cli.doctor_checks import Finding, check_requirements, network, shared_memory
from mcore_qwen3.cli.main import main
from mcore_qwen3.launch import resolve_environment

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command where everything is well; the ranks end with `ranks`. Returns (exit code, screen)."""
    folder = tmp_path / "bin"
    folder.mkdir()
    write_program(folder / "megatron", "from mcore_qwen3.cli.main import main")
    write_program(folder / "convert", "from mcore_qwen3.cli.convert import run")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    for name in (
        "NNODES",
        "NODE_RANK",
        "NPROC_PER_NODE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "WORLD_SIZE",
        "RANK",
        "SLURM_JOB_ID",
    ):
        monkeypatch.delenv(name, raising=False)

    def call(*words: str, ranks: int = 0) -> tuple[int, str]:
        monkeypatch.setattr(doctor, "run_ranks", lambda *args, **more: ranks)
        code = main(["doctor", "--disk_mib", "1", *words])
        return code, capsys.readouterr().out

    return call


def write_program(file: Path, text: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def failed(screen: str) -> list[str]:
    """The topics of what would fail."""
    return [line[11:29].strip() for line in screen.splitlines() if line.startswith("  FAILS")]


def test_all_is_well(run: Run, tmp_path: Path) -> None:
    code, screen = run()
    assert (code, failed(screen)) == (0, []), screen
    assert screen.endswith("nothing was found that would make a run fail\n")
    for part in ("torch", "GPUs", "transformer_engine", "apex", "flash_attn", "megatron", "nnodes", "GB/s written"):
        assert part in screen
    assert "not known without --load" in screen
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]  # nothing is left, and no save folder was made


@pytest.mark.parametrize(("ranks", "topics"), [(doctor.EXIT_RANKS_FOUND, []), (1, ["ranks"]), (2, ["ranks"])])
def test_what_the_ranks_find_counts(run: Run, ranks: int, topics: list[str]) -> None:
    """They print what they find; how they ended otherwise is said for them."""
    code, screen = run(ranks=ranks)
    assert (code, failed(screen)) == (2, topics)


@pytest.mark.parametrize(
    ("words", "environ", "topic"),
    [
        (["--device", "cuda"], {}, "GPUs"),
        ([], {"NNODES": "2"}, "launch"),
        ([], {"NPROC_PER_NODE": "many"}, "launch"),
        ([], {"GLOO_SOCKET_IFNAME": "nothing0"}, "network"),
        ([], {"NCCL_SOCKET_IFNAME": "=l"}, "network"),
        ([], {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "no.such.host.invalid"}, "network"),
        (["--save", "/proc/version"], {}, "save"),
        (["--save", "/proc/nothing/here"], {}, "save"),
        (["--load", "/nowhere"], {}, "save"),
    ],
)
def test_what_fails(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: list[str], environ: dict[str, str], topic: str
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    code, screen = run(*words)
    assert (code, failed(screen)) == (2, [topic]), screen


def test_a_variable_that_does_nothing_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("nproc_per_node", "2")
    code, screen = run()
    assert code == 0 and "  note     launch              nproc_per_node in lower case has no effect" in screen


def test_a_busy_port_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as busy:
        busy.bind(("", 0))
        busy.listen()
        monkeypatch.setenv("MASTER_PORT", str(busy.getsockname()[1]))
        code, screen = run()
    assert (code, failed(screen)) == (2, ["launch"]) and "in use" in screen


def test_a_busy_port_where_nodes_are_to_meet_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as busy:
        busy.bind(("", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        for name, value in {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        code, screen = run("--meeting_seconds", "1")
    assert (code, failed(screen)) == (2, ["network"]) and f"MASTER_PORT={port}" in screen and "is free" not in screen


@pytest.mark.parametrize("name", ["megatron", "convert"])
def test_another_program_of_the_name_fails(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    other, bin_folder = tmp_path / "other", tmp_path / "bin"
    write_program(other / name, "from swift.cli._megatron.main import cli_main")
    monkeypatch.setenv("PATH", f"{other}{os.pathsep}{bin_folder}")
    code, screen = run()
    assert (code, failed(screen)) == (2, [name])
    assert f"{other / name} comes first on PATH" in screen and f"this package's is {bin_folder / name}" in screen
    monkeypatch.setenv("PATH", f"{bin_folder}{os.pathsep}{other}")
    assert run()[0] == 0
    (bin_folder / name).unlink()
    assert "this package's is not on PATH" in run()[1]


def test_no_script_on_path_is_said_and_does_not_fail(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    code, screen = run()
    assert code == 0 and "python -m mcore_qwen3 convert works" in screen


def test_a_disk_without_room_for_one_checkpoint_fails(run: Run, moe_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has 91,552 parameters, by its config: 12 bytes each in a CPU run's checkpoint (fp32, two moments)."""
    needed = 91_552 * 12
    for free, code, level in ((needed - 1, 2, "FAILS"), (2 * needed - 1, 0, "note"), (2 * needed, 0, "ok")):
        usage = type("Usage", (), {"free": free})
        monkeypatch.setattr(doctor_checks.shutil, "disk_usage", lambda folder, usage=usage: usage)
        monkeypatch.setattr(doctor_checks, "shared_memory", list)
        got, screen = run("--load", str(moe_dir))
        assert got == code
        assert [line.split()[0] for line in screen.splitlines() if "a checkpoint with optimizer state" in line] == [
            level
        ]


@pytest.mark.parametrize(
    ("required", "levels", "text"),
    [
        (["torch>=2.10", "numpy>=2"], ["ok"], "torch 2."),
        (["torch>=99"], ["ok", "FAILS"], "is not >=99"),
        (["no-such-package-of-ours>=1"], ["ok", "FAILS"], "no-such-package-of-ours>=1 is not installed"),
        (["no-such-package-of-ours>=1; extra == 'gpu'"], ["ok"], ""),
    ],
)
def test_versions(required: list[str], levels: list[str], text: str) -> None:
    found = check_requirements(required)
    assert [each.level for each in found] == levels and text in found[-1].text


def test_a_driver_that_does_not_answer_fails(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "count_gpus", lambda environ: 2)
    write_program(tmp_path / "bin" / "nvidia-smi", 'echo "Driver/library version mismatch" >&2; exit 18')
    code, screen = run()
    assert code == 2 and set(failed(screen)) == {"GPUs"} and "version mismatch" in screen


def test_gpus_and_what_is_not_installed_for_them(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "count_gpus", lambda environ: 2)
    monkeypatch.setattr(doctor, "count_gpus", lambda environ: 2)
    table = "\\033[4m\tGPU0\tGPU1\\033[0m\\nGPU0\t X \tNV18\\nGPU1\tNV18\t X \\n\\nLegend:\\n  X = Self"
    answers = f'case "$1" in topo) printf "{table}" ;; *) echo "0, NVIDIA H100, 81559 MiB" ;; esac'
    write_program(tmp_path / "bin" / "nvidia-smi", answers)
    code, screen = run()
    assert (
        code == 0 and "NVIDIA H100" in screen and "NV18" in screen and "Legend" not in screen and "\033" not in screen
    )
    assert "transformer_engine  not found: a GPU run takes the portable modules" in screen
    monkeypatch.setenv("PATH", "")
    assert "names, memory, driver and links are not known" in run()[1]


def test_little_shared_memory_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 2**26}))
    assert [(each.level, "64 MiB" in each.text) for each in shared_memory(tmp_path)] == [("note", True)]


def test_the_interface_to_this_machine_is_the_loop_back() -> None:
    plan = resolve_environment({}, gpus=None)
    (found,) = network(plan, {})
    assert found.level == "ok" and "by lo;" in found.text


def test_packages_of_a_gpu_run_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mcore_qwen3.cli.doctor_rank import broken_accelerators

    (tmp_path / "broken_package.py").write_text("raise OSError('undefined symbol: _ZN3c104')")
    (tmp_path / "sound_package.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    found = broken_accelerators(("broken_package", "sound_package", "absent_package"))
    assert len(found) == 1 and "broken_package" in found[0] and "undefined symbol" in found[0]


def rank(**changes: Any) -> dict[str, Any]:
    """What a rank says of itself."""
    code = {"torch": "2.13.0"} | changes.pop("code", {})
    return {"place": "node 0 on a", "gpus_by_driver": 8, "gpu": "H100", "broken": [], "code": code} | changes


@pytest.mark.parametrize(
    ("other", "levels", "text"),
    [
        ({}, [], "2 joined"),
        ({"code": {"torch": "2.12.0"}}, ["FAILS"], "2.12.0"),
        ({"gpu": "A100"}, ["note"], "A100"),
        ({"gpu": "none"}, ["FAILS", "note"], "slowest"),
        ({"gpu": "none", "gpus_by_driver": 0}, ["note"], "slowest"),
        ({"broken": ["transformer_engine.pytorch is installed and cannot be imported"]}, ["FAILS"], "rank 1, node 1"),
    ],
)
def test_what_differs_between_ranks(other: dict[str, Any], levels: list[str], text: str) -> None:
    from mcore_qwen3.cli.doctor_rank import compare

    found: list[Finding] = compare([rank(), rank(place="node 1 on b", **other)])
    assert found[0].text.splitlines() == ["2 joined", "node 0 on a: 1 ranks from 0", "node 1 on b: 1 ranks from 1"]
    assert [each.level for each in found[1:]] == levels and text in found[-1].text


def test_a_node_that_does_not_come_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    for name, value in {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    code, screen = run("--meeting_seconds", "1")
    assert (code, failed(screen)) == (2, ["nodes"]), screen
