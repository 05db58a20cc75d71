"""How the layers are cut into pipeline stages and model chunks, by megatron-core 0.19.2's rules.

Stage s of PP holds `virtual` chunks; the layers run through chunk 0 of every stage, then chunk 1 of every stage, and so
on (`get_num_layers_to_build` and `get_transformer_layer_offset`). The first and the last stage may hold a number of
layers of their own, or one layer less for the embedding and for the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mcore_qwen3.arch.rule import Rule

FIRST = "--decoder_first_pipeline_num_layers"
LAST = "--decoder_last_pipeline_num_layers"
EMBEDDING = "--account_for_embedding_in_pipeline_split"
LOSS = "--account_for_loss_in_pipeline_split"


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSplit:
    """What a user chooses about the cut.

    Attributes:
        pipeline: PP size.
        virtual: model chunks of each stage; 1 is the plain schedule.
        first, last: layers of the first and last stage, all chunks together; None: like the others.
        embedding, loss: whether the embedding and the loss count as one layer each.
        given: layers of each [stage][chunk], by a layout string, which has been checked; empty: not given.
    """

    pipeline: int
    virtual: int = 1
    first: int | None = None
    last: int | None = None
    embedding: bool = False
    loss: bool = False
    given: tuple[tuple[int, ...], ...] = ()

    @property
    def has_own_ends(self) -> bool:
        """Whether the first or the last stage is given a number of layers."""
        return self.first is not None or self.last is not None

    @property
    def middle_stages(self) -> int:
        """Stages that are not given a number of layers."""
        return self.pipeline - (self.first is not None) - (self.last is not None)

    def middle_layers(self, num_layers: int) -> int:
        """Layers left for them, the embedding and the loss included where they count."""
        return num_layers + self.embedding + self.loss - (self.first or 0) - (self.last or 0)


def stage_layers(num_layers: int, split: PipelineSplit) -> tuple[tuple[int, ...], ...]:
    """Number of layers of each [stage][chunk]; their sum is num_layers. The rules of `split_rules` must hold."""
    if split.given:
        return split.given
    middle = split.middle_layers(num_layers) // split.middle_stages if split.middle_stages else 0
    stages = [[middle // split.virtual] * split.virtual for _ in range(split.pipeline)]
    for stage, own in ((0, split.first), (-1, split.last)):
        if own is not None:
            stages[stage] = [own // split.virtual] * split.virtual
    stages[0][0] -= split.embedding
    stages[-1][-1] -= split.loss
    return tuple(tuple(chunks) for chunks in stages)


def split_rules(num_layers: int, split: PipelineSplit) -> Iterator[Rule]:
    """Every rule of the cut. A rule that cannot be judged while an earlier one is broken is left out."""
    counted = split.embedding or split.loss
    if split.given:
        yield Rule(
            text="a pipeline layout says all about the cut: no other flag does",
            seen=_seen(num_layers, split),
            holds=not counted and not split.has_own_ends,
        )
        return
    yield Rule(
        text="virtual pipeline stages need PP above 1",
        seen=f"PP {split.pipeline}, {split.virtual} virtual stages",
        holds=split.pipeline > 1 or split.virtual == 1,
        knobs=("virtual_pipeline", "pipeline"),
    )
    yield Rule(
        text="a number of layers for the first or last stage needs PP above 1",
        seen=_seen(num_layers, split),
        holds=split.pipeline > 1 or not split.has_own_ends,
        knobs=("pipeline",),
    )
    yield Rule(
        text="the embedding and the loss count as layers only where no stage is given its number of layers",
        seen=_seen(num_layers, split),
        holds=not (counted and split.has_own_ends),
    )
    if split.pipeline == 1 or (counted and split.has_own_ends):
        return
    yield from _sums(num_layers, split)


def _sums(num_layers: int, split: PipelineSplit) -> Iterator[Rule]:
    seen = _seen(num_layers, split)
    middle, stages = split.middle_layers(num_layers), split.middle_stages
    ends = tuple(
        name
        for name, own in (("first_stage_layers", split.first), ("last_stage_layers", split.last))
        if own is not None
    )
    if not stages:
        text = "the first and the last stage must hold all layers at PP 2"
        yield Rule(text=text, seen=seen, holds=middle == 0, knobs=ends)
        # Megatron divides by the number of other stages when it works out where a chunk starts.
        text = "at PP 2 with virtual stages only one of the two stages may be given its number of layers"
        yield Rule(text=text, seen=seen, holds=split.virtual == 1)
    elif split.has_own_ends:
        yield Rule(
            text="the layers beside the first or last stage's must be shared equally, one or more each, by the other"
            " stages",
            seen=f"{seen}: {middle} for {stages} stage{'s' if stages > 1 else ''}",
            holds=middle > 0 and middle % stages == 0,
            knobs=(*ends, "pipeline"),
        )
    else:
        text = "num_layers must be a multiple of PP"
        if split.embedding or split.loss:
            text = "num_layers, with the embedding and the loss where they count, must be a multiple of PP"
            seen += f": {middle}"
        yield Rule(text=text, seen=seen, holds=middle % stages == 0, knobs=("pipeline",))
    if split.virtual > 1:
        sizes = [own for own in (split.first, split.last) if own is not None]
        if stages and middle % stages == 0:
            sizes.append(middle // stages)
        yield Rule(
            text="the layers of every stage must be a multiple of the virtual stages",
            seen=f"{', '.join(map(str, sizes))} layers a stage, {split.virtual} virtual stages",
            holds=all(size % split.virtual == 0 for size in sizes),
            knobs=("virtual_pipeline",),
        )


def _seen(num_layers: int, split: PipelineSplit) -> str:
    return f"{num_layers} layers, PP {split.pipeline} {_words(split)}".rstrip()


def is_legal(num_layers: int, split: PipelineSplit) -> bool:
    """Whether every rule holds."""
    return all(rule.holds for rule in split_rules(num_layers, split))


def other_splits(num_layers: int, split: PipelineSplit) -> Iterator[tuple[str, PipelineSplit]]:
    """(what to write, the legal cut that it gives) for cuts that differ in more than one flag; a balanced one last."""
    plain = replace(split, first=None, last=None, embedding=False, loss=False)
    candidates = [replace(split, first=None, last=None), replace(split, embedding=False, loss=False)]
    if split.has_own_ends:
        candidates += [replace(split, last=None), replace(split, first=None)]
    balanced = balanced_split(num_layers, plain)
    for candidate in dict.fromkeys([*candidates, *([balanced] if balanced else [])]):
        if is_legal(num_layers, candidate):
            counts = ",".join(str(sum(chunks)) for chunks in stage_layers(num_layers, candidate))
            only = "only " if _flags(candidate) and _flags(split).keys() - _flags(candidate).keys() else ""
            yield f"{only}{_words(candidate) or 'no flag that makes stages unequal'} (stages {counts})", candidate


def _flags(split: PipelineSplit) -> dict[str, str]:
    ends = {flag: str(own) for flag, own in ((FIRST, split.first), (LAST, split.last)) if own is not None}
    return ends | {flag: "true" for flag, on in ((EMBEDDING, split.embedding), (LOSS, split.loss)) if on}


def _words(split: PipelineSplit) -> str:
    return " ".join(f"{flag} {value}" for flag, value in _flags(split).items())


def balanced_split(num_layers: int, plain: PipelineSplit) -> PipelineSplit | None:
    """The cut with this PP and these virtual stages whose largest stage is smallest, or None where there is none.

    Of several, the one whose stages differ least, then the one with fewer layers in the first and the last stage,
    which also hold the embedding and the loss.
    """
    sizes = [None, *range(plain.virtual, num_layers, plain.virtual)]
    largest = -(-num_layers // plain.pipeline) + plain.virtual
    legal = []
    for first in sizes:
        for last in sizes:
            if (first or 0) > largest or (last or 0) > largest:
                continue
            split = replace(plain, first=first, last=last)
            if is_legal(num_layers, split):
                counts = [sum(chunks) for chunks in stage_layers(num_layers, split)]
                legal.append(((max(counts), max(counts) - min(counts), counts[0] + counts[-1], counts[0]), split))
    return min(legal, key=lambda pair: pair[0])[1] if legal else None
