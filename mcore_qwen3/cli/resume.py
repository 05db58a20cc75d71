"""Which checkpoint a run continues, found and checked before anything starts. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from mcore_qwen3.arch import iteration_directory
from mcore_qwen3.arch.shape import TRACKER
from mcore_qwen3.config import RunConfig
from mcore_qwen3.errors import ConfigError

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


def find_resume_point(config: RunConfig) -> ResumePoint | None:
    """The checkpoint that the run continues, or None where it starts at step 0 with the weights of ``--load``.

    ``--resume`` wins; where it finds nothing, ``--finetune false`` makes ``--load`` the run to continue.

    Args:
        config: a run whose ``save`` is set.

    Raises:
        ConfigError: the named checkpoint lacks a part, or there is none at the given path.
    """
    directory = _resume_directory(config)
    if directory is not None:
        return _read(directory, from_load=False)
    if config.checkpoint.finetune:
        return None
    load = Path(str(config.model.load))
    return _read(iteration_directory(load) if (load / TRACKER).is_file() else load, from_load=True)


def _resume_directory(config: RunConfig) -> Path | None:
    """What ``--resume`` finds. ``auto`` takes what the tracker file in ``--save`` names.

    The tracker is written last, so that a save that was cut short is not seen; converted weights (``release``) hold
    no run.
    """
    choice = config.checkpoint.resume
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
