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
    from mcore_qwen3.converters.staging import flush_tree
    from mcore_qwen3.converters.torch_dist_writer import Chunk, write_chunks, write_common
    from mcore_qwen3.model.weights import read_weights
    from mcore_qwen3.train.checkpoint import CheckpointWriter, save_checkpoint, tensors_to_save
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
        writer = CheckpointWriter(
            lambda directory, tensors: write_chunks(
                directory,
                [
                    Chunk(t.key, t.global_shape, t.starts, t.sizes, t.values.dtype, lambda t=t: t.values)
                    for t in tensors
                ],
            ),
            write_common,
            flush_tree,
        )
        done = len(batches)
        save_checkpoint(Path(save), TrainState(iteration=done, optimizer_steps=done), chunks, optimizer, writer)
    final = [
        (tensor.key, tensor.global_shape, tensor.starts, tensor.values.detach().float().reshape(tensor.sizes).clone())
        for tensor in tensors_to_save(models, optimizer, with_master=False)
    ]
    return {"losses": losses, "grad_norms": norms, "gradients": final}


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
