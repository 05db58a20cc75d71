"""`megatron sft` as it is started on one node or on two: what is refused before anything is prepared, by the real command.

Bxx: rows of the list of faults that public launchers had. Two launchers of one machine stand for two nodes.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import Megatron

from mcore_qwen3.cli import agreement
from mcore_qwen3.config import parse_args
from mcore_qwen3.errors import LaunchError
from mcore_qwen3.launch import check_in, resolve_environment
from mcore_qwen3.launch.check_in import ready

Refusal = Callable[..., str]
DLC = {"WORLD_SIZE": "2", "NPROC_PER_NODE": "2", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture
def words(moe_dir: Path, rows_file: Path) -> list[object]:
    return ["sft", "--load", moe_dir, "--dataset", rows_file, "--train_iters", 2, "--save", "out"]


@pytest.fixture
def two_launchers(megatron: Megatron, words: list[object]) -> Callable[..., list[str]]:
    """Start both, each with its own words and variables; what each is refused with. They wait for each other for 30 minutes,
    so one that is not told would not end within the limit of `megatron`.
    """

    def run(*nodes: tuple[list[object], dict[str, str]]) -> list[str]:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = str(probe.getsockname()[1])
        with ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(megatron, *words, *more, MASTER_PORT=port, **environ) for more, environ in nodes]
            done = [call.result() for call in calls]
        assert [one.returncode for one in done] == [2, 2], done
        return [one.stderr for one in done]

    return run


def test_b90_a_busy_port_is_refused_by_name(megatron: Megatron, words: list[object]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        one = megatron(*words, MASTER_PORT=port)
        two = megatron(*words, NNODES="2", NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    for done in (one, two):
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert f"MASTER_PORT={port}" in done.stderr and "it is in use on this machine" in done.stderr


@pytest.mark.parametrize("environ", [{"NNODES": "2"}, {"NNODES": "2", "NODE_RANK": "1"}, DLC | {"MASTER_ADDR": ""}])
def test_b92_several_nodes_without_an_address_stop(
    megatron: Megatron, words: list[object], environ: dict[str, str]
) -> None:
    done = megatron(*words, **environ)
    assert done.returncode == 2 and "else every node would train alone" in done.stderr


def test_b93_the_first_line_says_how_many_ranks_are_expected(megatron: Megatron, moe_dir: Path) -> None:
    done = megatron("sft", "--load", moe_dir, "--dataset", "none.jsonl", "--train_iters", 2, nproc_per_node="8")
    assert done.stdout.splitlines()[0] == "1 rank expected; this is node 0 with rank 0"
    assert "note: nproc_per_node in lower case has no effect; the variable is NPROC_PER_NODE" in done.stdout


def test_b93_four_are_expected_and_two_have_joined() -> None:
    environ = {"MCORE_QWEN3_EXPECTED_RANKS": "4", "WORLD_SIZE": "2"}
    with pytest.raises(LaunchError, match="seen: 4 expected, 2 joined; change: the same NNODES and NPROC_PER_NODE"):
        agreement.check_expected_ranks(environ)
    agreement.check_expected_ranks(environ | {"WORLD_SIZE": "4"})
    agreement.check_expected_ranks({"WORLD_SIZE": "2"})  # torchrun by hand: nobody has said what to expect


def test_b93_nodes_with_different_numbers_of_processes(two_launchers: Callable[..., list[str]]) -> None:
    both = two_launchers(([], DLC | {"RANK": "0"}), ([], DLC | {"RANK": "1", "NPROC_PER_NODE": "1"}))
    for text in both:
        head, columns, row, end = text.split("\n", 3)
        assert head.endswith("seen: the nodes differ:")
        assert columns.split("  ")[-2:] == [f"node {node} on {socket.gethostname()}" for node in range(2)]
        assert row.split() == ["nproc_per_node", "2", "1"] and end.startswith("; change: ")


def test_other_settings_on_one_node(two_launchers: Callable[..., list[str]]) -> None:
    """num_workers is each machine's own affair."""
    both = two_launchers(
        (["--lr", 1e-5, "--num_workers", 1], DLC | {"RANK": "0"}),
        (["--lr", 2e-5, "--num_workers", 2], DLC | {"RANK": "1"}),
    )
    for text in both:
        assert [line.split() for line in text.splitlines()[2:-1]] == [["--lr", "1e-05", "2e-05"]]


def test_b89_both_nodes_are_node_0(two_launchers: Callable[..., list[str]]) -> None:
    for text in two_launchers(([], DLC | {"RANK": "0"}), ([], DLC | {"RANK": "0"})):
        name = socket.gethostname()
        assert f"seen: two launchers have node rank 0: one on {name}, one on {name}; " in text


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({}, "seen: WORLD_SIZE=2, NODE_RANK and RANK are not set"),
        ({"RANK": "1", "LOCAL_RANK": "1"}, "LOCAL_RANK=1, as where one process a GPU"),
    ],
)
def test_b89_mistakes_on_dlc(megatron: Megatron, words: list[object], changes: dict[str, str], part: str) -> None:
    done = megatron(*words, **(DLC | changes))
    assert done.returncode == 2 and part in done.stderr and "expected; this is node" not in done.stdout


def test_a_node_that_cannot_start_its_ranks_tells_the_others(megatron: Megatron, moe_dir: Path) -> None:
    """Its data is missing; node 0, which is this process, has all of its own, and waits."""
    words = ["--load", str(moe_dir), "--dataset", "none.jsonl", "--train_iters", "2", "--device", "cpu"]
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    plan = resolve_environment(DLC | {"RANK": "0", "MASTER_PORT": port}, gpus=None)
    with ThreadPoolExecutor(1) as pool:
        node_1 = pool.submit(megatron, "sft", *words, MASTER_PORT=port, RANK="1", **DLC)
        company = check_in(plan, agreement.setting_facts(parse_args(words, "sft").config), (), 1000)
        with pytest.raises(LaunchError) as caught:
            ready(plan, company, 1000, lambda: False)
    assert node_1.result().returncode == 2 and "no file none.jsonl" in node_1.result().stderr
    place = f"node 1 on {socket.gethostname()}"
    assert str(caught.value).startswith(f"the ranks start on all nodes or on none; seen: {place} does not go on: ")
    assert "no file none.jsonl" in str(caught.value)
    assert company.interface == "lo"
