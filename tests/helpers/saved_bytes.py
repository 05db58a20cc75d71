"""Functions that run inside a rank: what a forward pass keeps for its backward, and what a model and its optimizer hold."""

from __future__ import annotations

from typing import Any

import torch
from helpers.tiny import Sample
from helpers.training import start_groups

Case = tuple[dict[str, Any], list[list[Sample]]]
"""Fields of ModelOptions, and the samples of each row of a micro-batch."""


def bytes_kept(sizes: dict[str, Any], layout: dict[str, Any], cases: list[Case], length: int) -> list[dict[str, Any]]:
    """Of each case: bytes that the forward of its micro-batch keeps on this rank, and what the router sent here.

    Every storage that autograd packs is counted once, at the size it has when the forward is over; parameters are not.

    Args:
        sizes: fields of ModelShape.
        layout: arguments of resolve_layout.
        cases: options and rows; all in the same groups of ranks, which take longer to start than a case to run.
        length: tokens of a row.

    Returns:
        "bytes"; "received": rows that this rank's experts computed over all layers.
    """
    import torch.distributed as dist

    from mcore_qwen3.arch import ModelShape, resolve_layout

    shape = ModelShape(**sizes)
    resolved = resolve_layout(dist.get_world_size(), shape=shape, **layout)
    start_groups(resolved)
    return [_kept(shape, resolved, options, rows, length) for options, rows in cases]


def _kept(shape: Any, resolved: Any, options: dict[str, Any], rows: list[list[Sample]], length: int) -> dict[str, Any]:
    from megatron.core import parallel_state

    from mcore_qwen3.arch import row_multiple
    from mcore_qwen3.data.micro_batch import build_micro_batch
    from mcore_qwen3.model.build import build_model
    from mcore_qwen3.model.config import ModelOptions
    from mcore_qwen3.model.router import Step, start_step
    from mcore_qwen3.train.step import forward_step

    model = build_model(shape, resolved, ModelOptions(**options)).train()
    generator = torch.Generator().manual_seed(parallel_state.get_pipeline_model_parallel_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    start_step(Step(scale=1.0, replicas=1, row_length=length, rows=len(rows)))
    each = row_multiple(resolved.tensor, resolved.sequence_parallel, resolved.context) if resolved.context > 1 else 1
    batch = build_micro_batch([[(s.ids, s.mask) for s in row] for row in rows], length, 0, each)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept.setdefault(storage._cdata, tensor)  # held, so that no later storage gets its number
        return tensor

    received = 0

    def count(_module: Any, inputs: tuple[Any, ...], _output: Any) -> None:
        nonlocal received
        received += len(inputs[0])

    for module in model.modules():
        if type(module).__name__ in ("GroupedExperts", "SequentialMLP"):
            module.register_forward_hook(count)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output, loss = forward_step(iter([batch]), model)
        total = loss(output)[0]
    del output, total
    return {"bytes": sum(tensor.untyped_storage().nbytes() for tensor in kept.values()), "received": received}


def bytes_held(sizes: dict[str, Any], layout: dict[str, Any], cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each case: bytes of this rank's buffers and optimizer after one update, and its pipeline rank.

    "weights" and "gradients" are the flat buffers, "moments" the optimizer's state, "master" the fp32 copies it works on where they
    are not the weights themselves.

    Args:
        sizes: fields of ModelShape.
        layout: arguments of resolve_layout.
        cases: fields of ModelOptions, and "optimizer" (adam where it lacks); all in the same groups of ranks.
    """
    import torch.distributed as dist

    from mcore_qwen3.arch import ModelShape, resolve_layout

    shape = ModelShape(**sizes)
    resolved = resolve_layout(dist.get_world_size(), shape=shape, **layout)
    start_groups(resolved)
    return [_held(shape, resolved, options) for options in cases]


def _held(shape: Any, resolved: Any, options: dict[str, Any]) -> dict[str, Any]:
    from megatron.core import parallel_state

    from mcore_qwen3.model.build import build_chunks
    from mcore_qwen3.model.config import ModelOptions
    from mcore_qwen3.train.optimizer import OptimizerSettings, build_optimizer, update, wrap_for_data_parallel

    optimizer_name = options.get("optimizer", "adam")
    model_options = {name: value for name, value in options.items() if name != "optimizer"}
    models = build_chunks(shape, resolved, ModelOptions(**model_options))
    with torch.no_grad():
        for parameter in (parameter for model in models for parameter in model.parameters()):
            parameter.fill_(0.1)
    chunks = wrap_for_data_parallel(models)
    optimizer = build_optimizer(chunks, OptimizerSettings(optimizer=optimizer_name))
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        parameter.main_grad.fill_(0.1)
    for chunk in chunks:
        chunk.finish_grad_sync()
    update(optimizer, 1e-3)
    buffers = [buffer for chunk in chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    weights = {parameter.untyped_storage()._cdata for chunk in chunks for parameter in chunk.parameters()}
    moments = master = 0
    for part in optimizer.chained_optimizers:
        for parameter, state in part.optimizer.state.items():
            moments += sum(value.nbytes for name, value in state.items() if name != "step")
            master += 0 if parameter.untyped_storage()._cdata in weights else parameter.nbytes
    return {
        "weights": sum(buffer.param_data.nbytes for buffer in buffers),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "moments": moments,
        "master": master,
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
    }


def most_in_flight(
    sizes: dict[str, Any], layout: dict[str, Any], micro_batches: list[list[list[Sample]]], length: int
) -> list[int]:
    """Micro-batches of each chunk that this rank's schedule held between forward and backward, at its fullest moment."""
    import torch.distributed as dist

    from mcore_qwen3.arch import ModelShape, resolve_layout
    from mcore_qwen3.data.micro_batch import build_micro_batch
    from mcore_qwen3.model.build import build_chunks
    from mcore_qwen3.model.config import ModelOptions
    from mcore_qwen3.train.optimizer import wrap_for_data_parallel
    from mcore_qwen3.train.step import run_schedule

    shape = ModelShape(**sizes)
    resolved = resolve_layout(dist.get_world_size(), shape=shape, **layout)
    start_groups(resolved)
    chunks = wrap_for_data_parallel(build_chunks(shape, resolved, ModelOptions()))
    with torch.no_grad():
        for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
            parameter.fill_(0.1)
    held, fullest = [0] * len(chunks), [0] * len(chunks)

    def watch(number: int, output: torch.Tensor) -> None:
        held[number] += 1
        if sum(held) > sum(fullest):
            fullest[:] = held

        def leave(_gradients: Any) -> None:
            held[number] -= 1

        assert output.grad_fn is not None
        output.grad_fn.register_prehook(leave)

    for number, chunk in enumerate(chunks):
        chunk.register_forward_hook(lambda _module, _inputs, output, number=number: watch(number, output))
    batches = [build_micro_batch([[(s.ids, s.mask) for s in row] for row in rows], length, 0) for rows in micro_batches]
    run_schedule(chunks, batches, forward_only=False)
    assert held == [0] * len(chunks), "a backward was not seen"
    return fullest
