"""What a run tells: a bar on a terminal, lines elsewhere, every step in `<save>/train_log.jsonl`, `<save>/loss.png`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from mcore_qwen3.train.record import RunFacts, StepFacts, step_record
from mcore_qwen3.train.state import TrainState
from mcore_qwen3.train.step import StepResult
from mcore_qwen3.train.trackers import Tracker

LOG_FILE = "train_log.jsonl"
PLOT_FILE = "loss.png"
# Of a step's router numbers: name, what a line calls it, digits.
_ROUTER_NUMBERS = (
    ("balance_loss", "balance", 4),
    ("z_loss", "z", 4),
    ("dropped_share", "dropped", 4),
    ("expert_load", "expert load", 2),
)


class TrainLog:
    """The log of one rank; only rank 0 writes, the others' calls do nothing.

    Args:
        directory: the run's save directory.
        run: what puts a step's numbers in proportion.
        log_interval: steps between two printed lines.
        active: True on rank 0.
        start_iteration: finished steps at the start; older records past it are overruled by a start mark.
        trackers: who else is told.
    """

    def __init__(
        self,
        directory: Path,
        run: RunFacts,
        log_interval: int,
        *,
        active: bool,
        start_iteration: int,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        self.path = directory / LOG_FILE
        self._run, self._interval, self._active = run, log_interval, active
        self._start, self._began = start_iteration, time.monotonic()
        self._other_time = 0.0
        self._window: list[tuple[StepResult, dict[str, Any]]] = []
        self._trackers = list(trackers)
        self._bar: Progress | None = None
        if active:
            directory.mkdir(parents=True, exist_ok=True)
            cut = _ends_inside_a_line(self.path)
            self._file = self.path.open("a", encoding="utf-8")
            if cut:
                self._file.write("\n")
            peak = {"peak_tflops": run.peak_tflops} if run.peak_tflops else {"no_mfu": run.no_peak_because}
            self._write({"event": "start", "iteration": start_iteration, "world_size": run.world_size, **peak})
            if sys.stdout.isatty():
                self._open_bar()

    def _open_bar(self) -> None:
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=20), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=Console(), transient=False)
        self._bar.start()
        self._task = self._bar.add_task("", total=self._run.train_iters, completed=self._start)

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def say(self, text: str) -> None:
        """Print a line (above the bar)."""
        if not self._active:
            return
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, flush=True)

    def event(self, iteration: int, name: str, text: str, **facts: Any) -> None:
        """Something about a step that a reader must know: a line on the screen, a record with its facts."""
        if self._active:
            self._write({"event": name, "iteration": iteration, **facts})
            self.say(f"step {iteration}/{self._run.train_iters} | {text}")

    def step(self, state: TrainState, result: StepResult, step: StepFacts) -> None:
        """Record a finished step: `state` is that after it."""
        if not self._active:
            return
        iteration = state.iteration
        left = (self._run.train_iters - iteration) * self._mean_seconds(iteration)
        record = step_record(self._run, state, result, step, left)
        self._window.append((result, record))
        self._write(record)
        self._track(lambda tracker: tracker.log("train", record))
        if iteration % self._interval == 0 or iteration in (self._start + 1, self._run.train_iters):
            self._show(record)

    def _track(self, act: Callable[[Tracker], None]) -> None:
        """Do something with every tracker; one that fails is told nothing more, and the run goes on."""
        for tracker in list(self._trackers):
            try:
                act(tracker)
            except Exception as error:  # a tracker's server and files are its own
                self._trackers.remove(tracker)
                self.say(f"{tracker.name} gets nothing more: {type(error).__name__}: {error}")

    def _mean_seconds(self, iteration: int) -> float:
        """Seconds a step so far, without evaluation and saving."""
        return (time.monotonic() - self._began - self._other_time) / max(1, iteration - self._start)

    def _show(self, record: dict[str, Any]) -> None:
        iteration, (last, _) = record["iteration"], self._window[-1]
        results = [result for result, _ in self._window if not result.skipped]
        trained = sum(result.trained_tokens for result in results)
        total = sum(result.loss * result.trained_tokens for result in results)
        seconds, tokens = (sum(each[key] for _, each in self._window) for key in ("step_seconds", "tokens"))
        parts = [f"loss {total / trained:.4f}" if trained else "loss none"]
        for name, label, digits in _ROUTER_NUMBERS:
            if name in last.router:
                parts.append(f"{label} {last.router[name]:.{digits}f}")
        norm = f"skipped: {last.skipped}" if last.skipped else f"{last.grad_norm:.3f}"
        parts += [f"grad norm {norm}", f"lr {record['lr']:.3e}", f"{tokens / seconds:,.0f} tokens/s"]
        if "mfu" in record:
            flops, used = (
                sum(each[key] * each["step_seconds"] for _, each in self._window) / seconds
                for key in ("tflops_per_device", "mfu")
            )
            parts.append(f"{flops:,.1f} TFLOP/s a device, MFU {100 * used:.1f} %")
        parts += [f"{record['memory_gib']:.2f} GiB", f"{timedelta(seconds=round(record['seconds_left']))} left"]
        text = " | ".join(parts)
        self._window = []
        if self._bar is not None:
            self._bar.update(self._task, completed=iteration, description=text)
        else:
            print(f"step {iteration}/{self._run.train_iters} | {text}", flush=True)

    def evaluation(self, iteration: int, metrics: dict[str, float], trained_tokens: int) -> None:
        """Record an evaluation of the fixed set: eval_loss, eval_ppl and eval_token_acc."""
        loss, perplexity, accuracy = (metrics[name] for name in ("eval_loss", "eval_ppl", "eval_token_acc"))
        text = f"eval loss {loss:.4f}, perplexity {perplexity:.3f}, accuracy {100 * accuracy:.2f} %"
        self.event(iteration, "eval", f"{text} ({trained_tokens:,} tokens)", **metrics, trained_tokens=trained_tokens)
        if self._active:
            self._track(lambda tracker: tracker.log("eval", {"iteration": iteration, **metrics}))

    def restart(self, iteration: int, number: int, reason: str) -> None:
        """Record that all ranks were started again.

        Args:
            iteration: the step from which the run goes on.
            number: how often this has happened to the job.
            reason: why the last start failed.
        """
        if self._active:
            self._write({"event": "restart", "iteration": iteration, "restart": number, "reason": reason})

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around work that is no step: its time does not count in the time left."""
        began = time.monotonic()
        yield
        self._other_time += time.monotonic() - began

    def close(self) -> None:
        """Draw the loss and end the bar."""
        if not self._active:
            return
        if self._bar is not None:
            self._bar.stop()
        self._file.close()
        self._track(lambda tracker: tracker.close())
        plot(self.path)
        print(f"log: {self.path}; loss curve: {self.path.with_name(PLOT_FILE)}", flush=True)


def _ends_inside_a_line(path: Path) -> bool:
    """Whether a killed run has left half a record at the end of the log."""
    return path.exists() and not path.read_bytes().endswith(b"\n")


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """The records that count: after a restart, those past the restored step are overruled by the new run's.

    Half a record that a killed run has left is none.
    """
    records: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record.get("event") == "start":
            records = [older for older in records if older["iteration"] <= record["iteration"]]
        else:
            records.append(record)
    return iter(records)


def plot(log: Path) -> Path:
    """Draw training and evaluation loss over steps into `loss.png` beside the log."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = list(read_log(log))
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, key in (("train", "loss"), ("eval", "eval_loss")):
        points = [(record["iteration"], record[key]) for record in records if key in record]
        if points:
            axes.plot(*zip(*points, strict=True), label=name, marker="o" if key == "eval_loss" else None)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per trained token)")
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend()
    path = log.with_name(PLOT_FILE)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    return path
