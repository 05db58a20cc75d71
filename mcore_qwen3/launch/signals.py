"""The signals that ask for a save and a stop, as the process that starts the ranks takes them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mcore_qwen3.launch.processes import descendants, send_signal
from mcore_qwen3.launch.rank_report import STOP_SIGNALS


class StopSignals:
    """Takes SIGTERM, SIGINT and SIGUSR1 between entering and leaving, and keeps them until someone asks.

    Once one has come, the process is about to end: after leaving, more of them are ignored, so that they do not replace its
    exit code.
    """

    def __init__(self) -> None:
        self._received: list[tuple[int, float]] = []
        self._code_at_once: int | None = None
        self._came = False

    def __enter__(self) -> StopSignals:
        self._before = {signum: signal.signal(signum, self._receive) for signum in STOP_SIGNALS}
        return self

    def __exit__(self, *failure: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, signal.SIG_IGN if self._came else handler)

    @contextmanager
    def ending_at_once(self, exit_code: int) -> Iterator[None]:
        """Within, a signal ends this process and those below it, as there is nothing to save yet.

        Nothing is cleaned up, as with SIGKILL: a pool that has lost its processes can wait for them for ever.
        """
        self._code_at_once = exit_code
        try:
            yield
        finally:
            self._code_at_once = None

    def _receive(self, signum: int, frame: object) -> None:
        self._came = True
        if self._code_at_once is None:
            self._received.append((signum, time.monotonic()))
            return
        for pid in descendants([os.getpid()]):
            send_signal(pid, signal.SIGKILL)
        text = f"{signal.Signals(signum).name} before any rank had started: stopped\n"
        os.write(sys.stderr.fileno(), text.encode())  # print may be in the middle of something
        os._exit(self._code_at_once)

    @property
    def pending(self) -> bool:
        """Whether one has come that nobody has taken."""
        return bool(self._received)

    def take(self) -> list[tuple[int, float]]:
        """(signal, time.monotonic() of its coming), each once."""
        received, self._received = self._received, []
        return received
