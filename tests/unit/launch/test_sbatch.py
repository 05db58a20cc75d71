"""The scripts of `megatron submit`, run by bash with programs in SLURM's place that write down what they get."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mcore_qwen3.config import SUBMIT, SubmitConfig, parse_command
from mcore_qwen3.launch.dlc_job import dlc_script
from mcore_qwen3.launch.sbatch import Payload, sbatch_quoted, sbatch_script

NASTY = [
    "two words",
    "it's",
    '"double"',
    "$(touch planted)",
    "`touch planted`",
    "a\nb",
    "--a=b c",
    "*",
    "",
    "\\n",
    "!x",
]

# Each writes its words and what it sees of a variable, then does what the test asks for by STEP.
FAKE = """#!{python}
import json, os, pathlib, signal, sys, time
name = pathlib.Path(sys.argv[0]).name
place = pathlib.Path(os.environ["PLACE"])
with (place / (name + ".json")).open("a") as file:
    file.write(json.dumps([sys.argv[1:], os.environ.get("NPROC_PER_NODE"), os.environ.get("TOKEN")]) + "\\n")
if name == "srun" and os.environ.get("STEP"):
    saves, code = os.environ["STEP"].split()
    def stop(*_):
        time.sleep(0.2)  # the shell's wait ends before this process does
        if saves == "saves":
            (place / "save" / "tracker.txt").write_text("7")
        sys.exit(int(code))
    signal.signal(signal.SIGUSR1, stop)
    signal.signal(signal.SIGTERM, stop)
    (place / "ready").touch()
    signal.pause()
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with srun, scontrol and dlc that write down their words."""
    for name in ("srun", "scontrol", "dlc"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(FAKE.format(python=sys.executable))
        program.chmod(0o755)
    (tmp_path / "save").mkdir()
    return tmp_path


def settings(*words: str) -> SubmitConfig:
    return parse_command(list(words), SUBMIT).config


def payload(place: Path, *words: str, training: bool = True, stop_code: int = 0) -> Payload:
    tracker = place / "save" / "tracker.txt" if training else None
    return Payload(words=["python", *words], variables=["PATH"], workdir=place, tracker=tracker, stop_code=stop_code)


def environment(place: Path, **more: str) -> dict[str, str]:
    path = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PLACE": str(place), "SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "n1", **more}


def start(place: Path, script: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", "-c", script],
        env=environment(place, **environ),
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def calls(place: Path, name: str) -> list[list[str]]:
    """The words of each call."""
    file = place / f"{name}.json"
    return [json.loads(line)[0] for line in file.read_text().splitlines()] if file.exists() else []


def options(script: str) -> dict[str, str]:
    """The #SBATCH lines, as sbatch reads a word: this reader knows nothing of how they were written."""
    lines = re.findall(r"^#SBATCH (.*)$", script, flags=re.MULTILINE)
    pairs = [shlex.split(line)[0].partition("=") for line in lines]
    assert len({name for name, _, _ in pairs}) == len(pairs)
    return {name: value for name, _, value in pairs}


@pytest.mark.parametrize("training", [True, False])
def test_every_word_arrives_as_it_is(place: Path, training: bool) -> None:
    script = sbatch_script(settings("--gpus_per_node", "0"), payload(place, *NASTY, training=training), "job", place)
    process = start(place, script)
    assert process.communicate(timeout=20)[0].startswith("job 5, start 1, on n1") and process.returncode == 0
    (words,) = calls(place, "srun")
    assert words[words.index("python") :] == ["python", *NASTY]
    assert not (place / "planted").exists() and calls(place, "scontrol") == []


def test_what_is_asked_of_slurm(place: Path) -> None:
    words = "--nodes 4 --gpus_per_node 8 --time 1-0 --partition a,b --account me --sbatch_options exclusive qos=high"
    more = ['comment=it\'s "so" \\', "--cpus_per_node", "64", "--nproc_per_node", "4"]
    config = settings(*words.split(), *more)
    folder = place / "log % folder"
    asked = options(sbatch_script(config, payload(place), "job", folder))
    assert asked == {
        "--job-name": "job",
        "--nodes": "4",
        "--ntasks-per-node": "1",
        "--gpus-per-node": "8",
        "--cpus-per-task": "64",
        "--partition": "a,b",
        "--account": "me",
        "--time": "1-0",
        "--signal": "B:USR1@900",
        "--requeue": "",
        "--chdir": str(place),
        "--output": f"{place}/log %% folder/slurm-%j.out",
        "--open-mode": "append",
        "--export": "PATH",
        "--exclusive": "",
        "--qos": "high",
        "--comment": 'it\'s "so" \\',
    }


def test_without_cores_whole_nodes_are_asked_for(place: Path) -> None:
    asked = options(sbatch_script(settings("--gpus_per_node", "0"), payload(place), "job", place))
    assert {"--exclusive": "", "--mem": "0"}.items() <= asked.items() and "--gpus-per-node" not in asked


@pytest.mark.parametrize("words", [["--requeue", "false"], []])
def test_what_cannot_continue_is_not_queued_again(place: Path, words: list[str]) -> None:
    """By the user's wish, or because the command does not train."""
    script = sbatch_script(settings("--gpus_per_node", "0", *words), payload(place, training=bool(words)), "job", place)
    assert "--no-requeue" in options(script) and "scontrol" not in script
    assert ("--signal" in options(script)) == bool(words)


def test_quoting_for_sbatch_is_one_word() -> None:
    for text in ("a b", 'a"b', "a\\", "it's", "$(id) `id` #x"):
        assert shlex.split(sbatch_quoted(text)) == [text]


def stopped(place: Path, step: str, signum: int, *words: str, stop_code: int = 0, before: str = "") -> tuple[int, str]:
    """(exit code, screen) of a job that gets a signal while its step runs."""
    if before:
        (place / "save" / "tracker.txt").write_text(before)
    config = settings("--gpus_per_node", "0", *words)
    process = start(place, sbatch_script(config, payload(place, stop_code=stop_code), "job", place), STEP=step)
    end = time.monotonic() + 20
    while not (place / "ready").exists() and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signum)
    if signum == signal.SIGTERM:  # SLURM sends it to the step, too
        subprocess.run(["pkill", "-TERM", "-P", str(process.pid)], check=True)
    screen = process.communicate(timeout=20)[0]
    return process.returncode, screen


@pytest.mark.parametrize("stop_code", [0, 143])
def test_the_warning_before_the_limit_saves_and_queues_again(place: Path, stop_code: int) -> None:
    code, screen = stopped(place, f"saves {stop_code}", signal.SIGUSR1, stop_code=stop_code, before="3")
    assert code == stop_code and "after step 7: queued again" in screen
    assert calls(place, "scontrol") == [["requeue", "5"]]


def test_a_job_that_got_no_further_is_not_queued_again(place: Path) -> None:
    code, screen = stopped(place, "sleeps 0", signal.SIGUSR1, before="3")
    assert code == 1 and "no checkpoint was saved in this time limit" in screen and calls(place, "scontrol") == []


def test_a_fault_is_not_queued_again(place: Path) -> None:
    code, _ = stopped(place, "saves 1", signal.SIGUSR1)
    assert code == 1 and calls(place, "scontrol") == []


def test_preemption_and_cancelling_are_left_to_slurm(place: Path) -> None:
    """The shell waits for the ranks' save, and leaves it to SLURM whether the job comes again."""
    code, _ = stopped(place, "saves 0", signal.SIGTERM)
    assert code == 0 and calls(place, "scontrol") == []
    assert (place / "save" / "tracker.txt").read_text() == "7"


def test_a_container_is_srun_s(place: Path) -> None:
    config = settings("--gpus_per_node", "8", "--container", "docker://a b", "--container_mounts", "/a:/b", "/c:/d e")
    script = sbatch_script(config, payload(place, training=False), "job", place)
    assert start(place, script).wait(20) == 0
    (words,) = calls(place, "srun")
    assert {"--container-image=docker://a b", "--container-mounts=/a:/b,/c:/d e", "--export=ALL"} < set(words)
    assert json.loads((place / "srun.json").read_text())[1] == "8"


def test_a_command_that_reads_nnodes_is_told_which_node_it_is_on(place: Path) -> None:
    told = Payload(words=["python"], variables=["PATH"], workdir=place, reads_nnodes=True)
    script = sbatch_script(settings("--gpus_per_node", "0", "--nodes", "2"), told, "job", place)
    start(place, script).wait(20)
    (words,) = calls(place, "srun")
    command = words[words.index("bash") :]
    assert command.pop() == "python"
    command += [sys.executable, "-c", "import os; print(os.environ['NNODES'], os.environ['NODE_RANK'])"]
    said = subprocess.run(
        command, env={**os.environ, "SLURM_NNODES": "2", "SLURM_NODEID": "1"}, capture_output=True, text=True
    )
    assert said.stdout == "2 1\n"


def test_dlc_gets_every_word_and_values_only_when_it_runs(place: Path) -> None:
    words = "--platform dlc --workspace_id 7 --container image:1 --nodes 2 --gpus_per_node 8 --time 1:30:30"
    config = settings(*words.split(), "--data_sources", "d-1", "d-2", "--worker_memory", "800Gi", "--priority", "3")
    script = dlc_script(config, ["python3", *NASTY], ["TOKEN"], "job")
    assert "s3" not in script
    process = start(place, script, TOKEN='s3 cr"et $(touch planted)')
    assert process.wait(20) == 0
    (words_of_dlc,) = calls(place, "dlc")
    assert words_of_dlc[:2] == ["submit", "pytorchjob"]
    fields = dict(word.removeprefix("--").split("=", 1) for word in words_of_dlc[2:])
    command = fields.pop("command")
    assert shlex.split(command) == ["NPROC_PER_NODE=8", "python3", *NASTY]
    assert fields == {
        "name": "job",
        "workspace_id": "7",
        "workers": "2",
        "worker_image": "image:1",
        "worker_gpu": "8",
        "worker_memory": "800Gi",
        "data_sources": "d-1,d-2",
        "priority": "3",
        "job_max_running_time_minutes": "91",
        "envs": 'TOKEN=s3 cr"et $(touch planted)',
    }
    assert not (place / "planted").exists()
