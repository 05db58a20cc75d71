"""Supervisors of several nodes start their ranks again together, or not at all."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from mcore_qwen3.launch.environment import LaunchPlan
from mcore_qwen3.launch.meeting import Word, meet
from mcore_qwen3.launch.ports import free_port


def never() -> bool:
    return False


def plan(node: int, nodes: int, port: int) -> LaunchPlan:
    return LaunchPlan(
        nnodes=nodes, node_rank=node, nproc_per_node=1, master_addr="127.0.0.1", master_port=port, sources={}
    )


def all_meet(words: list[Word], host_waits: float = 30, nodes: int | None = None) -> list[str | None]:
    """The answer that each node gets."""
    port = free_port()
    with ThreadPoolExecutor(len(words)) as pool:
        calls = [
            pool.submit(meet, plan(word.node, nodes or len(words), port), word, 30 if word.node else host_waits, never)
            for word in reversed(words)  # node 0 comes last
        ]
        return [call.result() for call in reversed(calls)]


def test_all_nodes_go_on_together() -> None:
    assert all_meet([Word(node, 1, True, "a rank was killed") for node in range(3)]) == [None, None, None]


@pytest.mark.parametrize("who", [0, 1, 2])
def test_one_node_that_ends_ends_all(who: int) -> None:
    words = [Word(node, 1, node != who, f"reason of {node}") for node in range(3)]
    assert all_meet(words) == [f"node {who} does not start again: reason of {who}"] * 3


def test_a_node_of_another_start_is_refused() -> None:
    answers = all_meet([Word(0, 2, True, ""), Word(1, 1, True, "")])
    assert answers == ["the nodes have started their ranks unequally often (node 0: 2, node 1: 1)"] * 2


def test_a_node_that_does_not_come_is_named() -> None:
    words = [Word(0, 1, True, ""), Word(2, 1, True, "")]
    assert all_meet(words, host_waits=3, nodes=3) == ["node 1 did not come to the restart"] * 2
    assert meet(plan(1, 2, free_port()), Word(1, 1, True, ""), 1, never) == "node 0 did not come to the restart"


def test_waiting_ends_when_the_user_wants_it() -> None:
    asked = time.monotonic() + 1
    for node in (0, 1):
        answer = meet(plan(node, 2, free_port()), Word(node, 1, True, ""), 1000, lambda: time.monotonic() > asked)
        assert answer == f"node {1 - node} did not come to the restart"


def test_a_port_that_is_not_the_meeting_yet_is_asked_again() -> None:
    """The torchrun of the failed start still holds it, and says nothing, or something else, and ends."""
    port = free_port()
    asked = threading.Event()

    def torchrun() -> None:
        with socket.create_server(("", port)) as server:
            for answer in (b"", b"\x00\x01 not JSON\n", b"3\n"):
                with server.accept()[0] as guest:
                    guest.recv(100)
                    guest.sendall(answer)
            asked.set()

    def host() -> str | None:
        asked.wait(30)
        with socket.socket() as stranger:  # nor is everyone who finds the port a node
            threading.Timer(0.5, lambda: talk(stranger, port)).start()
            return meet(plan(0, 2, port), Word(0, 1, True, ""), 30, never)

    with ThreadPoolExecutor(3) as pool:
        calls: list[Callable[[], object]] = [
            torchrun,
            host,
            lambda: meet(plan(1, 2, port), Word(1, 1, True, ""), 30, never),
        ]
        assert [call.result() for call in [pool.submit(call) for call in calls]] == [None, None, None]


def talk(stranger: socket.socket, port: int) -> None:
    try:
        stranger.connect(("127.0.0.1", port))
        stranger.sendall(b'{"node": 1}\n')
    except OSError:  # the meeting may be over
        pass
