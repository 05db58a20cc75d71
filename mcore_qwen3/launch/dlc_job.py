"""A `dlc submit pytorchjob` command line that runs one `megatron` command on all nodes: text alone, nothing is called.

The fields are those of the vendor's page "Submit commands" of the PAI-DLC client. This project has never called it.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from mcore_qwen3.config import SubmitConfig, ranks_per_node, time_minutes


def dlc_script(config: SubmitConfig, words: Sequence[str], variables: Sequence[str], name: str) -> str:
    """A bash script of one command. Values of environment variables are put in when it runs, and do not stand in it.

    Args:
        config: checked settings of `megatron submit`.
        words: the command that each node runs.
        variables: names of the environment variables that it gets.
        name: of the job.
    """
    job, dlc = config.job, config.dlc
    command = f"NPROC_PER_NODE={ranks_per_node(config)} {shlex.join(words)}"
    fields = {
        "name": name,
        "workspace_id": dlc.workspace_id,
        "resource_id": dlc.resource_id,
        "workers": job.nodes,
        "worker_image": job.container,
        "worker_spec": dlc.worker_spec,
        "worker_gpu": job.gpus_per_node or None,
        "worker_cpu": dlc.worker_cpu,
        "worker_memory": dlc.worker_memory,
        "worker_shared_memory": dlc.worker_shared_memory,
        "data_sources": ",".join(dlc.data_sources) or None,
        "priority": dlc.priority,
        "job_max_running_time_minutes": None if job.time is None else time_minutes(job.time),
        "command": command,
    }
    lines = [f"--{key}={shlex.quote(str(value))}" for key, value in fields.items() if value is not None]
    if variables:
        # Inside the double quotes bash puts the value in, and does nothing else with it.
        lines.append('--envs="' + ",".join(f"{name}=${{{name}}}" for name in variables) + '"')
    head = ["#!/bin/bash", "# Written by megatron submit. Needs the variables that it names: bash job.sh"]
    return "\n".join([*head, " \\\n    ".join(["exec dlc submit pytorchjob", *lines])]) + "\n"
