"""Environment -> plan. Bxx: rows of the list of faults that public launchers had."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from mcore_qwen3.errors import LaunchError
from mcore_qwen3.launch import LaunchPlan, expected_ranks, is_rank, ports, resolve_environment

TWO_NODES = {"NNODES": "2", "NODE_RANK": "1", "NPROC_PER_NODE": "8", "MASTER_ADDR": "node-0"}


def resolve(*, platform: str = "auto", gpus: int | None = 3, **environ: str) -> LaunchPlan:
    return resolve_environment(environ, gpus=gpus, platform=platform)


def refusal(*, platform: str = "auto", gpus: int | None = 3, **environ: str) -> str:
    with pytest.raises(LaunchError) as caught:
        resolve(platform=platform, gpus=gpus, **environ)
    return str(caught.value)


@pytest.fixture(params=[("127.0.0.1", socket.AF_INET), ("0.0.0.0", socket.AF_INET), ("::1", socket.AF_INET6)])
def busy_port(request: pytest.FixtureRequest) -> Iterator[int]:
    """A port on which this test listens, on one of the interfaces that torch's store would want."""
    address, family = request.param
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((address, 0))
        listener.listen(1)
        yield listener.getsockname()[1]


def test_nothing_set_is_one_node_with_the_default_processes() -> None:
    plan = resolve()
    assert (plan.nnodes, plan.node_rank, plan.nproc_per_node, plan.world_size) == (1, 0, 3, 3)
    assert plan.master_addr == "127.0.0.1"
    assert plan.sources["nproc_per_node"] == "GPUs seen" and plan.sources["master_port"] == "a free one"
    assert plan.notes == ()


def test_b89_dlc_variables_through_the_users_command() -> None:
    """WORLD_SIZE=2 RANK=1 NPROC_PER_NODE=8 on PAI-DLC, with NNODES=$WORLD_SIZE NODE_RANK=$RANK: ranks 8-15 of 16."""
    plan = resolve(WORLD_SIZE="2", RANK="1", MASTER_PORT="23456", **TWO_NODES)
    assert (plan.nnodes, plan.node_rank, plan.nproc_per_node) == (2, 1, 8)
    assert plan.node_ranks == range(8, 16) and plan.world_size == 16
    assert (plan.master_addr, plan.master_port) == ("node-0", 23456)
    assert plan.sources["master_port"] == "MASTER_PORT"
    assert plan.table() == [
        "16 ranks expected; this is node 1 with ranks 8-15",
        "  platform        dlc     WORLD_SIZE beside NPROC_PER_NODE",
        "  nnodes          2       NNODES and WORLD_SIZE",
        "  node_rank       1       NODE_RANK and RANK",
        "  nproc_per_node  8       NPROC_PER_NODE",
        "  master_addr     node-0  MASTER_ADDR",
        "  master_port     23456   MASTER_PORT",
    ]


@pytest.mark.parametrize(
    ("sign", "gpus"),
    [
        ({"NPROC_PER_NODE": "8"}, None),
        ({"KUBERNETES_CONTAINER_RESOURCE_GPU": "8"}, 8),
        ({"MASTER_ADDR": "dlc18isgeayd0000-master-0"}, 8),
    ],
)
def test_b89_dlc_variables_alone(sign: dict[str, str], gpus: int | None) -> None:
    environ = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "node-0", "MASTER_PORT": "23456"} | sign
    for platform in ("auto", "dlc"):
        plan = resolve(platform=platform, gpus=gpus, **environ)
        assert (plan.platform, plan.nnodes, plan.node_rank, plan.nproc_per_node) == ("dlc", 2, 1, 8)
        assert plan.node_ranks == range(8, 16) and plan.world_size == 16
        assert plan.sources["nnodes"] == "WORLD_SIZE" and plan.sources["node_rank"] == "RANK"
        assert expected_ranks(environ, gpus=gpus, platform=platform) == 16


def test_b89_world_size_alone_is_never_guessed() -> None:
    environ = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "node-0"}
    text = refusal(**environ)
    assert "number of nodes (PAI-DLC) or of processes (torchrun)" in text
    assert "WORLD_SIZE=2, RANK=1" in text and "--platform dlc" in text and "NNODES=$WORLD_SIZE NODE_RANK=$RANK" in text
    assert resolve(platform="dlc", **environ).world_size == 6  # 3 GPUs a node
    assert resolve(platform="local", **environ).world_size == 3


DLC = {"WORLD_SIZE": "2", "RANK": "1", "NPROC_PER_NODE": "2", "MASTER_ADDR": "node-0"}


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"RANK": ""}, "needs NODE_RANK on each node, else every node would train alone; seen: WORLD_SIZE=2"),
        ({"MASTER_ADDR": ""}, "needs MASTER_ADDR on each node, else every node would train alone; seen: WORLD_SIZE=2"),
        ({"RANK": "2"}, "seen: RANK=2, WORLD_SIZE=2"),
        ({"LOCAL_RANK": "0"}, "one launcher a node starts all of the node's ranks; seen: LOCAL_RANK=0"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "seen: OMPI_COMM_WORLD_LOCAL_SIZE=2"),
        ({"NNODES": "3", "NODE_RANK": "1"}, "seen: WORLD_SIZE=2, RANK=1; by NNODES 3 node(s), this one 1; 2 proc"),
        ({"NODE_RANK": "0"}, "seen: NODE_RANK=0 and RANK=1; change: unset the wrong one"),
        ({"NPROC_PER_NODE": "", "KUBERNETES_CONTAINER_RESOURCE_GPU": "8"}, "KUBERNETES_CONTAINER_RESOURCE_GPU=8, 3 by"),
    ],
)
def test_mistakes_on_dlc(changes: dict[str, str], part: str) -> None:
    assert part in refusal(**(DLC | changes))


def test_b89_nodes_by_two_names_on_a_platform_that_was_named() -> None:
    text = refusal(platform="dlc", **(DLC | {"NNODES": "3", "NODE_RANK": "1"}))
    assert "nnodes must be the same by every variable that gives it; seen: NNODES=3 and WORLD_SIZE=2; " in text


def test_gpus_that_the_platform_gives_and_nobody_sees() -> None:
    environ = {**DLC, "NPROC_PER_NODE": "", "KUBERNETES_CONTAINER_RESOURCE_GPU": "8"}
    assert "RESOURCE_GPU=8, 0 by CUDA_VISIBLE_DEVICES" in refusal(gpus=0, **environ)
    assert resolve(gpus=None, **environ).nproc_per_node == 1  # --device cpu
    one = environ | {"WORLD_SIZE": "1", "RANK": "0"}
    assert "RESOURCE_GPU=8, 0 by CUDA_VISIBLE_DEVICES" in refusal(gpus=0, **one)
    assert resolve(gpus=8, **one).sources["nproc_per_node"] == "GPUs seen, as KUBERNETES_CONTAINER_RESOURCE_GPU says"
    none = resolve(gpus=0, **(one | {"KUBERNETES_CONTAINER_RESOURCE_GPU": "0"}))
    assert (none.nproc_per_node, none.sources["nproc_per_node"]) == (1, "by default, on CPU")


@pytest.mark.parametrize(("world_size", "rank"), [("16", "8"), ("2", "1"), ("16", "1")])
def test_world_size_beside_our_own_may_count_processes_or_nodes(world_size: str, rank: str) -> None:
    """16 is torchrun's and Kubeflow's way; a sbatch script's author may export either."""
    with_slurm = TWO_NODES | {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_STEP_ID": "0"}
    plan = resolve(WORLD_SIZE=world_size, RANK=rank, **with_slurm)
    assert (plan.platform, plan.world_size, plan.node_rank) == ("slurm", 16, 1)
    plan = resolve(WORLD_SIZE=world_size, RANK=rank, **TWO_NODES)
    assert (plan.platform, plan.world_size, plan.node_rank) == ("local" if world_size == "16" else "dlc", 16, 1)


@pytest.mark.parametrize(("world_size", "rank"), [("4", "1"), ("2", "0")])
def test_world_size_that_fits_in_no_way_is_refused_with_every_reading(world_size: str, rank: str) -> None:
    with_slurm = TWO_NODES | {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_STEP_ID": "0"}
    text = refusal(WORLD_SIZE=world_size, RANK=rank, **with_slurm)
    assert (
        f"seen: WORLD_SIZE={world_size}, RANK={rank}; by NNODES and SLURM_NNODES 2 node(s), this one 1; 8 proc" in text
    )
    assert resolve(platform="local", WORLD_SIZE=world_size, RANK=rank, **with_slurm).world_size == 16


@pytest.mark.parametrize(("platform", "variable"), [("dlc", "WORLD_SIZE"), ("slurm", "SLURM_NNODES")])
def test_a_platform_that_is_not_there(platform: str, variable: str) -> None:
    assert f"seen: {variable} is not set" in refusal(platform=platform)


def test_world_size_of_one_says_the_same_in_both_readings() -> None:
    assert resolve(WORLD_SIZE="1", RANK="0").world_size == 3


def test_b90_each_job_on_one_node_gets_a_port_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that is in use nor one that the system could give to a connection before torchrun listens."""
    assert all(resolve().master_port < 32768 for _ in range(20))
    free = resolve().master_port
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen(1)
        monkeypatch.setattr(ports, "_OWN_RANGE", (listener.getsockname()[1], free))
        assert {resolve().master_port for _ in range(20)} == {free}


def test_b90_a_given_port_is_used() -> None:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    plan = resolve(MASTER_PORT=str(port))
    assert plan.master_port == port and plan.sources["master_port"] == "MASTER_PORT"


def test_b90_a_busy_port_is_refused_by_name(busy_port: int) -> None:
    text = refusal(MASTER_PORT=str(busy_port))
    assert f"MASTER_PORT={busy_port}" in text and "it is in use" in text


def test_a_port_of_a_connection_that_is_still_closing_counts_as_free() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted = server.accept()[0]
            accepted.close()  # the side that closes first keeps the port in TIME_WAIT
            client.recv(1)
    assert resolve(MASTER_PORT=str(port)).master_port == port


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "NODE_RANK"])
def test_b92_several_nodes_need_an_address_and_a_node_rank(missing: str) -> None:
    environ = {name: value for name, value in TWO_NODES.items() if name != missing}
    text = refusal(**environ)
    assert f"needs {missing}" in text and f"NNODES=2, {missing} is not set" in text
    assert f"needs {missing}" in refusal(**environ, **{missing: " "})


def test_several_nodes_meet_at_torchs_port_unless_told() -> None:
    plan = resolve(**TWO_NODES)
    assert plan.master_port == 29500 and plan.sources["master_port"] == "by default"


@pytest.mark.parametrize("value", ["2", "7"])
def test_node_rank_beyond_the_nodes(value: str) -> None:
    text = refusal(**{**TWO_NODES, "NODE_RANK": value})
    assert f"seen: NODE_RANK={value}, NNODES=2; " in text


def test_b93_a_second_node_that_does_not_know_of_the_first() -> None:
    """NODE_RANK=1 without NNODES would train a world of its own."""
    assert "NNODES is not set" in refusal(NODE_RANK="1")


@pytest.mark.parametrize("name", ["NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_PORT"])
@pytest.mark.parametrize("value", ["-1", "two", "1.5", "auto", "²", "70000000000000000000x"])
def test_what_is_no_whole_number_is_refused_by_name(name: str, value: str) -> None:
    text = refusal(**{**TWO_NODES, name: value})
    assert text.startswith(f"{name} must be a whole number") and f"seen: {name}={value}" in text


@pytest.mark.parametrize(("name", "value"), [("NNODES", "0"), ("NPROC_PER_NODE", "0"), ("MASTER_PORT", "65536")])
def test_numbers_out_of_range(name: str, value: str) -> None:
    assert f"seen: {name}={value}" in refusal(**{**TWO_NODES, name: value})


def test_b93_lower_case_variable_is_noted() -> None:
    plan = resolve(nproc_per_node="8")
    assert plan.nproc_per_node == 3
    assert plan.notes == ("nproc_per_node in lower case has no effect; the variable is NPROC_PER_NODE",)


def test_a_variable_set_to_nothing_counts_as_not_set_and_is_noted() -> None:
    """`NNODES=$WORLD_SIZE NODE_RANK=$RANK megatron sft` on a machine without these two."""
    plan = resolve(NNODES="", NODE_RANK="")
    assert (plan.nnodes, plan.node_rank) == (1, 0)
    assert [note.split()[0] for note in plan.notes] == ["NNODES", "NODE_RANK"]


def test_is_rank_needs_torchruns_own_variables() -> None:
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    assert is_rank(torchrun)
    assert not is_rank({"WORLD_SIZE": "2", "RANK": "0"})  # PAI-DLC
    for name in torchrun:
        assert not is_rank({key: value for key, value in torchrun.items() if key != name})


def test_the_readings_of_a_rank_are_torchruns() -> None:
    torchrun = {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "TORCHELASTIC_RUN_ID": "none",
        "LOCAL_WORLD_SIZE": "4",
    }
    torchrun |= {"GROUP_RANK": "1", "MASTER_ADDR": "node-0", "MASTER_PORT": "1234", "NNODES": "7"}
    plan = resolve(**torchrun)
    assert (plan.platform, plan.nnodes, plan.node_rank, plan.nproc_per_node) == ("torchrun", 2, 1, 4)
    assert (plan.master_addr, plan.master_port, expected_ranks(torchrun, gpus=None)) == ("node-0", 1234, 8)
