"""How near the planner's time of a step comes to published runs; fits the calibration that the package carries.

    python benchmarks/planner_time.py [--write] [--plot docs/planner-time.png]

Reads `published_runs.yaml` beside it. Each source is foretold by a fit to the other sources' runs alone; that is the error
to expect of a run that nobody has measured. `--write` fits all runs and writes `mcore_qwen3/planner/calibration.json`.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mcore_qwen3.arch import ModelShape, ParallelLayout, flops_per_token, resolve_layout
from mcore_qwen3.planner import calibration as calibration_module
from mcore_qwen3.planner.fit import as_record, fit, fit_without, log_errors
from mcore_qwen3.planner.gpus import find_gpu
from mcore_qwen3.planner.measured import MeasuredRun
from mcore_qwen3.planner.models import find_model
from mcore_qwen3.planner.settings import Settings
from mcore_qwen3.planner.step_time import SPREAD

RUNS = Path(__file__).with_name("published_runs.yaml")
COMMAND = "python benchmarks/planner_time.py --write"
SELECTIVE = {
    "core_attn": ("core_attn",),
    "norm+act": ("layernorm", "moe_act"),
    "norm+moe": ("layernorm", "moe"),
}


def read_runs(path: Path = RUNS) -> list[MeasuredRun]:
    """The runs of the file, in its order."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [measured_run(content["defaults"] | row) for row in content["runs"]]


def measured_run(row: dict[str, Any]) -> MeasuredRun:
    """One run of the file."""
    shape = replace(find_model(row["model"]), moe_layers=(), **row.get("shape", {}))
    layout = layout_of(row, shape)
    effective = float(row.get("effective", row["row"]))
    tokens = row["tokens"] if "tokens" in row else row["tflops"] * 1e12 / flops_per_token(shape, effective)
    return MeasuredRun(
        name=row["name"],
        source=row["source"],
        shape=shape,
        layout=layout,
        settings=settings_of_row(row, effective),
        gpu=find_gpu(row["gpu"]),
        tokens_per_second_per_gpu=tokens,
        natural_routing=row["routing"] == "natural",
        fitted=row.get("fitted", True),
        facts=row.get("facts", {}),
    )


def layout_of(row: dict[str, Any], shape: ModelShape) -> ParallelLayout:
    """TP/PP(xVPP)/CP/EP of a run.

    TP above the number of key-value heads, which is not offered here, repeats them in Megatron: the same as more heads.
    """
    numbers = re.fullmatch(r"(\d+)/(\d+)(?:x(\d+))?/(\d+)/(\d+)", row["layout"])
    if numbers is None:
        raise ValueError(f"{row['name']}: {row['layout']} is not TP/PP(xVPP)/CP/EP")
    tensor, pipeline, virtual, context, expert = (int(number or 1) for number in numbers.groups())
    ends = pipeline > 1 and shape.num_layers % pipeline > 0 and "first" not in row
    return resolve_layout(
        row["gpus"], tensor=tensor, pipeline=pipeline, virtual_pipeline=virtual, context=context, expert=expert,
        sequence_parallel=tensor > 1, first_stage_layers=row.get("first"),
        account_for_embedding=ends, account_for_loss=ends,
        shape=replace(shape, num_query_groups=max(tensor, shape.num_query_groups)),
    )  # fmt: skip


def settings_of_row(row: dict[str, Any], effective: float) -> Settings:
    """Batch, recomputation and optimizer of a run."""
    global_batch, micro_batch = map(int, row["batch"].split("/"))
    recompute = row["recompute"]
    modules = SELECTIVE.get(recompute, ())
    small = row.get("state") == "precision-aware"  # bf16 gradients, and 16 bits of master weight beside the bf16 ones
    return Settings(
        row_length=row["row"],
        effective_length=effective,
        micro_batch_size=micro_batch,
        global_batch_size=global_batch,
        recompute_granularity="selective" if modules else recompute,
        recompute_modules=modules,
        moe_token_dispatcher_type=row["dispatcher"],
        moe_expert_capacity_factor=row.get("capacity"),
        gradient_bytes=2 if small else 4,
        master_bytes=2 if small else 4,
        optimizer_offload_fraction=row.get("offload", 0.0),
        train_type=row.get("train", "full"),
    )


def foretold_errors(runs: list[MeasuredRun]) -> np.ndarray:
    """log(measured / estimated) of each run, estimated by a fit that has seen no run of its source."""
    errors = np.zeros(len(runs))
    for source in dict.fromkeys(run.source for run in runs):
        mine = [number for number, run in enumerate(runs) if run.source == source]
        errors[mine] = log_errors([runs[number] for number in mine], fit_without(runs, source))
    return errors


def summary(errors: np.ndarray) -> str:
    """Median error, bias, and share inside the printed range."""
    inside = int(np.sum(np.abs(errors) <= np.log(SPREAD)))
    return (
        f"median error {np.exp(np.median(np.abs(errors))) - 1:.0%}, {inside} of {len(errors)} runs within x/÷ {SPREAD},"
        f" median measured / estimated {np.exp(np.median(errors)):.2f}"
    )


def plot(runs: list[MeasuredRun], errors: np.ndarray, path: Path) -> None:
    """Measured against foretold tokens a second, one colour a source."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = np.array([run.tokens_per_second_per_gpu for run in runs])
    figure, axes = pyplot.subplots(figsize=(7, 6))
    ends = np.array([300, 30000])
    axes.fill_between(ends, ends / SPREAD, ends * SPREAD, alpha=0.15, label=f"x/÷ {SPREAD}")
    axes.plot(ends, ends, linewidth=1, color="grey")
    for source in dict.fromkeys(run.source for run in runs):
        mine = np.array([run.source == source for run in runs])
        axes.scatter(measured[mine] / np.exp(errors[mine]), measured[mine], s=22, label=source)
    for run, error in zip(runs, errors, strict=True):
        if abs(error) > np.log(SPREAD):
            x = run.tokens_per_second_per_gpu / np.exp(error)
            axes.annotate(
                run.name, (x, run.tokens_per_second_per_gpu), fontsize=6, textcoords="offset points", xytext=(4, -8)
            )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="estimated without that source, tokens/s/GPU",
        ylabel="measured, tokens/s/GPU",
    )
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=100, bbox_inches="tight")


def main() -> None:
    """Fit, print each run and the summary, and write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the fit of all runs into the package")
    parser.add_argument("--plot", type=Path, help="PNG file for the plot")
    arguments = parser.parse_args()
    runs = read_runs()
    fitted = fit(runs)
    errors, own = foretold_errors(runs), log_errors(runs, fitted)
    print(
        "| run | source | GPUs | layout | measured tokens/s/GPU | estimated | measured / estimated | fitted with it |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for run, error, fitted_error in zip(runs, errors, own, strict=True):
        tokens, layout = run.tokens_per_second_per_gpu, run.layout
        pipeline = f"{layout.pipeline}" + (f"x{layout.virtual_pipeline}" if layout.virtual_pipeline > 1 else "")
        print(
            f"| {run.name} | {run.source} | {layout.world_size} {run.gpu.name} |"
            f" {layout.tensor}/{pipeline}/{layout.context}/{layout.expert} | {tokens:,.0f} | {tokens / np.exp(error):,.0f} |"
            f" {np.exp(error):.2f}{' (!)' if abs(error) > np.log(SPREAD) else ''} | {np.exp(fitted_error):.2f} |"
        )
    print(f"\nforetold from other sources: {summary(errors)}")
    print(f"fitted to all runs: {summary(own)}")
    print(json.dumps(as_record(fitted)))
    if arguments.write:
        record = {"made_by": COMMAND, "runs": sum(run.fitted for run in runs), "calibration": as_record(fitted)}
        path = Path(calibration_module.__file__).with_name(calibration_module.FILE)
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if arguments.plot:
        plot(runs, errors, arguments.plot)


if __name__ == "__main__":
    main()
