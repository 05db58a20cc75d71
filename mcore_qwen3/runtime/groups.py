"""Start and end torch.distributed and megatron's process groups for one layout."""

from __future__ import annotations

import logging
import os
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

from mcore_qwen3.arch.layout import ParallelLayout
from mcore_qwen3.errors import LaunchError
from mcore_qwen3.runtime.device import Device


def quiet_libraries() -> None:
    """Keep the log for the user: these libraries tell their own developers what is not installed or will change."""
    warnings.filterwarnings("ignore", message=r".*(Apex|apex|Transformer Engine|transformer_engine).*")
    warnings.filterwarnings("ignore", module=r"megatron\..*", category=UserWarning)
    warnings.filterwarnings("ignore", module=r"torch\.distributed.*", category=FutureWarning)
    for name in ("torch.utils.cpp_extension", "megatron.core.distributed.distributed_data_parallel"):
        logging.getLogger(name).setLevel(logging.ERROR)


def prepare_megatron(device: Device) -> None:
    """Make megatron-core importable for this device; call before anything imports megatron."""
    quiet_libraries()
    if not device.is_cuda:
        from mcore_qwen3.runtime import cpu_standins

        cpu_standins.install()
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    # Its default for "no fp8" is False, which it then reads as fp8 and looks for transformer-engine (megatron-core 0.19.2).
    CheckpointWithoutOutput.__init__.__defaults__ = (None,)


def start_process_group(device: Device, timeout_s: float = 1800.0) -> None:
    """Join the world that torchrun described in the environment, or a world of one when there is none.

    Args:
        device: this rank's.
        timeout_s: seconds that a rank waits for the others, here and in each collective over all ranks.

    Raises:
        LaunchError: the ranks did not meet within the time-out.
    """
    if dist.is_initialized():
        return
    bound = device.torch_device if device.is_cuda else None  # which GPU, so that no collective has to guess
    timeout = timedelta(seconds=timeout_s)
    if "RANK" not in os.environ:
        store = dist.HashStore()
        dist.init_process_group(device.backend, store=store, rank=0, world_size=1, timeout=timeout, device_id=bound)
        return
    try:
        dist.init_process_group(device.backend, timeout=timeout, device_id=bound)
    except (RuntimeError, ValueError) as exc:
        raise LaunchError(
            "all ranks must meet at MASTER_ADDR:MASTER_PORT",
            seen=f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}: {exc}",
            fix="check that every node was started and can reach that address",
        ) from exc


def start_model_parallel(layout: ParallelLayout, timeout_s: float = 1800.0) -> None:
    """Create megatron's groups (rank order tp-cp-ep-dp-pp) for the layout.

    Args:
        layout: the run's.
        timeout_s: seconds that a rank waits for the others in each operation of these groups.

    Raises:
        LaunchError: another number of ranks has joined than the layout has.
    """
    from megatron.core import parallel_state

    if dist.get_world_size() != layout.world_size:
        raise LaunchError(
            "the number of joined ranks must be the layout's", seen=f"{dist.get_world_size()} of {layout.world_size}"
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        create_gloo_process_groups=True,
        distributed_timeout_minutes=timeout_s / 60,  # annotated as int, but handed to timedelta
    )
    for group in parallel_state._global_process_group_list:
        if group is not None:  # None: the world, which has its time-out; megatron-core 0.19.2 forgets one group's
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def stop_model_parallel() -> None:
    """Leave megatron's groups and end their threads and connections; another layout may start then."""
    from megatron.core import parallel_state

    groups = dict.fromkeys(parallel_state._global_process_group_list or [])  # in the order of their making, each once
    parallel_state.destroy_model_parallel()  # forgets the groups, and destroys only some of them
    for group in groups:
        if group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch, and megatron's tracker (different streams for tensor-parallel ranks)."""
    import random

    import numpy as np
    from megatron.core import tensor_parallel

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def stop_process_group() -> None:
    """Leave megatron's groups and the world; safe to call twice."""
    if dist.is_initialized():
        stop_model_parallel()
        dist.destroy_process_group()
