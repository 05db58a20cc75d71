"""The signals that ask for a save and a stop, as the process that starts the ranks takes them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mcore_qwen3.launch.processes import descendants, send_signal
from mcore_qwen3.launch.rank_report import STOP_SIGNALS


class StoppedEarly(BaseException):
    """A stop signal came while there was nothing to save yet. No Exception: nothing on the way up may keep it."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"{signal.Signals(signum).name} before any rank had started: stopped")


class StopSignals:
    """Takes SIGTERM, SIGINT and SIGUSR1 between entering and leaving, and keeps them until someone asks.

    Once one has come, the process is about to end: after leaving, more of them are ignored, so that they do not replace its
    exit code.
    """

    def __init__(self) -> None:
        self._received: list[tuple[int, float]] = []
        self._at_once = self._came = False

    def __enter__(self) -> StopSignals:
        self._before = {signum: signal.signal(signum, self._receive) for signum in STOP_SIGNALS}
        return self

    def __exit__(self, *failure: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, signal.SIG_IGN if self._came else handler)

    @contextmanager
    def ending_at_once(self) -> Iterator[None]:
        """Within, a signal kills the processes below this one and raises StoppedEarly."""
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def _receive(self, signum: int, frame: object) -> None:
        self._came = True
        if not self._at_once:
            self._received.append((signum, time.monotonic()))
            return
        self._at_once = False  # what cleans up after the first one is not interrupted
        for pid in descendants([os.getpid()]):
            send_signal(pid, signal.SIGKILL)
        raise StoppedEarly(signum)

    @property
    def pending(self) -> bool:
        """Whether one has come that nobody has taken."""
        return bool(self._received)

    def take(self) -> list[tuple[int, float]]:
        """(signal, time.monotonic() of its coming), each once."""
        received, self._received = self._received, []
        return received
