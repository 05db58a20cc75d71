"""How long each phase of a rank may take before the supervisor takes it for hung."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_qwen3.launch import heartbeat
from mcore_qwen3.launch.heartbeat import Beat, Heartbeat, dump_stacks, read_beats
from mcore_qwen3.launch.rank_report import RUN_DIR


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of reports of rank 3, which this process is."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    yield tmp_path
    faulthandler.unregister(heartbeat.DUMP_SIGNAL)


@pytest.mark.parametrize(
    ("phase", "first", "allowed"),
    [
        ("step", False, 60),
        ("waiting for data", False, 60),
        ("evaluation", False, 60),
        ("save", False, 600),
        ("looking for a fault", False, 600),
        ("step", True, 600),
        ("waiting for data", True, 600),
        ("save", True, 600),
        ("end", False, None),
    ],
)
def test_time_that_a_phase_may_take(phase: str, first: bool, allowed: int | None) -> None:
    beat = Beat(rank=0, pid=1, phase=phase, iteration=7, first=first, since=1000.0)
    late = [seconds for seconds in (59, 61, 599, 601, 10**6) if beat.overdue(60, 1000.0 + seconds)]
    assert late == {60: [61, 599, 601, 10**6], 600: [601, 10**6], None: []}[allowed]


def test_a_rank_tells_where_it_is(run_dir: Path) -> None:
    pulse = Heartbeat(enabled=True)
    assert read_beats(run_dir) == []  # the start is not watched
    seen = []
    for iteration in (20, 21):
        pulse.enter("waiting for data", iteration)
        for _ in pulse.around("step", iter("a")):
            seen += read_beats(run_dir)
    assert [(beat.rank, beat.pid, beat.phase, beat.iteration, beat.first) for beat in seen] == [
        (3, os.getpid(), "step", 20, True),
        (3, os.getpid(), "step", 21, False),
    ]
    assert seen[0].since < seen[1].since
    evaluated = [read_beats(run_dir)[0] for _ in pulse.around("evaluation", iter("ab"))]
    assert evaluated[0].since < evaluated[1].since and evaluated[1].phase == "evaluation"  # each batch has its own time
    assert evaluated[1].describe(evaluated[1].since + 2) == "rank 3: step 21 finished, then 2 s in evaluation"


def test_a_rank_writes_its_stacks_when_asked(run_dir: Path) -> None:
    pulse = Heartbeat(enabled=True)
    pulse.enter("step", 1)
    text = dump_stacks(run_dir, {3: os.getpid()})
    assert text.startswith(f"stacks of rank 3 (pid {os.getpid()}):\n") and "in dump_stacks\n" in text
    assert "test_a_rank_writes_its_stacks_when_asked" in text


@pytest.mark.parametrize("enabled", [True, False])
def test_no_files_without_a_supervisor_or_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    monkeypatch.setenv("RANK", "0")
    if enabled:
        monkeypatch.delenv(RUN_DIR, raising=False)
    else:
        monkeypatch.setenv(RUN_DIR, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert list(Heartbeat(enabled=enabled).around("step", iter([1, 2]))) == [1, 2]
    assert list(tmp_path.iterdir()) == []
