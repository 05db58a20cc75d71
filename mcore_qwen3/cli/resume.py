"""Which checkpoint a run continues, found and checked before anything starts. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mcore_qwen3.arch import iteration_directory
from mcore_qwen3.arch.shape import TRACKER
from mcore_qwen3.cli.agreement import disagreement
from mcore_qwen3.config import RunConfig
from mcore_qwen3.errors import ConfigError

# The parent process's stamp of the tracker file as it found it, for its ranks.
TRACKER_VARIABLE = "MCORE_QWEN3_TRACKER_BEFORE"

# Weights and optimizer (torch_dist) and where the run stood. Without one of them nothing is continued.
_PARTS = (".metadata", "metadata.json", "train_state.json")
_OTHER = {
    True: "--finetune true to take the weights alone, or another --load",
    False: "--resume PATH of a complete checkpoint, --resume never, or another --save",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """A complete checkpoint of an earlier run.

    ``directory`` is its ``iter_0000200``, ``iteration`` the steps done, ``has_optimizer`` whether Adam's moments are
    in it. ``from_load``: ``--finetune false`` made ``--load`` the run to continue.
    """

    directory: Path
    iteration: int
    has_optimizer: bool
    from_load: bool


def tracker_stamp(config: RunConfig) -> str:
    """Names one writing of the tracker file in ``--save``; "" where there is none.

    The file is opened, not only looked at: on NFS that is what asks the server.
    """
    try:
        with open(Path(str(config.checkpoint.save)) / TRACKER, encoding="utf-8") as tracker:
            return f"{os.fstat(tracker.fileno()).st_mtime_ns} {tracker.read()}"
    except FileNotFoundError:
        return ""


def find_resume_point(config: RunConfig, environ: Mapping[str, str] = os.environ) -> ResumePoint | None:
    """The checkpoint that the run continues, or None where it starts at step 0 with the weights of ``--load``.

    What this job itself has saved, before its ranks were started again, goes before everything. Else ``--resume`` wins;
    where it finds nothing, ``--finetune false`` makes ``--load`` the run to continue.

    Args:
        config: a run whose ``save`` is set.
        environ: the environment, in which the parent process left its stamp of the tracker file.

    Raises:
        ConfigError: the named checkpoint lacks a part, or there is none at the given path.
    """
    stamp = tracker_stamp(config)
    ours = environ.get(TRACKER_VARIABLE, stamp) != stamp
    directory = _resume_directory(config, "auto" if ours else config.checkpoint.resume)
    if directory is not None:
        return _read(directory, from_load=False)
    if config.checkpoint.finetune:
        return None
    load = Path(str(config.model.load))
    return _read(iteration_directory(load) if (load / TRACKER).is_file() else load, from_load=True)


def _resume_directory(config: RunConfig, choice: str) -> Path | None:
    """What ``--resume`` finds, given as ``choice``. ``auto`` takes what the tracker file in ``--save`` names.

    The tracker is written last, so that a save that was cut short is not seen; converted weights (``release``) hold
    no run.
    """
    if choice == "never":
        return None
    if choice == "auto":
        root = Path(str(config.checkpoint.save))
        if not (root / TRACKER).is_file():
            _check_no_run(root)
            return None
        directory = iteration_directory(root)
        return None if directory.name == "release" else directory
    path = Path(choice)
    if not path.is_dir():
        raise ConfigError("--resume names auto, never, or the folder of a checkpoint", seen=f"no folder {choice}")
    return iteration_directory(path) if (path / TRACKER).is_file() else path


def _check_no_run(root: Path) -> None:
    """Refuse to start again from step 0 beside checkpoints that only lack their tracker file.

    A run that is killed in the last moment of its very first save leaves one like that: it is written again.

    Raises:
        ConfigError: a run has saved there more than once.
    """
    for state in sorted(root.glob("iter_*/train_state.json"), reverse=True):
        if len(json.loads(state.read_text(encoding="utf-8")).get("checkpoints", ())) > 1:
            iteration = state.parent.name.removeprefix("iter_").lstrip("0")
            raise ConfigError(
                f"a save directory with checkpoints needs its tracker file {TRACKER}",
                seen=f"{state.parent}, but no {root / TRACKER}",
                fix=f"write {iteration} into it, or --resume {state.parent}, --resume never, or another --save",
            )


def check_optimizer_state(config: RunConfig, point: ResumePoint) -> None:
    """Raise ConfigError where moments would start at zero without the user having asked for it."""
    if not point.has_optimizer and not config.checkpoint.no_load_optim:
        raise ConfigError(
            "the checkpoint to continue has no optimizer state (it was saved with --no_save_optim true)",
            seen=str(point.directory),
            fix=ways_out(point),
        )


def check_same_point(point: ResumePoint | None) -> None:
    """Collective over all ranks: every one continues the same checkpoint, or none does.

    Raises:
        ConfigError: on every rank, naming two that differ.
    """
    mine = "none" if point is None else f"step {point.iteration}"
    if seen := disagreement(mine, mine if point is None else f"{mine} in {point.directory}"):
        raise ConfigError(
            "all ranks continue the same checkpoint", seen=seen, fix="--save on a file system that all nodes share"
        )


def ways_out(point: ResumePoint) -> str:
    """What a user can change who does not want to continue ``point`` as it is."""
    ways = (
        [] if point.has_optimizer else [f"--no_load_optim true to go on from step {point.iteration}, moments at zero"]
    )
    if point.from_load:
        ways.append("--finetune true to take the weights alone")
    else:
        ways += ["--resume never to start again from --load", "another --save"]
    return ", or ".join(ways)


def _read(directory: Path, from_load: bool) -> ResumePoint:
    missing = [name for name in _PARTS if not (directory / name).is_file()]
    if missing:
        raise ConfigError(
            "a run can be continued from a complete checkpoint only",
            seen=f"{directory} lacks {', '.join(missing)}",
            fix=_OTHER[from_load],
        )
    path = directory / "train_state.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        return ResumePoint(
            directory=directory,
            iteration=int(state["iteration"]),
            has_optimizer=bool(state["has_optimizer"]),
            from_load=from_load,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "train_state.json must hold iteration and has_optimizer",
            seen=f"{path}: {type(error).__name__}: {error}",
            fix=_OTHER[from_load],
        ) from None
