"""What a continued run has in common with the run that wrote the checkpoint, and what it changes. No torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from mcore_qwen3.arch import ModelShape, read_model_shape
from mcore_qwen3.config import RunConfig, to_flat_dict, with_values
from mcore_qwen3.config.optim import OptimFlags
from mcore_qwen3.config.yaml_file import read_flat_yaml
from mcore_qwen3.errors import ConfigError

# Megatron's scheduler keeps these in its checkpoints.
SCHEDULE = ("lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "lr_warmup_fraction", "weight_decay")
# Likewise; a checkpoint that does not have them was written when there was nothing but their defaults.
_LATER = (
    *("lr_warmup_init", "lr_wsd_decay_iters", "lr_wsd_decay_style"),
    *("start_weight_decay", "end_weight_decay", "weight_decay_incr_style"),
)
_TOLD = (
    *(field.name for field in dataclasses.fields(OptimFlags)),
    *("global_batch_size", "seed", "dataset", "max_length", "packing", "moe_aux_loss_coeff"),
)
_TOKENS = ("tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json", "tokenizer.model")
_TEMPLATES = ("tokenizer_config.json", "chat_template.jinja", "chat_template.json")


def check_same_model(shape: ModelShape, hf_files: Path, iteration: Path) -> list[str]:
    """Refuse to continue a checkpoint with another model or other token ids than it was trained with.

    Args:
        shape: of this run's model.
        hf_files: its config.json and tokenizer.
        iteration: the checkpoint; what it lacks under ``hf/`` is not compared.

    Returns:
        What to say about a changed chat template.

    Raises:
        ConfigError: the model or the tokenizer differs.
    """
    stored = iteration / "hf"
    if (stored / "config.json").is_file():
        other = dataclasses.asdict(read_model_shape(stored))
        ours = dataclasses.asdict(shape)
        differing = [f"{name} {other[name]} there, {ours[name]} here" for name in ours if ours[name] != other[name]]
        if differing:
            raise ConfigError(
                "a run is continued with the model that it began with",
                seen=f"{stored}: {'; '.join(differing[:3])}",
                fix="--load of the same model, --resume never to start again, or another --save",
            )
    changed = _changed_files(_TOKENS, hf_files, stored)
    if changed:
        raise ConfigError(
            "a run is continued with the tokenizer that it began with: other ids mean other words",
            seen=f"{', '.join(changed)} in {hf_files} and in {stored} differ",
            fix="put the first tokenizer back, --resume never to start again, or another --save",
        )
    return [
        f"{name} in {hf_files} is not the one that {iteration.name} was trained with; the new one is used"
        for name in _changed_files(_TEMPLATES, hf_files, stored)
    ]


def _changed_files(names: tuple[str, ...], ours: Path, stored: Path) -> list[str]:
    """Files that are in both folders and differ."""
    both = [name for name in names if (ours / name).is_file() and (stored / name).is_file()]
    return [name for name in both if (ours / name).read_bytes() != (stored / name).read_bytes()]


def with_saved_schedule(config: RunConfig, iteration: Path) -> RunConfig:
    """The config with learning rate, schedule and weight decay of the run that wrote the checkpoint.

    Raises:
        ConfigError: the checkpoint does not say what they were.
    """
    saved = _saved_settings(iteration)
    missing = [name for name in SCHEDULE if name not in saved]
    if missing:
        raise ConfigError(
            "--use_checkpoint_opt_param_scheduler needs a checkpoint that holds the schedule",
            seen=f"no {', '.join(missing)} in {iteration / 'run_config.yaml'}",
            fix="give the schedule with this run's flags",
        )
    defaults = to_flat_dict(RunConfig())
    later = {name: saved.get(name, defaults[name]) for name in _LATER}
    return with_values(config, later | {name: saved[name] for name in SCHEDULE})


def check_same_optimizer(config: RunConfig, iteration: Path) -> None:
    """Refuse to continue another optimizer's state.

    Raises:
        ConfigError: the checkpoint was written by another optimizer, and its state is to be read.
    """
    saved = _saved_settings(iteration).get("optimizer", "adam")
    if saved != config.optim.optimizer and not config.checkpoint.no_load_optim:
        raise ConfigError(
            "a run is continued with the optimizer that it began with",
            seen=f"{saved} in {iteration}, --optimizer {config.optim.optimizer} here",
            fix=f"--optimizer {saved}, or --no_load_optim true to start the new one afresh",
        )


def changed_settings(config: RunConfig, iteration: Path) -> list[str]:
    """One line for each setting that changes what is learned and that this run has otherwise than the checkpoint's."""
    saved, ours = _saved_settings(iteration), to_flat_dict(config)
    return [
        f"{name} is {_shown(ours[name])}, in the run to continue it was {_shown(saved[name])}: {_shown(ours[name])} is used"
        for name in _TOLD
        if name in saved and ours[name] is not None and ours[name] != saved[name]
    ]


def _saved_settings(iteration: Path) -> dict[str, Any]:
    file = iteration / "run_config.yaml"
    return read_flat_yaml(str(file)) if file.is_file() else {}


def _shown(value: object) -> str:
    return " ".join(map(str, value)) or "empty" if isinstance(value, list) else str(value)
