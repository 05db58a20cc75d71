"""The memory account of a rank: every part a number of its own, with where it comes from, and what they sum to."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mcore_qwen3.arch import ModelShape, ParallelLayout, resolve_batch
from mcore_qwen3.planner.activations import logit_values, tokens_of
from mcore_qwen3.planner.chunks import in_flight, stage_chunks
from mcore_qwen3.planner.settings import Settings
from mcore_qwen3.planner.state import state_bytes

GIB = 2**30

# CUDA context, loaded kernels and cuBLAS workspace of a process: a round figure, not measured here.
CONTEXT_GIB = 0.75
# Both fitted to the published runs of planner/measured_memory.py. These do not tell the two apart well: a larger share with
# a smaller size fits nearly as well.
FRAGMENTATION_SHARE = 0.065
COMMUNICATOR_GIB = 0.09
# Every one of those runs lies between these multiples of its account when the constants are fitted to the others.
LOW, HIGH = 0.80, 1.25


@dataclass(frozen=True, slots=True)
class Item:
    """One part of an account: bytes, and where the number comes from."""

    name: str
    bytes: float
    source: str


@dataclass(frozen=True, slots=True)
class Account:
    """The fullest moment of a rank of one pipeline stage.

    `items` follow from formulas; `fitted` are a guess and constants fitted to published runs.
    """

    stage: int
    items: tuple[Item, ...]
    fitted: tuple[Item, ...]

    @property
    def formula(self) -> float:
        """Bytes of the items that follow from formulas."""
        return sum(item.bytes for item in self.items)

    @property
    def total(self) -> float:
        """Bytes that the rank is expected to use."""
        return self.formula + sum(item.bytes for item in self.fitted)

    @property
    def allocated(self) -> float:
        """Bytes of the total that torch's allocator holds: context and communicators lie outside of it."""
        return self.formula + sum(item.bytes for item in self.fitted if item.name == "fragmentation")

    @property
    def low(self) -> float:
        """Bytes that it may get by with."""
        return LOW * self.total

    @property
    def high(self) -> float:
        """Bytes that it may need."""
        return HIGH * self.total


def heaviest_account(shape: ModelShape, layout: ParallelLayout, settings: Settings) -> Account:
    """The account of the stage that needs most; the first of several. A GPU must hold this one."""
    accounts = [stage_account(shape, layout, settings, stage) for stage in _different_stages(shape, layout)]
    return max(accounts, key=lambda account: (account.total, -account.stage))


def heaviest_state(shape: ModelShape, layout: ParallelLayout, settings: Settings) -> float:
    """Bytes that the fullest stage holds between two steps: a lower bound of its account."""
    return max(state_bytes(shape, layout, settings, stage).total for stage in _different_stages(shape, layout))


def _different_stages(shape: ModelShape, layout: ParallelLayout) -> list[int]:
    """One of those stages that hold the same: the first, which has most micro-batches in flight."""
    if shape.is_mixed:
        return list(range(layout.pipeline))
    ends = (0, layout.pipeline - 1)
    first: dict[object, int] = {}
    for stage, chunks in enumerate(layout.stages):
        first.setdefault((chunks, stage if stage in ends else None), stage)
    return list(first.values())


def stage_account(shape: ModelShape, layout: ParallelLayout, settings: Settings, stage: int) -> Account:
    """The account of a rank of a stage, at its fullest moment.

    Args:
        shape: the model.
        layout: a layout resolved for it.
        settings: the run's.
        stage: pipeline rank, 0 to PP - 1.

    Raises:
        ConfigError: the batch does not fit the layout.
    """
    items = [*_state_items(shape, layout, settings, stage), *_activation_items(shape, layout, settings, stage)]
    account = Account(stage, tuple(item for item in items if item.bytes > 0), fitted=())
    return replace(account, fitted=_process_items(layout, account.formula) if settings.on_cuda else ())


def _state_items(shape: ModelShape, layout: ParallelLayout, settings: Settings, stage: int) -> list[Item]:
    state = state_bytes(shape, layout, settings, stage)
    moved = f", {settings.optimizer_offload_fraction:.0%} in host memory" if settings.optimizer_offload_fraction else ""
    frozen = f" + {state.frozen:,} frozen" if state.frozen else ""
    return [
        Item("weights", state.weights, f"{state.trained:,} parameters{frozen} x {settings.element_bytes}"),
        Item("gradients", state.gradients, f"trained parameters x {settings.gradient_bytes}"),
        Item("master weights", state.master_weights, f"its share x {settings.master_bytes}{moved}"),
        Item("moments", state.moments, f"its share x {settings.moment_bytes}{moved}"),
    ]


def _activation_items(shape: ModelShape, layout: ParallelLayout, settings: Settings, stage: int) -> list[Item]:
    """Kept activations, and the larger of two moments on top: the loss (last stage), or the backward of one layer."""
    batch = resolve_batch(
        settings.micro_batch_size,
        settings.global_batch_size,
        layout.data,
        pipeline=layout.pipeline,
        virtual_pipeline=layout.virtual_pipeline,
    )
    tokens = tokens_of(shape, layout, settings)
    held = in_flight(layout, batch.num_microbatches, stage)
    chunks = stage_chunks(shape, layout, settings, stage)
    kept = sum(number * chunk.kept for number, chunk in zip(held, chunks, strict=True))
    source = f"{settings.modules} modules; micro-batches in flight: {' + '.join(map(str, held))}"
    items = [Item("activations", kept, source), *_pipeline_items(shape, layout, settings)]
    logits = logit_values(shape, layout, tokens) if stage == layout.pipeline - 1 else 0.0
    loss = [Item("logits and loss", logits * (settings.element_bytes + 4), "logits, and their softmax in fp32")]
    layer = [
        Item("computed again", max(chunk.recomputed for chunk in chunks), "the layers or parts recomputed at one time"),
        Item("backward of a layer", max(chunk.backward for chunk in chunks), "gradients of its values; a guess"),
        Item("dispatch buffers", _dispatch_bytes(shape, layout, settings), "tokens sent and received, before the sort"),
    ]
    return items + max(loss, layer, key=lambda moment: sum(item.bytes for item in moment))


def _pipeline_items(shape: ModelShape, layout: ParallelLayout, settings: Settings) -> list[Item]:
    if layout.pipeline == 1:
        return []
    tokens = tokens_of(shape, layout, settings)
    size = tokens.sequence * shape.hidden_size * settings.element_bytes
    return [Item("pipeline buffers", 2 * size, "one activation and one gradient on their way")]


def _dispatch_bytes(shape: ModelShape, layout: ParallelLayout, settings: Settings) -> float:
    if not shape.is_moe:
        return 0.0
    tokens = tokens_of(shape, layout, settings)
    sent = tokens.sequence * shape.moe_router_topk
    return (sent + tokens.received) * shape.hidden_size * settings.element_bytes


def _process_items(layout: ParallelLayout, formula: float) -> tuple[Item, ...]:
    number = communicators(layout)
    return (
        Item("fragmentation", FRAGMENTATION_SHARE * formula, "a fitted share of all above"),
        Item("communicators", number * COMMUNICATOR_GIB * GIB, f"{number} groups of ranks, a fitted size each"),
        Item("context", CONTEXT_GIB * GIB, "CUDA context and workspaces; a round figure"),
    )


def communicators(layout: ParallelLayout) -> int:
    """Groups of more than one rank that a rank talks in: world, TP, CP, DP x CP, PP, TP x PP, and those of the experts."""
    groups = [layout.world_size, layout.tensor, layout.context, layout.data * layout.context, layout.pipeline]
    groups.append(layout.tensor * layout.pipeline)
    if layout.is_moe:
        groups += [layout.expert, layout.expert_tensor, layout.expert_data]
    return sum(size > 1 for size in groups)
