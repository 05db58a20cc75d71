"""The parts that a training rank is put together from: the resolved run on one side, the packages on the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import ChainedOptimizer

from mcore_qwen3.cli.rank_settings import (
    data_parallel_settings,
    dataset_names,
    freezing,
    model_options,
    optimizer_settings,
    userbuffer_sizes,
)
from mcore_qwen3.cli.resolve import ResolvedRun, train_iters
from mcore_qwen3.config import freezes, to_flat_dict, to_yaml
from mcore_qwen3.converters import (
    OptimizerSource,
    TorchDistSource,
    WeightSource,
    copy_side_files,
    open_source,
    write_hf,
)
from mcore_qwen3.converters.staging import flush_tree
from mcore_qwen3.converters.torch_dist_writer import Chunk, Written, merge_parts, write_common, write_part
from mcore_qwen3.data.batches import StepBatch, eval_batches, largest_batch, train_batches
from mcore_qwen3.data.prepare import Prepared
from mcore_qwen3.data.template import load_tokenizer
from mcore_qwen3.model.build import build_chunks
from mcore_qwen3.model.userbuffers import start_userbuffers
from mcore_qwen3.model.weights import read_weights
from mcore_qwen3.planner.device_peak import peak_tflops
from mcore_qwen3.runtime.device import Device, device_name
from mcore_qwen3.train.checkpoint import CheckpointWriter, SavedTensor
from mcore_qwen3.train.dry_batch import dry_microbatches, run_dry_batch
from mcore_qwen3.train.finite import check_weights
from mcore_qwen3.train.freezing import freeze
from mcore_qwen3.train.loop import largest_memory
from mcore_qwen3.train.optimizer import Chunks, build_optimizer, count_parameters, wrap_for_data_parallel
from mcore_qwen3.train.optimizer_state import read_state
from mcore_qwen3.train.profile import StepProfiler
from mcore_qwen3.train.record import RunFacts
from mcore_qwen3.train.saving import CheckpointSaver
from mcore_qwen3.train.state import TrainState
from mcore_qwen3.train.trackers import Tracker, TrackerSettings, open_tracker

Say = Callable[[str], None]
_Part = tuple[list[Chunk], list[Written]]
"""What a rank has written: its chunks without values, and where they lie."""


def build(run: ResolvedRun, device: Device, say: Say) -> tuple[Chunks, ChainedOptimizer, TrainState]:
    """Model with its weights, optimizer with its state, and where the run stands.

    Raises:
        ConversionError: the checkpoint does not fit the model, or holds what the model has no place for.
        NonFiniteError: a weight of the checkpoint is not finite.
    """
    options = model_options(run, device, say)
    if options.tp_comm_overlap:
        start_userbuffers(**userbuffer_sizes(run))
    models = build_chunks(run.shape, run.layout, options)
    with open_source(run.weights, run.shape) as source:
        for model in models:
            read_weights(model, source)
        _check_all_used(source)
    check_weights(models, "take a checkpoint whose weights are numbers: another --load or --resume")
    if freezes(run.config.optim):
        freeze(models, freezing(run.config))
    trained, total = count_parameters(models)
    say(f"weights: {run.weights}; {trained:,} of {total:,} parameters are trained")
    chunks = wrap_for_data_parallel(models, data_parallel_settings(run.config))
    optimizer = build_optimizer(chunks, optimizer_settings(run.config))
    if run.resume is None:
        return chunks, optimizer, TrainState()
    state = TrainState.read(run.resume.directory)
    if run.resume.directory.parent.resolve() != save_root(run).resolve():  # of another save directory
        state = replace(state, checkpoints=(), best_metric=None, best_iteration=None)
    if run.config.checkpoint.no_load_optim:
        say(f"continuing after step {state.iteration}; the optimizer starts afresh (--no_load_optim true)")
        return chunks, optimizer, replace(state, optimizer_steps=0)  # Adam counts from its zero moments
    with OptimizerSource(run.resume.directory) as moments:
        read_state(models, optimizer, moments, step=state.optimizer_steps, with_master=options.bf16)
    say(f"continuing after step {state.iteration} with the optimizer's state")
    return chunks, optimizer, state


def _check_all_used(source: WeightSource) -> None:
    """Fail on every rank if the ranks together left a tensor of the files unread."""
    gathered: list[set[str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, source.used_tensors)
    source.check_all_used(set().union(*(names for names in gathered if names is not None)))


def save_root(run: ResolvedRun) -> Path:
    """The run's save directory."""
    return Path(str(run.config.checkpoint.save))


def training_batches(run: ResolvedRun, prepared: Prepared, consumed_samples: int) -> Iterator[StepBatch]:
    """This rank's steps from where the run stands."""
    return train_batches(
        prepared,
        run.batch,
        dp_rank=parallel_state.get_data_parallel_rank(),
        consumed_samples=consumed_samples,
        seed=run.config.train.seed,
        num_workers=run.config.data.num_workers,
        datasets=dataset_names(run.config),
    )


def run_facts(run: ResolvedRun, prepared: Prepared, device: Device) -> RunFacts:
    """What the log needs to put a step's numbers in proportion."""
    peak, why = None, "the device is a CPU"
    if device.is_cuda:
        name = device_name(device)
        peak, why = peak_tflops(name), f"the planner's table has no bf16 peak of {name}"
        if not run.config.model.bf16:
            peak, why = None, "peaks are of bf16, the run is fp32"
    return RunFacts(
        shape=run.shape,
        train_iters=train_iters(run.config),
        epoch_rows=prepared.train.rows,
        world_size=run.layout.world_size,
        peak_tflops=peak,
        no_peak_because="" if peak else why,
    )


def open_trackers(run: ResolvedRun, start_iteration: int) -> list[Tracker]:
    """What `--report_to` names, open; rank 0 alone calls this."""
    flags = run.config.tracking
    settings = TrackerSettings(
        save=save_root(run),
        config=to_flat_dict(run.config),
        start_iteration=start_iteration,
        tensorboard_dir=flags.tensorboard_dir,
        wandb_project=flags.wandb_project,
        wandb_exp_name=flags.wandb_exp_name,
        swanlab_project=flags.swanlab_project,
        swanlab_exp_name=flags.swanlab_exp_name,
    )
    return [open_tracker(name, settings) for name in dict.fromkeys(flags.report_to)]


def profiler(run: ResolvedRun, device: Device) -> StepProfiler | None:
    """What traces steps of this rank, None where it is asked for none."""
    flags, rank = run.config.tracking, dist.get_rank()
    if flags.profile_step_start is None or rank not in flags.profile_ranks:
        return None
    last = flags.profile_step_end or flags.profile_step_start
    path = save_root(run) / "profile" / f"rank_{rank}.json.gz"
    return StepProfiler(path, device, flags.profile_step_start, last, lambda text: print(text, flush=True))


def dry_batch(
    run: ResolvedRun, prepared: Prepared, device: Device, chunks: Chunks, optimizer: ChainedOptimizer, say: Say
) -> None:
    """Try the largest shape of the run before its first step, and say what it takes. Collective.

    Raises:
        OutOfMemoryError: it does not fit on some rank.
    """
    batch = largest_batch(prepared, run.batch, num_microbatches=dry_microbatches(run.batch, run.layout))
    run_dry_batch(chunks, optimizer, batch)
    shape = f"{run.batch.micro_batch_size} x {batch.row_length:,} tokens"
    say(f"dry batch of the largest shape, {shape}: {largest_memory(device):.2f} GiB on the fullest rank")


def evaluation(run: ResolvedRun, prepared: Prepared) -> Callable[[], Iterator[StepBatch]] | None:
    """A function that gives the fixed evaluation batches; None without validation data or with `--eval_iters 0`."""
    if prepared.validation is None or run.config.train.eval_iters == 0:
        return None
    rank = parallel_state.get_data_parallel_rank()
    return lambda: eval_batches(prepared, run.batch, dp_rank=rank, eval_iters=run.config.train.eval_iters)


def checkpoint_saver(
    run: ResolvedRun, say: Say, saved: Callable[[int], None] = lambda iteration: None
) -> CheckpointSaver:
    """What writes the run's checkpoints: torch_dist tensors, and the files that make the directory need nothing else."""

    def complete(directory: Path, parts: Sequence[_Part], iteration: int) -> None:
        chunks, written = zip(*parts, strict=True)
        merge_parts(directory, list(chain(*chunks)), list(chain(*written)))
        (directory / "hf").mkdir()
        copy_side_files(run.hf_files, directory / "hf")
        (directory / "run_config.yaml").write_text(to_yaml(run.config), encoding="utf-8")
        write_common(directory, iteration)

    export = partial(_export, run, say) if run.config.checkpoint.save_hf else lambda iteration_dir: None
    return CheckpointSaver(
        save_root(run),
        CheckpointWriter(_write_part, complete, flush_tree, export),
        total_limit=run.config.checkpoint.save_total_limit,
        asynchronous=run.config.checkpoint.async_save,
        say=say,
        saved=saved,
    )


def _write_part(directory: Path, tensors: Sequence[SavedTensor], rank: int) -> _Part:
    chunks = [
        Chunk(each.key, each.global_shape, each.starts, each.sizes, each.values.dtype, partial(_values, each))
        for each in tensors
    ]
    written = write_part(directory, chunks, rank)
    return [Chunk(each.key, each.global_shape, each.starts, each.sizes, each.dtype) for each in chunks], written


def _values(tensor: SavedTensor) -> torch.Tensor:
    return tensor.values


def _export(run: ResolvedRun, say: Say, iteration_dir: Path) -> None:
    """What `--save_hf true` does with each finished checkpoint: `<save>/iter_<n>-hf`."""
    target, sides = iteration_dir.with_name(f"{iteration_dir.name}-hf"), iteration_dir / "hf"
    end = load_tokenizer(sides).end_token_id
    with TorchDistSource(iteration_dir, run.shape) as source:
        report = write_hf(source, target, sides, run.shape, end_token_id=end, overwrite=True)
    say(f"exported {target}: {report.num_tensors} tensors, {report.num_bytes:,} bytes")
    for change in report.changes:
        say(f"  {change}")
