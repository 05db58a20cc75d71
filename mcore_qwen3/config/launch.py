"""On what the run runs, and whether it runs at all."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_qwen3.config.flags import flag


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchFlags:
    """Start: on what the run runs, whether it runs at all, and what happens when it hangs or fails."""

    device: str = flag("auto", "auto: cuda where a GPU is found, else cpu", choices=("auto", "cpu", "cuda"))
    dry_run: bool = flag(False, "print the resolved plan and stop")
    platform: str = flag(
        "auto",
        "whose variables give nodes, node rank and processes; auto: slurm or dlc where theirs are set, else local, which is "
        "NNODES, NODE_RANK, NPROC_PER_NODE, MASTER_ADDR, MASTER_PORT",
        choices=("auto", "local", "dlc", "slurm"),
    )
    log_dir: str | None = flag(
        None, "folder for what each rank prints, in rank_N.log; the screen then shows rank 0 and the launcher alone"
    )
    max_restarts: int = flag(
        0, "how often all ranks are started again after a fault, from the last complete checkpoint", at_least=0
    )
    step_timeout: float = flag(
        0.0,
        "seconds without a finished step (ten times that for the first one and for a save) after which every rank shows "
        "its stacks and the job ends; 0: no limit",
        at_least=0,
    )
    distributed_timeout_minutes: float = flag(
        30.0, "minutes that a rank waits for the others in one operation", at_least=0.01
    )
