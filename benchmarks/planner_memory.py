"""The memory table of docs/planner.md: published runs against the planner, with constants fitted to the other runs.

python benchmarks/planner_memory.py
"""

from __future__ import annotations

from mcore_qwen3.planner.measured_memory import FITS_OR_NOT, MEASURED, USABLE_80GB_GIB, fit, left_out
from mcore_qwen3.planner.memory import GIB


def table() -> list[str]:
    """Both tables, as Markdown."""
    lines = [
        "| run | formula GiB | estimate GiB | reported GiB | estimate / reported |",
        "|---|---|---|---|---|",
    ]
    for run, ratio in zip(MEASURED, left_out(MEASURED), strict=True):
        assert run.gib is not None
        miss = "" if abs(ratio - 1) <= 0.15 else " (miss)"
        formula = run.account().formula / GIB
        lines.append(f"| {run.name} | {formula:.1f} | {ratio * run.gib:.1f} | {run.gib:.1f} | {ratio:.2f}{miss} |")
    lines += ["", "| run on 80 GB | estimate GiB | published |", "|---|---|---|"]
    constants = fit(MEASURED)
    for run in FITS_OR_NOT:
        gib = constants.gib(run)
        wrong = "" if (gib <= USABLE_80GB_GIB) == run.fits else " (miss)"
        lines.append(f"| {run.name} | {gib:.1f} | {'fits' if run.fits else 'out of memory'}{wrong} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
