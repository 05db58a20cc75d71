"""`megatron submit`: whose a word is, what is refused before anything is written, and what is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_qwen3.cli.main import main
from mcore_qwen3.cli.submit import split_words
from mcore_qwen3.config import parse_args
from mcore_qwen3.errors import ConfigError

Text = pytest.CaptureFixture[str]


@pytest.fixture
def sft(moe_dir: Path, rows_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A training command for 16 ranks, started in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    words = f"sft --load {moe_dir} --dataset {rows_file} --train_iters 10 --expert_model_parallel_size 8"
    return words.split()


@pytest.mark.parametrize(
    ("line", "own"),
    [
        ("sft --load a", ""),
        ("--nodes 2 --gpus-per-node 8 sft --nodes 3", "--nodes 2 --gpus-per-node 8"),
        ("--nodes=2 pt --x", "--nodes=2"),
        ("--dry_run sft --load a", "--dry_run"),
        ("--dry_run true sft", "--dry_run true"),
        ("--partition data plan --gpus 8", "--partition data"),
        ("--env A B convert hf2mcore a b", "--env A B"),
        ("--config file.yaml sft", "--config file.yaml"),
        ("--unknown sft --load a", "--unknown"),
    ],
)
def test_what_stands_before_the_command_is_submit_s(line: str, own: str) -> None:
    mine, command = split_words(line.split())
    assert " ".join(mine) == own and " ".join([*mine, *command]) == line


@pytest.mark.parametrize("line", ["", "--nodes 2", "--partition sft", "--env A B"])
def test_without_a_command(line: str) -> None:
    with pytest.raises(ConfigError, match="needs the command"):
        split_words(line.split())


def written(folder: Path) -> list[Path]:
    """Everything that a submit may have written."""
    return [*folder.glob("megatron_jobs"), *folder.glob("out*")]


ASKED = ["--nodes", "2", "--gpus_per_node", "8", "--dry_run", "true"]


@pytest.mark.parametrize(
    ("own", "more", "message"),
    [
        (["--nodes", "0"], [], "--nodes needs a whole number"),
        (["--time", "soon"], [], "--time is a limit above 0"),
        (["--nods", "2"], [], "unknown flag; seen: --nods; change: nearest to nods: --nodes"),
        (["--env", "NOT_SET_ANYWHERE"], [], "NOT_SET_ANYWHERE is not set"),
        ([], ["--nodes", "2"], "flags of megatron submit stand before sft"),
        ([], ["--partition=a"], "flags of megatron submit stand before sft"),
        ([], ["--learning_rat", "1"], "unknown flag; seen: --learning_rat"),
        ([], ["--lr", "high"], "--lr needs a finite number"),
        ([], ["--dry_run", "true"], "a job trains, and a dry run does not"),
        ([], ["--device", "cpu"], "the nodes of the job have the device"),
        ([], ["--resume", "never"], "continues with --resume auto"),
        ([], ["--no_save_optim", "true"], "needs the optimizer state"),
        ([], ["--tensor_model_parallel_size", "3"], "3"),
        ([], ["--global_batch_size", "15"], "15"),
        ([], ["--val_dataset", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_refused_before_anything_is_written(
    own: list[str], more: list[str], message: str, sft: list[str], tmp_path: Path, capsys: Text
) -> None:
    asked = ASKED if "--nodes" not in own else ASKED[2:]
    assert main(["submit", *asked, *own, *sft, *more]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert written(tmp_path) == []


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["submit", "sft"], "takes a command of megatron"),
        (["convert", "sideways"], "takes a command of megatron"),
        (["data", "--load", "a"], "megatron data needs --dataset"),
        (["data", "--load", "a", "--dataset", "b"], "data works on one node"),
        (["convert", "hf2mcore", "a"], "SRC a, DST None"),
    ],
)
def test_other_commands_are_looked_at_too(command: list[str], message: str, tmp_path: Path, capsys: Text) -> None:
    assert main(["submit", "--output", str(tmp_path / "out"), *ASKED, *command]) == 2
    assert message in capsys.readouterr().err and written(tmp_path) == []


def test_a_dry_run_writes_script_and_configuration(
    sft: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Text
) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    monkeypatch.setenv("HF_TOKEN", "hunter3")
    monkeypatch.setenv("WORLD_SIZE", "99")
    monkeypatch.setenv("PATH", "")  # there is no sbatch, and none is needed
    assert main(["submit", *ASKED, "--env", "MY_TOKEN", "--output", "out", *sft]) == 0
    screen = capsys.readouterr().out
    script = (tmp_path / "out" / "job.sbatch").read_text()
    assert script in screen and "nothing was submitted" in screen
    export = re.search(r"^#SBATCH --export=(.*)$", script, re.MULTILINE)[1].split(",")
    assert {"MY_TOKEN", "HF_TOKEN"} <= set(export) and "WORLD_SIZE" not in export
    assert "hunter" not in script + screen
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["job.sbatch", "run_config.yaml"]
    run = parse_args(["--config", str(tmp_path / "out" / "run_config.yaml")], "sft").config
    assert (run.launch.device, run.launch.platform, run.launch.dry_run) == ("cuda", "slurm", False)
    assert (run.model.bf16, run.parallel.expert_model_parallel_size) == (True, 8)
    assert run.checkpoint.save == "megatron_output/tiny-moe"
    assert f"{tmp_path}/megatron_output/tiny-moe/latest_checkpointed_iteration.txt" in script
    assert "--device cuda" in script and "--platform slurm" in script and "export NPROC_PER_NODE=8" in script


def test_the_layout_is_checked_for_the_ranks_of_the_job(sft: list[str], capsys: Text) -> None:
    """16 ranks hold 8 experts' ranks; 4 do not."""
    few = ["--nodes", "2", "--gpus_per_node", "0", "--nproc_per_node", "2", "--dry_run", "true"]
    assert main(["submit", *few, *sft]) == 2
    assert "4" in capsys.readouterr().err


def test_a_run_that_is_complete_is_not_queued(
    sft: list[str], tmp_path: Path, write_checkpoint: Callable[..., Path], capsys: Text
) -> None:
    write_checkpoint(tmp_path / "megatron_output" / "tiny-moe", 10)
    assert main(["submit", *ASKED, *sft]) == 2
    assert "iter_0000010 has all of its steps" in capsys.readouterr().err and written(tmp_path) == []
    sft[sft.index("10")] = "11"
    assert main(["submit", *ASKED, *sft]) == 0


def test_in_a_container_what_is_not_here_is_checked_by_its_flags(
    sft: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Text
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/this/machine")
    elsewhere = ["sft", "--load", "/in/the/image", "--dataset", "/in/the/image/rows.jsonl", "--train_iters", "10"]
    dlc = ["--platform", "dlc", "--workspace_id", "7", "--container", "image:1"]
    assert main(["submit", *ASKED, *dlc, "--output", "out", *elsewhere]) == 0
    script = (tmp_path / "out" / "job.sh").read_text()
    assert "python3 -m mcore_qwen3 sft --load /in/the/image" in script and "PYTHONPATH" not in script
    assert "--platform dlc" in script and "checked by its flags alone" in capsys.readouterr().out
    assert main(["submit", *ASKED, *elsewhere]) == 2  # without a container the job sees what is here


@pytest.mark.parametrize(("platform", "name"), [([], "sbatch"), (["dlc"], "dlc")])
def test_without_the_scheduler_s_program(
    platform: list[str], name: str, sft: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Text
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    dlc = ["--platform", "dlc", "--workspace_id", "7", "--container", "image"] if platform else []
    assert main(["submit", *ASKED[:4], *dlc, *sft]) == 2
    assert f"no {name}" in capsys.readouterr().err


def test_what_sbatch_refuses_is_said_and_nothing_is_written(
    sft: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Text
) -> None:
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\n[ "$1" = --test-only ] || exit 9\necho "invalid partition specified: x" >&2\nexit 1\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    assert main(["submit", *ASKED[:4], "--partition", "x", *sft]) == 2
    assert "invalid partition specified: x" in capsys.readouterr().err and written(tmp_path) == []
