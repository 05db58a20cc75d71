"""Launchers of several nodes go on together, or not at all, and say who differs in what."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mcore_qwen3.launch import meeting
from mcore_qwen3.launch.environment import LaunchPlan
from mcore_qwen3.launch.meeting import Answer, Word, meet
from mcore_qwen3.launch.ports import free_port


def never() -> bool:
    return False


def plan(node: int, nodes: int, port: int, address: str = "127.0.0.1") -> LaunchPlan:
    return LaunchPlan(nnodes=nodes, node_rank=node, nproc_per_node=1, master_addr=address, master_port=port, sources={})


def word(node: int, **changes: Any) -> Word:
    """Of a machine of its own; each launcher has a key of its own."""
    values = {"stage": "restart 1", "goes_on": True, "reason": "", "host": f"host-{node}", "key": f"key-{node}"}
    return Word(**({"node": node} | values | changes))


def all_meet(words: list[Word], host_waits: float = 30, nodes: int | None = None) -> list[Answer]:
    """The answer that each node gets. Node 0 comes last."""
    port = free_port()
    with ThreadPoolExecutor(len(words)) as pool:
        calls = [
            pool.submit(meet, plan(one.node, nodes or len(words), port), one, 30 if one.node else host_waits, never)
            for one in reversed(words)
        ]
        return [call.result() for call in reversed(calls)]


def refusals(words: list[Word], **more: Any) -> list[str | None]:
    return [answer.refusal for answer in all_meet(words, **more)]


def test_all_nodes_go_on_together_and_know_each_other() -> None:
    answers = all_meet([word(node, reason=f"reason of {node}") for node in range(3)])
    assert [answer.refusal for answer in answers] == [None, None, None]
    for node, answer in enumerate(answers):
        assert answer.hosts == {"0": "host-0", "1": "host-1", "2": "host-2"}
        others = [other for other in range(3) if other != node]
        assert answer.reasons == {f"node {other} on host-{other}": f"reason of {other}" for other in others}
        assert answer.address.removeprefix("::ffff:") == "127.0.0.1"


@pytest.mark.parametrize("who", [0, 1, 2])
def test_one_node_that_ends_ends_all(who: int) -> None:
    words = [word(node, goes_on=node != who, reason=f"reason of {node}") for node in range(3)]
    assert refusals(words) == [f"node {who} on host-{who} does not go on: reason of {who}"] * 3


def test_a_node_of_another_start_is_refused() -> None:
    text = "the nodes are not at the same point (node 0 on host-0: restart 2, node 1 on host-1: start of the job): "
    assert (
        refusals([word(0, stage="restart 2"), word(1, stage="start of the job")])
        == [text + "start the job anew on all of them"] * 2
    )


def test_who_differs_in_what_is_a_table() -> None:
    facts = [{"torch": "2.13.0", "nnodes": "3", "--lr": "1e-05"}, {"torch": "2.13.0", "nnodes": "3", "--lr": "2e-05"}]
    words = [word(0, facts=facts[0]), word(1, facts=facts[1]), word(2, facts=facts[0] | {"torch": "2.12.1"})]
    table = """the nodes differ:
         node 0 on host-0  node 1 on host-1  node 2 on host-2
  torch  2.13.0            2.13.0            2.12.1
  --lr   1e-05             2e-05             1e-05"""
    assert refusals(words) == [table] * 3


def test_b91_two_launchers_of_one_node_rank_are_refused_at_once() -> None:
    """Nobody waits for a third, who will not come: the host would wait for 30 s here."""
    words = [word(0), word(1), word(1, key="another", host="host-9")]
    answers = refusals(words, nodes=3)
    assert answers[0] is not None and answers == [answers[0]] * 3
    assert answers[0].startswith("two launchers have node rank 1: one on host-")


@pytest.mark.parametrize("gpus", [("nvidia0",), ()])
def test_launchers_that_would_share_gpus(gpus: tuple[str, ...]) -> None:
    """One launcher a GPU, each of which starts the ranks of all GPUs. On CPU one machine may stand for two."""
    seen = refusals([word(0, host="h", gpus=gpus), word(1, host="h", gpus=(*gpus, *gpus))])
    if not gpus:
        assert seen == [None, None]
    else:
        text = "one launcher a node starts all of its ranks, but node 0 and node 1 on h would use the same GPUs"
        assert seen == [text, text]
    assert refusals([word(0, host="h", gpus=("nvidia0",)), word(1, host="h", gpus=("nvidia1",))]) == [None, None]


def test_two_launchers_that_take_themselves_for_node_0_of_one_machine() -> None:
    port = free_port()
    first = word(0)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(meet, plan(0, 2, port), first, 1000, never)
        with socket.socket() as probe:  # until the first one listens
            while probe.connect_ex(("127.0.0.1", port)):
                time.sleep(0.01)
        second = meet(plan(0, 2, port), word(0, key="second", host="host-9"), 1000, never)
        text = "two launchers have node rank 0: one on host-0, one on host-9"
        assert (call.result().refusal, second.refusal) == (text, text)


def test_two_launchers_that_take_themselves_for_node_0_of_two_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each could listen; one of them finds the other at the address that both were given."""
    port = free_port()
    addresses = iter(["127.0.0.1", "127.0.0.2"])
    monkeypatch.setattr(meeting, "_listen", lambda plan: socket.create_server((next(addresses), plan.master_port)))
    with ThreadPoolExecutor(2) as pool:
        words = [word(0), word(0, key="second", host="host-9")]
        calls = [pool.submit(meet, plan(0, 2, port), one, 1000, never) for one in words]
        assert {call.result().refusal for call in calls} <= {
            "two launchers have node rank 0: one on host-0, one on host-9",
            "two launchers have node rank 0: one on host-9, one on host-0",
        }


def test_a_port_that_something_else_has_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        answer = meet(plan(0, 2, port), word(0), 1000, never)
    assert answer.refusal == f"MASTER_PORT={port}, where node 0 has to listen: it is in use on this machine"


def test_a_node_that_does_not_come_is_named() -> None:
    assert refusals([word(0), word(2)], host_waits=3, nodes=3) == ["node 1 did not come to the restart 1"] * 2
    port = free_port()
    answer = meet(plan(1, 2, port), word(1), 1, never, {"0": "gpu-7"})
    assert answer.missing
    text = f"node 0 on gpu-7 did not come to the restart 1 (127.0.0.1:{port}: Connection refused)"
    assert answer.refusal == text


def test_a_node_that_ends_itself_still_learns_who_did_not_come() -> None:
    answer = meet(plan(0, 2, free_port()), word(0, goes_on=False, reason="mine"), 1, never, {"1": "gpu-8"})
    assert (answer.refusal, answer.missing) == ("node 1 on gpu-8 did not come to the restart 1", True)


def test_waiting_ends_when_the_user_wants_it() -> None:
    asked = time.monotonic() + 1
    for node in (0, 1):
        answer = meet(plan(node, 2, free_port()), word(node), 1000, lambda: time.monotonic() > asked)
        assert answer.missing and str(answer.refusal).startswith(f"node {1 - node} did not come to the restart 1")


def test_a_port_that_is_not_the_meeting_yet_is_asked_again() -> None:
    """The torchrun of the failed start still holds it, and says nothing, or something else, and ends."""
    port = free_port()
    asked = threading.Event()

    def torchrun() -> None:
        with socket.create_server(("", port)) as server:
            for answer in (b"", b"\x00\x01 not JSON\n", b"3\n", b'{"unknown": 1}\n'):
                with server.accept()[0] as guest:
                    guest.recv(100)
                    guest.sendall(answer)
            asked.set()

    def host() -> Answer:
        asked.wait(30)
        with socket.socket() as stranger:  # nor is everyone who finds the port a node
            threading.Timer(0.5, lambda: talk(stranger, port)).start()
            return meet(plan(0, 2, port), word(0), 30, never)

    with ThreadPoolExecutor(3) as pool:
        calls: list[Callable[[], Any]] = [torchrun, host, lambda: meet(plan(1, 2, port), word(1), 30, never)]
        _, *answers = [call.result() for call in [pool.submit(call) for call in calls]]
    assert [answer.refusal for answer in answers] == [None, None]


def talk(stranger: socket.socket, port: int) -> None:
    try:
        stranger.connect(("127.0.0.1", port))
        stranger.sendall(b'{"node": 1}\n')
    except OSError:  # the meeting may be over
        pass
