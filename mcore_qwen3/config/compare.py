"""Settings of `megatron compare`, which trains a few steps twice: here, and in a plain transformers loop."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from mcore_qwen3.config.checks import check
from mcore_qwen3.config.flags import flag
from mcore_qwen3.config.optim import freezes
from mcore_qwen3.config.run import RunConfig, iter_flags, with_values
from mcore_qwen3.errors import ConfigError

EXIT_STOPPED = 130  # what a shell returns for SIGINT: nothing was compared
_DEFAULTS = {each.name: each.default for each in iter_flags()}
# Of a training run's flags, those that have no part in a comparison in fp32 that saves and tells nothing.
_IDLE = frozenset(
    {each.name for each in iter_flags() if each.section in ("checkpoint", "tracking", "numerics")}
    - {"overlap_grad_reduce", "overlap_param_gather", "moe_flex_dispatcher_backend"}
    | {"bf16", "eval_on_start", "max_skipped_iters", "log_interval", "exit_duration_in_mins", "exit_code_on_signal"}
    | {"max_restarts", "step_timeout"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainLoopFlags:
    """Comparison: the plain loop, and how near the two have to be. All other flags are those of the training run."""

    hf: str | None = flag(None, "Hugging Face directory that transformers reads, or a hub's OWNER/NAME")
    steps: int = flag(20, "steps to compare, the first ones of the run", at_least=1)
    raw_text: bool = flag(False, "the rows are raw text, as for megatron pt; false: chat rows, as for megatron sft")
    loss_tolerance: float = flag(1e-4, "largest relative difference of a step's loss that passes", at_least=0)
    grad_norm_tolerance: float = flag(1e-3, "likewise of a step's gradient norm", at_least=0)
    tensor_tolerance: float = flag(
        1e-3, "a tensor of the first step differs where the largest difference / the largest value is above", at_least=0
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareConfig(RunConfig):
    """Settings of `megatron compare`: all of a run, and its own."""

    plain: PlainLoopFlags = field(default_factory=PlainLoopFlags)


def compared_run(config: CompareConfig) -> RunConfig:
    """The training run that is compared: in fp32, and nothing is saved, continued or started again."""
    run = RunConfig(**{section.name: getattr(config, section.name) for section in fields(RunConfig)})
    values: dict[str, Any] = {name: _DEFAULTS[name] for name in _IDLE}
    values |= {
        "load": config.model.load or config.plain.hf,
        "bf16": False,
        "exit_code_on_signal": EXIT_STOPPED,
        "save": "nothing is saved",
        "resume": "never",
    }
    if config.train.train_iters is None and config.train.num_train_epochs is None:
        values["train_iters"] = config.plain.steps
    return with_values(run, values)


def idle_flags(explicit: frozenset[str]) -> list[str]:
    """Those of the flags that the user set that do nothing in a comparison."""
    return sorted(explicit & _IDLE)


def check_compare(config: CompareConfig) -> None:
    """Raise ConfigError for the first broken rule."""
    if not config.plain.hf:
        raise ConfigError(
            "megatron compare needs --hf", fix="name the Hugging Face directory that the plain loop reads"
        )
    if config.model.moe_expert_capacity_factor is not None:
        raise ConfigError(
            "the plain loop drops no token",
            seen=f"--moe_expert_capacity_factor {config.model.moe_expert_capacity_factor}",
            fix="compare without it",
        )
    if config.optim.lr_mult or freezes(config.optim):
        raise ConfigError(
            "the plain loop trains every parameter at one rate",
            seen="--lr_mult, or parameters that are frozen",
            fix="compare without them",
        )
    run = compared_run(config)
    iters = run.train.train_iters
    if iters is not None and iters < config.plain.steps:
        raise ConfigError(
            "a run has at least the steps that are compared",
            seen=f"--train_iters {iters}, --steps {config.plain.steps}",
            fix=f"--steps {iters} or less",
        )
    check(run, "compare")
