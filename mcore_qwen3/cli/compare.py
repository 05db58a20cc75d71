"""``megatron compare``: the first steps of a training run, here and in a plain transformers loop, on the same packs."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_qwen3.arch import ModelShape, count_parameters, read_model_shape
from mcore_qwen3.cli.convert_logits import available_memory
from mcore_qwen3.cli.hub_model import find_model
from mcore_qwen3.cli.resolve import MODEL_VARIABLE, ResolvedRun, resolve, train_iters, with_steps, with_weights
from mcore_qwen3.cli.run_lines import batch_text
from mcore_qwen3.cli.sft import check_weights, limits, progress_on_screen, usable_gpus
from mcore_qwen3.config import (
    COMPARE,
    CompareConfig,
    Parsed,
    ParsedRun,
    compared_run,
    idle_flags,
    parse_command,
)
from mcore_qwen3.data.sources import check_entries
from mcore_qwen3.errors import ConfigError
from mcore_qwen3.launch import Company, LaunchPlan, StopSignals, is_rank, resolve_environment, started_now
from mcore_qwen3.launch import run as run_ranks

if TYPE_CHECKING:  # it imports torch
    from mcore_qwen3.data.prepare import Prepared

EXIT_DIFFERENT = 1
# The folder in which the ranks leave what they have for the parent process.
FOLDER_VARIABLE = "MCORE_QWEN3_COMPARE"
# fp32: weights, gradients and Adam's two moments, and a copy of our weights and gradients to compare with.
_BYTES_A_PARAMETER = 24


def run(argv: list[str]) -> int:
    """The words after ``megatron compare`` -> 0 where the two agree, 1 where they differ."""
    began = started_now()
    parsed = parse_command(argv, COMPARE)
    if parsed.config.launch.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything imports torch, here and in the ranks
    training = training_run(parsed)
    if is_rank(os.environ):
        from mcore_qwen3.cli.compare_rank import run_rank

        return run_rank(training, parsed.config.plain.steps)
    with StopSignals() as signals:
        with signals.ending_at_once(training.config.train.exit_code_on_signal):
            job = _prepare(parsed, training)
        if job is None:
            return 0
        plan, resolved, prepared, hf = job
        # Gone before the plain loop starts, which may be stopped at any time: what is read of the files stays mapped.
        with tempfile.TemporaryDirectory(prefix="megatron-compare-") as folder:
            environment = began | _environment(resolved, prepared, folder)
            words = ["-m", "mcore_qwen3", "compare", *argv]
            code = run_ranks(plan, words, limits(training.config), signals, extra_env=environment, company=Company())
            if code != 0:
                return code
            from mcore_qwen3.cli.compare_loops import compare_loops, read_ranks

            ranks = read_ranks(Path(folder))
    return 0 if compare_loops(parsed.config, resolved, prepared, hf, ranks) else EXIT_DIFFERENT


def training_run(parsed: Parsed[CompareConfig]) -> ParsedRun:
    """The training run that is compared, as if it had been given on its own."""
    explicit = parsed.explicit - {"hf"} | {"load"}
    idle = idle_flags(parsed.explicit)
    notes = list(parsed.notes)
    if idle:
        named = ", ".join(f"--{name}" for name in idle)
        notes.append(f"no effect in a comparison, which is in fp32 and saves nothing: {named}")
    return Parsed(
        command="pt" if parsed.config.plain.raw_text else "sft",
        config=compared_run(parsed.config),
        explicit=explicit - set(idle),
        notes=tuple(notes),
    )


def _environment(run: ResolvedRun, prepared: Prepared, folder: str) -> dict[str, str]:
    from mcore_qwen3.cli.prepare import PREPARED_VARIABLE

    return {
        PREPARED_VARIABLE: str(prepared.path),
        MODEL_VARIABLE: str(run.model.directory),
        FOLDER_VARIABLE: folder,
    }


def _prepare(
    parsed: Parsed[CompareConfig], training: ParsedRun
) -> tuple[LaunchPlan, ResolvedRun, Prepared, Path] | None:
    """All that comes before the ranks; None for a dry run."""
    gpus, platform = usable_gpus(training.config), training.config.launch.platform
    plan = resolve_environment(os.environ, gpus=gpus, platform=platform)
    if plan.nnodes > 1:
        raise ConfigError("megatron compare runs on one node", seen=f"NNODES={plan.nnodes}", fix="NNODES=1")
    run = resolve(training, plan.world_size)
    hf = find_model(str(parsed.config.plain.hf), run.config.data.use_hf)
    check_entries((*run.config.data.dataset, *run.config.data.val_dataset))
    hf_shape = read_model_shape(hf.directory)
    _say([*_head(parsed.config, run, hf_shape), *(f"note: {note}" for note in (*run.notes, *hf.note))])
    _check_models(run.shape, hf_shape)
    if run.config.launch.dry_run:
        _say(["dry run: nothing was started"])
        return None
    _check_memory(run)
    from mcore_qwen3.cli.prepare import prepare_data

    run = with_weights(run)
    check_weights(run)
    plain_directory = hf.with_weights().directory
    check_hf(plain_directory)
    with progress_on_screen():
        prepared = prepare_data(run)
    run = with_steps(run, prepared.train.rows)
    if train_iters(run.config) < parsed.config.plain.steps:
        raise ConfigError(
            "a run has at least the steps that are compared",
            seen=f"{train_iters(run.config)} steps of its epochs, --steps {parsed.config.plain.steps}",
            fix=f"--steps {train_iters(run.config)} or less",
        )
    _say(prepared.report)
    return plan, run, prepared, plain_directory


def _head(config: CompareConfig, run: ResolvedRun, hf_shape: ModelShape) -> list[str]:
    """What is compared with what."""
    count = count_parameters(run.shape).total
    lines = [
        f"megatron: {run.model.name} ({run.shape.model_type}, {count:,} parameters), {run.layout.grid_text()}",
        f"plain loop: {config.plain.hf} by transformers, torch's optimizer, one process, after the ranks have ended",
        f"both: fp32, device {run.config.launch.device}, {config.plain.steps} steps; {batch_text(run)}",
        *differing_settings(run.shape, hf_shape),
    ]
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        weight = getattr(run.config.model, name)
        if run.shape.is_moe and weight:
            lines.append(
                f"--{name} {weight} is in megatron's gradients alone: transformers defines its balance loss otherwise and "
                "has no z loss, so gradient norms, and losses after the first, differ by it"
            )
    return lines


def differing_settings(ours: ModelShape, theirs: ModelShape) -> list[str]:
    """A line for each setting of config.json that the two models do not share."""
    return [
        f"config.json: {name} is {getattr(ours, name)} in --load and {getattr(theirs, name)} in --hf"
        for name in (each.name for each in dataclasses.fields(ModelShape))
        if name != "torch_dtype" and getattr(ours, name) != getattr(theirs, name)
    ]


def _check_models(ours: ModelShape, theirs: ModelShape) -> None:
    from mcore_qwen3.converters.verify import check_same_model

    check_same_model(ours, theirs)
    theirs.check_router()


def check_hf(directory: Path) -> None:
    """Refuse what transformers cannot read.

    Raises:
        ConfigError: it is no Hugging Face directory.
    """
    from mcore_qwen3.converters import is_hf_dir

    if not is_hf_dir(directory):
        raise ConfigError(
            "--hf is a Hugging Face directory, for transformers",
            seen=str(directory),
            fix="convert mcore2hf, or the directory that --load was converted from",
        )


def _check_memory(run: ResolvedRun) -> None:
    """Before the ranks start: they hold about as much together as this process does after them."""
    needed, available = _BYTES_A_PARAMETER * count_parameters(run.shape).total, available_memory()
    if needed > available:
        raise ConfigError(
            "a comparison holds the model, its gradients and Adam's moments in fp32, and copies of the first two",
            seen=f"{needed:,} bytes needed ({_BYTES_A_PARAMETER} a parameter), {available:,} available",
            fix="a machine with more memory, or a model cut to fewer layers: the same code runs",
        )


def _say(lines: list[str] | tuple[str, ...]) -> None:
    print("\n".join(lines), flush=True)
