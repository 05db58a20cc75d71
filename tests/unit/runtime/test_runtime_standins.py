"""The stand-ins that let megatron-core run on a CPU rank: which they are, that they are in place, when they are refused."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import pool
from helpers.runtime_checks import (
    logits_of_transformers,
    missing_stand_ins,
    name_of,
    split_sizes,
    what_the_stand_ins_give,
)
from helpers.tiny import write_model

from mcore_qwen3.runtime import cpu_standins

# Written out, so that a stand-in more is a decision: say in `STAND_INS` what needs it, then add it here.
STAND_INS = {
    "torch.cuda": [
        "current_device",
        "synchronize",
        "empty_cache",
        "manual_seed",
        "get_rng_state",
        "set_rng_state",
        "Stream",
        "Event",
        "current_stream",
        "stream",
        "is_current_stream_capturing",
        "get_device_capability",
    ],
    "torch.cuda.random": ["get_rng_state", "set_rng_state"],
    "torch.Tensor": ["cuda", "record_stream", "type"],
    "torch.nn.modules.module.Module": ["cuda"],
    "torch": ["zeros", "ones", "empty", "empty_like", "tensor", "arange"],
}
WHERE = (torch, torch.cuda, torch.cuda.random, torch.Tensor, torch.nn.Module)


def test_the_list_is_the_one_written_here() -> None:
    listed: dict[str, list[str]] = {}
    for owner, name, _, reason in cpu_standins.STAND_INS:
        assert len(reason) > 10, f"{name}: say what needs it"
        listed.setdefault(name_of(owner), []).append(name)
    assert {key: sorted(names) for key, names in listed.items()} == {k: sorted(v) for k, v in STAND_INS.items()}


def test_each_is_in_place_in_a_rank() -> None:
    assert pool(1).run(missing_stand_ins) == [[]]


@pytest.fixture
def torch_put_back(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """After the test torch is as it was; megatron is replaced by empty modules, so that importing it changes nothing."""
    for owner, name, _, _ in cpu_standins.STAND_INS:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(cpu_standins, "_installed", False)
    for name in (
        "core",
        "core.jit",
        "core.transformer",
        "core.transformer.moe",
        "core.transformer.moe.token_dispatcher",
    ):
        monkeypatch.setitem(sys.modules, f"megatron.{name}", types.ModuleType(f"megatron.{name}"))
    sys.modules["megatron.core"].jit = sys.modules["megatron.core.jit"]  # type: ignore[attr-defined]
    sys.modules["megatron.core.jit"].disable_jit_fuser = lambda: None  # type: ignore[attr-defined]
    tensor_parallel = types.ModuleType("megatron.core.tensor_parallel")
    tensor_parallel.random = types.ModuleType("megatron.core.tensor_parallel.random")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.core.tensor_parallel", tensor_parallel)
    moe, dispatcher = "megatron.core.transformer.moe", "megatron.core.transformer.moe.token_dispatcher"
    sys.modules[moe].token_dispatcher = sys.modules[dispatcher]  # type: ignore[attr-defined]
    return monkeypatch


def _everything_in_torch() -> dict[tuple[str, str], Any]:
    return {(name_of(owner), name): value for owner in WHERE for name, value in vars(owner).items()}


def test_install_changes_what_is_listed_and_nothing_else_of_torch(torch_put_back: pytest.MonkeyPatch) -> None:
    before = _everything_in_torch()
    cpu_standins.install()
    after = _everything_in_torch()
    changed = {key for key, value in after.items() if key not in before or before[key] is not value}
    assert changed == {(owner, name) for owner, names in STAND_INS.items() for name in names}


def test_install_refuses_a_process_that_has_started_cuda(torch_put_back: pytest.MonkeyPatch) -> None:
    torch_put_back.setattr(torch.cuda, "is_initialized", lambda: True)
    before = _everything_in_torch()
    with pytest.raises(RuntimeError, match="has started CUDA"):
        cpu_standins.install()
    after = _everything_in_torch()
    assert [key for key, value in after.items() if before[key] is not value] == []


def test_what_megatron_asks_of_cuda_is_answered_on_the_cpu() -> None:
    seen = pool(1).run(what_the_stand_ins_give)[0]
    assert set(seen["devices"].values()) == {"cpu"}, seen["devices"]
    assert seen["meta"] == "meta"
    assert seen["arange"] == [0, 1]
    assert seen["random state returns"]
    # The distributed optimizer takes a parameter only under one of these names.
    assert seen["type"] == {"torch.float32": "torch.cuda.FloatTensor", "torch.bfloat16": "torch.cuda.BFloat16Tensor"}
    assert seen["converted"] == "torch.float64"
    assert seen["capturing"] is False


def test_split_sizes_are_plain_numbers_for_all_to_all() -> None:
    assert pool(1).run(split_sizes) == [{"numpy": "ndarray", "tensor": "Tensor", "none": None}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_transformers_gives_the_same_bits_in_a_rank(tmp_path: Path, moe: bool, dtype: torch.dtype) -> None:
    """A model loaded where the stand-ins are in place and one loaded where they never were."""
    write_model(tmp_path, moe=moe)
    plain = logits_of_transformers(str(tmp_path), dtype)
    (in_a_rank,) = pool(1).run(logits_of_transformers, directory=str(tmp_path), dtype=dtype)
    assert torch.equal(in_a_rank, plain)
    assert float(plain.abs().max()) > 0.5
