"""How long an optimizer step takes: micro-batches through the slowest stage, the pipeline's bubble, and the tail.

seconds = micro-batches x max(GPU, host) of the slowest stage x (1 + bubble) + gradients and weights over DP + optimizer.
The host starts kernels while the GPU works; with small micro-batches it is the slower of the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from mcore_qwen3.arch import ModelShape, ParallelLayout, resolve_batch
from mcore_qwen3.arch.flops import flops_per_token, logit_flops
from mcore_qwen3.errors import ConfigError
from mcore_qwen3.planner.calibration import Calibration
from mcore_qwen3.planner.gpus import Gpu
from mcore_qwen3.planner.layer_time import Machine, Seconds, layer_seconds
from mcore_qwen3.planner.settings import Settings
from mcore_qwen3.planner.state import state_bytes

# The range that is printed: the middle divided and multiplied by this.
SPREAD = 1.5
# Of the host under Adam on CPU, a GPU's share; assumed, since one published run is too few to fit them: PCIe 4.0 as reached,
# and parameters that Adam updates a second (28 bytes each in memory).
PCIE_BYTES = 25e9
HOST_ADAM_PARAMETERS = 0.5e9


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one optimizer step on the slowest pipeline stage, and where they go.

    Attributes:
        stage: the slowest stage.
        compute_s: products and memory traffic of all micro-batches.
        tp_s, ep_s, cp_s, pp_s: messages that nothing hides.
        host_s: the GPU waits for the host to start its kernels.
        bubble_s: the stage waits for the others.
        dp_s: gradients to their shards and weights back.
        optimizer_s: Adam on its shard.
        bubble_share: (p - 1) / (v x m + p - 1) of the micro-batches' time, bubble included.
        low, high: the range to expect, the middle divided and multiplied by SPREAD.
        tokens: tokens of a step, padding included.
        world_size: GPUs.
        flops_per_token: forward and backward, as Megatron counts.
    """

    stage: int
    compute_s: float
    tp_s: float
    ep_s: float
    cp_s: float
    pp_s: float
    host_s: float
    bubble_s: float
    dp_s: float
    optimizer_s: float
    bubble_share: float
    tokens: int
    world_size: int
    flops_per_token: float

    @property
    def seconds(self) -> float:
        """The middle of the range."""
        busy = self.compute_s + self.tp_s + self.ep_s + self.cp_s + self.pp_s + self.host_s
        return busy + self.bubble_s + self.dp_s + self.optimizer_s

    @property
    def low(self) -> float:
        """The fastest step to expect, seconds."""
        return self.seconds / SPREAD

    @property
    def high(self) -> float:
        """The slowest step to expect, seconds."""
        return self.seconds * SPREAD

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Tokens of a step, padding included, over seconds and GPUs."""
        return self.tokens / self.seconds / self.world_size

    @property
    def tflops_per_gpu(self) -> float:
        """10^12 operations a second and GPU as Megatron counts them: without what is computed again."""
        return self.tokens_per_second_per_gpu * self.flops_per_token / 1e12


def estimate_step(
    shape: ModelShape, layout: ParallelLayout, settings: Settings, gpu: Gpu, calibration: Calibration
) -> StepTime:
    """The time of one step.

    Args:
        shape, layout, settings: the run.
        gpu: where it runs.
        calibration: what share of the GPU's and the links' speed is reached.

    Raises:
        ConfigError: the run is not in bf16 on GPUs, or its batch cannot be cut into micro-batches.
    """
    if not (settings.bf16 and settings.on_cuda):
        raise ConfigError(
            "the time of a step is estimated for bf16 on GPUs",
            seen=f"bf16 {str(settings.bf16).lower()}, {'GPU' if settings.on_cuda else 'CPU'}",
            fix="--bf16 true --device cuda",
        )
    machine = Machine(gpu=gpu, calibration=calibration)
    count = resolve_batch(
        settings.micro_batch_size, settings.global_batch_size, layout.data,
        pipeline=layout.pipeline, virtual_pipeline=layout.virtual_pipeline,
    ).num_microbatches  # fmt: skip
    stages = _stages(shape, layout, settings, machine)
    stage = max(range(len(stages)), key=lambda number: max(stages[number].gpu, stages[number].host))
    slowest = stages[stage]
    messages = _pipeline_seconds(shape, layout, settings, machine)
    a_micro_batch = max(slowest.gpu + messages, slowest.host)
    waiting = (layout.pipeline - 1) / layout.virtual_pipeline
    data, optimizer = _tail(shape, layout, settings, stage, machine)
    return StepTime(
        stage=stage,
        compute_s=count * (slowest.products + slowest.memory),
        tp_s=count * slowest.tp,
        ep_s=count * slowest.ep,
        cp_s=count * slowest.cp,
        pp_s=count * messages,
        host_s=count * (a_micro_batch - slowest.gpu - messages),
        bubble_s=waiting * a_micro_batch,
        dp_s=data,
        optimizer_s=optimizer,
        bubble_share=waiting / (count + waiting),
        tokens=settings.global_batch_size * settings.row_length,
        world_size=layout.world_size,
        flops_per_token=flops_per_token(shape, settings.effective_length),
    )


def _stages(shape: ModelShape, layout: ParallelLayout, settings: Settings, machine: Machine) -> list[Seconds]:
    """Seconds of one micro-batch in each stage, its model chunks together."""
    largest_chunk = max(max(chunks) for chunks in layout.stages)
    kinds = {
        has_experts: layer_seconds(shape, layout, settings, has_experts, largest_chunk, machine)
        for has_experts in set(shape.moe_layers)
    }

    @cache
    def together(with_experts: int, dense: int) -> Seconds:
        experts, plain = kinds.get(True, Seconds()), kinds.get(False, Seconds())
        return Seconds().plus(experts, with_experts).plus(plain, dense)

    stages = [together(*_layer_kinds(shape, layout, stage)) for stage in range(layout.pipeline)]
    stages[-1] = stages[-1].plus(_output_seconds(shape, layout, settings, machine))
    return stages


def _layer_kinds(shape: ModelShape, layout: ParallelLayout, stage: int) -> tuple[int, int]:
    """Layers with experts and without of one stage."""
    layers = sum(layout.stages[stage])
    if not shape.is_mixed:
        return (layers, 0) if shape.is_moe else (0, layers)
    chunks = [layout.chunk_layers(stage, chunk) for chunk in range(layout.virtual_pipeline)]
    with_experts = sum(shape.moe_layers[layer] for chunk in chunks for layer in chunk)
    return with_experts, layers - with_experts


def _output_seconds(shape: ModelShape, layout: ParallelLayout, settings: Settings, machine: Machine) -> Seconds:
    """Logits and loss: products, and about 16 bytes a logit (written, read for the loss, fp32 gradient written and read)."""
    share = settings.micro_batch_size * settings.row_length / layout.context / layout.tensor
    back = 1 if settings.train_type == "lora" else 2
    return Seconds(
        products=(1 + back) * logit_flops(shape) * share / machine.gemm,
        memory=16 * shape.vocab_size * share / machine.memory,
    )


def _pipeline_seconds(shape: ModelShape, layout: ParallelLayout, settings: Settings, machine: Machine) -> float:
    """Seconds a micro-batch waits for the stage before and the stage after it: 2hTs bytes each.

    The interleaved schedule sends while it computes, and nothing of it shows.
    """
    if layout.pipeline == 1 or layout.virtual_pipeline > 1:
        return 0.0
    tokens = settings.micro_batch_size * settings.row_length / layout.context
    own_tokens = tokens / layout.tensor if layout.sequence_parallel else tokens
    return 2 * 2 * shape.hidden_size * own_tokens / machine.ring(2, layout.world_size // layout.pipeline)


def _tail(
    shape: ModelShape, layout: ParallelLayout, settings: Settings, stage: int, machine: Machine
) -> tuple[float, float]:
    """Seconds once a step: gradients reduced to their shards and weights gathered back, then Adam on the shards.

    A group of R ranks moves (gradient bytes + 2) x (R - 1) / R bytes a parameter. Adam reads the gradient (once more for its
    norm), reads and writes master weight and moments, and writes the weight. On CPU gradients go down and weights come back
    over PCIe. Adapters are hundredths of the weights; their tail is left out.
    """
    if settings.train_type == "lora":
        return 0.0, 0.0
    state = state_bytes(shape, layout, settings, stage)
    bytes_each = settings.gradient_bytes + 2
    data = shards = 0.0
    for parameters, copies, stride in (
        (state.dense, layout.data * layout.context, layout.tensor),
        (state.experts, layout.expert_data, layout.expert * layout.expert_tensor),
    ):
        data += bytes_each * parameters * (copies - 1) / copies / machine.ring(copies, stride)
        shards += parameters / copies
    touched = 2 * settings.gradient_bytes + 2 * (settings.master_bytes + settings.moment_bytes) + 2
    off = settings.optimizer_offload_fraction
    on_gpu = (1 - off) * shards * touched / machine.memory
    on_host = off * shards * (1 / HOST_ADAM_PARAMETERS + (settings.gradient_bytes + 2) / PCIE_BYTES)
    return data, on_gpu + on_host
