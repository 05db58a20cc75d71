"""How long one micro-batch keeps one layer busy, forward, backward and recomputation together.

Products run at a share of the GPU's peak; norms, RoPE, SwiGLU, routing and permutation at a share of its memory bandwidth;
messages at a share of the links that their group spans. Letters: T tokens of a micro-batch on a rank after the context is
split, Ts after the sequence is split too; h hidden, q and g rows of query and key, f MLP width, K experts of a token, t TP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mcore_qwen3.arch import ModelShape, ParallelLayout
from mcore_qwen3.arch.flops import layer_flops
from mcore_qwen3.planner.calibration import Calibration
from mcore_qwen3.planner.gpus import Gpu, group_bandwidth
from mcore_qwen3.planner.settings import Settings


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of one micro-batch: products, memory traffic, messages by group, and the host's work beside them."""

    products: float = 0.0
    memory: float = 0.0
    tp: float = 0.0
    ep: float = 0.0
    cp: float = 0.0
    host: float = 0.0

    def plus(self, other: Seconds, times: float = 1.0) -> Seconds:
        """The sum with `times` of another one."""
        return Seconds(
            self.products + times * other.products,
            self.memory + times * other.memory,
            self.tp + times * other.tp,
            self.ep + times * other.ep,
            self.cp + times * other.cp,
            self.host + times * other.host,
        )

    @property
    def gpu(self) -> float:
        """Seconds that the GPU is busy; the host works at the same time."""
        return self.products + self.memory + self.tp + self.ep + self.cp


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Speeds that are reached: operations, bytes and messages a second."""

    gpu: Gpu
    calibration: Calibration

    @property
    def gemm(self) -> float:
        """Operations a second of dense products."""
        return self.gpu.bf16_tflops * 1e12 * self.calibration.gemm_share

    @property
    def grouped(self) -> float:
        """Operations a second of the experts' grouped products."""
        return self.gpu.bf16_tflops * 1e12 * self.calibration.grouped_share

    @property
    def memory(self) -> float:
        """Bytes a second of memory traffic."""
        return self.gpu.memory_bw * 1e9 * self.calibration.memory_share

    def ring(self, size: int, stride: int) -> float:
        """Bytes a second of a ring over a group, see `group_bandwidth`."""
        inside = size * stride <= self.gpu.gpus_per_domain
        share = self.calibration.intra_share if inside else self.calibration.inter_share
        return group_bandwidth(self.gpu, size, stride) * 1e9 * share

    def all_to_all(self, layout: ParallelLayout, topk: int, *, one_copy_a_node: bool) -> float:
        """Seconds a byte of one token takes to reach its `topk` experts over the EP group.

        Of the copies, (1 - 1/D) leave the NVLink domain, where the group spans D of them; the two kinds of links work side
        by side. A dispatcher that sends one copy to each domain sends (D - 1) x (1 - (1 - 1/D)^topk) on average, and hands
        the copies on inside.
        """
        size, stride = layout.expert, layout.expert_tensor
        domains = math.ceil(size * stride / self.gpu.gpus_per_domain)
        inside = topk * (1 / domains - 1 / size)
        outside = topk * (1 - 1 / domains)
        if one_copy_a_node:
            inside = topk * (1 - 1 / size)
            outside = (domains - 1) * (1 - (1 - 1 / domains) ** topk)
        return max(
            inside / (self.gpu.intra_bw * 1e9 * self.calibration.intra_share),
            outside / (self.gpu.inter_bw * 1e9 * self.calibration.inter_share),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Recomputed:
    """Share of each part of a layer whose forward pass runs again in the backward pass."""

    attention: float
    core_attention: float
    norms: float
    mlp: float
    activation: float
    experts: float


def recomputed(settings: Settings, layers: int, has_experts: bool) -> Recomputed:
    """What a layer computes again.

    Args:
        settings: the run; `full` with `block` covers recompute_num_layers of the stage's layers, `uniform` all.
        layers: layers of one model chunk.
        has_experts: `moe` and `moe_act` act on layers with experts, `mlp` on the others.
    """
    if settings.recompute_granularity == "full":
        block = settings.recompute_method == "block"
        share = min(1.0, (settings.recompute_num_layers or 1) / layers) if block else 1.0
        return Recomputed(
            attention=share, core_attention=share, norms=share, mlp=share, activation=share, experts=share
        )
    modules = settings.recompute_modules if settings.recompute_granularity == "selective" else ()
    experts, mlp = has_experts and "moe" in modules, not has_experts and "mlp" in modules
    return Recomputed(
        attention=0.0,
        core_attention=float("core_attn" in modules),
        norms=float("layernorm" in modules),
        mlp=float(mlp),
        activation=float(experts or mlp or (has_experts and "moe_act" in modules)),
        experts=float(experts),
    )


def busiest_share(settings: Settings) -> float:
    """How much longer experts and dispatch take than with an even share. No published run has EP 1, where the ranks' shares are
    even: its experts are charged the same until one tells otherwise."""
    return settings.within_capacity(settings.moe_imbalance)


def layer_seconds(
    shape: ModelShape, layout: ParallelLayout, settings: Settings, has_experts: bool, layers: int, machine: Machine
) -> Seconds:
    """Seconds that one micro-batch takes in one layer.

    Args:
        shape, layout, settings: the run.
        has_experts: which kind of layer.
        layers: layers of one model chunk, see `recomputed`.
        machine: the speeds that are reached.
    """
    again = recomputed(settings, layers, has_experts)
    tokens = settings.micro_batch_size * settings.row_length / layout.context
    own_tokens = tokens / layout.tensor if layout.sequence_parallel else tokens
    frozen = settings.train_type == "lora"
    back = 1 if frozen else 2  # frozen weights need no product for their own gradient
    flops = layer_flops(shape, has_experts, settings.effective_length)
    share = tokens / layout.tensor
    received = busiest_share(settings) if has_experts else 1.0
    expert_tokens = tokens / layout.tensor * received
    launch = machine.calibration.expert_launch if has_experts else machine.calibration.dense_launch
    dense_products = (
        flops.projections * (1 + back + again.attention)
        + flops.core_attention * (3 + again.core_attention)
        + flops.mlp * (1 + back + again.mlp)
    ) * share + flops.router * own_tokens * (3 + again.experts)
    return Seconds(
        products=dense_products / machine.gemm
        + flops.experts * expert_tokens * (1 + back + again.experts) / machine.grouped,
        memory=_traffic(shape, layout, settings, has_experts, again, own_tokens, share, expert_tokens) / machine.memory,
        tp=_tensor_bytes(shape, layout, has_experts, again, tokens, back) / machine.ring(layout.tensor, 1)
        + _expert_tensor_bytes(shape, layout, again, expert_tokens if has_experts else 0.0)
        / machine.ring(layout.expert_tensor, 1),
        ep=_dispatch(shape, layout, settings, again, own_tokens, machine) if has_experts else 0.0,
        cp=_context(shape, layout, settings, flops.core_attention * share, again, tokens, machine),
        host=launch * (1 + again.attention / 3),
    )


def _traffic(
    shape: ModelShape, layout: ParallelLayout, settings: Settings, has_experts: bool, again: Recomputed,
    own_tokens: float, share: float, expert_tokens: float,
) -> float:  # fmt: skip
    """Bytes read and written by what is no product; the backward pass moves twice the forward's.

    Forward, bytes a token in bf16: two norms and two residual sums 20h over Ts; q- and k-norm and RoPE 8(q + g) and SwiGLU 6f
    over T/t; router scores, their softmax and maps 25 an expert over Ts; SwiGLU of the experts 6Kf; permutation to ranks and
    to experts and back, 4 copies read and written, 16Kh. The dispatcher with one copy a node permutes inside its kernels.
    """
    h, heads = shape.hidden_size, shape.num_attention_heads + shape.num_query_groups
    norms = 20 * h * own_tokens * (3 + again.norms)
    attention = 8 * heads * shape.head_dim * share * (3 + again.attention)
    if not has_experts:
        return norms + attention + 6 * shape.ffn_hidden_size * share * (3 + again.activation)
    topk = shape.moe_router_topk
    router = 25 * shape.num_experts * own_tokens * (3 + again.experts)
    swiglu = 6 * topk * shape.moe_ffn_hidden_size * expert_tokens * (3 + again.activation)
    copies = 1 if settings.moe_token_dispatcher_type == "flex" else 4
    permutation = copies * 4 * topk * h * expert_tokens * (3 + again.experts)
    return norms + attention + router + swiglu + permutation


def _tensor_bytes(
    shape: ModelShape, layout: ParallelLayout, has_experts: bool, again: Recomputed, tokens: float, back: int
) -> float:
    """Bytes over the TP group: 2hT(t-1)/t, twice forward and 1 + back times backward, a block (attention, dense MLP)."""
    once = 2 * shape.hidden_size * tokens * (layout.tensor - 1) / layout.tensor
    attention = once * (3 + back + 2 * again.attention)
    return attention + (0.0 if has_experts else once * (3 + back + 2 * again.mlp))


def _expert_tensor_bytes(shape: ModelShape, layout: ParallelLayout, again: Recomputed, expert_tokens: float) -> float:
    """Bytes over the expert-TP group: its ranks gather each other's tokens and scatter the sums back."""
    once = 2 * shape.hidden_size * shape.moe_router_topk * expert_tokens * (layout.expert_tensor - 1)
    return once * (4 + 2 * again.experts)


def _dispatch(
    shape: ModelShape, layout: ParallelLayout, settings: Settings, again: Recomputed, own_tokens: float,
    machine: Machine,
) -> float:  # fmt: skip
    """Seconds of dispatch and combine that nothing hides: twice forward, twice backward.

    The allgather dispatcher gives every rank all tokens of its group, once each and whatever its experts need.
    """
    if layout.expert == 1:
        return 0.0
    kind = settings.moe_token_dispatcher_type
    if kind == "allgather":
        a_byte = (layout.expert - 1) / machine.ring(layout.expert, layout.expert_tensor)
    else:
        one_copy = kind == "flex"
        a_byte = busiest_share(settings) * machine.all_to_all(layout, shape.moe_router_topk, one_copy_a_node=one_copy)
    once = 2 * shape.hidden_size * own_tokens * a_byte
    return once * (4 + 2 * again.experts) * (1 - machine.calibration.hidden_dispatch)


def _context(
    shape: ModelShape, layout: ParallelLayout, settings: Settings, core_flops: float, again: Recomputed, tokens: float,
    machine: Machine,
) -> float:  # fmt: skip
    """Seconds that keys and values of the other CP ranks are waited for: 4gT(c-1)/t bytes forward, twice that backward.

    transformer-engine passes them on in a ring while it computes attention, so that only what takes longer than attention
    shows; the portable modules gather them first.
    """
    if layout.context == 1:
        return 0.0
    groups = shape.num_query_groups * shape.head_dim
    once = 4 * groups * tokens * (layout.context - 1) / layout.tensor
    messages = once * (3 + again.core_attention) / machine.ring(layout.context, layout.tensor)
    if settings.modules == "torch":
        return messages
    return max(0.0, messages - core_flops * (3 + again.core_attention) / machine.gemm)
