"""The command inside a ``megatron submit``, checked before it is queued: what it would refuse in hours, it refuses now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mcore_qwen3.cli.resolve import resolve, save_folder
from mcore_qwen3.config import (
    SUBMIT,
    TRAINING,
    Command,
    ParsedRun,
    RunConfig,
    SubmitConfig,
    find_command,
    parse_command,
    ranks_per_node,
    to_yaml,
    with_values,
)
from mcore_qwen3.data.sources import check_entries
from mcore_qwen3.errors import ConfigError

CONVERSIONS = ("convert", "export")


@dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    """A command that may be queued.

    Attributes:
        words: after ``megatron``, as the user wrote them, with the device where it was left open.
        yaml: its settings, resolved where its files can be seen from here.
        save: the folder of a training run's checkpoints, as the run sees it; None for other commands.
        stop_code: exit code of a training run that a signal has stopped.
        notes: lines to print once.
    """

    words: list[str]
    yaml: str
    save: Path | None
    stop_code: int
    notes: tuple[str, ...]


def check_command(words: list[str], config: SubmitConfig, environ: Mapping[str, str]) -> Submitted:
    """Read the words after ``megatron``, and resolve a training run as the job will.

    Raises:
        ConfigError: the command could not run in such a job.
    """
    found = find_command(words)
    if found is None:
        raise ConfigError(
            "megatron submit takes a command of megatron that a job can run",
            seen=" ".join(words[:2]),
            fix="sft, pt, doctor, data, plan, export, convert hf2mcore, convert mcore2hf or convert verify",
        )
    command, rest = found
    _check_places(words[0], rest, command)
    parsed = parse_command(rest, command)
    if words[0] not in TRAINING:
        _check_size(words[0], config)
        return Submitted(words=words, yaml=to_yaml(parsed.config), save=None, stop_code=0, notes=parsed.notes)
    return _training(words, parsed, config, environ)


def _check_places(name: str, rest: list[str], command: Command[Any]) -> None:
    """Flags of submit's that stand after the command's name."""
    theirs = command.flags().keys() | command.aliases.keys() | {"config"}
    for word in rest:
        flag = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if word.startswith("--") and flag in SUBMIT.flags() and flag not in theirs:
            raise ConfigError(
                f"flags of megatron submit stand before {name}; what follows {name} is {name}'s own",
                seen=f"--{flag} after {name}",
                fix=f"megatron submit --{flag} ... {name} ...",
            )


def _check_size(name: str, config: SubmitConfig) -> None:
    """What does not train has no ranks, but the doctor's; conversions split themselves over nodes."""
    if name == "doctor":
        return
    if config.job.nproc_per_node is not None:
        raise ConfigError("ranks are for training", seen=f"--nproc_per_node with {name}", fix="leave it out")
    if config.job.nodes > 1 and name not in CONVERSIONS:
        raise ConfigError(f"{name} works on one node", seen=f"--nodes {config.job.nodes}", fix="--nodes 1")


def _training(words: list[str], parsed: ParsedRun, config: SubmitConfig, environ: Mapping[str, str]) -> Submitted:
    run = parsed.config
    if run.launch.dry_run:
        raise ConfigError(
            "a job trains, and a dry run does not",
            seen=f"--dry_run true after {words[0]}",
            fix=f"megatron submit --dry_run true ... {words[0]} ... to submit nothing, or leave it out",
        )
    if config.slurm.requeue and config.job.platform == "slurm":
        _check_continues(run)
    device = "cuda" if config.job.gpus_per_node else "cpu"
    if run.launch.device not in ("auto", device):
        raise ConfigError(
            "the nodes of the job have the device that the run asks for",
            seen=f"--device {run.launch.device}, --gpus_per_node {config.job.gpus_per_node}",
            fix="leave --device out, or change --gpus_per_node",
        )
    # A node whose GPUs cannot be seen has to refuse the run instead of training on CPU, and who is who is not guessed.
    settled = {"device": device, "platform": config.job.platform}
    words = [
        *words,
        *(word for name in settled if getattr(run.launch, name) == "auto" for word in (f"--{name}", settled[name])),
    ]
    elsewhere = config.job.container is not None and not Path(str(run.model.load)).exists()
    if elsewhere:
        notes = (*parsed.notes, f"checked by its flags alone: {run.model.load} is not on this machine")
        filled = with_values(run, settled)
    else:
        # dry_run: this machine may have no such device
        planned = replace(parsed, config=with_values(run, {**settled, "dry_run": True}))
        resolved = resolve(planned, config.job.nodes * ranks_per_node(config), environ)
        if resolved.finished:
            seen = f"{resolved.resume and resolved.resume.directory} has all of its steps"
            raise ConfigError("a job has steps to make", seen=seen, fix="a larger --train_iters, or another --save")
        check_entries((*resolved.config.data.dataset, *resolved.config.data.val_dataset))
        filled, notes = with_values(resolved.config, {"dry_run": False}), resolved.notes
    return Submitted(
        words=words,
        yaml=to_yaml(filled),
        save=Path(save_folder(filled)),
        stop_code=run.train.exit_code_on_signal,
        notes=notes,
    )


def _check_continues(run: RunConfig) -> None:
    """What is queued again has to go on from its own checkpoints."""
    if run.checkpoint.resume != "auto":
        raise ConfigError(
            "a job that is queued again continues with --resume auto",
            seen=f"--resume {run.checkpoint.resume}",
            fix="leave --resume out, or --requeue false before the command",
        )
    if run.checkpoint.no_save_optim and not run.checkpoint.no_load_optim:
        raise ConfigError(
            "a job that is queued again continues from a checkpoint, which needs the optimizer state",
            seen="--no_save_optim true",
            fix="drop it, add --no_load_optim true to go on with moments at zero, or --requeue false before the command",
        )
