"""Where the launchers of several nodes meet: before anything starts, before the ranks do, and after a failure.

Node 0 listens on MASTER_PORT, which is free then, until every node has come; all or none go on by its answer. A node that
comes before node 0 reaches nobody, or the port of a failed start's torchrun: it asks again. One line of JSON each way.

Two nodes that both take themselves for node 0 would each wait for the others. So node 0 also goes to the address that
all are given, and finds itself there, or the other one.

How a node whose ranks are well learns of another node's failure: their next collective with the dead ranks fails, at the
latest after distributed_timeout_minutes.
"""

from __future__ import annotations

import json
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace

from mcore_qwen3.launch.differences import table_of_differences
from mcore_qwen3.launch.environment import LaunchPlan
from mcore_qwen3.launch.ports import why_not_usable

_RETRY_SECONDS = 0.2
_LINE_SECONDS = 2.0  # for one line to arrive once a node is connected
_LONGEST_LINE = 1 << 20
_LINGER_SECONDS = 10.0  # after a refusal, for nodes that have not come yet to be told
_KEY = uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Word:
    """What one node says at a meeting.

    Attributes:
        node: its index.
        stage: which meeting it has come to, such as "start of the job".
        goes_on: whether it goes on from there.
        reason: why not, or why its ranks have ended, in some hundred letters at most.
        facts: what has to be the same on all nodes, by name.
        gpus: the GPUs that its ranks use.
        host: the machine's name.
        key: tells two launchers apart.
    """

    node: int
    stage: str
    goes_on: bool
    reason: str
    facts: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    host: str = field(default_factory=socket.gethostname)
    key: str = _KEY

    @property
    def name(self) -> str:
        """The node in words."""
        return f"node {self.node} on {self.host}"


@dataclass(frozen=True, slots=True)
class Answer:
    """How a meeting has ended.

    Attributes:
        refusal: why the nodes do not go on; None when all do.
        reasons: what the others said of themselves, by their names.
        missing: the refusal is that someone did not come.
        hosts: the machines by node, as far as they have come.
        address: this machine's own, on the way to the others; "" where nobody came.
    """

    refusal: str | None
    reasons: Mapping[str, str] = field(default_factory=dict)
    missing: bool = False
    hosts: Mapping[str, str] = field(default_factory=dict)
    address: str = ""


def meet(
    plan: LaunchPlan,
    mine: Word,
    seconds: float,
    cancelled: Callable[[], bool],
    hosts: Mapping[str, str] | None = None,
) -> Answer:
    """Wait for the launchers of all nodes; collective over them.

    Args:
        plan: which node this is, and where they meet.
        mine: this node's word.
        seconds: how long to wait for the others.
        cancelled: asked often; True ends the wait.
        hosts: the machines' names from an earlier meeting, for messages.
    """
    end = time.monotonic() + seconds
    if plan.node_rank == 0:
        return _Host(plan, mine, hosts or {}).hold(end, cancelled)
    return _visit(plan, mine, end, cancelled, hosts or {})


class _Host:
    """Node 0's side."""

    def __init__(self, plan: LaunchPlan, mine: Word, hosts: Mapping[str, str]) -> None:
        self._plan, self._mine, self._hosts = plan, mine, hosts
        self._words = {mine.key: mine}
        self._waiting: list[tuple[socket.socket, Word]] = []  # for the answer
        self._refusal: str | None = None
        self._missing = False
        self._address = ""
        self._closed = threading.Event()
        self._found: Answer | None = None  # the refusal of another node 0 that is at the address which all are given

    def hold(self, end: float, cancelled: Callable[[], bool]) -> Answer:
        """Until every node has come, or the end."""
        with ExitStack() as stack:
            try:
                server = stack.enter_context(_listen(self._plan))
            except OSError as error:
                return self._port_is_taken(error)
            server.settimeout(_RETRY_SECONDS)
            stack.callback(self._closed.set)
            threading.Thread(target=self._look_for_another_host, args=(end,), daemon=True).start()
            lingering = False
            while len(self._words) < self._plan.nnodes and not cancelled() and time.monotonic() < end:
                with suppress(TimeoutError):
                    self._receive(server.accept()[0], stack)
                self._refusal = self._refusal or _verdict(self._words) or self._other_host()
                differ = _differences(self._words) is not None
                if (self._refusal or differ) and self._mine.goes_on and not lingering:  # else `end` is short already
                    lingering, end = True, min(end, time.monotonic() + _LINGER_SECONDS)
                if self._refusal is not None:
                    self._answer_all()
                    if self._found is not None:
                        break
            self._refusal = self._refusal or _verdict(self._words) or _differences(self._words)
            if self._refusal is None and len(self._words) < self._plan.nnodes:
                self._refusal, self._missing = self._who_is_missing(), True
            self._answer_all()
        answer = self._answer(self._mine)
        if self._mine.goes_on or len(self._words) >= self._plan.nnodes:
            return answer
        return replace(answer, refusal=self._who_is_missing(), missing=True)  # its own refusal is no news to this node

    def _receive(self, guest: socket.socket, stack: ExitStack) -> None:
        word = _read_word(guest)
        if word is None or word.key == self._mine.key:  # a stranger, or this node itself, which looks for another host
            guest.close()
            return
        self._words[word.key] = word
        self._waiting.append((stack.enter_context(guest), word))
        self._address = self._address or guest.getsockname()[0]

    def _other_host(self) -> str | None:
        return self._found.refusal if self._found is not None else None

    def _answer_all(self) -> None:
        for guest, word in self._waiting:
            with suppress(OSError):
                guest.sendall(json.dumps(asdict(self._answer(word))).encode() + b"\n")
        self._waiting.clear()

    def _answer(self, word: Word) -> Answer:
        others = [other for other in self._words.values() if other.key != word.key]
        return Answer(
            refusal=self._refusal,
            reasons={other.name: other.reason for other in others if other.reason},
            missing=self._missing,
            hosts={str(one.node): one.host for one in self._words.values()},
            address=self._address,
        )

    def _who_is_missing(self) -> str:
        there = {word.node for word in self._words.values()}
        missing = [_named(node, self._hosts) for node in range(self._plan.nnodes) if node not in there]
        return f"{', '.join(missing)} did not come to the {self._mine.stage}"

    def _look_for_another_host(self, end: float) -> None:
        """Runs beside the others, since looking up a name may take seconds."""
        while not self._closed.wait(_RETRY_SECONDS):
            try:
                with socket.create_connection((self._plan.master_addr, self._plan.master_port), _LINE_SECONDS) as host:
                    host.sendall(_line(self._mine))
                    host.settimeout(_RETRY_SECONDS)
                    answer = _read_answer(host, end, self._closed.is_set)
            except OSError:  # the address is not known yet, or not reachable from here
                continue
            if answer is None:  # closed without a word: it was this node itself
                return
            if answer.refusal is not None:
                self._found = answer
                return

    def _port_is_taken(self, error: OSError) -> Answer:
        """By another launcher that takes itself for node 0 on this machine, or by anything else."""
        at_once = time.monotonic() + 2 * _RETRY_SECONDS
        answer = _visit(self._plan, self._mine, at_once, lambda: False, self._hosts)
        if answer.refusal is not None and not answer.missing:
            return answer
        return Answer(f"MASTER_PORT={self._plan.master_port}, where node 0 has to listen: {error}")


def _listen(plan: LaunchPlan) -> socket.socket:
    """On all interfaces, IPv6 and IPv4 alike, as torch's store will.

    Raises:
        OSError: the port is not free on one of them.
    """
    if (reason := why_not_usable(plan.master_port)) is not None:
        raise OSError(reason)
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # compiled in, but switched off
            return socket.create_server(
                ("", plan.master_port), family=socket.AF_INET6, backlog=plan.nnodes, dualstack_ipv6=True
            )
    return socket.create_server(("", plan.master_port), backlog=plan.nnodes)


def _verdict(words: Mapping[str, Word]) -> str | None:
    """Why these nodes cannot go on together."""
    nodes: dict[int, Word] = {}
    for word in words.values():
        if (twin := nodes.setdefault(word.node, word)) is not word:
            return f"two launchers have node rank {word.node}: one on {twin.host}, one on {word.host}"
    for word in words.values():
        if not word.goes_on:
            return f"{word.name} does not go on: {word.reason}"
        shared = [other for other in words.values() if other.host == word.host and set(other.gpus) & set(word.gpus)]
        if len(shared) > 1:
            names = " and ".join(f"node {other.node}" for other in shared)
            return f"one launcher a node starts all of its ranks, but {names} on {word.host} would use the same GPUs"
    if len({word.stage for word in words.values()}) > 1:
        stages = ", ".join(f"{word.name}: {word.stage}" for _, word in sorted(nodes.items()))
        return f"the nodes are not at the same point ({stages}): start the job anew on all of them"
    return None


def _differences(words: Mapping[str, Word]) -> str | None:
    """Who differs in what; worth waiting for those who have not come yet, since it is a table of all."""
    table = table_of_differences({word.name: word.facts for word in sorted(words.values(), key=lambda one: one.node)})
    return f"the nodes differ:\n{table}" if table else None


def _visit(plan: LaunchPlan, mine: Word, end: float, cancelled: Callable[[], bool], hosts: Mapping[str, str]) -> Answer:
    why = "no answer"
    while not cancelled() and time.monotonic() < end:
        try:
            with socket.create_connection((plan.master_addr, plan.master_port), _LINE_SECONDS) as host:
                host.sendall(_line(mine))
                host.settimeout(_RETRY_SECONDS)
                address = host.getsockname()[0]
                if (answer := _read_answer(host, end, cancelled)) is not None:
                    return Answer(answer.refusal, answer.reasons, answer.missing, answer.hosts, address)
                why = "no answer"
        except OSError as error:
            why = error.strerror or str(error)
        time.sleep(_RETRY_SECONDS)
    where = f"{plan.master_addr}:{plan.master_port}: {why}"
    return Answer(f"{_named(0, hosts)} did not come to the {mine.stage} ({where})", missing=True)


def _named(node: int, hosts: Mapping[str, str]) -> str:
    return f"node {node} on {hosts[str(node)]}" if str(node) in hosts else f"node {node}"


def _line(word: Word) -> bytes:
    return json.dumps(asdict(word)).encode() + b"\n"


def _read_answer(host: socket.socket, end: float, cancelled: Callable[[], bool]) -> Answer | None:
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
    with suppress(ValueError, TypeError):
        return Answer(**json.loads(received))
    return None


def _read_word(guest: socket.socket) -> Word | None:
    """The word of a node; None for anything else that has found the port."""
    guest.settimeout(_LINE_SECONDS)
    with suppress(OSError, ValueError, TypeError), guest.makefile("rb") as lines:
        return Word(**json.loads(lines.readline(_LONGEST_LINE)))
    return None
