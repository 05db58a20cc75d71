"""Training with options of the optimizer, the wrapper and what is frozen, run inside a rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helpers.resuming import _held, trainers_saver
from helpers.tiny import Sample
from helpers.training import Cut, Layout, build, gather_gradients, step_batch


def train_with(
    model_dir: str,
    layout: Layout,
    batches: list[list[Sample]],
    *,
    rates: Sequence[float],
    decays: Sequence[float | None] | None = None,
    settings: dict[str, Any] | None = None,
    wrapping: dict[str, Any] | None = None,
    frozen: dict[str, Any] | None = None,
    save: str | None = None,
    resume: str | None = None,
    skip: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Steps `skip`, ... on the batches with the learning rate and weight decay of each; from a checkpoint if given.

    Returns:
        losses, grad_norms; "gradients": weights and optimizer state of this rank at the end, by key and place; "first": the
        reduced gradients of the first step, of trained parameters; "count": (trained, all) parameters; "groups": by group
        of the optimizer: its values on this rank.
    """
    from megatron.core import parallel_state

    from mcore_qwen3.arch.shape import read_model_shape
    from mcore_qwen3.converters import OptimizerSource, TorchDistSource
    from mcore_qwen3.model.weights import read_weights
    from mcore_qwen3.train.freezing import Freezing, freeze
    from mcore_qwen3.train.optimizer import (
        DataParallelSettings,
        OptimizerSettings,
        build_optimizer,
        count_parameters,
        gather_parameters,
        wrap_for_data_parallel,
    )
    from mcore_qwen3.train.optimizer_state import ensure_state, read_state
    from mcore_qwen3.train.state import TrainState
    from mcore_qwen3.train.step import train_step

    resolved, models = build(model_dir, layout, **options)
    if resume:
        with TorchDistSource(resume, read_model_shape(model_dir)) as source:
            for model in models:
                read_weights(model, source)
    if frozen:
        freeze(models, Freezing(**frozen))
    chunks = wrap_for_data_parallel(models, DataParallelSettings(**(wrapping or {})))
    optimizer = build_optimizer(chunks, OptimizerSettings(**(settings or {})))
    if resume:
        with OptimizerSource(resume) as source:
            state = TrainState.read(Path(resume))
            read_state(models, optimizer, source, step=state.optimizer_steps, with_master=bool(options.get("bf16")))
    ensure_state(optimizer)  # as the dry batch before every run does
    losses, norms = [], []
    for number, samples in list(enumerate(batches))[skip:]:
        rank = parallel_state.get_data_parallel_rank()
        batch = step_batch(samples, Cut(), resolved.data, rank, resolved.context, resolved.tensor)
        decay = None if decays is None else decays[number]
        result = train_step(chunks, optimizer, batch, rates[number], decay)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    gather_parameters(chunks)
    if save:
        done = len(batches)
        trainers_saver(Path(save), model_dir).save(TrainState(iteration=done, optimizer_steps=done), chunks, optimizer)
    held = _held(models, optimizer)
    return {
        "losses": losses,
        "grad_norms": norms,
        "gradients": held,
        "count": count_parameters(models),
        "groups": [sum(p.numel() for p in group["params"]) for group in optimizer.param_groups],
    }


def trained_gradients(
    model_dir: str, layout: Layout, rows: list[Sample], frozen: dict[str, Any], **options: Any
) -> Any:
    """(gradients of the trained parameters by key and place, names of the frozen ones) of one batch."""
    from megatron.core import parallel_state

    from mcore_qwen3.train.freezing import Freezing, freeze
    from mcore_qwen3.train.optimizer import OptimizerSettings, build_optimizer, wrap_for_data_parallel, zero_gradients
    from mcore_qwen3.train.step import run_schedule, start_routers

    resolved, models = build(model_dir, layout, **options)
    freeze(models, Freezing(**frozen))
    chunks = wrap_for_data_parallel(models)
    optimizer = build_optimizer(chunks, OptimizerSettings())
    rank = parallel_state.get_data_parallel_rank()
    batch = step_batch(rows, Cut(), resolved.data, rank, resolved.context, resolved.tensor)
    zero_gradients(chunks, optimizer)
    start_routers(batch)
    run_schedule(chunks, batch.micro_batches, forward_only=False)
    return {"gradients": gather_gradients(chunks)}


def losses_by_dataset(model_dir: str, layout: Layout, rows: list[Sample], of: list[int], **options: Any) -> Any:
    """(the step's loss, that of each data set): sample n is of data set `of[n]`; "c" has none, "b" may have none."""
    from dataclasses import replace

    import torch
    from megatron.core import parallel_state

    from mcore_qwen3.train.optimizer import OptimizerSettings, build_optimizer, wrap_for_data_parallel
    from mcore_qwen3.train.step import train_step

    resolved, models = build(model_dir, layout, **options)
    chunks = wrap_for_data_parallel(models)
    rank = parallel_state.get_data_parallel_rank()
    batch = step_batch(rows, Cut(), resolved.data, rank, resolved.context, resolved.tensor)
    marked = [
        replace(each, datasets=torch.full_like(each.tokens, of[number]))
        for each, number in zip(batch.micro_batches, batch.rows.flatten().tolist(), strict=True)
    ]
    batch = replace(batch, micro_batches=marked, datasets=("a", "b", "c"))
    result = train_step(chunks, build_optimizer(chunks, OptimizerSettings()), batch, 0.0)
    return result.loss, result.dataset_losses


def names_in_the_model(model_dir: str, layout: Layout, **options: Any) -> dict[str, int]:
    """Names of this rank's parameters and their sizes in the whole model."""
    from mcore_qwen3.model.names import parameter_names, parameter_sizes

    _, models = build(model_dir, layout, **options)
    sizes = parameter_sizes(models)
    assert set(parameter_names(models).values()) == set(sizes)
    return sizes


def refusal(model_dir: str, **wanted: Any) -> str:
    """What is refused about frozen parameters (`frozen`) or learning rates (`factors`)."""
    from mcore_qwen3.errors import ConfigError
    from mcore_qwen3.train.freezing import Freezing, freeze, learning_rate_factors

    _, models = build(model_dir, Layout())
    try:
        if "frozen" in wanted:
            freeze(models, Freezing(**wanted["frozen"]))
        else:
            learning_rate_factors(models, wanted["factors"])
    except ConfigError as error:
        return str(error)
    return ""
