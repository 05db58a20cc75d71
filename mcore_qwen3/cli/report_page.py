"""The page of `megatron report`: what the logs hold, as JSON inside a file that draws itself.

Nothing of a log or a configuration becomes markup: the script sets texts, and the JSON holds no `<`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_qwen3 import __version__
from mcore_qwen3.cli.run_log import RunLog, differing_settings, is_number, thinned
from mcore_qwen3.config import RunConfig, to_flat_dict

_ASSETS = Path(__file__).resolve().parent / "page"
_MOST_POINTS = 4000  # of a curve
_MOST_COLUMNS = 500  # of a heat map
_MOST_EVENTS = 400  # of a run, in the table
WARM_UP_STEPS = 5  # kernels are chosen and memory grows: not counted in a median


@dataclass(frozen=True, slots=True)
class Chart:
    """A curve that the page draws where some run has it: key of the record, title, unit."""

    key: str
    title: str
    unit: str


CHARTS = (
    Chart("loss", "Training loss", "nats a trained token"),
    Chart("eval_loss", "Evaluation loss", "nats a trained token"),
    Chart("eval_token_acc", "Evaluation accuracy", "share of the trained tokens"),
    Chart("grad_norm", "Gradient norm", "before clipping"),
    Chart("lr", "Learning rate", "before the factors of single parameters"),
    Chart("tokens_per_second", "Throughput", "tokens/s without padding, all devices"),
    Chart("tflops_per_device", "Arithmetic", "TFLOP/s a device"),
    Chart("mfu", "MFU", "share of the device's bf16 peak"),
    Chart("step_seconds", "Step time", "s, without evaluation and saving"),
    Chart("data_wait_seconds", "Wait for data", "s a step"),
    Chart("memory_gib", "Peak memory", "GiB, the fullest rank"),
    Chart("packing_fill", "Packing fill", "share of the places that hold a token"),
    Chart("balance_loss", "Balance loss", "mean of the layers with experts"),
    Chart("z_loss", "Router z loss", "mean of the layers with experts"),
    Chart("expert_load", "Busiest expert", "tokens / the mean of its layer, the worst layer"),
    Chart("dropped_share", "Dropped tokens", "share of the routed tokens"),
)


def page_text(runs: Sequence[RunLog]) -> str:
    """The whole file."""
    data = json.dumps(page_data(runs), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text = (_ASSETS / "report.html").read_text(encoding="utf-8")
    parts = {
        "/*CSS*/": (_ASSETS / "report.css").read_text(encoding="utf-8"),
        "/*JS*/": (_ASSETS / "report.js").read_text(encoding="utf-8"),
        # Inside a script element only `<` can end it or begin a comment; JSON has it in texts alone.
        "/*DATA*/": data.replace("<", "\\u003c"),
    }
    for mark, content in parts.items():  # the data last: it may hold a mark
        text = text.replace(mark, content, 1)
    return text


def page_data(runs: Sequence[RunLog]) -> dict[str, Any]:
    """What the page's script reads."""
    charts = [chart for chart in _charts(runs) if any(run.series(chart.key)[0] for run in runs)]
    configs = sum(run.config is not None for run in runs)
    settings = list(differing_settings(runs, to_flat_dict(RunConfig())))
    return {
        "made_by": f"megatron report, mcore-qwen3 {__version__}",
        "charts": [{"key": chart.key, "title": chart.title, "unit": chart.unit} for chart in charts],
        "runs": [_run(run, charts) for run in runs],
        "summary": _summary(runs),
        "settings": settings,
        "settings_title": _settings_title(configs, len(runs), len(settings)),
    }


def _settings_title(configs: int, runs: int, differing: int) -> str:
    if not configs:
        return "No run has a configuration beside its log."
    if configs == 1:
        whose = "the run" if runs == 1 else "the one run with a configuration"
        return f"Resolved settings of {whose} that differ from the defaults."
    return "Resolved settings that differ between the runs." if differing else "All resolved settings are the same."


def _charts(runs: Sequence[RunLog]) -> list[Chart]:
    names = dict.fromkeys(name for run in runs for name in run.nested_keys("dataset_loss"))
    sources = [Chart(f"dataset_loss.{name}", f"Loss of {name}", "nats a trained token") for name in names]
    return [CHARTS[0], *sources, *CHARTS[1:]]


def _run(run: RunLog, charts: Sequence[Chart]) -> dict[str, Any]:
    series = {chart.key: _points(run.series(chart.key)) for chart in charts}
    overruled = {
        chart.key: [points for part in run.overruled if (points := _points(run.series(chart.key, part)))[0]]
        for chart in charts
    }
    half = _MOST_EVENTS // 2
    left_out = max(0, len(run.events) - _MOST_EVENTS)
    return {
        "name": run.name,
        "path": str(run.path),
        "notes": run.notes,
        "series": {key: points for key, points in series.items() if points[0]},
        "overruled": {key: parts for key, parts in overruled.items() if parts},
        "events": [*run.events[:half], *run.events[half + left_out :]],
        "events_left_out": left_out,
        "loads": _loads(run),
    }


def _points(series: tuple[list[int], list[float]]) -> tuple[list[int], list[float]]:
    steps, values = thinned(*series, _MOST_POINTS)
    return steps, [float(f"{value:.7g}") for value in values]


def _loads(run: RunLog) -> dict[str, Any] | None:
    """Of each layer with experts, by step: tokens of the busiest expert / the mean; the largest where steps are joined."""
    columns = [
        (record["iteration"], [float(load) for load in record["expert_loads"]])
        for record in run.records
        if isinstance(record.get("expert_loads"), list) and record["expert_loads"]
        if all(is_number(load) for load in record["expert_loads"])
    ]
    columns = [column for column in columns if len(column[1]) == len(columns[-1][1])]
    if not columns:
        return None
    size = -(-len(columns) // _MOST_COLUMNS)
    joined = [columns[at : at + size] for at in range(0, len(columns), size)]
    loads = [[max(layer) for layer in zip(*(each for _, each in part), strict=True)] for part in joined]
    return {"steps": [part[0][0] for part in joined], "loads": loads}


def _summary(runs: Sequence[RunLog]) -> list[tuple[str, list[float | str | None]]]:
    """(title, value of each run): the head of the page."""
    return [
        ("steps", [max((record["iteration"] for record in run.records), default=0) for run in runs]),
        ("last loss", [_last(run, "loss") for run in runs]),
        ("best eval loss", [min(run.series("eval_loss")[1], default=None) for run in runs]),
        ("tokens", [_tokens(run) for run in runs]),
        ("tokens/s", [_median(run, "tokens_per_second") for run in runs]),
        ("s a step", [_median(run, "step_seconds") for run in runs]),
        ("MFU", [_median(run, "mfu") for run in runs]),
        ("GiB", [max(run.series("memory_gib")[1], default=None) for run in runs]),
        ("skipped", [sum(kind == "skipped" for _, kind, _ in run.events) for run in runs]),
        ("saves", [sum(kind == "save" for _, kind, _ in run.events) for run in runs]),
        ("continued", [sum(kind == "resume" for _, kind, _ in run.events) for run in runs]),
        ("ended", [_ended(run) for run in runs]),
    ]


def _ended(run: RunLog) -> str:
    return {"": "not told", "end": "all steps done"}.get(run.ended, run.ended)


def _last(run: RunLog, key: str) -> float | None:
    values = run.series(key)[1]
    return values[-1] if values else None


def _tokens(run: RunLog) -> float | None:
    """All tokens that the run has read; older logs count those of each step."""
    return _last(run, "consumed_tokens") or sum(run.series("tokens")[1]) or None


def _median(run: RunLog, key: str) -> float | None:
    """Over the steps after the first ones, where there are more."""
    values = run.series(key)[1]
    return statistics.median(values[WARM_UP_STEPS:] or values) if values else None
