"""Which device the ranks use, and why: the one place that says so."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from mcore_qwen3.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Device:
    """The device of this rank.

    Attributes:
        kind: "cpu" or "cuda".
        index: the local index of the GPU; 0 on CPU.
        backend: the torch.distributed backend that fits ("gloo" or "nccl").
        reason: why this one was chosen, for the log.
    """

    kind: str
    index: int
    backend: str
    reason: str

    @property
    def torch_device(self) -> torch.device:
        """The device to hand to torch factories."""
        return torch.device(self.kind, self.index) if self.kind == "cuda" else torch.device("cpu")

    @property
    def is_cuda(self) -> bool:
        """True on a GPU."""
        return self.kind == "cuda"


def choose_device(wanted: str, local_rank: int = 0) -> Device:
    """Resolve `--device` (auto | cpu | cuda) for this rank and select it in torch.

    Args:
        wanted: the flag's value.
        local_rank: index of this rank on its node, which is also its GPU's index.

    Raises:
        ConfigError: cuda was asked for but torch sees no such GPU.
    """
    global _chosen
    _chosen = _choose(wanted, local_rank)
    return _chosen


def _choose(wanted: str, local_rank: int) -> Device:
    seen = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if wanted == "cuda" and seen == 0:
        raise ConfigError(
            "--device cuda needs a GPU that torch can use",
            seen=f"torch {torch.__version__} sees none",
            fix="check the driver (nvidia-smi) and the torch build, or use --device cpu",
        )
    if wanted == "cpu" or seen == 0:
        reason = "asked for by --device" if wanted == "cpu" else "no GPU is visible to torch"
        return Device("cpu", 0, "gloo", reason)
    if local_rank >= seen:
        raise ConfigError(
            "every rank of a node needs a GPU of its own",
            seen=f"local rank {local_rank}, {seen} GPUs",
            fix=f"set NPROC_PER_NODE to at most {seen}",
        )
    torch.cuda.set_device(local_rank)
    reason = "asked for by --device" if wanted == "cuda" else f"{seen} GPUs are visible to torch"
    return Device("cuda", local_rank, "nccl", reason)


def cpu() -> Device:
    """The CPU, whatever else this machine has."""
    return choose_device("cpu")


_chosen: Device | None = None


def current_device() -> torch.device:
    """The device that `choose_device` selected in this process: where tensors of this rank are made."""
    assert _chosen is not None, "choose_device was not called in this process"
    return _chosen.torch_device


CUDA_ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": ("1", "megatron overlaps tensor-parallel communication only with one queue"),
    "PYTORCH_CUDA_ALLOC_CONF": ("expandable_segments:True", "batches of changing length fragment GPU memory otherwise"),
}


_MANY_QUEUES = {
    "CUDA_DEVICE_MAX_CONNECTIONS": ("32", "messages of experts run beside computation only with several queues")
}


def set_cuda_environment(*, many_queues: bool = False) -> list[str]:
    """Set the variables CUDA runs want, where unset, before CUDA starts; returns one line for each that was set.

    `many_queues`: the run sends expert-parallel messages beside computation, and none of tensor or context parallel.
    """
    lines = []
    for name, (value, reason) in (CUDA_ENVIRONMENT | (_MANY_QUEUES if many_queues else {})).items():
        if name not in os.environ:
            os.environ[name] = value
            lines.append(f"{name}={value} was set: {reason}")
    return lines


def memory_gib(device: Device) -> float:
    """Peak memory of this rank in GiB: reserved by torch on a GPU, resident size of the process on CPU."""
    if device.is_cuda:
        return torch.cuda.max_memory_reserved() / 2**30
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20


def device_name(device: Device) -> str:
    """What the driver calls a GPU, such as "NVIDIA H100 80GB HBM3"."""
    return torch.cuda.get_device_name(device.index)


def synchronize(device: Device) -> None:
    """Wait for the device's queued work, so that a clock read means something."""
    if device.is_cuda:
        torch.cuda.synchronize()
