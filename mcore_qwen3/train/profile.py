"""A torch trace of a few steps (`--profile_step_start`, `--profile_step_end`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from mcore_qwen3.runtime.device import Device, synchronize


class StepProfiler:
    """Traces the steps `first` to `last` of a run, both included, on this rank.

    A run that starts inside the range traces what is left of it; one that ends inside writes what it has.

    Args:
        path: where the trace goes, `.json.gz`, for chrome://tracing or Perfetto.
        device: of this rank.
        first, last: steps of the whole run, from 1.
        say: told where the trace is.
    """

    def __init__(self, path: Path, device: Device, first: int, last: int, say: Callable[[str], None]) -> None:
        self._path, self._device, self._say = path, device, say
        self._first, self._last = first, last
        self._running: profile | None = None

    def before_step(self, number: int) -> None:
        """Called with the number of the step that begins, from 1."""
        if self._running is None and self._first <= number <= self._last:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.is_cuda else [])]
            self._running = profile(activities=activities, record_shapes=True)
            self._running.start()

    def after_step(self, number: int) -> None:
        """Called with the number of the step that ended."""
        if number >= self._last:
            self.close()

    def close(self) -> None:
        """End the trace, if one is running, and write it."""
        if self._running is None:
            return
        synchronize(self._device)
        running, self._running = self._running, None
        running.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(str(self._path))
        self._say(f"trace: {self._path}")
