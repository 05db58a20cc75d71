"""The optimizer, its schedules, what is trained, and what its state is kept in."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from mcore_qwen3.config.flags import flag
from mcore_qwen3.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimFlags:
    """Optimizer: AdamW or SGD, the schedules of learning rate and weight decay, and what is trained."""

    optimizer: str = flag("adam", "adam (AdamW) or sgd", choices=("adam", "sgd"))
    lr: float = flag(1e-5, "highest learning rate", at_least=0)
    min_lr: float = flag(0.0, "learning rate at the end of the decay", at_least=0)
    lr_decay_style: str = flag(
        "cosine",
        "form of the decay after the warm-up; WSD: stable at lr until the last lr_wsd_decay_iters",
        choices=("cosine", "linear", "constant", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = flag(None, "step at which min_lr is reached; unset: train_iters", at_least=1)
    lr_warmup_iters: int = flag(0, "steps over which lr rises from lr_warmup_init", at_least=0)
    lr_warmup_fraction: float | None = flag(
        None, "warm-up as a share of lr_decay_iters, instead of lr_warmup_iters", at_least=0, below=1
    )
    lr_warmup_init: float = flag(0.0, "learning rate of the first step of a warm-up", at_least=0)
    lr_wsd_decay_iters: int | None = flag(None, "with WSD: steps at the end in which the rate falls", at_least=1)
    lr_wsd_decay_style: str = flag(
        "exponential",
        "with WSD: form of that fall",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_mult: tuple[str, ...] = flag(
        (),
        "PATTERN=FACTOR, several allowed: parameters whose names match (*, ?) learn at FACTOR times the rate, such as "
        "'*.router.weight=0.1'",
    )
    weight_decay: float = flag(0.1, "decoupled weight decay of matrices (with sgd: added to the gradient)", at_least=0)
    start_weight_decay: float | None = flag(None, "weight decay of the first step, with an incr_style", at_least=0)
    end_weight_decay: float | None = flag(None, "weight decay of the last step, with an incr_style", at_least=0)
    weight_decay_incr_style: str = flag(
        "constant",
        "how weight decay goes from start to end over train_iters; constant: weight_decay throughout",
        choices=("constant", "linear", "cosine"),
    )
    adam_beta1: float = flag(0.9, "decay of the first moment", at_least=0, below=1)
    adam_beta2: float = flag(0.95, "decay of the second moment", at_least=0, below=1)
    adam_eps: float = flag(1e-8, "added to the root of the second moment", at_least=0)
    sgd_momentum: float = flag(0.9, "with sgd: decay of the momentum; 0: none is kept", at_least=0, below=1)
    clip_grad: float = flag(1.0, "largest gradient norm; 0: no clipping", at_least=0)
    freeze_parameters: tuple[str, ...] = flag((), "beginnings of the names of parameters that stay as they are")
    freeze_parameters_regex: str | None = flag(None, "regular expression found in the names of such parameters")
    freeze_parameters_ratio: float = flag(
        0.0, "share of all parameters that stay as they are, from the embedding up", at_least=0, below=1
    )
    trainable_parameters: tuple[str, ...] = flag((), "beginnings of the names of parameters trained all the same")
    trainable_parameters_regex: str | None = flag(None, "regular expression found in the names of such parameters")


def check_optim(optim: OptimFlags) -> None:
    """Raise ConfigError for rules between optimizer flags; what needs the number of steps is in `check_schedule`."""
    learning_rate_factors(optim)
    if optim.lr < optim.min_lr or optim.lr < optim.lr_warmup_init:
        raise ConfigError(
            "lr must not be below min_lr or lr_warmup_init",
            seen=f"--lr {optim.lr} --min_lr {optim.min_lr} --lr_warmup_init {optim.lr_warmup_init}",
        )
    if optim.lr_decay_style == "WSD" and optim.lr_wsd_decay_iters is None:
        raise ConfigError(
            "WSD needs the number of steps in which the rate falls",
            seen="--lr_decay_style WSD, lr_wsd_decay_iters unset",
            fix="--lr_wsd_decay_iters, a tenth of train_iters as a start",
        )
    _check_weight_decay(optim)
    for name in ("freeze_parameters_regex", "trainable_parameters_regex"):
        try:
            re.compile(getattr(optim, name) or "")
        except re.error as error:
            raise ConfigError(
                f"{name} is a regular expression of Python's", seen=f"{getattr(optim, name)}: {error}"
            ) from None


def _check_weight_decay(optim: OptimFlags) -> None:
    start, end, style = optim.start_weight_decay, optim.end_weight_decay, optim.weight_decay_incr_style
    shown = f"--weight_decay_incr_style {style}, start {start}, end {end}"
    if style == "constant" and (start is not None or end is not None):
        raise ConfigError(
            "start_weight_decay and end_weight_decay belong to a weight decay that changes",
            seen=shown,
            fix="--weight_decay_incr_style linear or cosine, or --weight_decay alone",
        )
    if style != "constant" and (start is None or end is None or end < start):
        raise ConfigError(
            "a weight decay that rises needs a start and an end that is not lower",
            seen=shown,
            fix="give --start_weight_decay and --end_weight_decay",
        )


def freezes(optim: OptimFlags) -> bool:
    """Whether some parameters are to stay as they are."""
    return bool(optim.freeze_parameters or optim.freeze_parameters_regex or optim.freeze_parameters_ratio)


def learning_rate_factors(optim: OptimFlags) -> dict[str, float]:
    """Pattern -> factor, of `lr_mult`.

    Raises:
        ConfigError: not PATTERN=FACTOR, or a factor that is below 0 or no number.
    """
    factors = {}
    for text in optim.lr_mult:
        pattern, _, number = text.rpartition("=")
        try:
            factor = float(number)
        except ValueError:
            factor = math.nan
        if not pattern or not 0 <= factor < math.inf or pattern in factors:
            raise ConfigError(
                "lr_mult is PATTERN=FACTOR, each pattern once and no factor below 0",
                seen=text,
                fix="--lr_mult 'embedding.*=0.1'",
            )
        factors[pattern] = factor
    return factors
