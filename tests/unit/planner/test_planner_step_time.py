"""Seconds of a step against numbers worked out here, on a machine that reaches every share of its speed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mcore_qwen3.arch import ModelShape, ParallelLayout, flops_per_token, padded_vocab_size, resolve_layout
from mcore_qwen3.errors import ConfigError
from mcore_qwen3.planner.calibration import Calibration
from mcore_qwen3.planner.gpus import GPUS, Gpu
from mcore_qwen3.planner.models import find_model
from mcore_qwen3.planner.settings import Settings
from mcore_qwen3.planner.step_time import StepTime, estimate_step

PERFECT = Calibration(
    gemm_share=1, grouped_share=1, memory_share=1, intra_share=1, inter_share=1, dense_launch=0, expert_launch=0,
    natural_imbalance=1,
)  # fmt: skip
# Memory so fast that products and messages stand alone.
H100: Gpu = replace(GPUS["h100-80"], memory_bw=1e15)
PEAK = 989e12
INSIDE, OUTSIDE = 450e9, 50e9
DENSE, MOE = find_model("Qwen3-8B"), find_model("Qwen3-30B-A3B")
ROW = 4096
# Operations of one forward pass of one token that Megatron does not count.
ROUTER = 48 * 2 * 128 * 2048


def layout_of(shape: ModelShape, gpus: int, **sizes: Any) -> ParallelLayout:
    return resolve_layout(gpus, shape=shape, **{"sequence_parallel": sizes.get("tensor", 1) > 1} | sizes)


def settings_of(**changes: Any) -> Settings:
    values = {"row_length": ROW, "effective_length": float(ROW), "global_batch_size": 64}
    return Settings(**values | changes)


def step(
    shape: ModelShape, gpus: int, *, gpu: Gpu = H100, calibration: Calibration = PERFECT,
    sizes: dict[str, Any] | None = None, **changes: Any,
) -> StepTime:  # fmt: skip
    return estimate_step(shape, layout_of(shape, gpus, **sizes or {}), settings_of(**changes), gpu, calibration)


def held(shape: ModelShape, layout: ParallelLayout, stage: int) -> tuple[int, int]:
    """(dense parameters, those of experts) of a rank of a stage, by the model's sizes."""
    h, q, g = (shape.hidden_size, *(n * shape.head_dim for n in (shape.num_attention_heads, shape.num_query_groups)))
    layers = sum(layout.stages[stage])
    layer = (h * (q + 2 * g) + q * h) // layout.tensor + 2 * h + 2 * shape.head_dim
    layer += shape.num_experts * h if shape.is_moe else 3 * h * shape.ffn_hidden_size // layout.tensor
    tables = (stage == 0) + (stage == layout.pipeline - 1) - (shape.tie_word_embeddings and layout.pipeline == 1)
    table = padded_vocab_size(shape.vocab_size, layout.tensor) * h // layout.tensor
    expert = 3 * h * shape.moe_ffn_hidden_size // layout.expert_tensor
    last_norm = h if stage == layout.pipeline - 1 else 0
    return layers * layer + tables * table + last_norm, layers * shape.num_experts // layout.expert * expert


def test_products_of_a_dense_model_are_megatrons_operations_over_the_peak() -> None:
    time = step(DENSE, 1)
    assert time.compute_s == pytest.approx(64 * ROW * flops_per_token(DENSE, ROW) / PEAK, rel=1e-3)
    assert time.tflops_per_gpu == pytest.approx(989, rel=1e-3)
    assert time.tokens_per_second_per_gpu == pytest.approx(64 * ROW / time.seconds)


def test_products_of_experts_are_active_ones_and_the_router() -> None:
    time = step(MOE, 8, sizes={"expert": 8})
    assert time.compute_s == pytest.approx(8 * ROW * (flops_per_token(MOE, ROW) + 3 * ROUTER) / PEAK, rel=1e-3)


def test_grouped_and_dense_products_have_their_own_share() -> None:
    experts = 3 * 48 * 2 * 3 * 2048 * 768 * 8 * 8 * ROW / PEAK
    slower = step(MOE, 8, sizes={"expert": 8}, calibration=replace(PERFECT, grouped_share=0.5))
    assert slower.compute_s - step(MOE, 8, sizes={"expert": 8}).compute_s == pytest.approx(experts, rel=1e-6)


def test_more_micro_batches_take_longer_in_proportion_and_the_tail_stays() -> None:
    once, twice = (step(DENSE, 16, global_batch_size=number) for number in (64, 128))
    assert twice.compute_s == pytest.approx(2 * once.compute_s)
    assert (twice.dp_s, twice.optimizer_s) == (once.dp_s, once.optimizer_s)


@pytest.mark.parametrize(("virtual", "micro_batches"), [(1, 8), (1, 64), (3, 8), (6, 16)])
def test_bubble(virtual: int, micro_batches: int) -> None:
    sizes = {"pipeline": 4, "virtual_pipeline": virtual, "expert": 4}
    time = step(MOE, 16, sizes=sizes, global_batch_size=4 * micro_batches)
    assert time.bubble_share == pytest.approx(3 / (virtual * micro_batches + 3))
    busy = time.compute_s + time.tp_s + time.ep_s + time.cp_s + time.pp_s + time.host_s
    assert time.bubble_s / (busy + time.bubble_s) == pytest.approx(time.bubble_share)


def test_full_recomputation_runs_the_layers_four_thirds_times_and_the_output_once() -> None:
    logits = 3 * 2 * 4096 * 151936
    layers = flops_per_token(DENSE, ROW) - logits
    time = step(DENSE, 1, recompute_granularity="full")
    assert time.compute_s == pytest.approx(64 * ROW * (layers * 4 / 3 + logits) / PEAK, rel=1e-3)


def test_recomputation_of_a_block_runs_a_share_of_the_layers_again() -> None:
    none, full = step(DENSE, 1).compute_s, step(DENSE, 1, recompute_granularity="full").compute_s
    block = step(DENSE, 1, recompute_granularity="full", recompute_method="block", recompute_num_layers=9).compute_s
    assert block - none == pytest.approx((full - none) * 9 / 36)


def test_recomputed_parts() -> None:
    def seconds(*modules: str) -> tuple[float, float]:
        time = step(
            MOE, 8, sizes={"expert": 8}, recompute_granularity="selective" if modules else "none",
            recompute_modules=modules,
        )  # fmt: skip
        return time.compute_s, time.ep_s

    compute, dispatch = seconds()
    attention = 48 * 2 * 4096 * ROW * 8 * ROW / PEAK
    assert seconds("core_attn") == (pytest.approx(compute + attention, rel=1e-4), dispatch)
    again, dispatch_again = seconds("moe")
    experts = 48 * (2 * 3 * 2048 * 768 * 8 + 2 * 128 * 2048) * 8 * ROW / PEAK
    assert again - compute == pytest.approx(experts, rel=1e-3)
    assert dispatch_again == pytest.approx(1.5 * dispatch)
    assert seconds("mlp")[0] == compute  # the model has no dense layer


def test_dispatch_inside_a_node() -> None:
    a_layer = 4 * 2 * 2048 * 8 * ROW * 7 / 8
    assert step(MOE, 8, sizes={"expert": 8}).ep_s == pytest.approx(8 * 48 * a_layer / INSIDE)


def test_dispatch_between_two_nodes_with_every_copy_or_one() -> None:
    token = 4 * 2 * 2048 * ROW * 4 * 48
    every = step(MOE, 16, sizes={"expert": 16}).ep_s
    assert every == pytest.approx(token * 8 * 0.5 / OUTSIDE)
    one = step(MOE, 16, sizes={"expert": 16}, moe_token_dispatcher_type="flex").ep_s
    assert one == pytest.approx(token * (1 - 0.5**8) / OUTSIDE)


def test_dispatch_between_two_nodes_may_wait_for_the_links_inside() -> None:
    slow_inside = replace(H100, intra_bw=5.0)
    token = 4 * 2 * 2048 * ROW * 4 * 48
    every = step(MOE, 16, sizes={"expert": 16}, gpu=slow_inside).ep_s
    assert every == pytest.approx(token * 8 * 7 / 16 / 5e9)  # half of the ranks, less the rank itself
    one = step(MOE, 16, sizes={"expert": 16}, gpu=slow_inside, moe_token_dispatcher_type="flex").ep_s
    assert one == pytest.approx(token * 8 * 15 / 16 / 5e9)  # what crossed once is handed on inside


def test_the_allgather_dispatcher_sends_every_token_everywhere_once() -> None:
    sizes, uneven = {"expert": 8}, {"moe_imbalance": 1.5}
    time = step(MOE, 8, sizes=sizes, moe_token_dispatcher_type="allgather", **uneven)
    assert time.ep_s == pytest.approx(8 * 48 * 4 * 2 * 2048 * ROW * 7 / INSIDE)


def test_dispatch_can_be_hidden_in_part() -> None:
    hidden = step(MOE, 8, sizes={"expert": 8}, calibration=replace(PERFECT, hidden_dispatch=0.25))
    assert hidden.ep_s == pytest.approx(0.75 * step(MOE, 8, sizes={"expert": 8}).ep_s)


def test_imbalance_slows_experts_and_dispatch_and_a_capacity_limits_it() -> None:
    even = step(MOE, 8, sizes={"expert": 8})
    uneven = step(MOE, 8, sizes={"expert": 8}, moe_imbalance=1.5)
    experts = 3 * 48 * 2 * 3 * 2048 * 768 * 8 * 8 * ROW / PEAK
    assert uneven.ep_s == pytest.approx(1.5 * even.ep_s)
    assert uneven.compute_s - even.compute_s == pytest.approx(0.5 * experts, rel=1e-3)
    limited = {"moe_imbalance": 1.5, "moe_expert_capacity_factor": 1.25}
    assert step(MOE, 8, sizes={"expert": 8}, **limited).ep_s == pytest.approx(1.25 * even.ep_s)
    padded = {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True}
    assert step(MOE, 8, sizes={"expert": 8}, **padded).ep_s == pytest.approx(2 * even.ep_s)


def test_tensor_parallel_messages() -> None:
    dense = step(DENSE, 4, sizes={"tensor": 4})
    once = 2 * 4096 * ROW * 3 / 4
    assert dense.tp_s == pytest.approx(64 * 36 * 2 * 5 * once / INSIDE)
    experts = step(MOE, 8, sizes={"tensor": 4, "expert": 8})
    assert experts.tp_s == pytest.approx(32 * 48 * 5 * 2 * 2048 * ROW * 3 / 4 / INSIDE)  # attention alone
    again = step(DENSE, 4, sizes={"tensor": 4}, recompute_granularity="full")
    assert again.tp_s == pytest.approx(dense.tp_s * 7 / 5)


def test_expert_tensor_parallel_gathers_the_tokens_of_its_ranks() -> None:
    split = step(MOE, 8, sizes={"tensor": 2, "expert": 4, "expert_tensor": 2})
    whole = step(MOE, 8, sizes={"tensor": 2, "expert": 4, "expert_tensor": 1})
    assert split.tp_s - whole.tp_s == pytest.approx(16 * 48 * 4 * 2 * 2048 * 8 * ROW / 2 / INSIDE)
    assert split.compute_s == pytest.approx(whole.compute_s)


def test_context_parallel_messages_hide_behind_attention_in_transformer_engine_alone() -> None:
    sizes = {"context": 4}
    gathered = step(DENSE, 4, sizes=sizes, modules="torch")
    assert gathered.cp_s == pytest.approx(64 * 36 * 3 * 4 * 1024 * ROW / 4 * 3 / INSIDE)
    assert step(DENSE, 4, sizes=sizes).cp_s < gathered.cp_s
    slow = replace(H100, intra_bw=1.0)
    attention = 64 * 36 * 3 * 2 * 4096 * ROW * ROW / 4 / PEAK
    shown = step(DENSE, 4, sizes=sizes, gpu=slow).cp_s
    assert step(DENSE, 4, sizes=sizes, gpu=slow, modules="torch").cp_s - shown == pytest.approx(attention)


def test_pipeline_messages_show_in_the_plain_schedule_alone() -> None:
    plain = step(MOE, 16, sizes={"pipeline": 2, "expert": 8})
    assert plain.pp_s == pytest.approx(8 * 2 * 2 * 2048 * ROW / OUTSIDE)
    assert step(MOE, 16, sizes={"pipeline": 2, "expert": 8, "virtual_pipeline": 2}).pp_s == 0


@pytest.mark.parametrize(
    ("name", "gpus", "sizes"),
    [
        ("Qwen3-8B", 16, {}),
        ("Qwen3-4B", 16, {"pipeline": 2}),  # tied: the last stage has a copy of the embedding
        ("Qwen3-4B", 16, {}),
        ("Qwen3-30B-A3B", 32, {"expert": 8, "pipeline": 2, "tensor": 2}),
    ],
)
def test_gradients_and_weights_of_the_slowest_stage_over_the_copies(
    name: str, gpus: int, sizes: dict[str, int]
) -> None:
    shape = find_model(name)
    layout = layout_of(shape, gpus, **sizes)
    time = step(shape, gpus, sizes=sizes)
    dense, experts = held(shape, layout, time.stage)
    cards = 8 // layout.tensor  # members of a data-parallel group in a node
    dense_speed = min(INSIDE, OUTSIDE * cards) if layout.data * layout.tensor > 8 else INSIDE
    expected = 6 * dense * (layout.data - 1) / layout.data / dense_speed
    if shape.is_moe:
        expected += 6 * experts * (layout.expert_data - 1) / layout.expert_data / OUTSIDE
    assert time.dp_s == pytest.approx(expected, rel=1e-4)
    assert step(shape, gpus, sizes=sizes, gradient_bytes=2).dp_s == pytest.approx(expected * 4 / 6, rel=1e-4)


def test_adam_on_the_gpu_and_on_the_host() -> None:
    dense, experts = held(MOE, layout_of(MOE, 8, expert=8), 0)
    shard = dense / 8 + experts
    on_gpu = step(MOE, 8, sizes={"expert": 8}, gpu=GPUS["h100-80"])
    assert on_gpu.optimizer_s == pytest.approx(shard * (4 + 4 + 2 * (4 + 8) + 2) / 3350e9, rel=1e-4)
    on_host = step(MOE, 8, sizes={"expert": 8}, optimizer_offload_fraction=1.0)
    assert on_host.optimizer_s == pytest.approx(shard * (1 / 0.5e9 + 6 / 25e9), rel=1e-4)


def test_a_small_micro_batch_waits_for_the_host() -> None:
    slow_host = replace(PERFECT, dense_launch=6e-3)
    time = step(DENSE, 1, row_length=128, effective_length=128.0, calibration=slow_host)
    assert time.seconds - time.optimizer_s == pytest.approx(64 * 36 * 6e-3)
    assert time.host_s > time.compute_s
    again = step(DENSE, 1, row_length=128, effective_length=128.0, calibration=slow_host, recompute_granularity="full")
    assert again.seconds - again.optimizer_s == pytest.approx(64 * 36 * 8e-3)
    large = step(DENSE, 1, row_length=32768, effective_length=32768.0, calibration=slow_host)
    assert large.host_s == 0


def test_frozen_weights_have_no_gradient_and_no_tail() -> None:
    time = step(DENSE, 2, train_type="lora", effective_length=0.0)
    assert time.compute_s == pytest.approx(32 * ROW * flops_per_token(DENSE, 0) * 2 / 3 / PEAK, rel=1e-3)
    assert time.dp_s == time.optimizer_s == 0


def test_memory_traffic_adds_to_products() -> None:
    """Norms and sums 20h, q- and k-norm and RoPE 8(q + g), SwiGLU 6f, three times over; 16 bytes a logit."""
    slow = replace(H100, bf16_tflops=1e9, memory_bw=3350)
    layer = 3 * (20 * 4096 + 8 * (4096 + 1024) + 6 * 12288)
    assert step(DENSE, 1, gpu=slow).compute_s == pytest.approx(64 * ROW * (36 * layer + 16 * 151936) / 3350e9, rel=1e-3)


NORMS, ATTENTION = 20 * 2048, 8 * (4096 + 512)
ROUTING, SWIGLU, PERMUTATION = 25 * 128, 6 * 8 * 768, 16 * 8 * 2048


def traffic(shape: ModelShape, *modules: str, **changes: Any) -> float:
    """Bytes a token that one GPU reads and writes in all layers, where nothing but memory takes time."""
    slow = replace(H100, bf16_tflops=1e9, memory_bw=1.0)
    granularity = "selective" if modules else "none"
    time = step(shape, 1, gpu=slow, recompute_granularity=granularity, recompute_modules=modules, **changes)
    return time.compute_s * 1e9 / (64 * ROW) - 16 * 151936


def test_memory_traffic_of_experts() -> None:
    layer = NORMS + ATTENTION + ROUTING + SWIGLU + PERMUTATION
    assert traffic(MOE) == pytest.approx(48 * 3 * layer, rel=1e-3)
    fused = 48 * 3 * (layer - PERMUTATION * 3 / 4)
    assert traffic(MOE, moe_token_dispatcher_type="flex") == pytest.approx(fused, rel=1e-3)
    uneven = 48 * 3 * 0.5 * (SWIGLU + PERMUTATION)
    assert traffic(MOE, moe_imbalance=1.5) - traffic(MOE) == pytest.approx(uneven, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "module", "again"),
    [
        ("Qwen3-30B-A3B", "layernorm", 48 * NORMS),
        ("Qwen3-30B-A3B", "moe_act", 48 * SWIGLU),
        ("Qwen3-30B-A3B", "moe", 48 * (ROUTING + SWIGLU + PERMUTATION)),
        ("Qwen3-30B-A3B", "mlp", 0),
        ("Qwen3-8B", "layernorm", 36 * 20 * 4096),
        ("Qwen3-8B", "mlp", 36 * 6 * 12288),
        ("Qwen3-8B", "moe_act", 0),
    ],
)
def test_memory_traffic_that_is_computed_again(name: str, module: str, again: int) -> None:
    shape = find_model(name)
    assert traffic(shape, module) - traffic(shape) == pytest.approx(again, abs=traffic(shape) * 1e-6)


def test_an_mlp_that_is_computed_again_repeats_its_products() -> None:
    mlp = 36 * 2 * 3 * 4096 * 12288 * 64 * ROW / PEAK
    again = step(DENSE, 1, recompute_granularity="selective", recompute_modules=("mlp",)).compute_s
    assert again - step(DENSE, 1).compute_s == pytest.approx(mlp, rel=1e-3)


def test_context_parallel_ranks_share_the_gradients_of_dense_weights() -> None:
    dense, _ = held(DENSE, layout_of(DENSE, 8, context=4), 0)
    assert step(DENSE, 8, sizes={"context": 4}).dp_s == pytest.approx(6 * dense * 7 / 8 / INSIDE, rel=1e-4)


def test_the_slowest_stage_counts() -> None:
    layout = {"pipeline": 2, "first_stage_layers": 30, "expert": 8}
    uneven, even = (step(MOE, 16, sizes=sizes) for sizes in (layout, {"pipeline": 2, "expert": 8}))
    assert (uneven.stage, even.stage) == (0, 1)  # with equal layers the output layer decides
    assert uneven.ep_s == pytest.approx(even.ep_s * 30 / 24)


def test_a_mixed_model_pays_for_each_kind_of_layer() -> None:
    mixed = replace(MOE, moe_layers=(False,) * 8 + (True,) * 40)
    assert step(mixed, 8, sizes={"expert": 8}).ep_s == pytest.approx(step(MOE, 8, sizes={"expert": 8}).ep_s * 40 / 48)
    time = step(mixed, 8, sizes={"expert": 8})
    expected = flops_per_token(mixed, ROW) + 3 * ROUTER * 40 / 48
    assert time.compute_s == pytest.approx(8 * ROW * expected / PEAK, rel=1e-3)


def test_the_range_is_the_middle_by_one_and_a_half() -> None:
    time = step(DENSE, 1)
    assert (time.low * 1.5, time.high / 1.5) == (pytest.approx(time.seconds), pytest.approx(time.seconds))


@pytest.mark.parametrize("changes", [{"bf16": False}, {"on_cuda": False}])
def test_other_runs_than_bf16_on_gpus_are_refused(changes: dict[str, bool]) -> None:
    with pytest.raises(ConfigError, match="bf16 on GPUs"):
        step(DENSE, 1, **changes)


@pytest.mark.parametrize("fact", ["bf16_tflops", "memory_bw", "intra_bw", "inter_bw"])
def test_a_better_gpu_is_never_slower(fact: str) -> None:
    better = replace(H100, **{fact: 2 * getattr(H100, fact)})
    sizes = {"tensor": 2, "pipeline": 2, "expert": 8, "context": 2}
    assert step(MOE, 32, sizes=sizes, gpu=better).seconds <= step(MOE, 32, sizes=sizes).seconds
