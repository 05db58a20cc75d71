"""Functions that run inside ranks for the numbers of known public faults."""

from __future__ import annotations

from typing import Any

import torch
from helpers.tiny import Sample
from helpers.training import Cut, Layout, build, step_batch


def weights_after(
    model_dir: str, layout: Layout, batches: list[list[Sample]], names: tuple[str, ...], **options: Any
) -> dict[str, Any]:
    """Train on the batches; returns the losses and this rank's weights whose names contain one of `names`."""
    from megatron.core import parallel_state

    from mcore_qwen3.train.optimizer import OptimizerSettings, build_optimizer, wrap_for_data_parallel
    from mcore_qwen3.train.step import train_step

    resolved, models = build(model_dir, layout, **options)
    chunks = wrap_for_data_parallel(models)
    optimizer = build_optimizer(chunks, OptimizerSettings())
    losses = []
    for rows in batches:
        rank = parallel_state.get_data_parallel_rank()
        batch = step_batch(rows, Cut(), resolved.data, rank, resolved.context, resolved.tensor)
        losses.append(train_step(chunks, optimizer, batch, 1e-3).loss)
    found = {
        name: parameter.detach().clone()
        for model in models
        for name, parameter in model.named_parameters()
        if any(part in name for part in names)
    }
    return {"losses": losses, "weights": found}


def norm_of_planted_gradients(model_dir: str, layout: Layout, values: list[list[float]]) -> float:
    """The gradient norm when all gradients are zero but the first of rank r's expert gradients, which are `values[r]`."""
    import torch.distributed as dist

    from mcore_qwen3.train.optimizer import OptimizerSettings, build_optimizer, wrap_for_data_parallel, zero_gradients

    _, models = build(model_dir, layout)
    chunks = wrap_for_data_parallel(models)
    optimizer = build_optimizer(chunks, OptimizerSettings())
    zero_gradients(chunks, optimizer)
    planted = torch.tensor(values[dist.get_rank()])
    chunks[0].expert_parallel_buffers[0].grad_data[: len(planted)] = planted
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def vocabulary_parallel_loss(model_dir: str, layout: Layout, logits: list[float], label: int) -> float:
    """The model's loss for one token when each tensor-parallel rank gives its own part of the logits."""
    from megatron.core import parallel_state

    _, models = build(model_dir, layout)
    own = torch.tensor(logits).chunk(layout.tensor)[parallel_state.get_tensor_model_parallel_rank()]
    return float(models[0].compute_language_model_loss(torch.tensor([[label]]), own[None, None].clone()))


def own_logits(model_dir: str, layout: Layout, ids: list[int], **options: Any) -> torch.Tensor:
    """This rank's part of the vocabulary of the logits of one sequence, [T, vocabulary / TP]."""
    from mcore_qwen3.model.context_parallel import PackedRow

    _, models = build(model_dir, layout, **options)
    ends = torch.tensor([0, len(ids)], dtype=torch.int32)
    packed = PackedRow(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=len(ids), max_seqlen_kv=len(ids)
    )
    with torch.no_grad():
        logits = models[0].eval()(torch.tensor([ids]), torch.arange(len(ids))[None], None, packed_seq_params=packed)
    return logits[0].clone()
