"""The rules that a layout obeys, and for a broken one the nearest values that would obey them all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from mcore_qwen3.arch.nearest import nearest_legal
from mcore_qwen3.arch.pipeline import FIRST, LAST, PipelineSplit, other_splits, split_rules
from mcore_qwen3.arch.rule import Rule
from mcore_qwen3.arch.shape import ModelShape
from mcore_qwen3.errors import ConfigError

# What a user changes to change a size.
_KNOBS = {
    "world_size": "a world size (NNODES x NPROC_PER_NODE) of",
    "tensor": "--tensor_model_parallel_size",
    "pipeline": "--pipeline_model_parallel_size",
    "context": "--context_parallel_size",
    "expert": "--expert_model_parallel_size",
    "expert_tensor": "--expert_tensor_parallel_size",
    "virtual_pipeline": "--virtual_pipeline_model_parallel_size",
    "first_stage_layers": FIRST,
    "last_stage_layers": LAST,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Degrees:
    """The sizes a user chooses; DP and expert-DP follow from them."""

    world_size: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int
    virtual_pipeline: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    account_for_embedding: bool = False
    account_for_loss: bool = False
    given_stages: tuple[tuple[int, ...], ...] = ()  # by a layout string

    @property
    def split(self) -> PipelineSplit:
        """The cut of the layers."""
        return PipelineSplit(
            pipeline=self.pipeline,
            virtual=self.virtual_pipeline,
            first=self.first_stage_layers,
            last=self.last_stage_layers,
            embedding=self.account_for_embedding,
            loss=self.account_for_loss,
            given=self.given_stages,
        )

    def with_split(self, split: PipelineSplit) -> Degrees:
        """The same sizes with another cut."""
        return replace(
            self,
            pipeline=split.pipeline,
            virtual_pipeline=split.virtual,
            first_stage_layers=split.first,
            last_stage_layers=split.last,
            account_for_embedding=split.embedding,
            account_for_loss=split.loss,
            given_stages=split.given,
        )

    @property
    def dense_product(self) -> int:
        """Ranks that hold one copy of the dense parameters and see the same rows."""
        return self.tensor * self.context * self.pipeline

    @property
    def expert_product(self) -> int:
        """Ranks that hold one copy of all experts."""
        return self.expert_tensor * self.expert * self.pipeline


def _multiple(text: str, value: int, divisor: int, seen: str, *knobs: str) -> Rule:
    return Rule(text=text, seen=seen, holds=value % divisor == 0, knobs=knobs)


def _rules(d: Degrees, shape: ModelShape) -> Iterator[Rule]:
    """Every rule for these sizes, in the order in which a user is told.

    hidden_size need not divide by TP: no weight and no activation is cut along it (sequence parallel cuts the row).
    """
    yield _multiple(
        "the world size must be a multiple of TP x CP x PP", d.world_size, d.dense_product,
        f"world size {d.world_size}, TP {d.tensor} x CP {d.context} x PP {d.pipeline} = {d.dense_product}",
        "world_size", "tensor", "context", "pipeline",
    )  # fmt: skip
    if shape.is_moe:
        yield _multiple(
            "the world size must be a multiple of expert-TP x EP x PP", d.world_size, d.expert_product,
            f"world size {d.world_size}, expert-TP {d.expert_tensor} x EP {d.expert} x PP {d.pipeline} ="
            f" {d.expert_product} (needs a multiple of {d.expert_product})",
            "world_size", "expert_tensor", "expert", "pipeline",
        )  # fmt: skip
        yield _multiple(
            "num_experts must be a multiple of EP", shape.num_experts, d.expert,
            f"{shape.num_experts} experts, EP {d.expert}", "expert",
        )  # fmt: skip
        yield _multiple(
            "moe_intermediate_size must be a multiple of expert-TP", shape.moe_ffn_hidden_size, d.expert_tensor,
            f"moe_intermediate_size {shape.moe_ffn_hidden_size}, expert-TP {d.expert_tensor}", "expert_tensor",
        )  # fmt: skip
    else:
        for text, knob, size in (("EP", "expert", d.expert), ("expert-TP", "expert_tensor", d.expert_tensor)):
            rule = f"{text} must be 1 for a model without experts"
            yield Rule(text=rule, seen=f"{text} {size}, {shape.model_type}", holds=size == 1, knobs=(knob,))
    if not all(shape.moe_layers):
        yield _multiple(
            "intermediate_size must be a multiple of TP", shape.ffn_hidden_size, d.tensor,
            f"intermediate_size {shape.ffn_hidden_size}, TP {d.tensor}", "tensor",
        )  # fmt: skip
    yield from split_rules(shape.num_layers, d.split)
    yield _attention_heads(d, shape)


def _attention_heads(d: Degrees, shape: ModelShape) -> Rule:
    """The only place that says how attention is cut.

    Query heads are a multiple of key-value heads (ModelShape), so this rule covers both. Megatron also has a form for
    TP above the number of key-value heads, where ranks share one; it is not offered here.
    """
    return _multiple(
        "the number of key-value heads must be a multiple of TP", shape.num_query_groups, d.tensor,
        f"{shape.num_query_groups} key-value heads, TP {d.tensor}", "tensor",
    )  # fmt: skip


def check_positive(degrees: Degrees) -> None:
    """Raises ConfigError where a size is below 1."""
    for field in fields(degrees):
        value = getattr(degrees, field.name)
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise ConfigError("a parallel size must be at least 1", seen=value, fix=f"{_KNOBS[field.name]} 1 or more")


def broken_rule(degrees: Degrees, shape: ModelShape) -> ConfigError | None:
    """The error for the first rule that these sizes (each at least 1) break, or None."""
    broken = [rule for rule in _rules(degrees, shape) if not rule.holds]
    if not broken:
        return None
    first = broken[0]
    return ConfigError(first.text, seen=f"{first.seen} ({_grid(degrees)})", fix=_remedies(degrees, shape, broken))


def _grid(d: Degrees) -> str:
    return (
        f"grid: world size {d.world_size}, TP {d.tensor}, CP {d.context}, PP {d.pipeline}, EP {d.expert},"
        f" expert-TP {d.expert_tensor}"
    )


def _remedies(degrees: Degrees, shape: ModelShape, broken: list[Rule]) -> str:
    """The nearest values of each size that mend everything; where no single size can, those that mend the first rule.

    One broken rule can always be mended alone: a size of 1, or a larger world, breaks no other rule. Where the layers
    are cut wrongly, other cuts that need more than one flag are named as well, a balanced one last.
    """
    first = broken[0]

    def obeys_all(candidate: Degrees) -> bool:
        return all(rule.holds for rule in _rules(candidate, shape))

    def obeys_first(candidate: Degrees) -> bool:
        return all(rule.holds for rule in _rules(candidate, shape) if rule.text == first.text)

    single = [_nearest_values(degrees, shape, first.knobs, obeys_all)]
    if any(rule.text == first.text for rule in split_rules(shape.num_layers, degrees.split)):
        cuts = other_splits(shape.num_layers, degrees.split)
        single += [text for text, cut in cuts if obeys_all(degrees.with_split(cut))]
    if any(single):
        return ", or ".join(text for text in single if text)
    others = ", ".join(f"{rule.text} ({rule.seen})" for rule in broken[1:])
    return f"{_nearest_values(degrees, shape, first.knobs, obeys_first)}; and mend what is broken as well: {others}"


def _nearest_values(
    degrees: Degrees, shape: ModelShape, knobs: tuple[str, ...], legal: Callable[[Degrees], bool]
) -> str:
    limits = {
        "world_size": degrees.world_size + math.lcm(degrees.dense_product, degrees.expert_product),
        "tensor": shape.num_attention_heads,
        "pipeline": shape.num_layers,
        "context": degrees.world_size,
        "expert": max(shape.num_experts, 1),
        "expert_tensor": max(shape.moe_ffn_hidden_size, 1),
        "virtual_pipeline": shape.num_layers,
        "first_stage_layers": shape.num_layers,
        "last_stage_layers": shape.num_layers,
    }
    remedies = []
    for knob in knobs:

        def with_value(value: int, knob: str = knob) -> bool:
            change: dict[str, Any] = {knob: value}
            return legal(replace(degrees, **change))

        if values := nearest_legal(getattr(degrees, knob), limits[knob], with_value):
            remedies.append(f"{_KNOBS[knob]} {values}")
    return ", or ".join(remedies)
