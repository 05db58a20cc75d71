"""Rules between flags that need nothing but their values."""

from __future__ import annotations

from mcore_qwen3.config.data import check_data
from mcore_qwen3.config.numerics import check_numerics
from mcore_qwen3.config.optim import check_optim
from mcore_qwen3.config.run import RunConfig
from mcore_qwen3.config.tracking import check_tracking
from mcore_qwen3.errors import ConfigError

_REQUIRED = {"load": "a checkpoint", "dataset": "at least one file of training rows"}


def check(config: RunConfig, command: str) -> None:
    """Raise ConfigError for the first broken rule; limits of single values are checked when they are read."""
    given = {"load": config.model.load, "dataset": config.data.dataset}
    for name, meaning in _REQUIRED.items():
        if not given[name]:
            raise ConfigError(f"megatron {command} needs --{name}", fix=f"name {meaning} with --{name}")
    check_data(config.data, raw_text=command == "pt")
    _check_length(config, command)
    check_schedule(config)
    _check_capacity(config)
    _check_best(config)
    _check_restarts(config)
    check_tracking(config.tracking)
    check_numerics(config.numerics, config.optim)
    if config.model.recompute_granularity == "selective" and not config.model.recompute_modules:
        raise ConfigError("selective recompute needs a module", seen="recompute_modules is empty", fix="name core_attn")


def warmup_iters(config: RunConfig) -> int:
    """Steps of the warm-up: lr_warmup_iters, or lr_warmup_fraction of lr_decay_iters (rounded down)."""
    fraction = config.optim.lr_warmup_fraction
    return config.optim.lr_warmup_iters if fraction is None else int(fraction * decay_iters(config))


def decay_iters(config: RunConfig) -> int:
    """Step at which min_lr is reached: lr_decay_iters, or train_iters where that is unset."""
    iters = config.optim.lr_decay_iters or config.train.train_iters
    assert iters is not None, "check() requires train_iters, or epochs have given it"
    return iters


def greater_is_better(config: RunConfig) -> bool:
    """How metric_for_best_model is compared: as asked for, else accuracy upwards, loss and perplexity downwards."""
    asked = config.checkpoint.greater_is_better
    return config.checkpoint.metric_for_best_model == "token_acc" if asked is None else asked


def _check_best(config: RunConfig) -> None:
    """Checkpoints can be compared only where each one has an evaluation of its own step."""
    every, saved = config.train.eval_interval, config.checkpoint.save_interval
    if config.checkpoint.metric_for_best_model is not None and every is not None and saved % every:
        raise ConfigError(
            "metric_for_best_model needs an evaluation at the step of every checkpoint",
            seen=f"--save_interval {saved}, --eval_interval {every}",
            fix="make save_interval a multiple of eval_interval, or leave eval_interval out",
        )


def _check_length(config: RunConfig, command: str) -> None:
    iters, epochs = config.train.train_iters, config.train.num_train_epochs
    if iters is None and epochs is None:
        raise ConfigError(
            f"megatron {command} needs --train_iters or --num_train_epochs",
            fix="name the steps to train, or the epochs",
        )
    if iters is not None and epochs is not None:
        raise ConfigError(
            "the length of a run is given in steps or in epochs",
            seen=f"--train_iters {iters} --num_train_epochs {epochs}",
            fix="drop one of the two",
        )


def check_schedule(config: RunConfig) -> None:
    """Raise ConfigError for a schedule that cannot be; where epochs give the steps, once more when they are known."""
    optim = config.optim
    check_optim(optim)
    if optim.lr_warmup_fraction is not None and optim.lr_warmup_iters:
        raise ConfigError(
            "the warm-up is given either in steps or as a fraction",
            seen=f"--lr_warmup_iters {optim.lr_warmup_iters} --lr_warmup_fraction {optim.lr_warmup_fraction}",
            fix="drop one of the two",
        )
    # Megatron's OptimizerParamScheduler asserts the same once the model is built.
    if optim.lr_decay_iters is None and config.train.train_iters is None:
        return
    warmup, decay = warmup_iters(config), decay_iters(config)
    if warmup >= decay:
        source = "train_iters" if optim.lr_decay_iters in (None, config.train.train_iters) else "lr_decay_iters"
        raise ConfigError(
            "the warm-up must be shorter than the decay",
            seen=f"--lr_warmup_iters {warmup}, {source} {decay}",
            fix=f"--lr_warmup_iters {decay - 1} or less, or a larger --{source}",
        )
    if optim.lr_decay_style == "WSD" and (optim.lr_wsd_decay_iters or 0) > decay - warmup:
        raise ConfigError(
            "the fall at the end of WSD must be no longer than what the warm-up leaves",
            seen=f"--lr_wsd_decay_iters {optim.lr_wsd_decay_iters}, {warmup} steps of warm-up, decay ends at {decay}",
            fix=f"--lr_wsd_decay_iters {decay - warmup} or less",
        )


def _check_restarts(config: RunConfig) -> None:
    if config.launch.max_restarts and config.checkpoint.no_save_optim and not config.checkpoint.no_load_optim:
        raise ConfigError(
            "a restart continues from a checkpoint, which needs the optimizer state",
            seen=f"--max_restarts {config.launch.max_restarts} --no_save_optim true",
            fix="drop one of the two, or add --no_load_optim true to go on with moments at zero",
        )


def _check_capacity(config: RunConfig) -> None:
    factor = config.model.moe_expert_capacity_factor
    if factor is not None and factor <= 0:
        raise ConfigError(
            "moe_expert_capacity_factor must be above 0",
            seen=f"--moe_expert_capacity_factor {factor}",
            fix="a factor of 1 or more keeps an even share; leave it out to drop nothing",
        )
    if config.model.moe_pad_expert_input_to_capacity and factor is None:
        raise ConfigError(
            "moe_pad_expert_input_to_capacity needs a capacity",
            seen="--moe_pad_expert_input_to_capacity true, moe_expert_capacity_factor unset",
            fix="add --moe_expert_capacity_factor, or drop --moe_pad_expert_input_to_capacity",
        )
