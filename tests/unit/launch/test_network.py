"""Whose an address is, and what a launcher that waits for the others is told about it."""

from __future__ import annotations

import socket

import pytest

from mcore_qwen3.launch import LaunchPlan
from mcore_qwen3.launch.check_in import _waiting_line
from mcore_qwen3.launch.network import interface_of, is_own

ELSEWHERE = "192.0.2.1"  # RFC 5737: an address for documents, nobody's


def test_addresses() -> None:
    assert interface_of("127.0.0.1") == interface_of("::ffff:127.0.0.1") == "lo"
    assert interface_of(ELSEWHERE) is None and interface_of("") is None
    assert is_own("127.0.0.1") and is_own("localhost")
    assert not is_own(ELSEWHERE) and not is_own("nobody.invalid")


@pytest.mark.parametrize(
    ("node", "address", "end"),
    [
        (0, "127.0.0.1", "for the other nodes (1) to come to 127.0.0.1:7"),
        (0, ELSEWHERE, f"come to {ELSEWHERE}:7, which is no address of this machine: should it be node 0?"),
        (1, ELSEWHERE, f"for node 0 at {ELSEWHERE}:7"),
        (1, "127.0.0.1", "for node 0 at 127.0.0.1:7, which is this machine: should it be node 0?"),
    ],
)
def test_a_launcher_that_waits_says_what_looks_wrong(node: int, address: str, end: str) -> None:
    """Node ranks that were swapped: nobody listens where all are told to come."""
    plan = LaunchPlan(nnodes=2, node_rank=node, nproc_per_node=1, master_addr=address, master_port=7, sources={})
    line = _waiting_line(plan, 60)
    assert line.startswith(f"node {node} on {socket.gethostname()} waits up to 60 s") and line.endswith(end)
