"""The account as a whole: its moments and parts by hand, and published runs."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3.arch import ModelShape, resolve_layout
from mcore_qwen3.errors import ConfigError
from mcore_qwen3.planner.activations import layer_rows, logit_values, tokens_of, total_bytes
from mcore_qwen3.planner.chunks import in_flight, stage_chunks
from mcore_qwen3.planner.measured_memory import FITS_OR_NOT, MEASURED, SHAPES, USABLE_80GB_GIB, fit, left_out
from mcore_qwen3.planner.memory import (
    COMMUNICATOR_GIB,
    FRAGMENTATION_SHARE,
    GIB,
    HIGH,
    LOW,
    Account,
    heaviest_account,
    stage_account,
)
from mcore_qwen3.planner.settings import Settings

ROOT = Path(__file__).resolve().parents[3]
SMALL, LARGE = SHAPES["Qwen3-30B-A3B"], SHAPES["Qwen3-235B-A22B"]


def settings(row: int = 8192, batch: int = 64, **changes: Any) -> Settings:
    return Settings(**({"row_length": row, "effective_length": row, "global_batch_size": batch} | changes))


def parts(account: Account) -> dict[str, float]:
    return {item.name: item.bytes for item in (*account.items, *account.fitted)}


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["30B-A3B", "235B-A22B"])
def test_transformer_engine_keeps_this_much_a_token_and_layer(shape: ModelShape) -> None:
    """By the terms of the module's source, in bf16 with both router losses: inputs and outputs of two norms, mixed qkv and
    the copy of the query, rotated query and key, attention output, log-sum-exp; about 25 bytes an expert for the router; input,
    gate and up, and product of each chosen expert."""
    h, q, g = shape.hidden_size, shape.num_attention_heads * 128, shape.num_query_groups * 128
    k, f, heads = shape.moe_router_topk, shape.moe_ffn_hidden_size, shape.num_attention_heads
    attention = 2 * (q + 2 * g) + 2 * q + 2 * (q + g) + 2 * q + 4 * heads
    expected = 8 * h + attention + 25 * shape.num_experts + k * (2 * h + 4 * f + 2 * f)
    layout = resolve_layout(1, shape=shape)
    run = settings(row=1024, batch=1, moe_aux_loss_coeff=0.001, moe_z_loss_coeff=0.001)
    kept = total_bytes(layer_rows(shape, layout, run, has_experts=True), tokens_of(shape, layout, run)) / 1024
    assert kept == pytest.approx(expected, rel=0.01)


def test_b99_logits_of_8192_tokens() -> None:
    layout = resolve_layout(1, shape=SMALL)
    values = logit_values(SMALL, layout, tokens_of(SMALL, layout, settings(batch=1)))
    assert round(4 * values / GIB, 3) == 4.637
    account = stage_account(SMALL, layout, settings(batch=1, recompute_granularity="full"), 0)
    assert parts(account)["logits and loss"] == 6 * 8192 * 151936  # bf16 logits and their fp32 softmax


def test_full_recompute_keeps_one_input_a_layer_and_sequence_parallel_shares_it() -> None:
    shape = SMALL
    for tensor in (1, 2):
        layout = resolve_layout(tensor, tensor=tensor, shape=shape)
        run = settings(batch=1, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=4)
        kept = stage_chunks(shape, layout, run, 0)[0].kept
        inputs = 48 / 4 * 2 * 2048 * 8192 / tensor
        assert inputs < kept < 1.5 * inputs


@pytest.mark.parametrize(
    ("pipeline", "chunks", "micro_batches", "expected"),
    [
        (4, 1, 8, [[4], [3], [2], [1]]),
        (4, 1, 2, [[2], [2], [2], [1]]),
        (2, 2, 4, [[3, 2], [2, 1]]),  # 2 x 1 + 2 + 1 and 0 + 2 + 1 passes, in turns of two
        (1, 1, 4, [[1]]),
    ],
)
def test_micro_batches_in_flight(pipeline: int, chunks: int, micro_batches: int, expected: list[list[int]]) -> None:
    layout = resolve_layout(pipeline, pipeline=pipeline, virtual_pipeline=chunks, shape=SMALL)
    assert [in_flight(layout, micro_batches, stage) for stage in range(pipeline)] == expected


def test_the_interleaved_schedule_holds_more_by_its_published_factor() -> None:
    """Stage 0 of PP 8 with 4 chunks: 1 + (p - 1) / (p v) times the layers that it holds without."""
    ends = {"account_for_embedding": True, "account_for_loss": True}
    plain = resolve_layout(64, pipeline=8, expert=8, shape=LARGE, **ends)
    chunked = resolve_layout(64, pipeline=8, expert=8, virtual_pipeline=4, shape=LARGE, **ends)
    layers = [
        sum(number * chunk for number, chunk in zip(in_flight(layout, 64, 1), layout.stages[1], strict=True))
        for layout in (plain, chunked)
    ]
    # Stage 1: 7 micro-batches of 12 layers; 2 x 6 + 3 x 8 + 1 = 37 passes of 3 layers.
    assert layers == [84, 111]
    assert sum(in_flight(chunked, 64, 0)) * 3 / (8 * 12) == pytest.approx(1 + 7 / 32, rel=0.01)


def test_b97_the_heaviest_stage_counts() -> None:
    """Three layers as 1 + 2, untied: with little to keep, the stage with two layers and the head needs most."""
    shape = dataclasses.replace(SMALL, num_layers=3, moe_layers=(True,) * 3)
    layout = resolve_layout(2, pipeline=2, first_stage_layers=1, shape=shape)
    accounts = [stage_account(shape, layout, settings(batch=2), stage) for stage in range(2)]
    assert heaviest_account(shape, layout, settings(batch=2)) == accounts[1]
    assert accounts[1].total > accounts[0].total > sum(account.total for account in accounts) / 3


def test_one_moment_is_counted_not_both() -> None:
    """The loss, or the backward of one layer: whichever is larger."""
    layout = resolve_layout(1, shape=SMALL)
    names = {
        name: set(parts(stage_account(SMALL, layout, settings(batch=batch, recompute_granularity="full", **more), 0)))
        for name, batch, more in (("loss", 1, {}), ("layer", 1, {"recompute_num_layers": 48}))
    }
    assert "logits and loss" in names["loss"] and "computed again" not in names["loss"]
    assert "computed again" in names["layer"] and "logits and loss" not in names["layer"]


def test_what_raises_activations() -> None:
    """Imbalance, unbalanced experts held by a capacity, longer rows; every value against the even run's."""
    layout = resolve_layout(8, expert=8, shape=SMALL)

    def activations(**changes: Any) -> float:
        return parts(stage_account(SMALL, layout, settings(batch=8, row=4096, **changes), 0))["activations"]

    even = activations()
    assert activations(moe_imbalance=2.0) > 1.5 * even
    assert activations(moe_imbalance=2.0, moe_expert_capacity_factor=1.0) == pytest.approx(even, rel=0.02)
    assert activations(moe_expert_capacity_factor=2.0, moe_pad_expert_input_to_capacity=True) > 1.5 * even
    assert activations(micro_batch_size=1, row_length=8192) == pytest.approx(2 * even, rel=1e-6)
    assert activations(modules="torch") > even  # SwiGLU of the experts is unfused


def test_a_batch_that_does_not_fit_is_refused() -> None:
    layout = resolve_layout(8, expert=8, shape=SMALL)
    with pytest.raises(ConfigError, match="global_batch_size"):
        stage_account(SMALL, layout, settings(batch=12), 0)


def test_a_cpu_run_has_no_cuda_parts() -> None:
    layout = resolve_layout(2, shape=SMALL)
    account = stage_account(SMALL, layout, settings(batch=2, on_cuda=False, modules="torch"), 0)
    assert account.fitted == () and account.total == account.formula


def test_published_runs_with_constants_fitted_to_the_others() -> None:
    ratios = left_out(MEASURED)
    assert len(ratios) == 9
    assert sum(abs(ratio - 1) <= 0.15 for ratio in ratios) >= 7, ratios
    assert all(LOW <= 1 / ratio <= HIGH for ratio in ratios), ratios


def test_the_constants_are_the_fit_of_all_published_runs() -> None:
    constants = fit(MEASURED)
    assert constants.fragmentation_share == pytest.approx(FRAGMENTATION_SHARE, abs=0.001)
    assert constants.communicator_gib == pytest.approx(COMMUNICATOR_GIB, abs=0.005)


def test_what_fitted_80_gb_and_what_did_not() -> None:
    assert len(FITS_OR_NOT) == 11
    totals = {run.name: (run.account().total / GIB, run.fits) for run in FITS_OR_NOT}
    wrong = {name: total for name, (total, fits) in totals.items() if (total <= USABLE_80GB_GIB) != fits}
    assert not wrong
    for at in range(len(MEASURED)):  # with none of the runs is one of them needed
        constants = fit([*MEASURED[:at], *MEASURED[at + 1 :]])
        assert all((constants.gib(run) <= USABLE_80GB_GIB) == run.fits for run in FITS_OR_NOT)


def test_the_tables_of_the_docs_are_the_ones_that_the_planner_gives() -> None:
    spec = importlib.util.spec_from_file_location("planner_memory", ROOT / "benchmarks" / "planner_memory.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["planner_memory"] = module
    spec.loader.exec_module(module)
    page = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    assert "\n".join(module.table()) in page
