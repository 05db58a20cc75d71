"""Which device a rank uses, why, and what is said when it cannot be had."""

from __future__ import annotations

import os

import psutil
import pytest
import torch

from mcore_qwen3.errors import ConfigError
from mcore_qwen3.runtime import device as device_module
from mcore_qwen3.runtime.device import CUDA_ENVIRONMENT, choose_device, cpu, current_device, set_cuda_environment


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "_chosen", None)


def gpus(monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Let torch see that many GPUs; returns the list of those that are selected."""
    selected: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    return selected


def test_cpu_by_itself_where_no_gpu_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)
    chosen = choose_device("auto", 3)
    assert (chosen.kind, chosen.index, chosen.backend) == ("cpu", 0, "gloo")
    assert chosen.reason == "no GPU is visible to torch"
    assert not chosen.is_cuda
    assert current_device() == torch.device("cpu")


def test_cpu_asked_for_wins_over_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    selected = gpus(monkeypatch, 8)
    chosen = choose_device("cpu", 0)
    assert (chosen.kind, chosen.backend, chosen.reason) == ("cpu", "gloo", "asked for by --device")
    assert cpu() == chosen
    assert selected == []


@pytest.mark.parametrize(("wanted", "reason"), [("auto", "8 GPUs are visible"), ("cuda", "asked for by --device")])
def test_a_gpu_is_selected_by_the_local_rank(monkeypatch: pytest.MonkeyPatch, wanted: str, reason: str) -> None:
    selected = gpus(monkeypatch, 8)
    chosen = choose_device(wanted, 5)
    assert (chosen.kind, chosen.index, chosen.backend) == ("cuda", 5, "nccl")
    assert chosen.torch_device == current_device() == torch.device("cuda", 5)
    assert chosen.reason.startswith(reason)
    assert selected == [5]


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)
    with pytest.raises(ConfigError) as refusal:
        choose_device("cuda")
    text = str(refusal.value)
    assert text.startswith("--device cuda needs a GPU that torch can use; seen: torch ")
    assert "--device cpu" in text
    with pytest.raises(AssertionError, match="choose_device was not called"):
        current_device()


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    selected = gpus(monkeypatch, 2)
    with pytest.raises(ConfigError, match=r"local rank 2, 2 GPUs; change: set NPROC_PER_NODE to at most 2"):
        choose_device(wanted, 2)
    assert selected == []


def test_cuda_environment_is_set_only_where_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")  # set first, so that it is gone again after the test
    lines = set_cuda_environment()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert len(lines) == 1 and lines[0].startswith("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True was set: ")
    assert set_cuda_environment() == []  # a second rank start in the same environment says nothing
    assert set(CUDA_ENVIRONMENT) == {"CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF"}


def test_expert_messages_get_many_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    (line,) = [line for line in set_cuda_environment(many_queues=True) if "CONNECTIONS" in line]
    assert line.startswith("CUDA_DEVICE_MAX_CONNECTIONS=32 was set: ")
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


def test_memory_of_this_process_is_told_in_gib() -> None:
    resident = psutil.Process().memory_info().rss / 2**30
    peak = device_module.memory_gib(cpu())
    assert 0.9 * resident <= peak < 64
