"""torchrun's command line and environment; the command line is read back by torchrun's own parser."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mcore_qwen3.launch import torchrun
from mcore_qwen3.launch.environment import LaunchPlan

PLAN = LaunchPlan(nnodes=2, node_rank=1, nproc_per_node=4, master_addr="node-0", master_port=1234, sources={})


def test_torchrun_reads_what_was_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import config_from_args, parse_args

    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else torchrun sets it in this process
    command = torchrun.torchrun_command(
        PLAN, ["-m", "mcore_qwen3", "sft", "--load", "x", "--nnodes", "9"], "/some/python"
    )
    assert command[:3] == ["/some/python", "-m", "torch.distributed.run"]
    config, program, argv = config_from_args(parse_args(command[3:]))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.rdzv_configs["rank"]) == (2, 2, 4, 1)
    assert (config.rdzv_backend, config.rdzv_endpoint, config.max_restarts) == ("static", "node-0:1234", 0)
    assert config.signals_to_handle == "SIGQUIT"
    assert program == sys.executable
    assert argv == ["-u", "-m", "mcore_qwen3", "sft", "--load", "x", "--nnodes", "9"]


def test_what_the_platform_set_for_nodes_does_not_reach_the_ranks() -> None:
    environ = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "a", "PET_STANDALONE": "1", "HOME": "/h", "NNODES": "2"}
    child, lines = torchrun.child_environment(PLAN, environ, Path("/run"), {"MY_FLAG": "x", "OMP_NUM_THREADS": "5"})
    assert child == {
        "HOME": "/h",
        "NNODES": "2",
        "MY_FLAG": "x",
        "OMP_NUM_THREADS": "5",
        "MCORE_QWEN3_SUPERVISED": "1",
        "MCORE_QWEN3_RUN_DIR": "/run",
        "MCORE_QWEN3_EXPECTED_RANKS": "8",
    }
    assert lines == ["not passed on to torchrun: MASTER_ADDR, PET_STANDALONE, RANK, WORLD_SIZE"]


@pytest.mark.parametrize(("cores", "expected"), [(9, "2"), (3, "1")])
def test_threads_share_the_cores_of_a_run_without_gpu(
    monkeypatch: pytest.MonkeyPatch, cores: int, expected: str
) -> None:
    monkeypatch.setattr(torchrun.os, "sched_getaffinity", lambda pid: set(range(cores)))
    child, lines = torchrun.child_environment(PLAN, {"CUDA_VISIBLE_DEVICES": ""}, Path("/run"), {})
    assert child["OMP_NUM_THREADS"] == expected
    assert lines == [f"OMP_NUM_THREADS={expected} ({cores} cores, 4 process(es))"]


def test_threads_of_a_gpu_run_are_left_to_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "count_gpus", lambda environ: 4)
    child, lines = torchrun.child_environment(PLAN, {}, Path("/run"), {})
    assert "OMP_NUM_THREADS" not in child and lines == []


def test_gloo_is_told_the_way_to_the_other_nodes_unless_the_user_has() -> None:
    """B92: a machine whose own name is not known takes the loopback, where no other node is."""
    environ = {"OMP_NUM_THREADS": "1"}
    child, lines = torchrun.child_environment(PLAN, environ, Path("/run"), {}, "eth7")
    assert child["GLOO_SOCKET_IFNAME"] == "eth7" and lines == ["GLOO_SOCKET_IFNAME=eth7 (the way to the other nodes)"]
    environ["GLOO_SOCKET_IFNAME"] = "ib0"
    child, lines = torchrun.child_environment(PLAN, environ, Path("/run"), {}, "eth7")
    assert child["GLOO_SOCKET_IFNAME"] == "ib0" and lines == []
    assert "GLOO_SOCKET_IFNAME" not in torchrun.child_environment(PLAN, {}, Path("/run"), {}, None)[0]
