"""The launchers of a job meet before anything is read or prepared, so that a mistake in their settings is seen at once."""

from __future__ import annotations

import hashlib
import platform
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from mcore_qwen3.errors import LaunchError
from mcore_qwen3.launch.attempt import say
from mcore_qwen3.launch.environment import LaunchPlan
from mcore_qwen3.launch.meeting import Word, meet
from mcore_qwen3.launch.network import interface_of, is_own

_PATIENCE = 5.0  # seconds of silence before the user is told what is waited for
NOTICE_SECONDS = 30.0  # for a node that ends, to tell the others
_PACKAGES = ("torch", "megatron-core", "transformer-engine", "flash-attn", "apex")


@dataclass(frozen=True, kw_only=True)
class Company:
    """The launchers that have met.

    Attributes:
        hosts: the machines' names by node, as text.
        interface: this machine's network interface on the way to the others; None where that is not known.
    """

    hosts: Mapping[str, str] = field(default_factory=dict)
    interface: str | None = None


def code_facts() -> dict[str, str]:
    """What every process of a job has to run alike: Python, packages, and the sum of this package's own files."""
    facts = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = "not installed"
    return facts | {"code of mcore-qwen3": _code_digest()}


def _code_digest() -> str:
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def check_in(plan: LaunchPlan, facts: Mapping[str, str], gpus: tuple[str, ...], seconds: float) -> Company:
    """Wait until the launchers of all nodes are there, and compare them; collective over the nodes.

    Args:
        plan: which node this is, and where they meet.
        facts: what has to be the same on all nodes, beside their number, their processes and their code.
        gpus: the GPUs that this node's ranks use.
        seconds: how long to wait.

    Raises:
        LaunchError: the nodes do not agree, two have the same rank, or one did not come.
    """
    if plan.nnodes == 1:
        return Company()
    sizes = {"nnodes": str(plan.nnodes), "nproc_per_node": str(plan.nproc_per_node)}
    mine = Word(plan.node_rank, "start of the job", True, "", {**sizes, **code_facts(), **facts}, gpus)
    teller = threading.Timer(_PATIENCE, lambda: say(_waiting_line(plan, seconds)))
    teller.daemon = True
    teller.start()
    try:
        answer = meet(plan, mine, seconds, lambda: False)
    finally:
        teller.cancel()
    if answer.refusal is not None:
        raise LaunchError(
            "the launchers of all nodes must meet and agree before the job starts",
            seen=answer.refusal + ("\n" if "\n" in answer.refusal else ""),  # a table ends with its line
            fix="on each node the same command, code and packages, its own NODE_RANK (0 to NNODES-1), and a MASTER_ADDR and "
            "MASTER_PORT that lead to node 0",
        )
    return Company(hosts=answer.hosts, interface=interface_of(answer.address))


def _waiting_line(plan: LaunchPlan, seconds: float) -> str:
    where, own = f"{plan.master_addr}:{plan.master_port}", is_own(plan.master_addr)
    whom, hint = f"node 0 at {where}", ", which is this machine: should it be node 0?" if own else ""
    if plan.node_rank == 0:
        whom = f"the other nodes ({plan.nnodes - 1}) to come to {where}"
        hint = "" if own else ", which is no address of this machine: should it be node 0?"
    return f"node {plan.node_rank} on {socket.gethostname()} waits up to {seconds:g} s for {whom}{hint}"


def ready(plan: LaunchPlan, company: Company, seconds: float, cancelled: Callable[[], bool]) -> None:
    """Wait until all nodes are ready to start their ranks; collective over the nodes.

    Raises:
        LaunchError: one of them is not going to, or did not come.
    """
    if plan.nnodes == 1:
        return
    answer = meet(plan, Word(plan.node_rank, "start of the ranks", True, ""), seconds, cancelled, company.hosts)
    if answer.refusal is not None and not cancelled():
        raise LaunchError("the ranks start on all nodes or on none", seen=answer.refusal)


def decline(plan: LaunchPlan, company: Company, reason: str) -> None:
    """Tell the other nodes that this one will not start its ranks, so that they do not wait for it."""
    if plan.nnodes > 1:
        say("telling the other nodes that the ranks are not started")
        mine = Word(plan.node_rank, "start of the ranks", False, reason)
        meet(plan, mine, NOTICE_SECONDS, lambda: False, company.hosts)
