"""Functions about the guards of a run that run inside a rank: plant a fault, run the loop, tell what happened."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from helpers.log_checks import run_facts
from helpers.tiny import Sample
from helpers.train_checks import adam_steps, batch_of, changed, copies, new_trainer
from helpers.training import Cut, Layout

BAD_TOKEN = 125  # a row that holds it is the one at fault


def run_loop(
    model_dir: str,
    save: str,
    layout: Layout,
    batches: list[list[Sample]],
    *,
    cut: Cut = Cut(),  # noqa: B008 (frozen)
    fault: str = "",
    on_ranks: tuple[int, ...] = (0,),
    max_skipped_iters: int = 3,
    **options: Any,
) -> dict[str, Any]:
    """The training loop, real but for its checkpoints, with a fault of `_FAULTS` planted in this rank's model.

    Returns:
        error: the exception's class and text, or "". steps: updates that Adam counted. changed: weights that differ from
        the planted ones. state: (iteration, optimizer_steps, consumed_samples) at the end, None after an error.
        records: rank 0's log. saves: checkpoints that were written. phases: what began, as who watches for hangs is told.
    """
    import torch.distributed as dist

    from mcore_qwen3.errors import McoreQwen3Error
    from mcore_qwen3.runtime.device import cpu
    from mcore_qwen3.train import loop
    from mcore_qwen3.train.log import TrainLog
    from mcore_qwen3.train.schedule import LearningRate, WeightDecay
    from mcore_qwen3.train.state import TrainState

    chunks, optimizer = new_trainer(model_dir, layout, **options)
    active = dist.get_rank() == 0
    log = TrainLog(Path(save), run_facts(len(batches)), 1, active=active, start_iteration=0)
    phases: list[str] = []
    saver = mock.Mock()
    saver.save.side_effect = lambda state, chunks, optimizer: state
    parts = loop.Parts(
        device=cpu(),
        chunks=chunks,
        optimizer=optimizer,
        schedule=LearningRate(lr=1e-3, min_lr=1e-3, style="constant", warmup_iters=0, decay_iters=len(batches)),
        weight_decay=WeightDecay(start=0.1, end=0.1),
        batches=iter([batch_of(rows, cut, layout) for rows in batches]),
        evaluation=None,
        enter=lambda phase, iteration: phases.append(phase),
        saver=saver,
        log=log,
    )
    plan = loop.Plan(
        train_iters=len(batches),
        global_batch_size=len(batches[0]) // cut.pack,
        eval_interval=1000,
        save_interval=1000,
        save_optimizer=True,
        eval_on_start=False,
        max_skipped_iters=max_skipped_iters,
        metric_for_best_model="",
        greater_is_better=False,
    )
    error, state = "", None
    with _FAULTS[fault](chunks, dist.get_rank() in on_ranks):
        before = copies(chunks)
        try:
            state = loop.train(plan, parts, TrainState(), loop.StopRequest())
        except McoreQwen3Error as exc:
            error = f"{type(exc).__name__}: {exc}"
    records = []
    if active:
        records = [json.loads(line) for line in (Path(save) / "train_log.jsonl").read_text().splitlines()]
    return {
        "error": error,
        "steps": adam_steps(optimizer),
        "changed": changed(chunks, before),
        "state": state and (state.iteration, state.optimizer_steps, state.consumed_samples),
        "records": records,
        "saves": saver.save.call_count,
        "phases": phases,
    }


@contextmanager
def _nothing(chunks: Any, mine: bool) -> Iterator[None]:
    yield


@contextmanager
def _bad_weight(chunks: Any, mine: bool) -> Iterator[None]:
    """NaN at [2, 3] of the output projection of this rank's last layer, and in its last norm."""
    if mine:
        inner = _inner(chunks[-1])
        with torch.no_grad():
            layer = inner.decoder.layers[-1]
            layer.self_attention.linear_proj.weight[2, 3] = math.nan
            layer.pre_mlp_layernorm.weight[1] = math.inf
    yield


@contextmanager
def _unseen_bad_weight(chunks: Any, mine: bool) -> Iterator[None]:
    """The embedding of a token that no row has."""
    with torch.no_grad():
        _inner(chunks[0]).embedding.word_embeddings.weight[BAD_TOKEN, 7] = math.inf
    yield


@contextmanager
def _bad_embedding(chunks: Any, mine: bool) -> Iterator[None]:
    """The embedding of a micro-batch with the token is infinite: a bad loss with good weights."""

    def spoil(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * math.inf if (inputs[0] == BAD_TOKEN).any() else output

    yield from _hooked([model.embedding for model in map(_inner, chunks) if model.pre_process], spoil)


def _hooked(modules: list[Any], hook: Callable) -> Iterator[None]:
    def named(module: Any, arguments: Any, keywords: Any, output: Any) -> Any:
        return hook(module, arguments or tuple(keywords.values()), output)

    handles = [module.register_forward_hook(named, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _bad_gradient(chunks: Any, mine: bool) -> Iterator[None]:
    """Behind the layers but the last, a micro-batch with the token gets a gradient of NaN: a good loss."""
    from mcore_qwen3.train import step

    seen: list[bool] = [False]
    real = step.model_inputs

    def note(batch: Any, model: Any) -> Any:
        seen[0] = bool((batch.tokens == BAD_TOKEN).any())
        return real(batch, model)

    def spoil(module: Any, inputs: Any, output: Any) -> Any:
        if seen[0] and output[0].requires_grad:
            output[0].register_hook(lambda gradient: gradient * math.nan)
        return output

    layers = [model.decoder.layers[0] for model in map(_inner, chunks) if model.pre_process]
    with mock.patch.object(step, "model_inputs", note):
        yield from _hooked(layers, spoil)


@contextmanager
def _zero_loss(chunks: Any, mine: bool) -> Iterator[None]:
    """A loss of exactly 0 whose gradient is not."""
    from mcore_qwen3.train import step

    real = step.token_loss

    def zero(loss_mask: torch.Tensor, losses: torch.Tensor) -> Any:
        total, count, _ = real(loss_mask, losses)
        total = total - total.detach()
        return total, count, {"loss": torch.stack([total.detach(), count.to(total.dtype)])}

    with mock.patch.object(step, "token_loss", zero):
        yield


@contextmanager
def _once(chunks: Any, mine: bool) -> Iterator[None]:
    """The reduced gradient of one step is NaN, and no micro-batch gives it again."""
    from mcore_qwen3.train import step

    real = step.forward_backward

    def plant(chunks: Any, batch: Any) -> Any:
        result = real(chunks, batch)
        if (batch.micro_batches[0].tokens == BAD_TOKEN).any():
            chunks[0].buffers[0].grad_data.fill_(math.nan)
        return result

    with mock.patch.object(step, "forward_backward", plant):
        yield


_FAULTS: dict[str, Callable[[Any, bool], Any]] = {
    "": _nothing,
    "bad weight": _bad_weight,
    "unseen bad weight": _unseen_bad_weight,
    "bad loss": _bad_embedding,
    "bad gradient": _bad_gradient,
    "zero loss": _zero_loss,
    "once": _once,
}


def _inner(chunk: Any) -> Any:
    from mcore_qwen3.model.build import unwrapped

    return unwrapped(chunk)


def evaluated(model_dir: str, layout: Layout, batches: list[list[Sample]], **options: Any) -> dict[str, float]:
    """The metrics of an evaluation over the batches, which must not change a weight."""
    from mcore_qwen3.train.evaluation import EvalSums, evaluate_step

    chunks, _ = new_trainer(model_dir, layout, **options)
    before = copies(chunks)
    sums = sum((evaluate_step(chunks, batch_of(rows, Cut(), layout)) for rows in batches), start=EvalSums())
    assert changed(chunks, before) == []
    return sums.metrics()


def likely_tokens(model_dir: str, layout: Layout, logits: list[list[float]]) -> list[int]:
    """What the model takes for the most likely token when each tensor-parallel rank has its own part of the logits."""
    from megatron.core import parallel_state

    chunks, _ = new_trainer(model_dir, layout)
    whole_T1V = torch.tensor(logits)[:, None]
    own = whole_T1V.chunk(layout.tensor, dim=-1)[parallel_state.get_tensor_model_parallel_rank()]
    return _inner(chunks[0]).most_likely_tokens(own).flatten().tolist()


def expert_tokens(model_dir: str, layout: Layout, rows: list[Sample], **options: Any) -> tuple[list[list[int]], float]:
    """Tokens of each layer's experts in one training step, and the largest load."""
    from mcore_qwen3.train.step import train_step

    chunks, optimizer = new_trainer(model_dir, layout, **options)
    result = train_step(chunks, optimizer, batch_of(rows, Cut(), layout), 1e-3)
    assert result.expert_tokens is not None
    return result.expert_tokens.tolist(), result.router["expert_load"]


def parameter_counts(model_dir: str, layout: Layout, *, frozen: str = "", **options: Any) -> tuple[int, int]:
    """(trained, all) parameters, with those whose name contains `frozen` taken out of training."""
    from helpers.training import build

    from mcore_qwen3.train.optimizer import count_parameters

    _, models = build(model_dir, layout, **options)
    for name, parameter in ((name, parameter) for model in models for name, parameter in model.named_parameters()):
        if frozen and frozen in name:
            parameter.requires_grad = False
    return count_parameters(models)


def steps_behind_a_dry_batch(
    model_dir: str, layout: Layout, dry: list[Sample], batches: list[list[Sample]], **options: Any
) -> dict[str, Any]:
    """Two runs of the same steps, one behind a dry batch: whether everything is equal, and what the dry batch ran."""
    from mcore_qwen3.train import dry_batch
    from mcore_qwen3.train.step import train_step

    runs, gradients = [], []
    real = dry_batch.forward_backward

    def spied(chunks: Any, batch: Any) -> Any:
        result = real(chunks, batch)
        gradients.append(float(torch.stack([buffer.grad_data.norm() for buffer in chunks[0].buffers]).norm()))
        return result

    for with_dry in (True, False):
        chunks, optimizer = new_trainer(model_dir, layout, **options)
        before = copies(chunks)
        if with_dry:
            with mock.patch.object(dry_batch, "forward_backward", spied):
                dry_batch.run_dry_batch(chunks, optimizer, batch_of(dry, Cut(), layout))
            assert changed(chunks, before) == []
            assert adam_steps(optimizer) == {0.0}, "the moments are there, and no update counted"
            assert all(not buffer.grad_data.any() for buffer in chunks[0].buffers)
        results = [train_step(chunks, optimizer, batch_of(rows, Cut(), layout), 1e-3) for rows in batches]
        runs.append((copies(chunks), [(one.loss, one.grad_norm, one.router) for one in results], adam_steps(optimizer)))
    (weights, *rest), (wanted, *wanted_rest) = runs
    return {
        "equal": rest == wanted_rest and all(torch.equal(weights[name], wanted[name]) for name in wanted),
        "gradient of the dry batch": gradients[0],
    }


def out_of_memory(model_dir: str, rows: list[Sample], kind: str, micro_batch: int, **options: Any) -> str:
    """The text of the error when a layer asks for more memory than there is."""
    from mcore_qwen3.train.memory import OutOfMemoryError
    from mcore_qwen3.train.step import train_step

    def ask(module: Any, inputs: Any, output: Any) -> Any:
        if kind == "gpu":
            raise torch.OutOfMemoryError("GPU 0 is out of memory. Tried to allocate 2.00 GiB.\nmore lines")
        if kind == "cpu":
            torch.empty(1 << 60, dtype=torch.uint8)
        raise RuntimeError("another fault")

    chunks, optimizer = new_trainer(model_dir, Layout(), **options)
    try:
        for _ in _hooked([_inner(chunks[0]).decoder], ask):
            train_step(chunks, optimizer, batch_of(rows, Cut(micro_batch=micro_batch), Layout()), 1e-3)
    except OutOfMemoryError as error:
        return str(error)
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    return ""


def share_folder(folders: list[str], patience: float) -> str:
    """What each rank is told that was given the folder of its place."""
    import torch.distributed as dist

    from mcore_qwen3.cli import shared_folder
    from mcore_qwen3.errors import ConfigError

    with mock.patch.object(shared_folder, "_PATIENCE", patience):
        try:
            shared_folder.check_shared_folder(Path(folders[dist.get_rank()]))
        except ConfigError as error:
            return str(error)
    return ""


def spikes(losses: list[float]) -> list[tuple[int, float]]:
    """(place, bound) of the losses that are told as spikes."""
    from mcore_qwen3.train.guards import LossSpikes

    guard = LossSpikes()
    bounds = [(place, guard.new(loss)) for place, loss in enumerate(losses)]
    return [(place, bound) for place, bound in bounds if bound is not None]


def dead_experts(tokens: list[list[list[int]]], after: int) -> list[list[tuple[int, int]]]:
    """What is told at each step."""
    from mcore_qwen3.train.guards import DeadExperts

    guard = DeadExperts(after)
    return [guard.new(torch.tensor(step)) for step in tokens]
