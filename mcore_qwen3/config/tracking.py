"""What a run tells beside its log, and the traces it takes of itself."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_qwen3.config.flags import flag
from mcore_qwen3.errors import ConfigError

TRACKERS = ("tensorboard", "wandb", "swanlab")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackingFlags:
    """Tracking: who is told of every step beside `<save>/train_log.jsonl`, and traces of single steps."""

    log_loss_per_dataset: bool = flag(False, "the loss of each --dataset entry too, in every step's record")
    report_to: tuple[str, ...] = flag((), "also tell these of every step; rank 0 does", choices=TRACKERS)
    tensorboard_dir: str | None = flag(None, "folder of tensorboard's files; unset: <save>/runs")
    wandb_project: str = flag("mcore-qwen3", "project of the run at wandb")
    wandb_exp_name: str | None = flag(None, "name of the run at wandb; unset: the name of the save folder")
    swanlab_project: str = flag("mcore-qwen3", "project of the run at swanlab")
    swanlab_exp_name: str | None = flag(None, "name of the run at swanlab; unset: the name of the save folder")
    profile_step_start: int | None = flag(None, "first step of a torch trace, from 1; unset: no trace", at_least=1)
    profile_step_end: int | None = flag(None, "last step of the trace; unset: profile_step_start", at_least=1)
    profile_ranks: tuple[int, ...] = flag(
        (0,), "ranks that write a trace, each `<save>/profile/rank_<n>.json.gz`", at_least=0
    )


def check_tracking(tracking: TrackingFlags) -> None:
    """Raise ConfigError for a trace that cannot be taken."""
    first, last = tracking.profile_step_start, tracking.profile_step_end
    if last is not None and (first is None or last < first):
        raise ConfigError(
            "a trace goes from profile_step_start to a later step, or to the same",
            seen=f"--profile_step_start {'unset' if first is None else first} --profile_step_end {last}",
            fix="give profile_step_start, and no smaller profile_step_end",
        )
