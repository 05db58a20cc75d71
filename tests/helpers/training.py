"""Functions that run inside the ranks of a pool: build, step, gather. Results are compared in the test's own process."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.tiny import Sample


@dataclass(frozen=True)
class Layout:
    """Group sizes of a test."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    data: int = 1
    context: int = 1
    virtual: int = 1
    first_stage: int | None = None

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data * self.context

    def __str__(self) -> str:
        names = {
            "tensor": "TP",
            "pipeline": "PP",
            "virtual": "VPP",
            "context": "CP",
            "expert": "EP",
            "expert_tensor": "ETP",
            "data": "DP",
        }
        parts = [f"{short}{getattr(self, name)}" for name, short in names.items() if getattr(self, name) > 1]
        if self.first_stage is not None:
            parts.append(f"first{self.first_stage}")
        return "x".join(parts) or "one"


@dataclass(frozen=True)
class Cut:
    """How the batch is cut: micro-batch size, packs of `pack` samples (1 = no packing)."""

    micro_batch: int = 1
    pack: int = 1


def rows_of(samples: list[Sample], cut: Cut) -> list[list[Sample]]:
    """Samples -> rows; with packing each row holds `pack` samples."""
    return [samples[i : i + cut.pack] for i in range(0, len(samples), cut.pack)]


def step_batch(samples: list[Sample], cut: Cut, data: int, dp_rank: int, context: int, tensor: int) -> Any:
    """This rank's StepBatch of one global batch, by the trainer's own collation."""
    from mcore_qwen3.arch import row_multiple
    from mcore_qwen3.data.batches import StepBatch
    from mcore_qwen3.data.micro_batch import build_micro_batch

    rows = rows_of(samples, cut)
    assert len(rows) % (data * cut.micro_batch) == 0
    each = row_multiple(tensor, tensor > 1, context) if context > 1 else 1
    longest = max(sum(-(-len(sample.ids) // each) * each for sample in row) for row in rows)
    multiple = row_multiple(tensor, True, context) * 2
    length = -(-longest // multiple) * multiple
    count = len(rows) // (data * cut.micro_batch)
    places = np.arange(len(rows)).reshape(count, data, cut.micro_batch)[:, dp_rank]
    micro_batches = [
        build_micro_batch([[(s.ids, s.mask) for s in rows[i]] for i in group], length, 0, each) for group in places
    ]
    trained = sum(int(sample.mask[1:].sum()) for sample in samples)
    tokens = sum(len(sample.ids) for sample in samples)
    squares = sum(len(sample.ids) ** 2 for sample in samples)
    return StepBatch(
        micro_batches, length, places, tokens, trained, tokens, trained, squares, lambda row: [f"rows.jsonl:{row + 1}"]
    )


_started: Any = None


def start_groups(layout: Any) -> None:
    """Megatron's groups for the layout; kept while tests use the same one, since every group costs threads and time."""
    global _started
    from mcore_qwen3.runtime import groups

    if layout == _started:
        return
    if _started is not None:
        _release_models()
        groups.stop_model_parallel()
    groups.start_model_parallel(layout)
    groups.seed_everything(1)
    _started = layout


def _release_models() -> None:
    """Let go of what earlier tests have wrapped, so that the groups' threads end, all of which poll.

    The wrapper's hooks and autograd's nodes hold each other where Python's collector does not see it.
    """
    from megatron.core.distributed import DistributedDataParallel

    for each in gc.get_objects():
        if isinstance(each, DistributedDataParallel):
            vars(each).clear()
    gc.collect()


def build(model_dir: str, layout: Layout, **options: Any) -> tuple[Any, Any]:
    """(layout, this rank's chunks of the model with the weights of `model_dir`)."""
    import torch.distributed as dist

    from mcore_qwen3.arch.layout import resolve_layout
    from mcore_qwen3.arch.shape import read_model_shape
    from mcore_qwen3.converters import open_source
    from mcore_qwen3.model.build import build_chunks
    from mcore_qwen3.model.config import ModelOptions
    from mcore_qwen3.model.weights import read_weights

    shape = read_model_shape(model_dir)
    resolved = resolve_layout(
        dist.get_world_size(),
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
        context=layout.context,
        **_pipeline_extras(layout),
        sequence_parallel=options.pop("sequence_parallel", False),
        pipeline_layout=options.pop("pipeline_layout", None),
        shape=shape,
    )
    start_groups(resolved)
    models = build_chunks(shape, resolved, ModelOptions(**options))
    with open_source(model_dir, shape) as source:
        for model in models:
            read_weights(model, source)
    return resolved, models


def _pipeline_extras(layout: Layout) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    if layout.virtual > 1:
        extras["virtual_pipeline"] = layout.virtual
    if layout.first_stage is not None:
        extras["first_stage_layers"] = layout.first_stage
    return extras


def gather_gradients(chunks: Any) -> list[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
    """This rank's gradients as (key, global shape, global start, values).

    The distributed optimizer leaves each data-parallel rank only its reduced part of the buffer: the parts are gathered.
    """
    import torch.distributed as dist

    from mcore_qwen3.model.build import unwrapped
    from mcore_qwen3.model.pieces import pieces

    for buffer in [buffer for ddp in chunks for buffer in ddp.buffers + ddp.expert_parallel_buffers]:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather(list(bucket.grad_data.chunk(group.size())), own, group=group)
    result = []
    for piece in [piece for ddp in chunks for piece in pieces(unwrapped(ddp)) if piece.parameter.requires_grad]:
        place = piece.global_block(piece.block)
        values = piece.parameter.main_grad[piece.block.slices].reshape(place.sizes).clone()
        result.append((piece.key, piece.global_shape, place.starts, values))
    return result


def run_steps(
    model_dir: str,
    layout: Layout,
    batches: list[list[Sample]],
    cut: Cut,
    *,
    lr: float = 1e-3,
    gradients: bool = True,
    sabotage: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Train on the batches from the files in `model_dir`.

    Returns:
        losses, grad_norms and router numbers by step, and the first step's gradients of this rank.
    """
    from megatron.core import parallel_state

    from mcore_qwen3.train.optimizer import OptimizerSettings, build_optimizer, wrap_for_data_parallel
    from mcore_qwen3.train.step import train_step

    resolved, models = build(model_dir, layout, **options)
    chunks = wrap_for_data_parallel(models)
    if sabotage:
        _sabotage(sabotage, chunks[0])
    optimizer = build_optimizer(chunks, OptimizerSettings(weight_decay=0.1, clip_grad=1.0))
    losses, norms, router, first = [], [], [], []
    for number, samples in enumerate(batches):
        rank = parallel_state.get_data_parallel_rank()
        batch = step_batch(samples, cut, resolved.data, rank, resolved.context, resolved.tensor)
        if number == 0 and gradients:
            first = first_gradients(chunks, optimizer, batch)
        result = train_step(chunks, optimizer, batch, lr)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        router.append(result.router)
    return {"losses": losses, "grad_norms": norms, "router": router, "gradients": first}


def first_gradients(chunks: Any, optimizer: Any, batch: Any) -> list[Any]:
    """Gradients of one batch before any update, gathered."""
    from mcore_qwen3.train.optimizer import zero_gradients
    from mcore_qwen3.train.step import run_schedule, start_routers

    zero_gradients(chunks, optimizer)
    start_routers(batch)
    run_schedule(chunks, batch.micro_batches, forward_only=False)
    return gather_gradients(chunks)


def _sabotage(kind: str, ddp: Any) -> None:
    """Plant a missing all-reduce."""
    if kind == "data":  # gradients are not summed over data-parallel ranks
        ddp.finish_grad_sync = lambda *args, **kwargs: None
        ddp.start_grad_sync = lambda *args, **kwargs: None
    elif kind == "norms":  # partial gradients of replicated weights are not summed over tensor-parallel ranks
        for parameter in ddp.parameters():
            if hasattr(parameter, "sequence_parallel"):
                parameter.sequence_parallel = False
    else:
        raise ValueError(kind)


def logits_of(model_dir: str, sequences: list[list[int]], **options: Any) -> list[torch.Tensor]:
    """Logits of each sequence by the model on one rank, all in one packed row."""
    from mcore_qwen3.model.logits import packed_logits

    _, models = build(model_dir, Layout(), **options)
    return packed_logits(models[0].eval(), sequences)


def assemble(ranks: list[dict[str, Any]], *, atol: float = 0.0) -> dict[str, torch.Tensor]:
    """Put the ranks' pieces together; copies of the same values on several ranks must agree, and nothing may be missing."""
    whole: dict[str, torch.Tensor] = {}
    seen: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for key, shape, starts, values in rank["gradients"]:
            if key not in whole:
                whole[key], seen[key] = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
            place = tuple(slice(start, start + size) for start, size in zip(starts, values.shape, strict=True))
            if seen[key][place].any():
                torch.testing.assert_close(values, whole[key][place], rtol=0, atol=atol, msg=f"copies of {key} differ")
            whole[key][place] = values
            seen[key][place] = True
    for key, filled in seen.items():
        assert filled.all(), f"{key} is not complete"
    return whole


def read_all(model_dir: Path | str) -> dict[str, torch.Tensor]:
    """Every global tensor of a Hugging Face directory under its torch_dist key."""
    from mcore_qwen3.arch.shape import read_model_shape
    from mcore_qwen3.converters import open_source

    with open_source(model_dir, read_model_shape(model_dir)) as source:
        return {key: source.read(key, (slice(None),) * len(entry.shape)) for key, entry in source.entries().items()}


def reference_gradients(model: torch.nn.Module, directory: Path) -> dict[str, torch.Tensor]:
    """The gradients of a transformers model under torch_dist keys: written as if they were weights, then read."""
    weights = {name: parameter.data for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = parameter.grad.clone()
    model.save_pretrained(directory)
    for name, parameter in model.named_parameters():
        parameter.data = weights[name]
    return read_all(directory)


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """max |a - b| / max |b|; zero must meet zero."""
    ours = ours[: reference.shape[0]]  # vocabulary padding
    largest = float(reference.abs().max())
    if largest == 0:
        assert float(ours.abs().max()) == 0
        return 0.0
    return float((ours - reference).abs().max()) / largest
