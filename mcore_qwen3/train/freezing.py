"""Which parameters are trained, and which have a learning rate of their own: patterns over their names in the model."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mcore_qwen3.errors import ConfigError
from mcore_qwen3.model.build import Qwen3Model
from mcore_qwen3.model.names import parameter_names, parameter_sizes

_SHOWN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Freezing:
    """Names as the flags; prefixes and regular expressions are of parameter names in the whole model."""

    freeze_parameters: tuple[str, ...] = ()
    freeze_parameters_regex: str | None = None
    freeze_parameters_ratio: float = 0.0
    trainable_parameters: tuple[str, ...] = ()
    trainable_parameters_regex: str | None = None


def freeze(models: Sequence[Qwen3Model], freezing: Freezing) -> None:
    """Take the gradient from the parameters to freeze, before the model is wrapped. Collective.

    First the ratio, then prefixes and expression freeze; then what is to be trained after all is given back.

    Raises:
        ConfigError: on every rank: a pattern that no parameter has, or nothing is left to train.
    """
    sizes = _sizes_of_all(models)
    frozen = _lowest(sizes, freezing.freeze_parameters_ratio)
    frozen |= _matching(sizes, "freeze_parameters", freezing.freeze_parameters, str.startswith)
    frozen |= _matching(sizes, "freeze_parameters_regex", _one(freezing.freeze_parameters_regex), _found)
    frozen -= _matching(sizes, "trainable_parameters", freezing.trainable_parameters, str.startswith)
    frozen -= _matching(sizes, "trainable_parameters_regex", _one(freezing.trainable_parameters_regex), _found)
    if len(frozen) == len(sizes):
        raise ConfigError("some parameter must be trained", seen="all are frozen", fix="freeze less")
    for parameter, name in parameter_names(models).items():
        parameter.requires_grad = name not in frozen
    for model in models:
        model.partly_frozen = True
        config = model.config
        # What is computed again in backward gets no gradient for its weights unless its input wants one, and a pipeline
        # stage has to send one back. Else nothing below the lowest trained layer is gone through backwards.
        if config.recompute_granularity is not None or config.pipeline_model_parallel_size > 1:
            _let_gradients_through(model)


def _let_gradients_through(model: Qwen3Model) -> None:
    """Make the output of the model's embedding, where this part has it, ask for a gradient."""
    embedding = getattr(model, "embedding", None)
    if embedding is not None:
        embedding.register_forward_hook(
            lambda module, inputs, output: output.requires_grad_() if torch.is_grad_enabled() else output
        )


def learning_rate_factors(
    models: Sequence[Qwen3Model], factors: Mapping[str, float]
) -> dict[torch.nn.Parameter, float]:
    """The factor of each parameter of this rank that a pattern (`*`, `?`, `[...]`) names. Collective.

    Raises:
        ConfigError: on every rank: a pattern that no parameter has, or two with different factors for one parameter.
    """
    if not factors:
        return {}
    sizes = _sizes_of_all(models)
    found: dict[str, tuple[str, float]] = {}
    for pattern, factor in factors.items():
        for name in sorted(_matching(sizes, "lr_mult", (pattern,), fnmatch.fnmatchcase)):
            earlier = found.setdefault(name, (pattern, factor))
            if earlier[1] != factor:
                raise ConfigError(
                    "a parameter has one learning rate",
                    seen=f"--lr_mult {earlier[0]}={earlier[1]} and {pattern}={factor} for {name}",
                    fix="patterns that share no parameter",
                )
    return {parameter: found[name][1] for parameter, name in parameter_names(models).items() if name in found}


def _one(pattern: str | None) -> tuple[str, ...]:
    return () if pattern is None else (pattern,)


def _found(name: str, pattern: str) -> bool:
    return re.search(pattern, name) is not None


def _matching(
    names: Iterable[str], flag: str, patterns: Sequence[str], matches: Callable[[str, str], bool]
) -> set[str]:
    found = set()
    for pattern in patterns:
        hits = {name for name in names if matches(name, pattern)}
        if not hits:
            shown = [re.sub(r"\.\d+\.", ".0.", name) for name in names]
            raise ConfigError(
                f"what {flag} names must be a parameter of the model",
                seen=pattern,
                fix=f"names such as {', '.join(list(dict.fromkeys(shown))[:_SHOWN])}",
            )
        found |= hits
    return found


def _sizes_of_all(models: Sequence[Qwen3Model]) -> dict[str, int]:
    """Name -> values of every parameter of the whole model, from the embedding up."""
    gathered: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, parameter_sizes(models))
    everyone = {name: size for sizes in gathered for name, size in sizes.items()}
    return dict(sorted(everyone.items(), key=lambda item: _height(item[0])))


def _height(name: str) -> tuple[int, int, str]:
    """Place in the model: embedding, layers by number, final norm, output layer."""
    layer = re.match(r"decoder\.layers\.(\d+)\.", name)
    if layer:
        return 1, int(layer[1]), name
    return (0 if name.startswith("embedding.") else 2), 0, name


def _lowest(sizes: Mapping[str, int], ratio: float) -> set[str]:
    """The parameters from the embedding up that together hold at most this share of all values."""
    limit, taken = ratio * sum(sizes.values()), 0
    found = set()
    for name, size in sizes.items():
        taken += size
        if taken > limit:
            break
        found.add(name)
    return found
