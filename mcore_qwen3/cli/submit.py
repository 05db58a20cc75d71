"""``megatron submit``: another ``megatron`` command as a job of SLURM or PAI-DLC. Imports no torch.

    megatron submit --nodes 2 --gpus_per_node 8 --time 12:00:00 sft --load ... --dataset ...

What stands before the command's name is submit's, and from there on everything is the command's, as it is written.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mcore_qwen3.arch.shape import TRACKER
from mcore_qwen3.cli.submitted import CONVERSIONS, Submitted, check_command
from mcore_qwen3.config import SUBMIT, SubmitConfig, parse_command
from mcore_qwen3.errors import ConfigError, LaunchError
from mcore_qwen3.launch.dlc_job import dlc_script
from mcore_qwen3.launch.sbatch import LOG_NAME, Payload, sbatch_script
from mcore_qwen3.launch.submit_variables import passed_variables

_SBATCH_SECONDS = 120


def run(argv: list[str]) -> int:
    """The words after ``megatron submit`` -> exit code."""
    own, words = split_words(argv)
    parsed = parse_command(own, SUBMIT)
    config = parsed.config
    submitted = check_command(words, config, os.environ)
    name = config.job.job_name or f"megatron-{words[0]}"
    folder = Path(config.job.output or Path("megatron_jobs") / name).absolute()
    variables = passed_variables(config, os.environ)
    script_name, script = _script(config, submitted, variables, name, folder)
    if config.job.platform == "slurm" and not config.job.dry_run:
        _sbatch(script, ["--test-only"])  # what the cluster would refuse is refused before anything is written
    _write(folder, {script_name: script, "run_config.yaml": submitted.yaml})
    lines = [
        *parsed.notes,
        *submitted.notes,
        *_stronger_settings(config, os.environ),
        f"script: {folder / script_name}",
        f"resolved configuration: {folder / 'run_config.yaml'}",
        f"environment, by name alone: {' '.join(variables) or 'nothing'}",
    ]
    print("\n".join(lines), flush=True)
    if config.job.dry_run:
        print(f"dry run: nothing was submitted\n\n{script}", end="", flush=True)
        return 0
    if config.job.platform == "dlc":
        return _submit_to_dlc(folder / script_name)
    return _submit_to_slurm(script, folder)


def split_words(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(submit's own words, the command's): the command begins with the first word that is no flag and no flag's value.

    A flag takes one value, a list all words up to the next flag or to a command's name.

    Raises:
        ConfigError: there is no command.
    """
    from mcore_qwen3.cli.main import COMMANDS  # imports this module by name

    kinds = {flag.name: flag.type for flag in SUBMIT.flags().values()} | {"config": "str"}
    place = 0
    while place < len(argv) and argv[place].startswith("-"):
        name, equals, _ = argv[place].lstrip("-").replace("-", "_").partition("=")
        place += 1
        kind = "none" if equals else kinds.get(name, "none")
        if kind == "bool":
            place += place < len(argv) and argv[place].lower() in ("true", "false")
        elif kind == "list":
            while place < len(argv) and not argv[place].startswith("-") and argv[place] not in COMMANDS:
                place += 1
        elif kind != "none":
            place += 1
    own, words = list(argv[:place]), list(argv[place:])
    if not words and not {"-h", "--help"} & set(own):
        raise ConfigError(
            "megatron submit needs the command that the job runs, after its own flags",
            seen=shlex.join(argv) or "no words",
            fix="megatron submit --nodes 2 --gpus_per_node 8 sft --load ...",
        )
    return own, words


def _script(
    config: SubmitConfig, submitted: Submitted, variables: list[str], name: str, folder: Path
) -> tuple[str, str]:
    """(file name, text)"""
    python = config.job.python or ("python3" if config.job.container else sys.executable)
    words = [python, "-m", "mcore_qwen3", *submitted.words]
    if config.job.platform == "dlc":
        return "job.sh", dlc_script(config, words, variables, name)
    workdir = Path.cwd()
    payload = Payload(
        words=words,
        variables=variables,
        workdir=workdir,
        tracker=None if submitted.save is None else workdir / submitted.save / TRACKER,
        stop_code=submitted.stop_code,
        reads_nnodes=submitted.words[0] in CONVERSIONS,
    )
    return "job.sbatch", sbatch_script(config, payload, name, folder)


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Each file whole or not at all."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            temporary = folder / f".{name}.{os.getpid()}"
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(folder / name)
    except OSError as error:
        raise ConfigError("--output is a folder that can be written", seen=error, fix="another path") from None


def _sbatch(script: str, options: Sequence[str]) -> str:
    """sbatch's answer to the script; it reads it from its standard input, so that no path is left to be read."""
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "megatron submit needs SLURM's sbatch on PATH",
            seen="no sbatch",
            fix="run it where jobs are submitted, or --dry_run true to write the script alone",
        )
    words = ["sbatch", *options]
    try:
        done = subprocess.run(words, input=script, capture_output=True, text=True, timeout=_SBATCH_SECONDS)
    except subprocess.TimeoutExpired:
        seen = f"no answer to {shlex.join(words)} within {_SBATCH_SECONDS} s"
        raise LaunchError("sbatch answers", seen=seen, fix="look whether the job is there: squeue --me") from None
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise LaunchError("sbatch takes the job", seen=said, fix="the flags that its message names")
    return done.stdout


def _stronger_settings(config: SubmitConfig, environ: Mapping[str, str]) -> list[str]:
    """sbatch's own variables go before the lines of a script."""
    names = sorted(name for name in environ if name.startswith("SBATCH_")) if config.job.platform == "slurm" else []
    return [f"{', '.join(names)}: sbatch takes these before what the script says"] if names else []


def _submit_to_slurm(script: str, folder: Path) -> int:
    # Plug-ins of a cluster may print lines of their own before it.
    job, _, cluster = _sbatch(script, ["--parsable"]).strip().splitlines()[-1].partition(";")
    log = folder / LOG_NAME.replace("%j", job)
    on = f" --clusters={cluster}" if cluster else ""
    lines = [
        f"submitted: job {job}" + (f" on cluster {cluster}" if cluster else ""),
        f"log: {log}",
        f"follow: tail -n +1 -F {shlex.quote(str(log))}",
        f"state: squeue{on} --jobs={job}",
        f"save and stop: scancel{on} --signal=TERM {job}",
    ]
    print("\n".join(lines), flush=True)
    return 0


def _submit_to_dlc(script: Path) -> int:
    if shutil.which("dlc") is None:
        raise ConfigError(
            "megatron submit --platform dlc needs the dlc client on PATH",
            seen=f"no dlc; the command is in {script}",
            fix=f"install and configure it, then bash {shlex.quote(str(script))}",
        )
    return subprocess.run(["bash", str(script)], check=False).returncode
