"""Environment variables -> how many nodes and processes, which node this is, and where they meet.

Each platform has its own names for the same five numbers. What two names say about one of them has to agree: nothing is
guessed, and a contradiction is refused with what each of them says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mcore_qwen3.errors import LaunchError
from mcore_qwen3.launch.ports import free_port, why_not_usable
from mcore_qwen3.launch.slurm import Readings, reachable, slurm_readings

VARIABLES = ("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT")
PLATFORMS = ("auto", "local", "dlc", "slurm")
MULTI_NODE_PORT = 29500  # torch's own default: every node can know it without being told
_GPUS_ON_DLC = "KUBERNETES_CONTAINER_RESOURCE_GPU"
_DEFAULT = "by default"


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """The processes of one job as seen from this node.

    Attributes:
        platform: local, dlc, slurm, or torchrun in a process that torchrun has started.
        nnodes: number of nodes.
        node_rank: index of this node, 0 <= node_rank < nnodes.
        nproc_per_node: processes (ranks) on each node.
        master_addr: host name or address of node 0.
        master_port: TCP port on node 0 where the ranks meet.
        sources: for each field above, where its value came from.
        notes: what the user should know about variables that were set but not used.
    """

    platform: str = "local"
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

    def table(self) -> list[str]:
        """The expected ranks, then a line for each value with its source."""
        ranks = self.node_ranks
        mine = f"ranks {ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
        expected = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        head = f"{expected} expected; this is node {self.node_rank} with {mine}"
        names = ("platform", *(name.lower() for name in VARIABLES))
        width = max(len(str(getattr(self, name))) for name in names)
        return [
            head,
            *(
                f"  {name:<14}  {getattr(self, name)!s:<{width}}  {self.sources.get(name, '')}".rstrip()
                for name in names
            ),
        ]


def is_rank(environ: Mapping[str, str]) -> bool:
    """Whether this process was started by torchrun as one rank of a job, and so must not launch again.

    WORLD_SIZE and RANK alone do not tell: some platforms set them for nodes. torchrun always sets LOCAL_RANK and
    TORCHELASTIC_RUN_ID beside them.
    """
    return all(name in environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"))


def resolve_environment(environ: Mapping[str, str], *, gpus: int | None, platform: str = "auto") -> LaunchPlan:
    """Read the variables of a platform, and our own: NNODES, NODE_RANK, NPROC_PER_NODE, MASTER_ADDR and MASTER_PORT.

    Ours may stand beside the platform's, and must agree on the nodes and the node's rank; NPROC_PER_NODE, MASTER_ADDR and
    MASTER_PORT come before what the platform says.

    Args:
        environ: the environment. A variable that is set to nothing counts as not set, and a note says so.
        gpus: GPUs that this process sees (`count_gpus`), the default for the processes; None for a run on CPU: 1 process.
        platform: one of PLATFORMS. auto: slurm where SLURM_JOB_ID is set; dlc where WORLD_SIZE is and something else tells
            that it counts nodes; else local, our variables alone.

    Raises:
        LaunchError: a value is no whole number in its range; variables contradict each other, or can be read in two ways;
            several nodes without a node rank or master address (each node would train a world of its own); several
            launchers on one node; a busy port.
    """
    if is_rank(environ):
        return _inside_torchrun(environ)
    name, why = _find_platform(environ, platform)
    own, theirs = _own(environ), _readings(environ, name)
    nnodes, nproc = _sizes(own, theirs, gpus)
    if name != "local" and nnodes[1] == _DEFAULT:
        variable = {"dlc": "WORLD_SIZE", "slurm": "SLURM_NNODES"}[name]
        fix = f"start it as a task of {name}, set NNODES, or add --platform local"
        raise LaunchError(
            f"platform {name} gives the number of nodes in {variable}", seen=f"{variable} is not set", fix=fix
        )
    sources = {"platform": why, "nnodes": nnodes[1], "nproc_per_node": nproc[1]}
    node_rank, sources["node_rank"] = _node_rank(own, theirs, nnodes, name)
    _check_world_size(environ, platform, nnodes, node_rank, nproc)
    address, sources["master_addr"] = _master_addr(own, theirs, nnodes, name)
    port, sources["master_port"] = _master_port(own, theirs, nnodes[0])
    return LaunchPlan(
        platform=name,
        nnodes=nnodes[0],
        node_rank=node_rank,
        nproc_per_node=nproc[0],
        master_addr=address,
        master_port=port,
        sources=sources,
        notes=tuple(_notes(environ, name)),
    )


def expected_ranks(environ: Mapping[str, str], *, gpus: int | None, platform: str = "auto") -> int:
    """Ranks of the whole job, where the other values do not matter: a dry run needs no address and no free port.

    Args and errors as in `resolve_environment`.
    """
    if is_rank(environ):
        return int(environ["WORLD_SIZE"])
    nnodes, nproc = _sizes(_own(environ), _readings(environ, _find_platform(environ, platform)[0]), gpus)
    return nnodes[0] * nproc[0]


def _inside_torchrun(environ: Mapping[str, str]) -> LaunchPlan:
    """What torchrun has resolved already; it has set all of these."""
    nproc = int(environ["LOCAL_WORLD_SIZE"])
    names = {"nnodes": "WORLD_SIZE / LOCAL_WORLD_SIZE", "node_rank": "GROUP_RANK", "nproc_per_node": "LOCAL_WORLD_SIZE"}
    return LaunchPlan(
        platform="torchrun",
        nnodes=int(environ["WORLD_SIZE"]) // nproc,
        node_rank=int(environ["GROUP_RANK"]),
        nproc_per_node=nproc,
        master_addr=environ["MASTER_ADDR"],
        master_port=int(environ["MASTER_PORT"]),
        sources={
            "platform": "TORCHELASTIC_RUN_ID",
            **names,
            "master_addr": "MASTER_ADDR",
            "master_port": "MASTER_PORT",
        },
    )


def _given(environ: Mapping[str, str], name: str) -> str:
    """The value of a variable; "" where it is not set, or set to nothing."""
    return environ.get(name, "").strip()


def _own(environ: Mapping[str, str]) -> Readings:
    return {name.lower(): (_given(environ, name), name) for name in VARIABLES if _given(environ, name)}


def _find_platform(environ: Mapping[str, str], asked: str) -> tuple[str, str]:
    """(platform, what it was chosen by)."""
    if asked != "auto":
        return asked, "--platform"
    if _given(environ, "SLURM_JOB_ID"):
        return "slurm", "SLURM_JOB_ID is set"
    if world_size := _given(environ, "WORLD_SIZE"):
        mark, nnodes = _sign_of_dlc(environ), _given(environ, "NNODES")
        if mark and nnodes in ("", world_size):
            return "dlc", f"WORLD_SIZE beside {mark}"
        if world_size != "1" and not nnodes:  # one is one in both ways
            raise LaunchError(
                "WORLD_SIZE alone can be read in two ways: number of nodes (PAI-DLC) or of processes (torchrun)",
                seen=f"WORLD_SIZE={environ['WORLD_SIZE']}, RANK={environ.get('RANK', 'not set')}, NNODES is not set",
                fix="if it counts nodes, add --platform dlc, or put NNODES=$WORLD_SIZE NODE_RANK=$RANK before the command; "
                "if it counts processes, unset WORLD_SIZE and RANK and set NPROC_PER_NODE",
            )
    return "local", "no other platform's variables"


def _sign_of_dlc(environ: Mapping[str, str]) -> str | None:
    """What tells that WORLD_SIZE counts nodes, as PAI-DLC's general environment variables are documented.

    NPROC_PER_NODE is for a launcher: RANK counts what was started, and what was started starts that many processes.
    """
    for name in (_GPUS_ON_DLC, "NPROC_PER_NODE"):
        if _given(environ, name):
            return name
    address = _given(environ, "MASTER_ADDR")
    return f"MASTER_ADDR={address}" if re.fullmatch(r"dlc\w+-master-0.*", address) else None


def _readings(environ: Mapping[str, str], platform: str) -> Readings:
    """What the platform's own variables say.

    Raises:
        LaunchError: several launchers on one node.
    """
    for name, alone in (("LOCAL_RANK", ()), ("OMPI_COMM_WORLD_LOCAL_SIZE", ("1",))):
        if _given(environ, name) not in ("", *alone):
            raise LaunchError(
                "one launcher a node starts all of the node's ranks",
                seen=f"{name}={environ[name]}, as where one process a GPU is started",
                fix=f"start megatron once on each node, with NPROC_PER_NODE set; unset {name} if it is left over",
            )
    if platform == "slurm":
        return slurm_readings(environ)
    if platform == "dlc":
        names = {"nnodes": "WORLD_SIZE", "node_rank": "RANK", "nproc_per_node": _GPUS_ON_DLC}
        return {field: (_given(environ, name), name) for field, name in names.items() if _given(environ, name)}
    return {}


def _sizes(own: Readings, theirs: Readings, gpus: int | None) -> tuple[tuple[int, str], tuple[int, str]]:
    """(nodes, source) and (processes a node, source)."""
    nnodes = _agreed("nnodes", own, theirs, 1, None) or (1, _DEFAULT)
    return nnodes, _nproc(own, theirs, gpus)


def _nproc(own: Readings, theirs: Readings, gpus: int | None) -> tuple[int, str]:
    if "nproc_per_node" in own:
        return _whole_number(own["nproc_per_node"], 1, None), own["nproc_per_node"][1]
    cpu = (1, f"{_DEFAULT}, on CPU")
    if gpus is None:
        return cpu
    told = theirs.get("nproc_per_node")
    if told is not None and _whole_number(told, 0, None) != gpus:
        raise LaunchError(
            "the GPUs that the platform gives must be those that are seen",
            seen=f"{told[1]}={told[0]}, {gpus} by CUDA_VISIBLE_DEVICES and the machine's devices",
            fix="set NPROC_PER_NODE to the number to use, or --device cpu to use none",
        )
    return (gpus, f"GPUs seen, as {told[1]} says" if told is not None else "GPUs seen") if gpus else cpu


def _node_rank(own: Readings, theirs: Readings, nnodes: tuple[int, str], platform: str) -> tuple[int, str]:
    said = "NNODES is not set, so there is one node" if nnodes[1] == _DEFAULT else f"{nnodes[1]}={nnodes[0]}"
    found = _agreed("node_rank", own, theirs, 0, nnodes[0] - 1, f", {said}")
    if found is None and nnodes[0] > 1:
        raise _needed("node_rank", nnodes, platform)
    return found or (0, _DEFAULT)


def _master_addr(own: Readings, theirs: Readings, nnodes: tuple[int, str], platform: str) -> tuple[str, str]:
    if "master_addr" in own:
        return own["master_addr"]
    if nnodes[0] == 1:
        return "127.0.0.1", _DEFAULT
    if "master_addr" not in theirs:
        raise _needed("master_addr", nnodes, platform)
    host, source = theirs["master_addr"]
    address = reachable(host)
    return address, source if address == host else f"{source}, {host}: its NodeAddr"


def _needed(field: str, nnodes: tuple[int, str], platform: str) -> LaunchError:
    theirs = {("node_rank", "dlc"): "RANK", ("node_rank", "slurm"): "SLURM_NODEID"}.get((field, platform))
    name = field.upper()
    return LaunchError(
        f"a job of several nodes needs {name} on each node, else every node would train alone",
        seen=f"{nnodes[1]}={nnodes[0]}, {f'{name} and {theirs} are' if theirs else f'{name} is'} not set",
        fix="set NODE_RANK=0..NNODES-1 and, the same on all nodes, MASTER_ADDR=<host of node 0>",
    )


def _agreed(
    field: str, own: Readings, theirs: Readings, low: int, high: int | None, beside: str = ""
) -> tuple[int, str] | None:
    """(value, sources) that ours and the platform's variable give alike; None where neither is set."""
    given = [readings[field] for readings in (own, theirs) if field in readings]
    values = [_whole_number(reading, low, high, beside) for reading in given]
    if len(set(values)) > 1:
        raise LaunchError(
            f"{field} must be the same by every variable that gives it",
            seen=" and ".join(f"{name}={value}" for value, name in given),
            fix="unset the wrong one, or add --platform local to read only our own variables",
        )
    return (values[0], " and ".join(name for _, name in given)) if given else None


def _whole_number(reading: tuple[str, str], low: int, high: int | None, beside: str = "") -> int:
    """The whole number of a variable, low <= value <= high; `beside` says what else was looked at."""
    text, name = reading
    if text.isascii() and text.isdecimal() and low <= int(text) and (high is None or int(text) <= high):
        return int(text)
    bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
    raise LaunchError(
        f"{name} must be a whole number {bounds}", seen=f"{name}={text}{beside}", fix=f"set {name}, or unset it"
    )


def _check_world_size(
    environ: Mapping[str, str], asked: str, nnodes: tuple[int, str], node_rank: int, nproc: tuple[int, str]
) -> None:
    """WORLD_SIZE may be there for nodes or for processes, and has to fit in one of the two ways; not where we were told."""
    text = _given(environ, "WORLD_SIZE")
    if asked in ("local", "slurm") or text in ("", "1"):
        return
    rank = _given(environ, "RANK") or str(node_rank)
    as_nodes = text == str(nnodes[0]) and rank == str(node_rank)
    if not as_nodes and text != str(nnodes[0] * nproc[0]):
        raise LaunchError(
            "WORLD_SIZE and RANK must count the nodes, or WORLD_SIZE the processes, that the other variables give",
            seen=f"WORLD_SIZE={text}, RANK={environ.get('RANK', 'not set')}; by {nnodes[1]} {nnodes[0]} node(s), "
            f"this one {node_rank}; {nproc[0]} processes a node ({nproc[1]})",
            fix="unset the wrong ones, or add --platform local to read only our own variables",
        )


def _master_port(own: Readings, theirs: Readings, nnodes: int) -> tuple[int, str]:
    """The port and where it came from. On several nodes the launchers meet there first, and so find a busy one."""
    if "master_port" in own:
        port, source = _whole_number(own["master_port"], 1, 65535), own["master_port"][1]
    elif nnodes == 1:
        return free_port(), "a free one"
    elif "master_port" in theirs:
        port, source = int(theirs["master_port"][0]), theirs["master_port"][1]
    else:
        port, source = MULTI_NODE_PORT, _DEFAULT
    if nnodes == 1 and (reason := why_not_usable(port)) is not None:
        raise LaunchError(
            "MASTER_PORT must be free, as the ranks meet there",
            seen=f"MASTER_PORT={port}: {reason}",
            fix="set another MASTER_PORT, or unset it for a free one",
        )
    return port, source


def _notes(environ: Mapping[str, str], platform: str) -> list[str]:
    """Variables that look as if they were meant for the launcher but have no effect."""
    notes = []
    for name in VARIABLES:
        if name in environ and not environ[name].strip():
            notes.append(f"{name} is set to nothing, which counts as not set")
        if name.lower() in environ:
            notes.append(f"{name.lower()} in lower case has no effect; the variable is {name}")
    if platform == "local" and _given(environ, "SLURM_JOB_ID"):
        notes.append("SLURM's variables are not read (--platform local)")
    return notes
