"""What share of the data sheets' numbers real runs reach. The numbers are fitted, see `planner/fit.py`."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources

FILE = "calibration.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The numbers of a time estimate that no data sheet gives.

    Attributes:
        gemm_share: share of the bf16 peak that dense products and attention reach.
        grouped_share: the same for the grouped products of experts.
        memory_share: share of the memory bandwidth that norms, RoPE, SwiGLU, routing and permutation reach.
        intra_share: share of the bandwidth within an NVLink domain that collectives reach.
        inter_share: the same between domains.
        dense_launch: seconds the host needs to start the kernels of a dense layer, forward and backward.
        expert_launch: the same for a layer with experts.
        natural_imbalance: tokens of the busiest rank's experts where the router is free, as a multiple of an even share.
        hidden_dispatch: share of the dispatch of tokens that runs behind computation; 0 without an overlapping schedule.
    """

    gemm_share: float
    grouped_share: float
    memory_share: float
    intra_share: float
    inter_share: float
    dense_launch: float
    expert_launch: float
    natural_imbalance: float
    hidden_dispatch: float = 0.0


@cache
def load_calibration() -> Calibration:
    """The calibration that comes with the package, fitted to published runs."""
    text = resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8")
    return Calibration(**json.loads(text)["calibration"])


def fitted_names() -> tuple[str, ...]:
    """The names of the numbers that are fitted; hidden_dispatch is a fact of a run's software."""
    return tuple(field.name for field in fields(Calibration) if field.name != "hidden_dispatch")
