"""Settings of `megatron submit`: what is refused, and how a time limit is read."""

from __future__ import annotations

import pytest

from mcore_qwen3.config import SUBMIT, parse_command, signal_seconds, time_minutes
from mcore_qwen3.errors import ConfigError

CPU = ["--gpus_per_node", "0"]
DLC = ["--platform", "dlc", "--workspace_id", "7", "--container", "image"]


@pytest.mark.parametrize(
    ("text", "minutes"),
    [  # the forms of sbatch's manual page; seconds round up to the next minute
        ("90", 90),
        ("90:01", 91),
        ("12:00:00", 720),
        ("2-12", 3600),
        ("2-12:30", 3630),
        ("1-00:00:01", 1441),
        ("0", 0),
        ("1:2:3:4", None),
        ("12h", None),
        ("-5", None),
        ("1-2-3", None),
    ],
)
def test_time_limits(text: str, minutes: int | None) -> None:
    assert time_minutes(text) == minutes


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        ([], 900),
        (["--time", "12:00:00"], 900),
        (["--time", "20"], 300),
        (["--time", "60", "--signal_before", "120"], 120),
    ],
)
def test_when_the_signal_comes(words: list[str], seconds: int) -> None:
    assert signal_seconds(parse_command([*CPU, *words], SUBMIT).config) == seconds


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs --gpus_per_node"),
        (["--gpus_per_node", "8", "--nproc_per_node", "9"], "a GPU of its own"),
        ([*CPU, "--nodes", "0"], "--nodes needs a whole number of at least 1"),
        ([*CPU, "--job_name", "a b"], "--job_name is one word"),
        ([*CPU, "--job_name", "a\n#SBATCH --uid=0"], "--job_name is one word"),
        ([*CPU, "--account", "$(id)"], "--account is one word"),
        ([*CPU, "--partition", "a, b"], "--partition is a name, or several"),
        ([*CPU, "--container", "a\nb"], "--container is one line"),
        ([*CPU, "--output", "a\nb"], "--output is one line"),
        ([*CPU, "--time", "12h"], "--time is a limit above 0"),
        ([*CPU, "--time", "0"], "--time is a limit above 0"),
        ([*CPU, "--time", "10", "--signal_before", "600"], "within the time limit"),
        ([*CPU, "--container_mounts", "/a:/b"], "--container_mounts needs --container"),
        ([*CPU, "--sbatch_options", "qos=a\n#SBATCH --uid=0"], "each in one line"),
        ([*CPU, "--sbatch_options=--qos=a"], "without dashes"),
        ([*CPU, "--sbatch_options", "export=ALL"], "set by megatron submit itself"),
        ([*CPU, "--env", "A-B"], "takes names of variables"),
        ([*CPU, "--env", "WORLD_SIZE"], "the job's own"),
        ([*CPU, "--env", "SLURM_JOB_ID"], "the job's own"),
        ([*CPU, "--workspace_id", "7"], "--workspace_id belongs to --platform dlc"),
        ([*CPU, "--platform", "dlc", "--container", "image"], "--platform dlc needs --workspace_id"),
        ([*CPU, "--platform", "dlc", "--workspace_id", "7"], "--platform dlc needs --container"),
        ([*CPU, *DLC, "--partition", "a"], "--partition belongs to --platform slurm"),
        ([*CPU, *DLC, "--requeue", "false"], "--requeue belongs to --platform slurm"),
        ([*CPU, *DLC, "--data_sources", "d1,d2"], "--data_sources are ids"),
    ],
)
def test_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_command(words, SUBMIT)
    assert message in str(caught.value)


def test_a_value_that_was_given_for_a_name_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_command([*CPU, "--env", "HF_TOKEN=hf_secret"], SUBMIT)
    assert "HF_TOKEN=..." in str(caught.value) and "hf_secret" not in str(caught.value)
