"""Environment variables -> how many nodes and processes, which node this is, and where they meet."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mcore_qwen3.errors import LaunchError
from mcore_qwen3.launch.ports import free_port, why_not_usable

VARIABLES = ("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT")
MULTI_NODE_PORT = 29500  # torch's own default: every node can know it without being told


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """The processes of one job as seen from this node.

    Attributes:
        nnodes: number of nodes.
        node_rank: index of this node, 0 <= node_rank < nnodes.
        nproc_per_node: processes (ranks) on each node.
        master_addr: host name or address of node 0.
        master_port: TCP port on node 0 where the ranks meet.
        sources: for each field above, where its value came from.
        notes: what the user should know about variables that were set but not used.
    """

    nnodes: int
    node_rank: int
    nproc_per_node: int
    master_addr: str
    master_port: int
    sources: Mapping[str, str]
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks of the whole job."""
        return self.nnodes * self.nproc_per_node

    @property
    def node_ranks(self) -> range:
        """Global ranks of this node."""
        return range(self.node_rank * self.nproc_per_node, (self.node_rank + 1) * self.nproc_per_node)

    def describe(self) -> str:
        """One line: the processes, the meeting place, and where each value came from."""
        ranks = self.node_ranks
        sources = ", ".join(f"{name} {source}" for name, source in self.sources.items())
        return (
            f"{self.world_size} ranks expected: nnodes {self.nnodes} x nproc_per_node {self.nproc_per_node}; this is "
            f"node {self.node_rank} with ranks {ranks[0]}-{ranks[-1]}; they meet at "
            f"{self.master_addr}:{self.master_port} ({sources})"
        )


def is_rank(environ: Mapping[str, str]) -> bool:
    """Whether this process was started by torchrun as one rank of a job, and so must not launch again.

    WORLD_SIZE and RANK alone do not tell: some platforms set them for nodes. torchrun always sets LOCAL_RANK and
    TORCHELASTIC_RUN_ID beside them.
    """
    return all(name in environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"))


def count_gpus(environ: Mapping[str, str], device_folder: Path = Path("/dev")) -> int:
    """Number of NVIDIA GPUs that a process with this environment can see, without importing torch.

    Device files nvidia0, nvidia1, ... are counted. CUDA_VISIBLE_DEVICES narrows them as the driver does: the list
    ends at the first entry that names no device; entries that are no number (GPU-..., MIG-...) are taken as given.
    """
    devices = [entry for entry in device_folder.glob("nvidia*") if re.fullmatch(r"nvidia[0-9]+", entry.name)]
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not devices:
        return len(devices)
    count = 0
    for entry in visible.split(","):
        entry = entry.strip()
        if not entry.startswith(("GPU-", "MIG-")) and not (entry.isdecimal() and int(entry) < len(devices)):
            break
        count += 1
    return count


def resolve_environment(environ: Mapping[str, str], *, default_nproc: int) -> LaunchPlan:
    """Read NNODES, NODE_RANK, NPROC_PER_NODE, MASTER_ADDR and MASTER_PORT.

    Args:
        environ: the environment. A variable that is set to nothing counts as not set, and a note says so.
        default_nproc: processes on this node when NPROC_PER_NODE is not set.

    Raises:
        LaunchError: a value is no whole number in its range; several nodes without NODE_RANK or MASTER_ADDR (each
            node would train a world of its own); WORLD_SIZE set where its meaning cannot be known; a busy port.
    """
    given = {name: environ[name] for name in VARIABLES if environ.get(name, "").strip()}
    if "NNODES" not in given:
        _refuse_ambiguous_world_size(environ)
    nnodes = _integer(given, "NNODES", 1, None, default=1)
    if nnodes > 1:
        for name in ("NODE_RANK", "MASTER_ADDR"):
            if name not in given:
                raise LaunchError(
                    f"a job of several nodes needs {name} on each node, else every node would train alone",
                    seen=f"NNODES={nnodes}, {name} is not set",
                    fix="set NODE_RANK=0..NNODES-1 and, the same on all nodes, MASTER_ADDR=<host of node 0>",
                )
    node_rank = _integer(given, "NODE_RANK", 0, nnodes - 1, default=0)
    nproc = _integer(given, "NPROC_PER_NODE", 1, None, default=default_nproc)
    sources = {name.lower(): f"from {name}" if name in given else "by default" for name in VARIABLES}
    port, sources["master_port"] = _master_port(given, nnodes, node_rank)
    return LaunchPlan(
        nnodes=nnodes,
        node_rank=node_rank,
        nproc_per_node=nproc,
        master_addr=given.get("MASTER_ADDR", "127.0.0.1").strip(),
        master_port=port,
        sources=sources,
        notes=tuple(_notes(environ)),
    )


def _refuse_ambiguous_world_size(environ: Mapping[str, str]) -> None:
    """WORLD_SIZE counts nodes on PAI-DLC and processes under torchrun: never guess between the two."""
    world_size = environ.get("WORLD_SIZE", "").strip()
    if world_size in ("", "1") or is_rank(environ):
        return
    raise LaunchError(
        "WORLD_SIZE without NNODES can be read in two ways: number of nodes (PAI-DLC) or of processes (torchrun)",
        seen=f"WORLD_SIZE={world_size}, RANK={environ.get('RANK', 'not set')}, NNODES is not set",
        fix="if it counts nodes, put NNODES=$WORLD_SIZE NODE_RANK=$RANK before the command; "
        "if it counts processes, unset WORLD_SIZE and RANK and set NPROC_PER_NODE",
    )


def _integer(given: Mapping[str, str], name: str, low: int, high: int | None, *, default: int) -> int:
    """The whole number in variable `name`, low <= value <= high."""
    if name not in given:
        return default
    text = given[name].strip()
    if text.isascii() and text.isdecimal() and low <= int(text) and (high is None or int(text) <= high):
        return int(text)
    if name == "NODE_RANK":
        nodes = given.get("NNODES", "1, as NNODES is not set")
        fix = f"set NODE_RANK to this node's own index from 0 to NNODES-1 (NNODES={nodes})"
        raise LaunchError("NODE_RANK must be a whole number from 0 to NNODES-1", seen=f"NODE_RANK={text}", fix=fix)
    bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
    raise LaunchError(f"{name} must be a whole number {bounds}", seen=f"{name}={text}", fix=f"set {name} or unset it")


def _master_port(given: Mapping[str, str], nnodes: int, node_rank: int) -> tuple[int, str]:
    """The port and where it came from. Only node 0 listens, so only there can a port be in use."""
    if "MASTER_PORT" in given:
        port, source = _integer(given, "MASTER_PORT", 1, 65535, default=0), "from MASTER_PORT"
    elif nnodes == 1:
        return free_port(), "a free one"
    else:
        port, source = MULTI_NODE_PORT, "by default"
    reason = why_not_usable(port) if node_rank == 0 else None
    if reason is not None:
        other = "another MASTER_PORT on all nodes" if nnodes > 1 else "another MASTER_PORT, or unset it for a free one"
        raise LaunchError(
            "MASTER_PORT must be free on node 0, where the ranks meet",
            seen=f"MASTER_PORT={port} ({source}): {reason}",
            fix=f"set {other}",
        )
    return port, source


def _notes(environ: Mapping[str, str]) -> list[str]:
    """Variables that look as if they were meant for the launcher but have no effect."""
    notes = []
    for name in VARIABLES:
        if name in environ and not environ[name].strip():
            notes.append(f"{name} is set to nothing, which counts as not set")
        if name.lower() in environ:
            notes.append(f"{name.lower()} in lower case has no effect; the variable is {name}")
    return notes
