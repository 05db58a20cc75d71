"""Functions that run inside ranks: train, save with the trainer's own writer, continue from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers.tiny import Sample
from helpers.training import Cut, Layout, build, step_batch


def train_and_save(
    model_dir: str,
    layout: Layout,
    batches: list[list[Sample]],
    cut: Cut,
    *,
    save: str | None = None,
    resume: str | None = None,
    skip: int = 0,
    drop_moments: bool = False,
    lr: float = 1e-3,
    **options: Any,
) -> dict[str, Any]:
    """Train on `batches[skip:]` from `model_dir`, or from the checkpoint `resume`; save at the end if asked.

    Returns:
        losses and grad norms of the steps, and this rank's final weights and moments by key and place.
    """
    from megatron.core import parallel_state

    from mcore_qwen3.arch.shape import read_model_shape
    from mcore_qwen3.converters import OptimizerSource, TorchDistSource
    from mcore_qwen3.model.weights import read_weights
    from mcore_qwen3.train.checkpoint import state_held, weights_held
    from mcore_qwen3.train.optimizer import AdamSettings, build_optimizer, wrap_for_data_parallel
    from mcore_qwen3.train.optimizer_state import read_state
    from mcore_qwen3.train.state import TrainState
    from mcore_qwen3.train.step import train_step

    resolved, models = build(model_dir, layout, **options)
    if resume:
        with TorchDistSource(resume, read_model_shape(model_dir)) as source:
            for model in models:
                read_weights(model, source)
    chunks = wrap_for_data_parallel(models)
    optimizer = build_optimizer(chunks, AdamSettings())
    if resume and not drop_moments:
        state = TrainState.read(Path(resume))
        with OptimizerSource(resume) as source:
            read_state(models, optimizer, source, step=state.optimizer_steps, with_master=bool(options.get("bf16")))
    losses, norms = [], []
    for samples in batches[skip:]:
        rank = parallel_state.get_data_parallel_rank()
        batch = step_batch(samples, cut, resolved.data, rank, resolved.context, resolved.tensor)
        result = train_step(chunks, optimizer, batch, lr)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    if save:
        done = len(batches)
        saver = trainers_saver(Path(save), model_dir)
        saver.save(TrainState(iteration=done, optimizer_steps=done), chunks, optimizer)
    final = [
        (tensor.key, tensor.global_shape, tensor.starts, tensor.values.detach().float().reshape(tensor.sizes).clone())
        for tensor in [*weights_held(models), *state_held(models, optimizer, with_master=False)]
    ]
    return {"losses": losses, "grad_norms": norms, "gradients": final}


def trainers_saver(root: Path, model_dir: str, *, asynchronous: bool = False) -> Any:
    """The command line's own saver."""
    from types import SimpleNamespace

    from mcore_qwen3.cli import rank_parts
    from mcore_qwen3.config import RunConfig, with_values

    config = with_values(RunConfig(), {"save": str(root), "async_save": asynchronous})
    run: Any = SimpleNamespace(config=config, hf_files=Path(model_dir))
    return rank_parts.checkpoint_saver(run, lambda text: None)


def written_bytes(model_dir: str, layout: Layout, *, moments: bool, chunk_bytes: int) -> dict[str, Any]:
    """What this rank would write of a fresh model: bytes by rectangle, and the largest one that others hold too."""
    from unittest import mock

    from mcore_qwen3.train import checkpoint
    from mcore_qwen3.train.optimizer import AdamSettings, build_optimizer, wrap_for_data_parallel
    from mcore_qwen3.train.shares import Shares

    _, models = build(model_dir, layout, sequence_parallel=layout.tensor > 1)
    optimizer = build_optimizer(wrap_for_data_parallel(models), AdamSettings())
    with mock.patch.object(checkpoint, "_CHUNK_BYTES", chunk_bytes):
        state = checkpoint.state_held(models, optimizer, with_master=False) if moments else []
        weights = checkpoint.weights_held(models)
    own = Shares().own(weights, sum(each.values.nbytes for each in state))
    return {
        "own": {each.place: each.values.nbytes for each in [*own, *state]},
        "held": {each.place: each.values.nbytes for each in weights},
    }


def stored_tensors(iteration_dir: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a torch_dist directory by plain torch, weights and optimizer."""
    from torch.distributed.checkpoint import FileSystemReader, load

    metadata = FileSystemReader(iteration_dir).read_metadata()
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
    }
    load(tensors, storage_reader=FileSystemReader(iteration_dir), no_dist=True)
    return tensors
