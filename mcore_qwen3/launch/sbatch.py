"""An sbatch script that runs one `megatron` command on all nodes of a job: text alone, nothing is written or called.

One task a node, which starts the ranks of its node. Words of the user's stand in the script quoted for bash, or, in
#SBATCH lines, for sbatch, whose quotes are not bash's. Of the environment it names variables, and holds no value.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_qwen3.config import SubmitConfig, ranks_per_node, signal_seconds

LOG_NAME = "slurm-%j.out"


@dataclass(frozen=True, kw_only=True, slots=True)
class Payload:
    """What a job runs.

    Attributes:
        words: the command: interpreter, module, subcommand and flags.
        variables: names of the environment variables that it gets.
        workdir: where it runs; absolute.
        tracker: of a training run, the file in its save folder that names the newest checkpoint; None for other commands,
            which have nothing to continue.
        stop_code: exit code of a training run that a signal has stopped, and that has saved.
        reads_nnodes: the command reads NNODES and NODE_RANK, and not what SLURM says.
    """

    words: Sequence[str]
    variables: Sequence[str]
    workdir: Path
    tracker: Path | None = None
    stop_code: int = 0
    reads_nnodes: bool = False


def sbatch_script(config: SubmitConfig, payload: Payload, name: str, folder: Path) -> str:
    """The script.

    Args:
        config: checked settings of `megatron submit`.
        payload: what to run.
        name: of the job.
        folder: absolute folder of the log, which all nodes see.
    """
    parts = [
        "#!/bin/bash",
        "# Written by megatron submit. Needs no argument: sbatch job.sbatch",
        *(f"#SBATCH {line}" for line in _options(config, payload, name, folder)),
        "",
        f"export NPROC_PER_NODE={ranks_per_node(config)}",
        "command=(",
        *(f"    {line}" for line in _lines_of_words(payload.words)),
        ")",
        "step=(",
        *(f"    {shlex.quote(word)}" for word in _srun(config, payload)),
        ")",
        'echo "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST, $(date)"',
    ]
    if payload.tracker is None:
        parts.append('exec "${step[@]}" "${command[@]}"')
        return "\n".join(parts) + "\n"
    requeue = _REQUEUE if config.slurm.requeue else ""
    parts.append(_TRAINING.format(tracker=shlex.quote(str(payload.tracker))))
    return "\n".join(parts) + requeue.format(stop_code=payload.stop_code) + 'exit "$code"\n'


# bash's wait ends early when a signal comes, so it is called until srun is gone, and then once more for the exit code.
_TRAINING = """
tracker={tracker}
newest() {{ cat "$tracker" 2>/dev/null || echo none; }}
before=$(newest)
near_the_end=
# USR1 is SLURM's warning before the time limit, to this shell alone; srun passes it to every node.
trap 'near_the_end=yes; kill -USR1 "$step_pid"' USR1
# TERM comes to every process when the job is pre-empted, requeued or cancelled: the ranks save, and this shell waits.
trap : TERM
"${{step[@]}}" "${{command[@]}}" &
step_pid=$!
while kill -0 "$step_pid" 2>/dev/null; do wait "$step_pid"; done
wait "$step_pid"
code=$?
"""

_REQUEUE = """
if [[ -n $near_the_end && $code -eq {stop_code} ]]; then
    if [[ $(newest) == "$before" ]]; then
        echo "not queued again: no checkpoint was saved in this time limit, and the next start would get no further" >&2
        exit 1
    fi
    echo "stopped before the time limit after step $(newest): queued again"
    scontrol requeue "$SLURM_JOB_ID" || echo "not queued again; the same megatron submit continues" >&2
fi
"""


def _options(config: SubmitConfig, payload: Payload, name: str, folder: Path) -> list[str]:
    job, slurm = config.job, config.slurm
    # In a name of a file sbatch replaces %j and the like.
    log = str(folder).replace("%", "%%") + "/" + LOG_NAME
    options = [
        f"--job-name={name}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        *(["--exclusive", "--mem=0"] if slurm.cpus_per_node is None else [f"--cpus-per-task={slurm.cpus_per_node}"]),
        *([f"--partition={slurm.partition}"] if slurm.partition else []),
        *([f"--account={slurm.account}"] if slurm.account else []),
        *([f"--time={job.time}"] if job.time else []),
    ]
    if payload.tracker is not None:
        options.append(f"--signal=B:USR1@{signal_seconds(config)}")
    options.append("--requeue" if payload.tracker is not None and slurm.requeue else "--no-requeue")
    options += [
        f"--chdir={sbatch_quoted(str(payload.workdir))}",
        f"--output={sbatch_quoted(log)}",
        "--open-mode=append",
        f"--export={','.join(payload.variables) or 'NONE'}",
    ]
    for option in slurm.sbatch_options:
        key, equals, value = option.partition("=")
        options.append(f"--{key}{equals}{sbatch_quoted(value) if equals else ''}")
    return options


def _srun(config: SubmitConfig, payload: Payload) -> list[str]:
    """srun's words: sbatch's --export would narrow the environment of the step, too, and cores are not to be shared out."""
    job, slurm = config.job, config.slurm
    words = ["srun", "--export=ALL", f"--nodes={job.nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    words.append("--cpu-bind=none")
    if slurm.cpus_per_node is not None:  # not taken over from sbatch since SLURM 22.05
        words.append(f"--cpus-per-task={slurm.cpus_per_node}")
    if job.container is not None:
        words += [f"--container-image={job.container}", f"--container-workdir={payload.workdir}"]
        if slurm.container_mounts:
            words.append(f"--container-mounts={','.join(slurm.container_mounts)}")
    if payload.reads_nnodes:
        words += ["bash", "-c", 'NNODES=$SLURM_NNODES NODE_RANK=$SLURM_NODEID exec "$@"', "bash"]
    return words


def _lines_of_words(words: Sequence[str]) -> list[str]:
    """The words quoted for bash, a flag and its values in one line."""
    lines: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return [" ".join(line) for line in lines if line]


def sbatch_quoted(text: str) -> str:
    """`text`, which has no line break, as one word of an #SBATCH line: double quotes, in which \\ keeps " and \\."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
