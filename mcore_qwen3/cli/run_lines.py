"""The lines that tell a user what a run is going to be."""

from __future__ import annotations

from mcore_qwen3.arch import count_parameters
from mcore_qwen3.cli.resolve import ResolvedRun


def plan_lines(run: ResolvedRun) -> list[str]:
    """Model, grid, batch, length, where it starts and what was filled in or has no effect: one line each."""
    config, count = run.config, count_parameters(run.shape)
    active = f", {count.active:,} of them active" if run.shape.is_moe else ""
    start = f"weights of {config.model.load}, step 0"
    if run.resume is not None:
        start = f"continues {run.resume.directory} at step {run.resume.iteration}"
    return [
        f"model: {run.shape.model_type}, {count.total:,} parameters{active}; {start}",
        f"ranks: {run.layout.grid_text()}; device {config.launch.device}, {'bf16' if config.model.bf16 else 'fp32'}",
        f"batch: {batch_text(run)}",
        f"steps: {steps_text(run)}; saved to {config.checkpoint.save} every {config.checkpoint.save_interval}",
        *(f"note: {note}" for note in run.notes),
    ]


def steps_text(run: ResolvedRun) -> str:
    """The steps, or the epochs that give them once the data is prepared."""
    iters, epochs = run.config.train.train_iters, run.config.train.num_train_epochs
    return f"{iters:,}" if iters is not None else f"{epochs} x the rows of an epoch, known when they are prepared"


def batch_text(run: ResolvedRun) -> str:
    """The arithmetic of one step: rows, micro-batches, tokens."""
    batch, length = run.batch, run.config.data.max_length
    assert length is not None, "resolve() fills max_length in"
    form = "packed rows" if run.config.data.packing else "rows of at most"
    return (
        f"{batch.global_batch_size} rows a step = micro-batch {batch.micro_batch_size} x DP {batch.data} x "
        f"{batch.num_microbatches} micro-batches; {form} {'of ' if run.config.data.packing else ''}{length:,} tokens; "
        f"{'' if run.config.data.packing else 'at most '}{batch.global_batch_size * length:,} tokens a step"
    )
