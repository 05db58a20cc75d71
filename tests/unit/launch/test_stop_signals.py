"""Signals before there are ranks, while there are, and after them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from mcore_qwen3.launch import StoppedEarly, StopSignals
from mcore_qwen3.launch.rank_report import STOP_SIGNALS


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_before_the_ranks_it_ends_what_is_done_and_who_does_it(signum: signal.Signals) -> None:
    cleaned = []
    with (
        StopSignals() as signals,
        pytest.raises(StoppedEarly, match=f"{signum.name} before any rank had started"),
        signals.ending_at_once(),
    ):
        worker = subprocess.Popen(["sleep", "300"])
        try:
            os.kill(os.getpid(), signum)
        except Exception:  # as code in between may have it
            pass
        finally:
            os.kill(os.getpid(), signum)  # a second one does not disturb what cleans up
            cleaned.append(True)
    assert cleaned and worker.wait(timeout=30) == -signal.SIGKILL


def test_while_ranks_run_they_are_kept_until_someone_asks() -> None:
    with StopSignals() as signals:
        with signals.ending_at_once():
            pass
        assert not signals.pending and signals.take() == []
        began = time.monotonic()
        for signum in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), signum)
        assert signals.pending
        (first, early), (second, late) = signals.take()
        assert (first, second) == (signal.SIGTERM, signal.SIGINT) and began <= early <= late <= time.monotonic()
        assert not signals.pending


def test_after_a_stop_they_do_not_replace_the_exit_code() -> None:
    with StopSignals():
        os.kill(os.getpid(), signal.SIGTERM)
    for signum in STOP_SIGNALS:
        os.kill(os.getpid(), signum)


def test_otherwise_everything_is_as_before() -> None:
    before = [signal.getsignal(signum) for signum in STOP_SIGNALS]
    with StopSignals():
        pass
    assert [signal.getsignal(signum) for signum in STOP_SIGNALS] == before
