"""How the ranks of a job share a model: the two grids (dense and expert) over the same ranks, and the rules they obey.

A dense parameter lives on the grid TP x CP x DP x PP, an expert on expert-TP x EP x expert-DP x PP. Ranks are numbered
in Megatron's order "tp-cp-ep-dp-pp": the first axis changes fastest, and both grids cut the pipeline stages alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mcore_qwen3.arch.layout_rules import Degrees, broken_rule, check_positive
from mcore_qwen3.arch.layout_string import FLAG as LAYOUT_FLAG
from mcore_qwen3.arch.layout_string import layout_stages
from mcore_qwen3.arch.pipeline import stage_layers
from mcore_qwen3.arch.shape import ModelShape
from mcore_qwen3.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCoordinates:
    """The place of one rank on both grids; each counts from 0."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert_tensor: int
    expert: int
    expert_data: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """The sizes of all groups of ranks. Made by `resolve_layout`, which checks them.

    `data` counts the ranks that see different rows; `expert_data` counts the copies of one expert. `stages` holds the
    number of layers of each [pipeline rank][model chunk]; every rank has `virtual_pipeline` chunks. `first_stage_layers`
    and `last_stage_layers` are the user's numbers for those ranks (all chunks together) or None; `account_for_embedding`
    and `account_for_loss` count one layer each for them; `pipeline_layout` is Megatron's string for all of it. `notes` says in plain sentences what was filled in or switched
    for the user.
    """

    world_size: int
    tensor: int
    pipeline: int
    context: int = 1
    expert: int
    expert_tensor: int
    data: int
    expert_data: int
    sequence_parallel: bool
    is_moe: bool
    stages: tuple[tuple[int, ...], ...]
    virtual_pipeline: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    account_for_embedding: bool = False
    account_for_loss: bool = False
    pipeline_layout: str | None = None
    notes: tuple[str, ...] = ()

    def grid_text(self) -> str:
        """All group sizes in one line."""
        text = (
            f"world size {self.world_size} = TP {self.tensor} x CP {self.context} x DP {self.data} x PP {self.pipeline}"
        )
        if self.is_moe:
            text += (
                f"; experts = expert-TP {self.expert_tensor} x EP {self.expert} x expert-DP {self.expert_data}"
                f" x PP {self.pipeline}"
            )
        return text + f"; sequence parallel {'on' if self.sequence_parallel else 'off'}"

    def chunk_layers(self, pp_rank: int, chunk: int) -> range:
        """The layers of one model chunk, counted from 0 over the whole model.

        The model runs through chunk 0 of every pipeline rank, then through chunk 1 of every rank, and so on.

        Args:
            pp_rank: pipeline rank, 0 to PP - 1.
            chunk: 0 to virtual_pipeline - 1.
        """
        earlier = sum(stage[number] for stage in self.stages for number in range(chunk))
        first = earlier + sum(stage[chunk] for stage in self.stages[:pp_rank])
        return range(first, first + self.stages[pp_rank][chunk])

    def stages_text(self) -> str:
        """Layers of each pipeline rank, such as "23, 24, 24, 23", or with chunks "2+2, 2+2"."""
        return ", ".join("+".join(map(str, chunks)) for chunks in self.stages)

    def coordinates(self, rank: int) -> RankCoordinates:
        """Where a rank stands on both grids.

        Args:
            rank: global rank, 0 to world_size - 1.
        """
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is not in a world of {self.world_size}")
        stage, place = divmod(rank, self.world_size // self.pipeline)
        return RankCoordinates(
            tensor=place % self.tensor,
            context=place // self.tensor % self.context,
            data=place // (self.tensor * self.context),
            pipeline=stage,
            expert_tensor=place % self.expert_tensor,
            expert=place // self.expert_tensor % self.expert,
            expert_data=place // (self.expert_tensor * self.expert),
        )


def resolve_layout(
    world_size: int,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    expert: int = 1,
    expert_tensor: int | None = None,
    context: int = 1,
    sequence_parallel: bool = False,
    virtual_pipeline: int = 1,
    first_stage_layers: int | None = None,
    last_stage_layers: int | None = None,
    account_for_embedding: bool = False,
    account_for_loss: bool = False,
    pipeline_layout: str | None = None,
    shape: ModelShape,
) -> ParallelLayout:
    """The layout for a number of ranks, with what the user left open filled in.

    Args:
        world_size: number of ranks.
        tensor: TP size.
        pipeline: PP size.
        expert: EP size.
        expert_tensor: TP size inside an expert; None is 1 (Megatron itself would take TP).
        context: CP size.
        sequence_parallel: switched on for a MoE model with TP above 1 (Megatron cannot train it otherwise) and off
            at TP 1, where it has no meaning; `notes` says so.
        virtual_pipeline: model chunks of each pipeline rank (interleaved schedule).
        first_stage_layers: layers of the first pipeline rank, all chunks together; None: as many as the others.
        last_stage_layers: the same for the last one.
        account_for_embedding: count the embedding as one layer of the first stage.
        account_for_loss: count the loss as one layer of the last stage.
        pipeline_layout: Megatron's string for all chunks, instead of the four above and of virtual_pipeline.
        shape: the model.

    Raises:
        ConfigError: a rule is broken; the message has the grid and the nearest values that obey every rule.
    """
    given: tuple[tuple[int, ...], ...] = ()
    if pipeline_layout is not None:
        given = _given_stages(pipeline_layout, pipeline, virtual_pipeline, shape)
        virtual_pipeline = len(given[0])
    degrees = Degrees(
        world_size=world_size, tensor=tensor, pipeline=pipeline, context=context, expert=expert,
        expert_tensor=1 if expert_tensor is None else expert_tensor, virtual_pipeline=virtual_pipeline,
        first_stage_layers=first_stage_layers, last_stage_layers=last_stage_layers,
        account_for_embedding=account_for_embedding, account_for_loss=account_for_loss, given_stages=given,
    )  # fmt: skip
    check_positive(degrees)
    broken = broken_rule(degrees, shape)
    if broken is not None:
        raise broken
    return ParallelLayout(
        world_size=world_size,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert,
        expert_tensor=degrees.expert_tensor,
        data=world_size // degrees.dense_product,
        expert_data=world_size // degrees.expert_product,
        sequence_parallel=tensor > 1 and (sequence_parallel or shape.is_moe),
        is_moe=shape.is_moe,
        stages=stage_layers(shape.num_layers, degrees.split),
        virtual_pipeline=virtual_pipeline,
        first_stage_layers=first_stage_layers,
        last_stage_layers=last_stage_layers,
        account_for_embedding=account_for_embedding,
        account_for_loss=account_for_loss,
        pipeline_layout=pipeline_layout,
        notes=tuple(_notes(degrees, shape, sequence_parallel, expert_tensor_is_open=expert_tensor is None)),
    )


def _given_stages(text: str, pipeline: int, virtual: int, shape: ModelShape) -> tuple[tuple[int, ...], ...]:
    """Layers of each [stage][chunk] by a layout string, for virtual stages that are left open (1) or the same."""
    given = layout_stages(text, pipeline, shape.num_layers)
    if virtual not in (1, len(given[0])):
        raise ConfigError(
            "a pipeline layout and the virtual stages must agree",
            seen=f"{LAYOUT_FLAG} {text}: {len(given[0])} chunks a stage, {virtual} virtual stages",
            fix="drop --virtual_pipeline_model_parallel_size",
        )
    return given


def _notes(
    degrees: Degrees, shape: ModelShape, sequence_parallel: bool, *, expert_tensor_is_open: bool
) -> Iterator[str]:
    """What was filled in or switched for the user."""
    if shape.is_moe and expert_tensor_is_open:
        yield "expert_tensor_parallel_size is not set: 1 is taken"
    if shape.is_moe and degrees.tensor > 1 and not sequence_parallel:
        yield "sequence_parallel is switched on: a MoE model with TP above 1 cannot be trained without it"
    if sequence_parallel and degrees.tensor == 1:
        yield "sequence_parallel is switched off: it has no meaning at TP 1"
    if degrees.pipeline == 1 and (degrees.account_for_embedding or degrees.account_for_loss):
        yield "account_for_embedding and account_for_loss have no effect at PP 1: one stage holds all layers"
