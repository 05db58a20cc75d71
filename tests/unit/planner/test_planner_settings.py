"""A run's flags -> what the estimates read."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mcore_qwen3.arch import resolve_layout
from mcore_qwen3.config import RunConfig, with_values
from mcore_qwen3.planner.calibration import load_calibration
from mcore_qwen3.planner.measured_memory import SHAPES
from mcore_qwen3.planner.settings import Settings, settings_of

RUN = with_values(
    RunConfig(),
    {
        "max_length": 8190,
        "bf16": True,
        "micro_batch_size": 2,
        "global_batch_size": 32,
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 3,
        "moe_aux_loss_coeff": 0.01,
        "moe_expert_capacity_factor": 2.0,
        "moe_token_dispatcher_type": "allgather",
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 0.5,
    },
)


def test_every_flag_reaches_its_setting() -> None:
    """All fields of Settings that are flags have the flag's value; the row is rounded up for CP x lcm(2, TP) = 16."""
    layout = resolve_layout(16, tensor=4, context=4, expert=8, shape=SHAPES["Qwen3-30B-A3B"])
    settings = settings_of(RUN, layout, modules="torch", on_cuda=True)
    flags = {
        field.name for section in dataclasses.fields(RUN) for field in dataclasses.fields(getattr(RUN, section.name))
    }
    shared = [field.name for field in dataclasses.fields(Settings) if field.name in flags]
    assert len(shared) >= 14
    values = {
        name: getattr(getattr(RUN, section.name), name)
        for section in dataclasses.fields(RUN)
        for name in shared
        if hasattr(getattr(RUN, section.name), name)
    }
    assert {name: getattr(settings, name) for name in shared} == values
    assert (settings.row_length, settings.effective_length) == (8192, 8192.0)
    assert (settings.modules, settings.on_cuda, settings.element_bytes, settings.master_bytes) == ("torch", True, 2, 4)
    assert settings.moe_imbalance == load_calibration().natural_imbalance


def test_fp32_has_no_master_weights_and_no_balance_loss_keeps_no_scores() -> None:
    run = with_values(RUN, {"bf16": False, "moe_router_load_balancing_type": "none"})
    layout = resolve_layout(1, shape=SHAPES["Qwen3-30B-A3B"])
    settings = settings_of(run, layout, modules="torch", on_cuda=False)
    assert (settings.element_bytes, settings.master_bytes, settings.moe_aux_loss_coeff) == (4, 0, 0.0)
    assert settings.row_length == 8190


def test_experts_are_uneven_where_other_ranks_have_some() -> None:
    """At EP 1 a rank's experts get the choices of its own tokens, whatever the router does."""
    shape = SHAPES["Qwen3-30B-A3B"]
    one, eight = (resolve_layout(8, expert=expert, shape=shape) for expert in (1, 8))
    run = Settings(row_length=8192, effective_length=8192, moe_imbalance=1.5)
    assert (run.expert_load(one), run.expert_load(eight)) == (1.0, 1.5)
    capped = dataclasses.replace(run, moe_expert_capacity_factor=1.25)
    assert (capped.expert_load(one), capped.expert_load(eight)) == (1.0, 1.25)
    padded = dataclasses.replace(capped, moe_pad_expert_input_to_capacity=True)
    assert (padded.expert_load(one), padded.expert_load(eight)) == (1.25, 1.25)


PRECISION_AWARE = {"use_precision_aware_optimizer": True}


@pytest.mark.parametrize(
    ("flags", "bytes_each"),
    [
        ({}, (4, 4, 8, 0.0)),
        ({"optimizer_offload_fraction": 0.5}, (4, 4, 8, 0.0)),  # no effect without optimizer_cpu_offload
        ({"optimizer_cpu_offload": True}, (4, 4, 8, 1.0)),
        (PRECISION_AWARE, (4, 2, 8, 0.0)),
        (PRECISION_AWARE | {"main_grads_dtype": "bf16"}, (2, 2, 8, 0.0)),
        (PRECISION_AWARE | {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}, (4, 2, 4, 0.0)),
        (PRECISION_AWARE | {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16"}, (4, 2, 3, 0.0)),
        ({"optimizer": "sgd"}, (4, 4, 4, 0.0)),
        ({"optimizer": "sgd", "sgd_momentum": 0.0}, (4, 4, 0, 0.0)),
    ],
)
def test_what_the_optimizer_keeps(flags: dict[str, Any], bytes_each: tuple[float, ...]) -> None:
    """Bytes a parameter of gradient, master weight and moments, and the share of the latter two in host memory."""
    run = with_values(RunConfig(), {"max_length": 64, "bf16": True} | flags)
    settings = settings_of(run, resolve_layout(1, shape=SHAPES["Qwen3-30B-A3B"]), modules="torch", on_cuda=True)
    names = ("gradient_bytes", "master_bytes", "moment_bytes", "optimizer_offload_fraction")
    assert tuple(getattr(settings, name) for name in names) == bytes_each
