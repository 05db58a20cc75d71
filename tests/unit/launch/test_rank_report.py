"""What ranks leave for the supervisor, and which failure counts as the first."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_qwen3.errors import DataError
from mcore_qwen3.launch import failures, rank_report
from mcore_qwen3.launch.failures import SilentDeath, failure_exit_code, failure_text, first_failure
from mcore_qwen3.launch.rank_report import RankDone, RankError, rank_main


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process as rank 3 of a torchrun without supervisor; it must not be tied to the life of pytest's parent."""
    monkeypatch.setenv("RANK", "3")
    for name in (rank_report.RUN_DIR, rank_report.SUPERVISED):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(rank_report, "watch_parent", lambda: None)
    return monkeypatch


@pytest.fixture
def run_dir(rank: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The same below a supervisor."""
    rank.setenv(rank_report.RUN_DIR, str(tmp_path))
    rank.setenv(rank_report.SUPERVISED, "1")
    return tmp_path


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in rank_report.STOP_SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def user_error() -> int:
    raise DataError("a rule", seen="x")


def fault() -> int:
    raise ZeroDivisionError("the cause")


def test_orderly_end(run_dir: Path) -> None:
    assert rank_main(lambda: 143) == 0  # torchrun must not take it for a failure
    assert rank_report.read_done(run_dir) == [RankDone(rank=3, pid=os.getpid(), exit_code=143)]
    assert rank_report.first_error(run_dir) is None


def test_user_error_is_reported_without_traceback(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = time.time()
    assert rank_main(user_error) == 0  # torchrun would print a traceback and a table
    error = rank_report.first_error(run_dir)
    assert error is not None and before <= error.time <= time.time()
    assert (error.rank, error.pid, error.message, error.clean) == (3, os.getpid(), "a rule; seen: x", True)
    assert error.traceback is None
    assert rank_report.read_done(run_dir) == []
    assert capfd.readouterr() == ("", "")


def test_fault_is_reported_with_traceback(run_dir: Path) -> None:
    assert rank_main(fault) == 0
    error = rank_report.first_error(run_dir)
    assert error is not None and not error.clean and error.traceback is not None
    assert "in fault" in error.traceback and error.traceback.endswith("ZeroDivisionError: the cause\n")


def test_sys_exit_inside_the_work_is_no_orderly_end(run_dir: Path) -> None:
    def leave() -> int:
        raise SystemExit(0)

    assert rank_main(leave) == 0
    assert rank_report.read_done(run_dir) == [] and len(rank_report.read_errors(run_dir)) == 1


def test_without_supervisor_the_rank_speaks_for_itself(
    rank: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert rank_main(lambda: 143) == 143
    assert rank_main(user_error) == 2
    line = capfd.readouterr().err
    assert line.startswith("rank 3 on ") and line.endswith("failed: a rule; seen: x\n") and line.count("\n") == 1
    assert rank_main(fault) == 1
    assert "in fault" in capfd.readouterr().err


def test_an_error_is_not_lost_with_the_folder(
    rank: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rank.setenv(rank_report.RUN_DIR, str(tmp_path / "gone"))
    assert rank_main(user_error) == 2
    assert "a rule; seen: x" in capfd.readouterr().err


def test_the_first_error_is_the_earliest_not_the_lowest_rank(run_dir: Path, rank: pytest.MonkeyPatch) -> None:
    rank_main(user_error)
    rank.setenv("RANK", "0")
    rank_main(fault)
    error = rank_report.first_error(run_dir)
    assert error is not None and error.rank == 3
    assert {error.rank for error in rank_report.read_errors(run_dir)} == {0, 3}


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_stop_request_reaches_the_callback(run_dir: Path, handlers: None, signum: int) -> None:
    calls: list[int] = []
    rank_report.on_stop_request(calls.append)
    assert calls == []
    os.kill(os.getpid(), signum)
    assert calls == [signum]


def test_a_stop_request_from_before_is_not_lost(run_dir: Path, handlers: None) -> None:
    rank_report.request_stop(run_dir, signal.SIGUSR1)
    calls: list[int] = []
    rank_report.on_stop_request(calls.append)
    assert calls == [signal.SIGUSR1]


def error_at(seconds: float) -> RankError:
    return RankError(0, 100, "host", seconds, "RuntimeError: closed by peer", "Traceback\n", False)


def death(exit_code: int | None, alive_at: float = 50.0, rank: int = 1) -> SilentDeath:
    return SilentDeath(rank, 101, exit_code, alive_at)


@pytest.mark.parametrize(
    ("exit_code", "error_time", "expected"),
    [
        (-9, 50.1, "death"),  # the peer saw the closed connection, then reported
        (-9, 49.5, "death"),  # the same, reported before the supervisor saw the end of the killed process
        (-9, 40.0, "error"),  # long before
        (None, 49.5, "death"),  # what ended it could not be seen
        (-6, 49.5, "error"),  # abort: NCCL ends a process so after a peer has gone
        (-6, 50.1, "death"),
        (5, 49.5, "error"),
    ],
)
def test_cause_and_consequence(exit_code: int | None, error_time: float, expected: str) -> None:
    error, dead = error_at(error_time), death(exit_code)
    assert first_failure(error, [dead]) is (dead if expected == "death" else error)


def test_first_of_several_deaths_or_of_one_kind_alone() -> None:
    assert first_failure(None, []) is None
    error = error_at(1.0)
    assert first_failure(error, []) is error
    early, late = death(-9, 50.0, rank=2), death(-9, 51.0, rank=1)
    assert first_failure(None, [late, early]) is early


def test_what_the_user_reads() -> None:
    clean = RankError(3, 1, "node-7", 0.0, "a rule; seen: x", None, True)
    assert failure_text(clean) == "rank 3 on node-7 failed first: a rule; seen: x"
    assert failure_exit_code(clean) == 2
    assert failure_text(error_at(0.0)) == "rank 0 on host failed first:\nTraceback"
    assert failure_exit_code(error_at(0.0)) == 1
    killed = failure_text(death(-9))
    assert "rank 1" in killed and "(pid 101)" in killed and "SIGKILL" in killed and "out of memory" in killed
    assert "signal 11 (Segmentation fault)" in failure_text(death(-11))
    assert "exit code 5" in failure_text(death(5))
    assert "not seen" in failure_text(death(None))
    assert failure_exit_code(death(5)) == 1


def test_exit_code_of_a_wait_status() -> None:
    assert [failures.exit_code_of(status) for status in (None, 0, 9, 5 << 8)] == [None, 0, -9, 5]
