"""SLURM's variables -> plan. What SLURM really sets was seen in jobs on SLURM 22.05; Bxx: rows of the list of faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_qwen3.errors import LaunchError
from mcore_qwen3.launch import LaunchPlan, expected_ranks, resolve_environment
from mcore_qwen3.launch.slurm import expand_nodelist

# A task of `srun --ntasks-per-node=1` on the second of two nodes. Names of hosts that end in .invalid are never known.
STEP = {
    "SLURM_JOB_ID": "70123",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_NODELIST": "localhost,n2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "localhost,n2",
    "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
}


def resolve(environ: dict[str, str], *, gpus: int | None = None, platform: str = "auto") -> LaunchPlan:
    return resolve_environment(environ, gpus=gpus, platform=platform)


def refusal(environ: dict[str, str], *, gpus: int | None = None) -> str:
    with pytest.raises(LaunchError) as caught:
        resolve(environ, gpus=gpus)
    return str(caught.value)


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in STEP.items() if name not in names}


def test_a_task_of_a_step() -> None:
    plan = resolve(STEP | {"NPROC_PER_NODE": "8"})
    assert (plan.platform, plan.nnodes, plan.node_rank, plan.nproc_per_node) == ("slurm", 2, 1, 8)
    assert (plan.master_addr, plan.master_port) == ("localhost", 20123)  # 10000 + 70123 % 20000
    assert plan.sources["nnodes"] == "SLURM_STEP_NUM_NODES" and plan.sources["node_rank"] == "SLURM_NODEID"
    assert plan.sources["master_addr"] == "first of SLURM_STEP_NODELIST"
    assert plan.sources["master_port"] == "10000 + SLURM_JOB_ID % 20000"


def test_a_step_on_fewer_nodes_than_its_job() -> None:
    step = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "n2", "SLURM_NODEID": "0"}
    plan = resolve(STEP | step)
    assert (plan.nnodes, plan.master_addr, plan.sources["master_port"]) == (1, "127.0.0.1", "a free one")


@pytest.mark.parametrize("gpus", [4, None])
def test_gpus_of_the_node(gpus: int | None) -> None:
    plan = resolve(STEP | {"SLURM_GPUS_ON_NODE": "4"}, gpus=gpus)
    assert (plan.nproc_per_node, plan.sources["nproc_per_node"]) == (
        (4, "GPUs seen, as SLURM_GPUS_ON_NODE says") if gpus else (1, "by default, on CPU")
    )


def test_a_task_that_sees_one_of_the_nodes_gpus() -> None:
    """--gpus-per-task, or --gpu-bind."""
    assert "seen: SLURM_GPUS_ON_NODE=8, 1 by CUDA_VISIBLE_DEVICES" in refusal(
        STEP | {"SLURM_GPUS_ON_NODE": "8"}, gpus=1
    )


def test_b91_one_launcher_a_task_is_refused_and_the_process_id_is_never_the_node() -> None:
    row = {
        "SLURM_JOB_ID": "1",
        "SLURM_NNODES": "2",
        "SLURM_NODEID": "1",
        "SLURM_PROCID": "8",
        "SLURM_NTASKS_PER_NODE": "8",
    }
    text = refusal(row | {"MASTER_ADDR": "node-0"})
    assert "one launcher a node" in text and "SLURM_NTASKS_PER_NODE=8, SLURM_NODEID=1, SLURM_PROCID=8" in text
    one_task = row | {"SLURM_NTASKS_PER_NODE": "1", "MASTER_ADDR": "node-0"}
    assert resolve(one_task).node_rank == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_NUM_TASKS": "16"},
        {"SLURM_LOCALID": "3"},
        {"SLURM_STEP_NUM_TASKS": "", "SLURM_NTASKS_PER_NODE": "8"},
        {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0"},
    ],
)
def test_several_launchers_on_a_node(changes: dict[str, str]) -> None:
    assert "SLURM has to start one launcher a node" in refusal(STEP | changes)


def test_the_jobs_tasks_do_not_count_where_the_step_has_one_a_node() -> None:
    assert resolve(STEP | {"SLURM_NTASKS_PER_NODE": "8"}).nnodes == 2


def test_a_batch_script_is_one_process() -> None:
    """On one node it may start the ranks itself, however many tasks the job was asked for; on two it has to use srun."""
    step = [name for name in STEP if "STEP" in name]
    batch = without(*step) | {"SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS_PER_NODE": "1"}
    one = {"SLURM_NNODES": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS_PER_NODE": "8", "NPROC_PER_NODE": "8"}
    assert resolve(batch | one).world_size == 8
    text = refusal(batch)
    assert "a batch script and salloc start one" in text and "seen: SLURM_NNODES=2, SLURM_STEP_ID is not set" in text
    assert "srun --ntasks-per-node=1" in text and "--platform local" in text
    salloc = without(*step, "SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID")
    assert "salloc" in refusal(salloc)
    assert expected_ranks(STEP | {"NPROC_PER_NODE": "8"}, gpus=None) == 16


def test_own_variables_beside_slurms() -> None:
    own = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4321"}
    plan = resolve(STEP | own)
    assert (plan.master_addr, plan.master_port, plan.sources["nnodes"]) == (
        *("10.0.0.1", 4321),
        "NNODES and SLURM_STEP_NUM_NODES",
    )
    assert "seen: NNODES=4 and SLURM_STEP_NUM_NODES=2" in refusal(STEP | own | {"NNODES": "4"})
    assert "seen: NODE_RANK=0 and SLURM_NODEID=1" in refusal(STEP | own | {"NODE_RANK": "0"})
    local = resolve(STEP | {"NNODES": "1"}, platform="local")
    assert local.nnodes == 1 and local.notes == ("SLURM's variables are not read (--platform local)",)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1 n2"),
        ("node[01-03,7],gpu-a[1-2]b", "node01 node02 node03 node7 gpu-a1b gpu-a2b"),
        ("a[09-11]", "a09 a10 a11"),
        ("r[1-2]n[3,5]", "r1n3 r1n5 r2n3 r2n5"),
        ("login-1.site.org,n[8]", "login-1.site.org n8"),
    ],
)
def test_list_of_nodes(text: str, hosts: str) -> None:
    assert expand_nodelist(text) == hosts.split()


@pytest.mark.parametrize("text", ["", "n[1-2", "n1-2]", "n[2-1]", "n[a-b]", "n[]", "n[1,,2]", "n 1", "n[[1]]"])
def test_list_of_nodes_that_cannot_be_read(text: str) -> None:
    with pytest.raises(LaunchError, match="list of nodes cannot be read"):
        expand_nodelist(text)


def test_b92_a_first_node_without_an_address_stops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither localhost nor the node that srun was called on is taken instead."""
    unknown = STEP | {"SLURM_STEP_NODELIST": "n[1-2].invalid"}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "seen: n1.invalid: " in refusal(unknown)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        "#!/bin/sh\n[ \"$*\" = 'show node n1.invalid' ] || exit 1\necho 'NodeName=n1 Arch=x'\necho '   NodeAddr=10.0.0.1 NodeHostName=h'\n"
    )
    scontrol.chmod(0o755)
    plan = resolve(unknown)
    assert plan.master_addr == "10.0.0.1"
    assert plan.sources["master_addr"] == "first of SLURM_STEP_NODELIST, n1.invalid: its NodeAddr"
