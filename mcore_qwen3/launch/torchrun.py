"""The command line and the environment that torchrun is started with."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mcore_qwen3.launch.environment import LaunchPlan
from mcore_qwen3.launch.gpus import count_gpus
from mcore_qwen3.launch.rank_report import EXPECTED_RANKS, RUN_DIR, SUPERVISED

# What torchrun sets for its ranks. Set by a platform with another meaning, or left over, it must not reach torchrun.
_SET_BY_TORCHRUN = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
}


def torchrun_command(plan: LaunchPlan, module_argv: Sequence[str], python: str = sys.executable) -> list[str]:
    """The command that starts this node's ranks.

    Args:
        plan: nodes, processes and meeting place.
        module_argv: what each rank runs: ["-m", "mcore_qwen3", "sft", ...] or ["script.py", ...].
        python: the interpreter of torchrun and the ranks.
    """
    return [
        *(python, "-m", "torch.distributed.run"),
        *("--nnodes", str(plan.nnodes)),
        *("--node_rank", str(plan.node_rank)),
        *("--nproc_per_node", str(plan.nproc_per_node)),
        *("--master_addr", plan.master_addr),
        *("--master_port", str(plan.master_port)),
        # By default torchrun kills its ranks 30 s after SIGTERM or SIGINT, in the middle of a save.
        *("--signals-to-handle", "SIGQUIT"),
        # torchrun buries a dead rank when it looks; the supervisor looks more often, and learns how the rank died.
        *("--monitor-interval", "1"),
        *module_argv,
    ]


def child_environment(
    plan: LaunchPlan,
    environ: Mapping[str, str],
    run_dir: Path,
    extra_env: Mapping[str, str],
    interface: str | None = None,
) -> tuple[dict[str, str], list[str]]:
    """The environment of torchrun and its ranks, and one line for each thing that differs from the user's.

    Removed: what torchrun itself sets for ranks, and PET_*, torchrun's own options by environment, of which some would
    undo the command line. GLOO_SOCKET_IFNAME, when not set, becomes `interface`, on the way to the other nodes: gloo looks up
    this machine's own name, and takes the loopback, where no other node is, when that is not known. OMP_NUM_THREADS, when not set and no GPU is visible, becomes the cores per process.
    """
    merged = {**environ, **extra_env}
    removed = sorted(name for name in merged if name in _SET_BY_TORCHRUN or name.startswith("PET_"))
    child = {name: value for name, value in merged.items() if name not in removed}
    child |= {SUPERVISED: "1", RUN_DIR: str(run_dir), EXPECTED_RANKS: str(plan.world_size)}
    lines = [f"not passed on to torchrun: {', '.join(removed)}"] if removed else []
    if interface is not None and not child.get("GLOO_SOCKET_IFNAME"):
        child["GLOO_SOCKET_IFNAME"] = interface
        lines.append(f"GLOO_SOCKET_IFNAME={interface} (the way to the other nodes)")
    if "OMP_NUM_THREADS" not in child and count_gpus(child) == 0:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        child["OMP_NUM_THREADS"] = str(max(1, cores // plan.nproc_per_node))
        lines.append(f"OMP_NUM_THREADS={child['OMP_NUM_THREADS']} ({cores} cores, {plan.nproc_per_node} process(es))")
    return child, lines
