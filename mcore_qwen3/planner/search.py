"""Every legal layout of a model on a number of GPUs, and which of them fit and are fast.

Knobs that are searched: TP, CP, PP (uneven stages where the layers do not divide), virtual stages, EP, expert-TP,
micro-batch and recompute. A knob that the user fixes keeps its value.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mcore_qwen3.arch import ModelShape, ParallelLayout, resolve_layout, row_multiple
from mcore_qwen3.arch.pipeline import PipelineSplit, balanced_split, is_legal
from mcore_qwen3.errors import ConfigError
from mcore_qwen3.planner.calibration import Calibration
from mcore_qwen3.planner.gpus import Gpu
from mcore_qwen3.planner.memory import GIB, HIGH, Account, heaviest_account, heaviest_state
from mcore_qwen3.planner.settings import Settings
from mcore_qwen3.planner.step_time import StepTime, estimate_step

SHORTEST_PART = 8192  # tokens of a row that a context-parallel rank keeps: no published run cuts finer; a flag does
MICRO_BATCH_SIZES = (1, 2, 4, 8)
MOST_VIRTUAL_STAGES = 12  # the most that any published run has

# Cheapest first: what is kept instead of computed again costs memory, never time.
RECOMPUTE: tuple[Mapping[str, Any], ...] = (
    {"recompute_granularity": "none"},
    {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "moe_act")},
    {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "moe")},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
)


def usable_bytes(gpu: Gpu) -> float:
    """Bytes that a process can allocate."""
    return gpu.memory_gib * GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A layout with its settings and what they cost. `account` is the heaviest stage's; `optimizer` is its search's."""

    layout: ParallelLayout
    settings: Settings
    account: Account
    step: StepTime
    optimizer: tuple[str, Mapping[str, Any]]

    def fits(self, gpu: Gpu) -> bool:
        """Whether the middle of the estimate lies in the GPU's memory."""
        return self.account.total <= usable_bytes(gpu)

    def at_the_edge(self, gpu: Gpu) -> bool:
        """Whether the upper end of the estimate lies above it."""
        return self.account.high > usable_bytes(gpu)


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Layouts that differ in their virtual stages alone, most stages first, with one micro-batch size."""

    layouts: tuple[ParallelLayout, ...]
    micro_batch_size: int


def sizes(layout: ParallelLayout) -> tuple[int, ...]:
    """TP, CP, PP, EP, expert-TP: what tells the lines of a plan apart."""
    return layout.tensor, layout.context, layout.pipeline, layout.expert, layout.expert_tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """What is searched. `fixed` holds the flags that the user gave, by name; `settings` everything that is not a knob;
    `optimizer` a name for what the optimizer keeps, and the flags that ask for it beside the user's."""

    shape: ModelShape
    gpu: Gpu
    settings: Settings
    fixed: Mapping[str, Any]
    calibration: Calibration
    optimizer: tuple[str, Mapping[str, Any]] = ("as given", {})

    def best(self, gpus: int, number: int) -> list[Plan]:
        """The fastest plans that fit, one for each TP, CP, PP, EP and expert-TP.

        First those whose whole range fits, then those at the edge of the memory.
        """
        bounds = [(self._bound(start), start) for start in self._starts(gpus, usable_bytes(self.gpu))]
        bounds.sort(key=lambda pair: pair[0])
        plans = self._fastest(bounds, number, at_the_edge=False)
        if len(plans) < number:
            known = {sizes(plan.layout) for plan in plans}
            others = [(bound, start) for bound, start in bounds if sizes(start.layouts[0]) not in known]
            plans += self._fastest(others, number - len(plans), at_the_edge=True)
        return plans

    def _bound(self, start: Start) -> float:
        """Seconds of the fastest of a start's choices: most virtual stages, nothing computed again."""
        layout, settings = next(self._choices(start))
        return self._seconds(layout, settings).seconds

    def _fastest(self, starts: Sequence[tuple[float, Start]], number: int, *, at_the_edge: bool) -> list[Plan]:
        """The fastest plans of starts in the order of their bounds; ends where no bound can be beaten."""
        best: dict[tuple[int, ...], Plan] = {}
        too_large: dict[tuple[int, ...], int] = {}  # micro-batch sizes that do not fit: larger ones need no less
        for bound, start in starts:
            seconds = sorted(plan.step.seconds for plan in best.values())
            if len(best) >= number and bound >= seconds[number - 1]:
                break
            place = sizes(start.layouts[0])
            if start.micro_batch_size >= too_large.get(place, math.inf):
                continue
            plan = self._first_that_fits(start, at_the_edge)
            if plan is None:
                too_large[place] = start.micro_batch_size
            else:
                best[place] = min(plan, best.get(place, plan), key=lambda one: one.step.seconds)
        return sorted(best.values(), key=lambda plan: plan.step.seconds)[:number]

    def _first_that_fits(self, start: Start, at_the_edge: bool) -> Plan | None:
        """The fastest of a start's virtual stages and recompute choices that fits."""
        limit = self._most_bytes(at_the_edge)
        # One row a recompute choice, the layout that needs least memory last: fewer virtual stages never need more.
        rows = list(itertools.batched(self._choices(start), len(start.layouts)))
        if heaviest_account(self.shape, *rows[-1][-1]).total > limit:
            return None
        rows = [row for row in rows if heaviest_account(self.shape, *row[-1]).total <= limit]
        timed = [(self._seconds(*choice), *choice) for row in rows for choice in row]
        for step, layout, settings in sorted(timed, key=lambda choice: choice[0].seconds):
            if (account := heaviest_account(self.shape, layout, settings)).total <= limit:
                return self._plan(layout, settings, account, step)
        return None

    def _most_bytes(self, at_the_edge: bool) -> float:
        """The largest total of an account that fits: with its middle alone, or with its whole range."""
        return usable_bytes(self.gpu) / (1 if at_the_edge else HIGH)

    def _choices(self, start: Start) -> Iterator[tuple[ParallelLayout, Settings]]:
        """Every virtual stage and recompute choice of a start; the one that needs least memory last."""
        plain = replace(for_layout(self.settings, start.layouts[0]), micro_batch_size=start.micro_batch_size)
        for choice in self._recompute_choices():
            settings = replace(plain, **choice)
            for layout in start.layouts:
                yield layout, settings

    def _seconds(self, layout: ParallelLayout, settings: Settings) -> StepTime:
        return estimate_step(self.shape, layout, settings, self.gpu, self.calibration)

    def one(self, layout: ParallelLayout, settings: Settings) -> Plan:
        """What one layout costs; ConfigError where the batch does not suit it."""
        account = heaviest_account(self.shape, layout, settings)
        return self._plan(layout, settings, account, self._seconds(layout, settings))

    def _plan(self, layout: ParallelLayout, settings: Settings, account: Account, step: StepTime) -> Plan:
        return Plan(layout=layout, settings=settings, account=account, step=step, optimizer=self.optimizer)

    def lightest(self, gpus: int) -> Plan | None:
        """The plan that needs least memory, for the case that none fits; None where no layout is legal."""
        lightest = [list(self._choices(start))[-1] for start in self._starts(gpus)]
        return min((self.one(*choice) for choice in lightest), key=lambda plan: plan.account.total, default=None)

    def fewest_gpus(self, limit: int, *, at_the_edge: bool = True) -> int | None:
        """The smallest number of GPUs, whole nodes above one, on which something fits.

        Args:
            limit: the largest number to look at.
            at_the_edge: the middle of an estimate has to fit; False: its whole range.
        """
        node = self.gpu.gpus_per_node
        sizes = [size for size in (1, 2, 4, 8, 16, 32) if size < node]
        sizes += range(node, limit + 1, node)
        return next((size for size in sizes if size <= limit and self._any_fits(size, at_the_edge)), None)

    def _any_fits(self, gpus: int, at_the_edge: bool) -> bool:
        most = self._most_bytes(at_the_edge)
        lightest = (list(self._choices(start))[-1] for start in self._starts(gpus, most))
        return any(heaviest_account(self.shape, *choice).total <= most for choice in lightest)

    def _starts(self, gpus: int, most_state: float = math.inf) -> Iterator[Start]:
        """Every legal start whose weights, gradients and optimizer take no more bytes."""
        for layouts in self._layouts(gpus):
            if heaviest_state(self.shape, layouts[-1], self.settings) > most_state:
                continue
            for size in self._micro_batch_sizes():
                if legal := tuple(layout for layout in layouts if self._divides(size, layout)):
                    yield Start(layouts=legal, micro_batch_size=size)

    def _divides(self, micro_batch_size: int, layout: ParallelLayout) -> bool:
        group = layout.data * (layout.pipeline if layout.virtual_pipeline > 1 else 1)
        return self.settings.global_batch_size % (micro_batch_size * group) == 0

    def _micro_batch_sizes(self) -> tuple[int, ...]:
        return (self.settings.micro_batch_size,) if "micro_batch_size" in self.fixed else MICRO_BATCH_SIZES

    def _recompute_choices(self) -> tuple[Mapping[str, Any], ...]:
        if any(name.startswith("recompute_") for name in self.fixed):
            return ({},)
        return RECOMPUTE if self.shape.is_moe else (RECOMPUTE[0], RECOMPUTE[-1])

    def _layouts(self, gpus: int) -> Iterator[tuple[ParallelLayout, ...]]:
        """Every legal TP, CP, PP, EP and expert-TP once, with each number of virtual stages, most first.

        The rules of `resolve_layout` decide. Sizes are divisors: TP of the key-value heads inside a node, PP of the GPUs, EP of
        the experts; CP is a power of two; expert-TP is 1 or TP.
        """
        shape = self.shape
        tensors = self._sizes("tensor_model_parallel_size", self.gpu.gpus_per_node, shape.num_query_groups)
        contexts = self._sizes("context_parallel_size", max(1, self.settings.row_length // SHORTEST_PART))
        experts = self._sizes("expert_model_parallel_size", max(1, shape.num_experts), shape.num_experts)
        for tensor in tensors:
            for context in contexts:
                for pipeline in self._pipelines(gpus):
                    if gpus % (tensor * context * pipeline):
                        continue
                    if self.settings.global_batch_size % (gpus // (tensor * context * pipeline)):
                        continue
                    for expert in experts:
                        for inner in self._expert_tensors(tensor):
                            if shape.is_moe and gpus % (pipeline * expert * inner):
                                continue
                            if cuts := tuple(self._cuts(gpus, tensor, context, pipeline, expert, inner)):
                                yield cuts[::-1]

    def _sizes(self, flag: str, limit: int, whole: int = 0) -> list[int]:
        """The fixed size, or those up to a limit that divide `whole`; without `whole` the powers of two."""
        if flag in self.fixed:
            return [int(self.fixed[flag])]
        if whole:
            return [size for size in range(1, limit + 1) if whole % size == 0]
        return [2**power for power in range(limit.bit_length())]

    def _pipelines(self, gpus: int) -> list[int]:
        if "pipeline_model_parallel_size" in self.fixed:
            return [int(self.fixed["pipeline_model_parallel_size"])]
        return [size for size in range(1, min(gpus, self.shape.num_layers) + 1) if gpus % size == 0]

    def _expert_tensors(self, tensor: int) -> list[int]:
        if "expert_tensor_parallel_size" in self.fixed:
            return [int(self.fixed["expert_tensor_parallel_size"])]
        return [1, tensor] if self.shape.is_moe and tensor > 1 else [1]

    def _cuts(
        self, gpus: int, tensor: int, context: int, pipeline: int, expert: int, inner: int
    ) -> Iterator[ParallelLayout]:
        for cut in self._pipeline_cuts(pipeline):
            try:
                yield resolve_layout(
                    gpus,
                    tensor=tensor,
                    pipeline=pipeline,
                    context=context,
                    expert=expert,
                    expert_tensor=inner,
                    sequence_parallel=self.fixed.get("sequence_parallel", True),
                    virtual_pipeline=cut.virtual,
                    first_stage_layers=cut.first,
                    last_stage_layers=cut.last,
                    account_for_embedding=cut.embedding,
                    account_for_loss=cut.loss,
                    shape=self.shape,
                )
            except ConfigError:  # a rule that the loops do not know
                continue

    def _pipeline_cuts(self, pipeline: int) -> tuple[PipelineSplit, ...]:
        ends = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
        counted = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
        virtual = self.fixed.get("virtual_pipeline_model_parallel_size")
        if any(self.fixed.get(name) for name in (*ends, *counted)):
            first, last = (self.fixed.get(name) for name in ends)
            embedding, loss = (bool(self.fixed.get(name)) for name in counted)
            return (
                PipelineSplit(
                    pipeline=pipeline, virtual=virtual or 1, first=first, last=last, embedding=embedding, loss=loss
                ),
            )
        return pipeline_cuts(self.shape.num_layers, pipeline, virtual)


def for_layout(settings: Settings, layout: ParallelLayout) -> Settings:
    """The settings with the length of a row rounded up as the layout needs it."""
    multiple = row_multiple(layout.tensor, layout.sequence_parallel, layout.context)
    return replace(settings, row_length=-(-settings.row_length // multiple) * multiple)


@functools.cache
def pipeline_cuts(num_layers: int, pipeline: int, virtual: int | None) -> tuple[PipelineSplit, ...]:
    """How the layers may be shared out, for each number of virtual stages: evenly; with the embedding and the loss
    counted as a layer each (94 layers as 96); or, without virtual stages, by the balanced cut."""
    if pipeline == 1:
        return (PipelineSplit(pipeline=1, virtual=virtual or 1),)
    cuts = []
    for size in [virtual] if virtual else range(1, MOST_VIRTUAL_STAGES + 1):
        even = PipelineSplit(pipeline=pipeline, virtual=size)
        counted = replace(even, embedding=True, loss=True)
        if is_legal(num_layers, even):
            cuts.append(even)
        elif is_legal(num_layers, counted):
            cuts.append(counted)
        elif size == 1 and (balanced := balanced_split(num_layers, even)) is not None:
            cuts.append(balanced)
    return tuple(cuts)
