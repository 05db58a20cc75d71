"""The commands on the pages of the platforms: their flags are read, and their variables mean what the page says."""

from __future__ import annotations

import re
import shlex
import string
from pathlib import Path

import pytest
import yaml

from mcore_qwen3.config import parse_args
from mcore_qwen3.launch import LaunchPlan, resolve_environment

DLC = {"WORLD_SIZE": "2", "RANK": "1", "NPROC_PER_NODE": "8", "MASTER_ADDR": "dlc1-master-0", "MASTER_PORT": "23456"}
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "8",
    "PET_MASTER_ADDR": "run-node-0-0.run",
    "PET_MASTER_PORT": "29400",
}
# page: what the platform sets, then (nodes, node rank, processes, address) by each command of the page
PAGES: dict[str, tuple[dict[str, str], list[tuple[int, int, int, str]]]] = {
    "docs/laptop.md": ({}, [(1, 0, 8, "127.0.0.1"), (1, 0, 2, "127.0.0.1"), (1, 0, 8, "127.0.0.1")]),
    "docs/two-nodes.md": ({}, [(2, 0, 8, "10.0.0.1"), (2, 1, 8, "10.0.0.1")]),
    "docs/dlc.md": (DLC, [(2, 1, 8, "dlc1-master-0")] * 2),
    "docs/kubernetes.md": (KUBEFLOW, [(2, 1, 8, "run-node-0-0.run")]),
}


def plan_of(command: str, platform: dict[str, str]) -> LaunchPlan:
    """What a command means on a node of 8 GPUs where the platform has set these variables."""
    words = shlex.split(string.Template(command).substitute(platform))
    program = words.index("megatron")
    given = dict(word.split("=", 1) for word in words[:program])
    config = parse_args(words[program + 2 :], words[program + 1]).config
    return resolve_environment(platform | given, gpus=8, platform=config.launch.platform)


@pytest.mark.parametrize("page", PAGES)
def test_what_the_commands_mean(page: str, repo_root: Path) -> None:
    platform, expected = PAGES[page]
    blocks = re.findall(r"```bash\n(.*?)```", (repo_root / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    commands = [block.replace("\\\n", " ").strip() for block in blocks]
    plans = [plan_of(command, platform) for command in commands if "megatron sft" in command]
    found = [(plan.nnodes, plan.node_rank, plan.nproc_per_node, plan.master_addr) for plan in plans]
    assert found == expected


def test_torchrun_by_hand_is_read_by_torchrun(repo_root: Path) -> None:
    from torch.distributed.run import config_from_args
    from torch.distributed.run import parse_args as torchrun_args

    text = (repo_root / "docs/two-nodes.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"```bash\ntorchrun (.*?)```", text, flags=re.DOTALL)
    config, _, argv = config_from_args(torchrun_args(shlex.split(command.replace("\\\n", " "))))
    assert (config.min_nodes, config.nproc_per_node, config.rdzv_endpoint) == (2, 8, "10.0.0.1:29500")
    assert argv[1:4] == ["-m", "mcore_qwen3", "sft"] and parse_args(argv[4:], "sft").config.train.train_iters == 1000


def test_the_pods_of_the_job_are_one_run(repo_root: Path) -> None:
    text = (repo_root / "docs/kubernetes.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    service, job = yaml.safe_load_all(block)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    plans = []
    for index in range(job["spec"]["completions"]):
        environ = {one["name"]: one["value"] for one in container["env"]}
        shell = string.Template(container["command"][2]).substitute(JOB_COMPLETION_INDEX=index)
        environ |= dict([shell.split()[0].split("=")])
        plans.append(resolve_environment(environ, gpus=container["resources"]["limits"]["nvidia.com/gpu"]))
    assert [plan.node_ranks for plan in plans] == [range(8), range(8, 16)]
    assert plans[0].master_addr == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"] and job["spec"]["parallelism"] == job["spec"]["completions"]
