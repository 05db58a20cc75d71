"""Optimizers that need less of a GPU's memory than fp32 state, and the search over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from mcore_qwen3.planner.search import Plan, Search, sizes

_BF16_GRADIENTS = {
    "optimizer": "adam",
    "use_precision_aware_optimizer": True,
    "main_grads_dtype": "bf16",
    "no_save_optim": True,
}
# Name in the table -> flags. The state of none of them can be saved (`cli/numerics_checks.py`), so each says so.
CHOICES: dict[str, dict[str, Any]] = {
    "bf16 gradients": _BF16_GRADIENTS,
    "bf16 gradients, moments": {**_BF16_GRADIENTS, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    "in host memory": {"optimizer": "adam", "optimizer_cpu_offload": True, "no_save_optim": True},
}
AS_GIVEN = "as given"


def choices(given: Mapping[str, Any], fixed: Set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, flags to add) of the optimizer that the flags name, and of those that contradict none that the user fixed.

    Args:
        given: every flag with its value.
        fixed: names of those that the user gave.
    """
    yield AS_GIVEN, {}
    for name, flags in CHOICES.items():
        if all(given[flag] == value for flag, value in flags.items() if flag in fixed):
            yield name, flags


def best_of(searches: Sequence[Search], gpus: int, number: int) -> list[Plan]:
    """The fastest plans of several searches, as `Search.best` orders those of one."""
    gpu = searches[0].gpu
    plans = [plan for search in searches for plan in search.best(gpus, number)]
    plans.sort(key=lambda plan: (plan.at_the_edge(gpu), plan.step.seconds))
    first: dict[tuple[int, ...], Plan] = {}
    for plan in plans:
        first.setdefault(sizes(plan.layout), plan)
    return list(first.values())[:number]


def fewest_of(searches: Sequence[Search], limit: int, *, at_the_edge: bool = True) -> int | None:
    """The smallest number of GPUs on which something of any search fits; see `Search.fewest_gpus`."""
    found = [search.fewest_gpus(limit, at_the_edge=at_the_edge) for search in searches]
    return min((gpus for gpus in found if gpus is not None), default=None)


def lightest_of(searches: Sequence[Search], gpus: int) -> Plan | None:
    """The plan of all searches that needs least memory."""
    plans = [plan for search in searches if (plan := search.lightest(gpus)) is not None]
    return min(plans, key=lambda plan: plan.account.total, default=None)
