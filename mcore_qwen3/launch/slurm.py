"""What SLURM tells the tasks of a job, and where its first node can be reached.

SLURM has to start one launcher on each node: `srun --ntasks-per-node=1 megatron sft ...`. The variables are those of `man
srun`; the step's come first, since a step may have fewer nodes than its job.
"""

from __future__ import annotations

import itertools
import re
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress

from mcore_qwen3.errors import LaunchError

Readings = dict[str, tuple[str, str]]  # field of a LaunchPlan -> (value as text, the variable it was read from)

ONE_A_NODE = "srun --ntasks-per-node=1 megatron ..."
_VARIABLES = {
    "nnodes": ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "node_rank": ("SLURM_NODEID",),
    "nproc_per_node": ("SLURM_GPUS_ON_NODE",),
    "master_addr": ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
    "master_port": ("SLURM_JOB_ID", "SLURM_JOBID"),
}
_FIRST_PORT, _PORTS = 10000, 20000  # below 32768, where Linux's ports for outgoing connections begin
_SCONTROL_SECONDS = 10.0


def slurm_readings(environ: Mapping[str, str]) -> Readings:
    """What SLURM says about a job; `master_addr` is the first host's name, and `nproc_per_node` its number of GPUs.

    Raises:
        LaunchError: SLURM has started several launchers on a node, or one for several nodes; a list of nodes that cannot be
            read.
    """
    found = {field: reading for field, names in _VARIABLES.items() if (reading := _first_set(environ, names))}
    _refuse_wrong_tasks(environ, found)
    if "master_addr" in found:
        nodes, name = found["master_addr"]
        found["master_addr"] = expand_nodelist(nodes)[0], f"first of {name}"
    job, name = found.pop("master_port", ("", ""))
    if job.isdecimal():
        found["master_port"] = str(_FIRST_PORT + int(job) % _PORTS), f"{_FIRST_PORT} + {name} % {_PORTS}"
    return found


def _first_set(environ: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str] | None:
    """(value, name) of the first variable that is set to something."""
    return next(((environ[name].strip(), name) for name in names if environ.get(name, "").strip()), None)


def _refuse_wrong_tasks(environ: Mapping[str, str], found: Readings) -> None:
    """More than one launcher a node would start every rank more often, and a single one would wait for the others for ever.

    A batch script, and the shell of salloc, is one process, however many tasks its job has; srun alone starts as many.
    """
    nodes, node_variable = found.get("nnodes", ("1", ""))
    in_step = _first_set(environ, ("SLURM_STEP_ID", "SLURM_STEPID")) is not None
    several = nodes != "1"
    many = _several_tasks(environ) if in_step or several else None
    if many is None and environ.get("SLURM_LOCALID", "").strip() not in ("", "0"):
        many = f"SLURM_LOCALID={environ['SLURM_LOCALID']}"
    if many is not None:
        where = [f"{name}={environ[name]}" for name in ("SLURM_NODEID", "SLURM_PROCID") if name in environ]
        raise LaunchError(
            "SLURM has to start one launcher a node, which starts the ranks itself",
            seen=", ".join([many, *where]),
            fix=f"{ONE_A_NODE} with --gpus-per-node for the GPUs; or --platform local where this is the only launcher",
        )
    alone = not in_step and found.get("node_rank", ("0", ""))[0] == "0"
    if several and alone and not environ.get("NODE_RANK", "").strip():
        raise LaunchError(
            "a job of several nodes needs a launcher on each of them; a batch script and salloc start one",
            seen=f"{node_variable}={nodes}, SLURM_STEP_ID is not set",
            fix=f"{ONE_A_NODE}; or --platform local to use this machine alone",
        )


def _several_tasks(environ: Mapping[str, str]) -> str | None:
    """What says that a node of this step has more than one task, or None."""
    tasks, nodes = (environ.get(name, "").strip() for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"))
    if tasks.isdecimal() and nodes.isdecimal():
        return f"SLURM_STEP_NUM_TASKS={tasks}, SLURM_STEP_NUM_NODES={nodes}" if int(tasks) > int(nodes) else None
    asked = environ.get("SLURM_NTASKS_PER_NODE", "").strip()
    return f"SLURM_NTASKS_PER_NODE={asked}" if asked not in ("", "1") else None


def expand_nodelist(text: str) -> list[str]:
    """The host names of a list as SLURM writes it: `node[01-03,7],gpu-a[1-2]b` -> node01, node02, node03, node7, ...

    Raises:
        LaunchError: it cannot be read.
    """
    hosts: list[str] = []
    for entry in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text.strip()):
        pieces = re.findall(r"\[([^\]]*)\]|([^\[\]]+)", entry)
        if "".join(f"[{ranges}]" if ranges else plain for ranges, plain in pieces) != entry:
            raise _unreadable(text)
        choices = [_expand_ranges(ranges, text) if ranges else [plain] for ranges, plain in pieces]
        hosts += ["".join(parts) for parts in itertools.product(*choices)]
    if not hosts or any(re.search(r"[\s\[\]]", host) for host in hosts) or text.count("[") != text.count("]"):
        raise _unreadable(text)
    return hosts


def _expand_ranges(ranges: str, whole: str) -> list[str]:
    """`01-03,7` -> 01, 02, 03, 7: numbers keep the width of the first one."""
    numbers: list[str] = []
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise _unreadable(whole)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _unreadable(text: str) -> LaunchError:
    return LaunchError(
        "SLURM's list of nodes cannot be read", seen=text, fix="set MASTER_ADDR=<host of node 0> on all nodes"
    )


def reachable(host: str) -> str:
    """The name of a node where it can be looked up, else the address that SLURM itself uses for it.

    Raises:
        LaunchError: neither is known. Nothing else is tried: with a guess every node would train alone.
    """
    try:
        socket.getaddrinfo(host, None)
        return host
    except OSError as error:
        reason = error.strerror
    with suppress(OSError, subprocess.SubprocessError):
        command = ["scontrol", "show", "node", host]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_SECONDS, check=True).stdout
        if address := re.search(r"\bNodeAddr=(\S+)", shown):
            return address[1]
    raise LaunchError(
        "the first node of the job must have an address",
        seen=f"{host}: {reason}; scontrol show node {host} gives none either",
        fix="set MASTER_ADDR=<address of node 0> on all nodes",
    )
