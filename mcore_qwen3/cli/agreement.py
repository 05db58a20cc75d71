"""Whether all ranks have the same."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from mcore_qwen3.config import RunConfig, to_flat_dict
from mcore_qwen3.errors import ConfigError, LaunchError
from mcore_qwen3.launch import EXPECTED_RANKS, code_facts, table_of_differences

# What each machine may have as it likes: it does not change what is trained, nor what is written for all.
_OWN_TO_A_NODE = {"dataset_num_proc", "num_workers", "log_dir"}


def disagreement(mine: str, shown: str) -> str:
    """Two ranks that do not have the same, in words; "" where all agree. Collective over all ranks.

    Args:
        mine: what is compared.
        shown: how it is named to the user.
    """
    import torch.distributed as dist

    everyone = [(mine, shown)] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, shown))
    first = everyone[0]
    for rank, other in enumerate(everyone):
        if other[0] != first[0]:
            return f"rank 0 has {first[1]}, rank {rank} has {other[1]}"
    return ""


def setting_facts(config: RunConfig) -> dict[str, str]:
    """The settings that all nodes have to share, by flag."""
    return {f"--{name}": str(value) for name, value in to_flat_dict(config).items() if name not in _OWN_TO_A_NODE}


def check_expected_ranks(environ: Mapping[str, str]) -> None:
    """What torchrun has counted over all nodes is what the launcher of this node expects.

    Raises:
        LaunchError: it is not.
    """
    expected = environ.get(EXPECTED_RANKS, environ["WORLD_SIZE"])
    if environ["WORLD_SIZE"] != expected:
        raise LaunchError(
            "as many ranks must join as the launcher expects",
            seen=f"{expected} expected, {environ['WORLD_SIZE']} joined",
            fix="the same NNODES and NPROC_PER_NODE on every node",
        )


def check_agreement(config: RunConfig, hf_files: Path) -> str:
    """Every rank runs the same code with the same settings and folders; collective over all ranks.

    Args:
        config: with nothing left open, so that folders taken by default are compared as well.
        hf_files: the model's folder; what its config.json says is compared.

    Returns:
        Which ranks have joined, on which machines.

    Raises:
        ConfigError: on every rank, with a table of who differs in what.
    """
    import torch.distributed as dist

    facts = code_facts() | setting_facts(config)
    facts["config.json"] = hashlib.sha256((hf_files / "config.json").read_bytes()).hexdigest()[:12]
    mine = (socket.gethostname(), hashlib.sha256(json.dumps(facts).encode()).hexdigest())
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if len({digest for _, digest in everyone}) > 1:
        every_fact = [facts] * dist.get_world_size()
        dist.all_gather_object(every_fact, facts)
        places = {_place(host, ranks): every_fact[ranks[0]] for (host, _), ranks in _grouped(everyone).items()}
        raise ConfigError(
            "all ranks must run the same code with the same settings",
            seen=f"\n{table_of_differences(places)}\n",
            fix="start the same command with the same packages on every node",
        )
    return ", ".join(_place(host, ranks) for host, ranks in _grouped([host for host, _ in everyone]).items())


def _grouped[Key](keys: Sequence[Key]) -> dict[Key, list[int]]:
    """Key -> the ranks that have it."""
    groups: dict[Key, list[int]] = {}
    for rank, key in enumerate(keys):
        groups.setdefault(key, []).append(rank)
    return groups


def _place(host: str, ranks: list[int]) -> str:
    """`ranks 0-3, 8 on HOST`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown} on {host}"
