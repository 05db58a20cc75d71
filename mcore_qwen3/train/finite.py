"""Which weight or gradient is not finite, under the name that checkpoints use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mcore_qwen3.errors import McoreQwen3Error
from mcore_qwen3.model.build import Qwen3Model, unwrapped
from mcore_qwen3.model.pieces import Block, pieces

ValuesOf = Callable[[torch.nn.Parameter], torch.Tensor]


class NonFiniteError(McoreQwen3Error):
    """A weight that is not a number or infinite: nothing that the run computes means anything any more."""


@dataclass(frozen=True, order=True, slots=True)
class BadTensor:
    """A tensor with a value that is not finite; they sort as in the model, equal places by rank.

    Attributes:
        place: (pipeline chunk, pipeline stage, number within the chunk).
        rank: the rank that holds it.
        name: torch_dist key, the index of its first bad value in the global tensor, and that value. Where one key holds
            all layers, the layer (from 0) is the first number of the index.
    """

    place: tuple[int, int, int]
    rank: int
    name: str


def own_bad_tensors(models: Sequence[torch.nn.Module], values_of: ValuesOf, *, last: bool = False) -> BadTensor | None:
    """The first (or last) tensor in the model's order, among this rank's, that holds a value that is not finite.

    One read of every value and one wait for the device; memory for a few numbers. `values_of`: a parameter's weights,
    or its gradient.
    """
    named = [(chunk, *item) for chunk, model in enumerate(models) for item in enumerate(_parameters(model))]
    finite = torch.stack([_is_finite(values_of(parameter)) for _, _, parameter in named]).tolist()
    bad = [item for item, good in zip(named, finite, strict=True) if not good]
    if not bad:
        return None
    chunk, number, parameter = bad[-1 if last else 0]
    stage = parallel_state.get_pipeline_model_parallel_rank()
    name = _name(unwrapped(models[chunk]), parameter, values_of(parameter))
    return BadTensor((chunk, stage, number), dist.get_rank(), name)


def check_weights(models: Sequence[torch.nn.Module], fix: str) -> None:
    """Stop the run if a weight of any rank is not finite. Collective.

    Args:
        models: this rank's chunks, wrapped or not.
        fix: what the user can do about it.

    Raises:
        NonFiniteError: on every rank, naming the first bad tensor of the whole model.
    """
    found: list[BadTensor | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own_bad_tensors(models, lambda parameter: parameter.data))
    bad = min((one for one in found if one is not None), default=None)
    if bad is not None:
        raise NonFiniteError("every weight must be finite", seen=f"{bad.name} on rank {bad.rank}", fix=fix)


def _parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return list(unwrapped(model).parameters())


def _is_finite(values: torch.Tensor) -> torch.Tensor:
    low, high = values.aminmax()  # a NaN anywhere is the answer of both
    return low.isfinite() & high.isfinite()


def _name(model: Qwen3Model, parameter: torch.nn.Parameter, values: torch.Tensor) -> str:
    at_flat = (~values.isfinite()).flatten().view(torch.uint8).argmax()
    at = tuple(int(index) for index in torch.unravel_index(at_flat, values.shape))
    for piece in pieces(model):
        one = Block(at, (1,) * len(at))
        if piece.parameter is parameter and piece.block.intersect(one) is not None:
            index = ", ".join(map(str, piece.global_block(one).starts))
            return f"{piece.key}[{index}] = {float(values[at])}"
    raise AssertionError("every value of a parameter belongs to a piece")
