"""Where the supervisors of several nodes meet after a failure, so that all start their ranks again, or none does.

Each node comes when nothing of its own ranks is left. Node 0 listens on MASTER_PORT, which is free then, until every
node has come; all or none go on by its answer. A node that came before node 0 has reached the port of the failed start's
torchrun, or nobody: it asks again. One line of JSON each way.

How a node whose ranks are well learns of another node's failure: their next collective with the dead ranks fails, at the
latest after distributed_timeout_minutes.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass

from mcore_qwen3.launch.environment import LaunchPlan

_RETRY_SECONDS = 0.5
_LINE_SECONDS = 5.0  # for one line to arrive once a node is connected
_LONGEST_LINE = 4096


@dataclass(frozen=True, slots=True)
class Word:
    """What one node says at the meeting.

    Attributes:
        node: its index.
        start: how often it has started its ranks: the same on all nodes.
        goes_on: whether it would start them again.
        reason: why its ranks have ended, in some hundred letters at most.
    """

    node: int
    start: int
    goes_on: bool
    reason: str


def meet(plan: LaunchPlan, mine: Word, seconds: float, cancelled: Callable[[], bool]) -> str | None:
    """Wait for the supervisors of all nodes; collective over them.

    Args:
        plan: which node this is, and where they meet.
        mine: this node's word.
        seconds: how long to wait for the others.
        cancelled: asked often; True ends the wait.

    Returns:
        None when all nodes start their ranks again, else why not.
    """
    end = time.monotonic() + seconds
    if plan.node_rank == 0:
        return _host(plan, mine, end, cancelled)
    return _visit(plan, mine, end, cancelled)


def _host(plan: LaunchPlan, mine: Word, end: float, cancelled: Callable[[], bool]) -> str | None:
    words = {0: mine}
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("", plan.master_port), backlog=plan.nnodes))
        server.settimeout(_RETRY_SECONDS)
        guests: dict[int, socket.socket] = {}
        while len(words) < plan.nnodes and not cancelled() and time.monotonic() < end:
            with suppress(TimeoutError):
                guest = stack.enter_context(server.accept()[0])
                if (word := _read_word(guest)) is not None and 0 < word.node < plan.nnodes:
                    words[word.node], guests[word.node] = word, guest
        missing = [str(node) for node in range(plan.nnodes) if node not in words]
        answer = f"node {', '.join(missing)} did not come to the restart" if missing else _verdict(words)
        for guest in guests.values():
            with suppress(OSError):
                guest.sendall(json.dumps(answer).encode() + b"\n")
    return answer


def _verdict(words: dict[int, Word]) -> str | None:
    for word in words.values():
        if not word.goes_on:
            return f"node {word.node} does not start again: {word.reason}"
    if len({word.start for word in words.values()}) > 1:
        starts = ", ".join(f"node {node}: {word.start}" for node, word in sorted(words.items()))
        return f"the nodes have started their ranks unequally often ({starts})"
    return None


def _visit(plan: LaunchPlan, mine: Word, end: float, cancelled: Callable[[], bool]) -> str | None:
    line = json.dumps(asdict(mine)).encode() + b"\n"
    while not cancelled() and time.monotonic() < end:
        with suppress(OSError), socket.create_connection((plan.master_addr, plan.master_port), _LINE_SECONDS) as host:
            host.sendall(line)
            host.settimeout(_RETRY_SECONDS)
            if (answer := _read_answer(host, end, cancelled)) is not None:
                return answer[0]
        time.sleep(_RETRY_SECONDS)
    return "node 0 did not come to the restart"


def _read_answer(host: socket.socket, end: float, cancelled: Callable[[], bool]) -> tuple[str | None] | None:
    """Node 0's answer, or None when the other side has closed without one: it was not the meeting."""
    received = b""
    while not received.endswith(b"\n"):
        if cancelled() or time.monotonic() > end:
            return None
        with suppress(TimeoutError):
            part = host.recv(_LONGEST_LINE)
            if not part:
                return None
            received += part
    with suppress(ValueError):
        answer = json.loads(received)
        if answer is None or isinstance(answer, str):
            return (answer,)
    return None


def _read_word(guest: socket.socket) -> Word | None:
    """The word of a node; None for anything else that has found the port."""
    guest.settimeout(_LINE_SECONDS)
    with suppress(OSError, ValueError, TypeError), guest.makefile("rb") as lines:
        return Word(**json.loads(lines.readline(_LONGEST_LINE)))
    return None
