"""A parsed command line and a number of ranks -> the run with nothing left open. Shared by parent, dry run and ranks.

No torch. The same flags, environment and files give the same answer in each process.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_qwen3.arch import (
    BatchPlan,
    ModelShape,
    ParallelLayout,
    find_config_file,
    read_model_shape,
    resolve_batch,
    resolve_layout,
)
from mcore_qwen3.cli.continued import changed_settings, check_same_model, check_same_optimizer, with_saved_schedule
from mcore_qwen3.cli.hub_model import NamedModel, find_model
from mcore_qwen3.cli.moe_checks import check_moe
from mcore_qwen3.cli.numerics_checks import check_numerics_device
from mcore_qwen3.cli.resume import ResumePoint, check_optimizer_state, find_resume_point
from mcore_qwen3.cli.tracking_checks import check_trackers
from mcore_qwen3.config import Facts, ParsedRun, RunConfig, check_schedule, flags_without_effect, freezes, with_values
from mcore_qwen3.errors import ConfigError
from mcore_qwen3.launch import count_gpus

# The directory in which the parent process found a hub's model, for its ranks: they need not ask the hub once more each.
MODEL_VARIABLE = "MCORE_QWEN3_MODEL"


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedRun:
    """Everything that is known before torch is imported.

    ``config`` has every field filled in but these: ``transformer_impl`` stays ``auto`` (a rank chooses, and says why),
    and ``recompute_*``, ``lr_warmup_fraction``, the pipeline's virtual stages and uneven ends, ``moe_z_loss_coeff`` and
    ``moe_expert_capacity_factor`` stay None where they are not in use.
    ``vocab_size`` is the model's own, without padding. ``model`` is what ``--load`` names, a hub's still without its
    weights; ``hf_files`` holds config.json and the tokenizer.
    ``resume`` is the checkpoint to continue. ``notes`` are lines to print once.
    """

    command: str
    config: RunConfig
    shape: ModelShape
    layout: ParallelLayout
    batch: BatchPlan
    model: NamedModel
    hf_files: Path
    resume: ResumePoint | None
    notes: tuple[str, ...]

    @property
    def weights(self) -> Path:
        """Where the weights are read from: the checkpoint to continue, else ``--load``."""
        return self.model.directory if self.resume is None else self.resume.directory

    @property
    def finished(self) -> bool:
        """Whether the checkpoint to continue already has all steps of this run."""
        iters = self.config.train.train_iters
        return self.resume is not None and iters is not None and self.resume.iteration >= iters


def with_steps(run: ResolvedRun, rows: int) -> ResolvedRun:
    """The run with its steps filled in where epochs give them: every one of the `rows` is seen at least so often.

    Raises:
        ConfigError: the schedule does not fit the steps.
    """
    epochs = run.config.train.num_train_epochs
    if epochs is None:
        return run
    iters = -(-rows * epochs // run.batch.global_batch_size)
    decay = run.config.optim.lr_decay_iters or iters
    config = with_values(run.config, {"train_iters": iters, "num_train_epochs": None, "lr_decay_iters": decay})
    check_schedule(config)
    return dataclasses.replace(run, config=config)


def with_weights(run: ResolvedRun) -> ResolvedRun:
    """The run with the weights that it reads fetched, where a hub has them.

    Raises:
        ConfigError: the hub cannot be reached.
    """
    return run if run.resume is not None else dataclasses.replace(run, model=run.model.with_weights())


def train_iters(config: RunConfig) -> int:
    """Steps of the whole run; parsing has refused a command without them and epochs."""
    assert config.train.train_iters is not None
    return config.train.train_iters


def resolve_device(config: RunConfig, environ: Mapping[str, str]) -> str:
    """``cpu`` or ``cuda``. A dry run may plan for GPUs that this machine does not have.

    Raises:
        ConfigError: ``--device cuda`` where no GPU is seen.
    """
    gpus = count_gpus(environ)
    if config.launch.device == "cuda" and not gpus and not config.launch.dry_run:
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        seen = "no GPU" if visible is None else f"CUDA_VISIBLE_DEVICES={visible}"
        raise ConfigError("--device cuda needs an NVIDIA GPU", seen=seen, fix="--device cpu, or auto")
    if config.launch.device == "auto":
        return "cuda" if gpus else "cpu"
    return config.launch.device


def resolve(parsed: ParsedRun, world_size: int, environ: Mapping[str, str] = os.environ) -> ResolvedRun:
    """Fill in what the user left open and check what needs the model, the number of ranks, or earlier files.

    Args:
        parsed: the command line.
        world_size: ranks of the job.
        environ: the environment, for the device and the cache folder.

    Raises:
        ConfigError: a rule between flags, model, ranks and files is broken.
    """
    config = parsed.config
    given = environ.get(MODEL_VARIABLE)
    name = str(config.model.load)
    model = NamedModel(name, Path(given)) if given else find_model(name, config.data.use_hf)
    hf_files, shape = find_config_file(model.directory).parent, read_model_shape(model.directory)
    layout = layout_of(config, world_size, shape)
    batch = resolve_batch(
        config.train.micro_batch_size,
        config.train.global_batch_size,
        layout.data,
        pipeline=layout.pipeline,
        virtual_pipeline=layout.virtual_pipeline,
    )
    device = resolve_device(config, environ)
    _check_transformer_impl(config, device)
    check_moe(config, shape, layout, device)
    check_trackers(config, world_size)
    check_numerics_device(config, shape, layout, device)
    filled, notes = _fill(parsed, shape, layout, device, environ)
    resume = find_resume_point(filled, environ)
    if resume is not None:
        if config.checkpoint.use_checkpoint_opt_param_scheduler:
            filled = with_saved_schedule(filled, resume.directory)
        notes += check_same_model(shape, hf_files, resume.directory)
        notes += changed_settings(filled, resume.directory)
    facts = Facts(
        is_moe=shape.is_moe,
        has_mlp=not all(shape.moe_layers),
        device=device,
        resumes=resume is not None,
        reads_load=resume is None or resume.from_load,
        raw_text=parsed.command == "pt",
        evaluates=bool(filled.data.val_dataset) or filled.data.split_dataset_ratio > 0,
    )
    run = ResolvedRun(
        command=parsed.command,
        config=filled,
        shape=shape,
        layout=layout,
        batch=batch,
        model=model,
        hf_files=hf_files,
        resume=resume,
        notes=(
            *parsed.notes,
            *model.note,
            *layout.notes,
            *notes,
            *flags_without_effect(config, parsed.explicit, facts),
        ),
    )
    if resume is not None and not run.finished:
        check_same_optimizer(filled, resume.directory)
        check_optimizer_state(filled, resume)
    return run


def layout_of(config: RunConfig, world_size: int, shape: ModelShape) -> ParallelLayout:
    """The layout that a run's flags name for a number of ranks; ConfigError where it breaks a rule."""
    parallel = config.parallel
    return resolve_layout(
        world_size,
        tensor=parallel.tensor_model_parallel_size,
        pipeline=parallel.pipeline_model_parallel_size,
        expert=parallel.expert_model_parallel_size,
        expert_tensor=parallel.expert_tensor_parallel_size,
        context=parallel.context_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        virtual_pipeline=parallel.virtual_pipeline_model_parallel_size or 1,
        first_stage_layers=parallel.decoder_first_pipeline_num_layers,
        last_stage_layers=parallel.decoder_last_pipeline_num_layers,
        account_for_embedding=parallel.account_for_embedding_in_pipeline_split,
        account_for_loss=parallel.account_for_loss_in_pipeline_split,
        pipeline_layout=parallel.pipeline_model_parallel_layout,
        shape=shape,
    )


def _fill(
    parsed: ParsedRun, shape: ModelShape, layout: ParallelLayout, device: str, environ: Mapping[str, str]
) -> tuple[RunConfig, list[str]]:
    """(the config with what was open filled in, what to say about it)."""
    config, notes = parsed.config, []
    values: dict[str, Any] = {
        "device": device,
        "bf16": device == "cuda" if config.model.bf16 is None else config.model.bf16,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "sequence_parallel": layout.sequence_parallel,
        "max_length": _max_length(config, shape),
        "eval_interval": config.train.eval_interval or config.checkpoint.save_interval,
        "lr_decay_iters": config.optim.lr_decay_iters or config.train.train_iters,
        "save": config.checkpoint.save or f"megatron_output/{Path(str(config.model.load)).resolve().name}",
        "data_cache_path": config.data.data_cache_path or default_cache(environ),
    }
    if config.checkpoint.save is None:
        notes.append(f"save is not set: {values['save']} is taken")
    if config.model.recompute_granularity == "full":
        values["recompute_method"] = config.model.recompute_method or "uniform"
        values["recompute_num_layers"] = config.model.recompute_num_layers or 1
        for name in ("recompute_method", "recompute_num_layers"):
            if name not in parsed.explicit:
                notes.append(f"{name} is not set: {values[name]} is taken")
    if config.launch.dry_run and freezes(config.optim):
        notes.append("some parameters are frozen: the state that is counted below takes all of them for trained")
    if config.model.moe_shared_expert_overlap:
        values["moe_shared_expert_overlap"] = False  # accepted, and said to do nothing: Qwen3 has no shared expert
    ratio, note = _split_ratio(parsed)
    values["split_dataset_ratio"] = ratio
    return with_values(config, values), [*notes, *note]


def _split_ratio(parsed: ParsedRun) -> tuple[float, list[str]]:
    """(share of the training rows split off, what to say): own validation files are never mixed with training rows."""
    config = parsed.config
    if config.data.val_dataset:
        return 0.0, []
    asked = parsed.explicit & {"eval_iters", "eval_interval"} and config.train.eval_iters != 0
    if asked and "split_dataset_ratio" not in parsed.explicit:
        return 0.01, ["no validation data: split_dataset_ratio 0.01 is taken, 1 % of the training rows"]
    return config.data.split_dataset_ratio, []


def _check_transformer_impl(config: RunConfig, device: str) -> None:
    if device == "cpu" and config.model.transformer_impl == "transformer_engine":
        raise ConfigError(
            "transformer_engine modules run on a GPU only",
            seen="--transformer_impl transformer_engine, device cpu",
            fix="--transformer_impl torch, or auto",
        )


def _max_length(config: RunConfig, shape: ModelShape) -> int:
    limit = shape.max_sequence_length
    if config.data.max_length is not None and config.data.max_length > limit:
        yarn = "" if shape.rope_scaling is None else f", YaRN reaches {limit}"
        raise ConfigError(
            "max_length must not be above the model's max_position_embeddings, or what YaRN stretches them to",
            seen=f"--max_length {config.data.max_length}, max_position_embeddings {shape.max_position_embeddings}{yarn}",
            fix=f"--max_length {limit} or less",
        )
    return config.data.max_length or shape.max_position_embeddings


def default_cache(environ: Mapping[str, str] = os.environ) -> str:
    """``mcore_qwen3/data`` in the user's cache folder, by the XDG base directory rule: a relative path is ignored."""
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = Path.home() / ".cache"
    return str(base / "mcore_qwen3" / "data")
