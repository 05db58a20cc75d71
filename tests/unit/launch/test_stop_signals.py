"""Signals before there are ranks, while there are, and after them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_qwen3.launch import StopSignals
from mcore_qwen3.launch.processes import descendants, read_processes
from mcore_qwen3.launch.rank_report import STOP_SIGNALS

ROOT = str(Path(__file__).resolve().parents[3])


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


SCRIPT = """
import concurrent.futures, multiprocessing, os, signal, sys, time
from mcore_qwen3.launch import StopSignals

def work(number):
    print(len(number), flush=True)
    time.sleep(300)

if __name__ == "__main__":
    with StopSignals() as signals, signals.ending_at_once(9):
        with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(work, [b"large" * 10**6] * 100))  # the queue to the processes is full
"""


@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_before_the_ranks_it_ends_all_that_is_done(signum: signal.Signals, tmp_path: Path) -> None:
    """Processes that are killed in the middle of their work keep nobody waiting."""
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [sys.executable, str(tmp_path / "script.py")]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": ROOT}
    ) as job:
        assert job.stdout is not None and job.stderr is not None
        assert job.stdout.readline() and job.stdout.readline()
        below = descendants([job.pid])
        assert len(below) >= 2
        job.send_signal(signum)
        assert job.wait(timeout=60) == 9
        assert job.stderr.read().decode() == f"{signum.name} before any rank had started: stopped\n"
    end = time.monotonic() + 30
    while any(not row.zombie for row in read_processes(below).values()):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_while_ranks_run_they_are_kept_until_someone_asks() -> None:
    with StopSignals() as signals:
        with signals.ending_at_once(9):
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
