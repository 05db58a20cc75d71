"""Functions that run inside ranks: train, save with the trainer's own writer, continue from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from helpers.tiny import Sample
from helpers.training import Cut, Layout, build, step_batch


class GroupStepAdam(torch.optim.Optimizer):
    """AdamW with the state of apex's and transformer-engine's FusedAdam: one `step` number a group, none a parameter."""

    def __init__(self, params: Any, *, lr: float, betas: Any, eps: float, weight_decay: float, **_: Any) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """As torch's AdamW."""
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(parameter))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                root = (state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt_().add_(group["eps"])
                parameter.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - beta1 ** group["step"]))


@contextmanager
def adam_class(name: str) -> Iterator[None]:
    """Make megatron build `torch`'s Adam, or one that keeps its step as `apex` does."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    if name == "torch":
        yield
        return
    with (
        mock.patch.multiple(optimizer, Adam=GroupStepAdam, USING_PYTORCH_OPTIMIZER=False),
        mock.patch.object(distrib_optimizer, "Adam", GroupStepAdam),
    ):
        yield


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
    adam: str = "torch",
    lr: float = 1e-3,
    **options: Any,
) -> dict[str, Any]:
    """Train on `batches[skip:]` from `model_dir`, or from the checkpoint `resume`; save at the end if asked.

    Returns:
        losses and grad norms of the steps, and this rank's weights and moments by key and place, final ones and, of a
        continued run, those it began with.
    """
    from megatron.core import parallel_state

    from mcore_qwen3.arch.shape import read_model_shape
    from mcore_qwen3.converters import OptimizerSource, TorchDistSource
    from mcore_qwen3.model.weights import read_weights
    from mcore_qwen3.train.optimizer import OptimizerSettings, build_optimizer, wrap_for_data_parallel
    from mcore_qwen3.train.optimizer_state import read_state
    from mcore_qwen3.train.state import TrainState
    from mcore_qwen3.train.step import train_step

    resolved, models = build(model_dir, layout, **options)
    if resume:
        with TorchDistSource(resume, read_model_shape(model_dir)) as source:
            for model in models:
                read_weights(model, source)
    chunks = wrap_for_data_parallel(models)
    with adam_class(adam):
        optimizer = build_optimizer(chunks, OptimizerSettings())
    if resume and not drop_moments:
        state = TrainState.read(Path(resume))
        with OptimizerSource(resume) as source:
            read_state(models, optimizer, source, step=state.optimizer_steps, with_master=bool(options.get("bf16")))
    first = _held(models, optimizer) if resume else []
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
    return {"losses": losses, "grad_norms": norms, "gradients": _held(models, optimizer), "first": first}


def _held(models: Any, optimizer: Any) -> list[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
    """Copies of this rank's weights and moments as (key, global shape, place, values)."""
    from mcore_qwen3.train.checkpoint import state_held, weights_held

    return [
        (tensor.key, tensor.global_shape, tensor.starts, tensor.values.detach().float().reshape(tensor.sizes).clone())
        for tensor in [*weights_held(models), *state_held(models, optimizer, with_master=False)]
    ]


def trainers_saver(root: Path, model_dir: str, *, asynchronous: bool = False) -> Any:
    """The command line's own saver."""
    from types import SimpleNamespace

    from mcore_qwen3.arch import find_config_file
    from mcore_qwen3.cli import rank_parts
    from mcore_qwen3.config import RunConfig, with_values

    config = with_values(RunConfig(), {"save": str(root), "async_save": asynchronous})
    run: Any = SimpleNamespace(config=config, hf_files=find_config_file(model_dir).parent)
    return rank_parts.checkpoint_saver(run, lambda text: None)


def written_bytes(model_dir: str, layout: Layout, *, moments: bool, chunk_bytes: int) -> dict[str, Any]:
    """What this rank would write of a fresh model: bytes by rectangle, and the largest one that others hold too."""
    from mcore_qwen3.train import checkpoint
    from mcore_qwen3.train.optimizer import OptimizerSettings, build_optimizer, wrap_for_data_parallel
    from mcore_qwen3.train.shares import Shares

    _, models = build(model_dir, layout, sequence_parallel=layout.tensor > 1)
    optimizer = build_optimizer(wrap_for_data_parallel(models), OptimizerSettings())
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
