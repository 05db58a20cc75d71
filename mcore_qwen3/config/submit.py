"""Settings of `megatron submit`, which hands another `megatron` command to a scheduler."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields

from mcore_qwen3.config.flags import flag
from mcore_qwen3.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:+-]*")
_NAMES = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:+,-]*")  # a partition may be a list of them
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPTION = re.compile(r"[a-z][a-z0-9-]*(=.+)?")
# SLURM's forms: minutes, minutes:seconds, hours:minutes:seconds, and days-hours with or without :minutes and :seconds.
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<numbers>\d+(?::\d+){0,2})")
_LEAD_SECONDS = 900

# Where a launcher says who is who: in a job the scheduler does.
_OF_THE_JOB = re.compile(
    r"NNODES|NODE_RANK|NPROC_PER_NODE|MASTER_ADDR|MASTER_PORT|WORLD_SIZE|RANK|LOCAL_RANK|CUDA_VISIBLE_DEVICES|SLURM_.*"
)
# Options of sbatch that have a flag here, or on which the script depends.
_OURS = {
    *(
        "job-name",
        "nodes",
        "ntasks-per-node",
        "gpus-per-node",
        "cpus-per-task",
        "partition",
        "account",
        "time",
        "signal",
    ),
    *(
        "requeue",
        "no-requeue",
        "chdir",
        "output",
        "error",
        "open-mode",
        "export",
        "export-file",
        "ntasks",
        "array",
        "wrap",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFlags:
    """Job: what is asked of the scheduler."""

    platform: str = flag("slurm", "the scheduler: sbatch, or PAI-DLC's dlc submit pytorchjob", choices=("slurm", "dlc"))
    dry_run: bool = flag(False, "write the script and the resolved configuration, and submit nothing")
    nodes: int = flag(1, "nodes of the job", at_least=1)
    gpus_per_node: int | None = flag(None, "GPUs of each node, 0 for a job on CPU; has to be given", at_least=0)
    nproc_per_node: int | None = flag(None, "ranks on each node; unset: one a GPU, one on CPU", at_least=1)
    job_name: str | None = flag(None, "name of the job; unset: megatron-<command>")
    time: str | None = flag(None, "time limit in SLURM's forms, such as 90 (minutes), 12:00:00 or 2-12 (days-hours)")
    container: str | None = flag(None, "image to run in: for SLURM with the pyxis plugin, for DLC the worker_image")
    env: tuple[str, ...] = flag((), "names of more environment variables to pass on; values are never written")
    python: str | None = flag(None, "Python in the job; unset: this one, or python3 in a container")
    output: str | None = flag(
        None, "folder for script, resolved configuration and log; unset: megatron_jobs/<job_name>"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmFlags:
    """SLURM: used with --platform slurm."""

    partition: str | None = flag(None, "partition, or several with commas; unset: the cluster's default")
    account: str | None = flag(None, "account to charge; unset: the user's default")
    cpus_per_node: int | None = flag(
        None, "cores of each node; unset: whole nodes with all cores and memory", at_least=1
    )
    container_mounts: tuple[str, ...] = flag((), "SOURCE:TARGET folders to mount in the container")
    signal_before: int | None = flag(
        None,
        "seconds before the time limit at which a training run saves and stops; unset: 900, or a quarter of less than an hour",
        at_least=1,
        at_most=65535,
    )
    requeue: bool = flag(
        True, "queue a training run again when it was stopped by the time limit, and go on where it saved"
    )
    sbatch_options: tuple[str, ...] = flag((), "more options of sbatch without their dashes, such as qos=high mem=64G")


@dataclass(frozen=True, kw_only=True, slots=True)
class DlcFlags:
    """PAI-DLC: used with --platform dlc; names as the dlc client has them."""

    workspace_id: str | None = flag(None, "workspace of the job")
    resource_id: str | None = flag(None, "quota to take the nodes from")
    worker_spec: str | None = flag(None, "kind of node, such as ecs.gn7e-c16g1.16xlarge, where no quota is used")
    worker_cpu: int | None = flag(None, "cores of each node", at_least=1)
    worker_memory: str | None = flag(None, "memory of each node, such as 800Gi")
    worker_shared_memory: str | None = flag(None, "shared memory of each node, such as 400Gi")
    data_sources: tuple[str, ...] = flag((), "ids of data sets to mount")
    priority: int | None = flag(None, "1 (lowest) to 9", at_least=1, at_most=9)


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmitConfig:
    """Settings of `megatron submit`."""

    job: JobFlags = field(default_factory=JobFlags)
    slurm: SlurmFlags = field(default_factory=SlurmFlags)
    dlc: DlcFlags = field(default_factory=DlcFlags)


def ranks_per_node(config: SubmitConfig) -> int:
    """Ranks that each node starts."""
    return config.job.nproc_per_node or config.job.gpus_per_node or 1


def time_minutes(text: str) -> int | None:
    """Whole minutes, rounded up, of a time limit in one of SLURM's forms; None for none of them."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    numbers = [int(number) for number in match["numbers"].split(":")]
    hours_first = match["days"] is not None or len(numbers) == 3
    hours, minutes, seconds = ([*numbers, 0, 0] if hours_first else [0, *numbers, 0])[:3]
    total = ((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    return -(-total // 60)


def signal_seconds(config: SubmitConfig) -> int:
    """Seconds before the time limit at which the run is asked to stop."""
    if config.slurm.signal_before is not None:
        return config.slurm.signal_before
    minutes = time_minutes(config.job.time or "0") or 60
    return min(_LEAD_SECONDS, 60 * minutes // 4)


def check_submit(config: SubmitConfig) -> None:
    """Raise ConfigError for the first broken rule: whatever reaches a script is of a form that needs no trust."""
    job = config.job
    if job.gpus_per_node is None:
        raise ConfigError("megatron submit needs --gpus_per_node", fix="the GPUs of a node, or 0 for a job on CPU")
    if job.nproc_per_node is not None and 0 < job.gpus_per_node < job.nproc_per_node:
        seen = f"--nproc_per_node {job.nproc_per_node}, --gpus_per_node {job.gpus_per_node}"
        raise ConfigError("every rank of a node needs a GPU of its own", seen=seen, fix="fewer ranks, or more GPUs")
    _check_forms(config)
    _check_variables(job.env)
    _check_platform(config)
    if job.time is not None:
        _check_time(config, job.time)
    for option in config.slurm.sbatch_options:
        if not _OPTION.fullmatch(option) or "\n" in option:
            raise ConfigError(
                "sbatch_options are NAME or NAME=VALUE without dashes, each in one line",
                seen=repr(option),
                fix="qos=high",
            )
        if option.partition("=")[0] in _OURS:
            raise ConfigError(
                "this option of sbatch is set by megatron submit itself",
                seen=option,
                fix="the flag of the same name, where there is one (megatron submit --help)",
            )


def _check_forms(config: SubmitConfig) -> None:
    words = {"job_name": config.job.job_name, "account": config.slurm.account}
    names = ("workspace_id", "resource_id", "worker_spec", "worker_memory", "worker_shared_memory")
    words |= {name: getattr(config.dlc, name) for name in names}
    for name, value in words.items():
        if value is not None and not _NAME.fullmatch(value):
            raise ConfigError(f"--{name} is one word of letters, digits and _ . @ : + -", seen=repr(value))
    if config.slurm.partition is not None and not _NAMES.fullmatch(config.slurm.partition):
        raise ConfigError(
            "--partition is a name, or several with commas and no spaces", seen=repr(config.slurm.partition)
        )
    for value in config.dlc.data_sources:
        if not _NAME.fullmatch(value):
            raise ConfigError("--data_sources are ids, separated by spaces", seen=repr(value))
    texts = {"container": config.job.container, "python": config.job.python, "output": config.job.output}
    texts |= {"container_mounts": ",".join(config.slurm.container_mounts)}
    for name, value in texts.items():
        if value is not None and ("\n" in value or "\0" in value):
            raise ConfigError(f"--{name} is one line", seen=repr(value))


def _check_variables(names: tuple[str, ...]) -> None:
    for name in names:
        if not _VARIABLE.fullmatch(name):
            value_given = "=" in name
            raise ConfigError(
                "--env takes names of variables" + (", so that no value is written into a file" if value_given else ""),
                seen=repr(name.partition("=")[0] + "=..." if value_given else name),
                fix="export it, and give its name",
            )
        if _OF_THE_JOB.fullmatch(name):
            raise ConfigError("this variable is the job's own, and set there", seen=f"--env {name}", fix="leave it out")


def _check_platform(config: SubmitConfig) -> None:
    """Flags of the other platform would do nothing."""
    other, cls = ("dlc", DlcFlags) if config.job.platform == "slurm" else ("slurm", SlurmFlags)
    section = getattr(config, other)
    for item in fields(cls):
        if getattr(section, item.name) != item.default:
            raise ConfigError(
                f"--{item.name} belongs to --platform {other}",
                seen=f"--platform {config.job.platform}",
                fix=f"--platform {other}, or leave it out",
            )
    if config.job.platform == "dlc":
        for name, value in (("workspace_id", config.dlc.workspace_id), ("container", config.job.container)):
            if value is None:
                raise ConfigError(f"--platform dlc needs --{name}", fix=f"--{name}")
    elif config.slurm.container_mounts and config.job.container is None:
        raise ConfigError("--container_mounts needs --container", fix="--container IMAGE, or leave it out")


def _check_time(config: SubmitConfig, text: str) -> None:
    minutes = time_minutes(text)
    if not minutes:
        raise ConfigError(
            "--time is a limit above 0 in one of SLURM's forms",
            seen=repr(text),
            fix="minutes, hours:minutes:seconds, or days-hours:minutes:seconds",
        )
    if config.slurm.signal_before is not None and config.slurm.signal_before >= 60 * minutes:
        raise ConfigError(
            "the signal to save comes within the time limit",
            seen=f"--signal_before {config.slurm.signal_before} s, --time {text} ({minutes} minutes)",
            fix=f"--signal_before below {60 * minutes}, or a longer --time",
        )
