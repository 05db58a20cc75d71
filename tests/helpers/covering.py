"""The covering design of layouts and options: every option's every value meets every layout at least once.

Made so: each layout has three runs. Run r takes the r-th value of the three-valued factors (micro-batch, recompute) and, of
the two-valued ones (packing, experts, tying, vocabulary), a value by the parity of r plus an offset that differs from
factor to factor and from layout to layout, so that both values appear in the three runs and combinations differ between
layouts. `uncovered` proves the property.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from helpers.training import Cut, Layout

LAYOUTS: dict[str, Layout] = {
    "one": Layout(),
    "DP2": Layout(data=2),
    "TP2+SP": Layout(tensor=2),
    "PP2": Layout(pipeline=2),
    "PP2 interleaved": Layout(pipeline=2, virtual=2),
    "EP2": Layout(data=2, expert=2),
    "CP2": Layout(context=2),
    "ETP2": Layout(tensor=2, expert_tensor=2),
    "TP2+SP x EP2": Layout(tensor=2, expert=2, data=2),
    "PP2 x EP2": Layout(pipeline=2, expert=2, data=2),
    "CP2 x TP2+SP": Layout(context=2, tensor=2),
    "CP2 x EP2": Layout(context=2, expert=2),
    "PP2 x CP2": Layout(pipeline=2, context=2),
    "PP3 uneven": Layout(pipeline=3, first_stage=2),
}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm")},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
VALUES: dict[str, tuple[Any, ...]] = {
    "micro_batch": (1, 2, 4),
    "packing": (True, False),
    "recompute": tuple(RECOMPUTE),
    "experts": ("grouped", "sequential"),
    "tied": (False, True),
    "vocabulary": (128, 101),
}


@dataclass(frozen=True)
class Run:
    """One cell of the design."""

    layout: str
    micro_batch: int
    packing: bool
    recompute: str
    experts: str
    tied: bool
    vocabulary: int

    @property
    def cut(self) -> Cut:
        return Cut(micro_batch=self.micro_batch, pack=2 if self.packing else 1)

    @property
    def options(self) -> dict[str, Any]:
        return {**RECOMPUTE[self.recompute], "moe_grouped_gemm": self.experts == "grouped"}

    def row(self) -> str:
        """A line of the table in docs/layouts.md, without its figures."""
        packing, tied = ("packed" if self.packing else "padded"), ("tied" if self.tied else "untied")
        return (
            f"| {self.layout} | {self.micro_batch} | {packing} | {self.recompute} | {self.experts} | {tied} | "
            f"{self.vocabulary} |"
        )


def design() -> list[Run]:
    """All runs."""
    runs = []
    for number, layout in enumerate(LAYOUTS):
        for r in range(3):
            choice: dict[str, Any] = {}
            for place, (name, values) in enumerate(VALUES.items()):
                choice[name] = values[(r + number * (place + 1) + place) % len(values)]
            runs.append(Run(layout=layout, **choice))
    return runs


def uncovered(runs: list[Run]) -> list[tuple[str, str, Any]]:
    """(layout, factor, value) that no run has."""
    met = {(run.layout, field.name, getattr(run, field.name)) for run in runs for field in fields(run)[1:]}
    wanted = [(layout, name, value) for layout in LAYOUTS for name, values in VALUES.items() for value in values]
    return [cell for cell in wanted if cell not in met]
