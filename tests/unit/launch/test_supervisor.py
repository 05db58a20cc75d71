"""The supervisor with the real torchrun and fake ranks (fake_rank.py): signals, failures, and that nothing is left.

Each test starts torchrun, which takes some seconds. Waits end by themselves when what they wait for has happened; their
limits only end a test that would hang.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mcore_qwen3.launch.attempt import Attempt, Limits
from mcore_qwen3.launch.environment import LaunchPlan
from mcore_qwen3.launch.ports import free_port
from mcore_qwen3.launch.processes import kill_group, read_processes
from mcore_qwen3.launch.signals import StopSignals

FAKE_RANK = Path(__file__).with_name("fake_rank.py")
LIMIT = 120.0
UNSEEN = "its exit status was not seen"  # torchrun may, seldom, bury a rank before the supervisor looks
DRIVER = """
import json, os, sys
from mcore_qwen3.launch import Limits, StopSignals, attempt, check_in, resolve_environment, run
attempt._ONE_REQUEST_SECONDS = float(sys.argv[1])
plan = resolve_environment(os.environ, gpus=len(sys.argv) - 5)
company = check_in(plan, {}, (), 60)
with StopSignals() as signals:
    sys.exit(run(plan, sys.argv[3:], Limits(**json.loads(sys.argv[2])), signals, extra_env={}, company=company))
"""


def wait_until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, f"this did not happen: {what}"
        time.sleep(0.02)


class Job:
    """One supervisor, its torchrun and its ranks."""

    def __init__(
        self, folder: Path, *behaviours: str, burst: float = 5, node: dict[str, str] | None = None, **limits: float
    ) -> None:
        self.folder, self.size = folder, len(behaviours)
        words = json.dumps({"exit_grace": 40, "exit_code_on_signal": 0} | limits)
        options = [str(burst), words, str(FAKE_RANK), str(folder), *behaviours]
        root = FAKE_RANK.parents[3]
        names = ("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
        environ = {name: value for name, value in os.environ.items() if name not in names}
        environ |= {"PYTHONPATH": str(root), "TMPDIR": str(folder)} | (node or {})
        with (folder / "screen").open("wb") as screen:
            self.process = subprocess.Popen(
                [sys.executable, "-c", DRIVER, *options], stdout=screen, stderr=subprocess.STDOUT, env=environ
            )

    @property
    def screen(self) -> str:
        return (self.folder / "screen").read_text()

    @property
    def last_lines(self) -> str:
        """From the supervisor's last word on."""
        return self.screen[self.screen.rindex("launcher: ") :]

    def number(self, name: str, rank: int) -> int:
        return int((self.folder / f"{name}_{rank}").read_text())

    def wait_for(self, name: str) -> None:
        """Until every rank has left this file."""
        files = [self.folder / f"{name}_{rank}" for rank in range(self.size)]
        wait_until(lambda: all(file.exists() for file in files) or self.process.poll() is not None, name)
        assert all(file.exists() for file in files), self.screen

    def torchrun(self) -> int:
        """The pid of torchrun, the supervisor's only child."""
        children: list[int] = []

        def found() -> bool:
            children[:] = [row.pid for row in read_processes().values() if row.parent == self.process.pid]
            return bool(children)

        wait_until(found, "torchrun started")
        return children[0]

    def end(self) -> int:
        return self.process.wait(timeout=LIMIT)

    def pids(self) -> list[int]:
        """All processes that the ranks have told of."""
        return [int(file.read_text()) for name in ("pid", "helper") for file in self.folder.glob(f"{name}_*")]

    def running(self, *others: int) -> set[int]:
        return {row.pid for row in read_processes([*self.pids(), *others]).values() if not row.zombie}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def begin(*behaviours: str, folder: Path = tmp_path, **options: float) -> Job:
        jobs.append(Job(folder, *behaviours, **options))  # type: ignore[arg-type]
        return jobs[-1]

    yield begin
    for job in jobs:
        job.process.kill()
        job.process.wait()
        for pid in job.running():  # only after a test has failed
            os.kill(pid, signal.SIGKILL)


def test_orderly_end_with_the_exit_code_that_a_rank_asks_for(start: Callable[..., Job]) -> None:
    job = start("return_0", "return_7")
    assert job.end() == 7
    assert len(job.pids()) == 4 and not job.running()
    assert "-m torch.distributed.run --nnodes 1 --node_rank 0" in job.screen
    assert not list(job.folder.glob("mcore_qwen3_run_*"))


def test_signals_are_one_request_and_the_ranks_may_finish_their_save(start: Callable[..., Job]) -> None:
    job = start("wait_143", "wait_143", exit_code_on_signal=143)
    job.wait_for("pid")
    job.process.send_signal(signal.SIGTERM)
    job.wait_for("signals")
    job.process.send_signal(signal.SIGUSR1)
    job.process.send_signal(signal.SIGINT)
    assert job.end() == 143
    for rank in range(2):
        assert (job.folder / f"saved_{rank}").exists()
        assert (job.folder / f"signals_{rank}").read_text() == "15"
    assert not job.running()


def test_a_request_while_ranks_start_is_not_lost(start: Callable[..., Job]) -> None:
    job = start("slow_start", "slow_start")
    job.wait_for("pid")
    job.process.send_signal(signal.SIGUSR1)
    wait_until(lambda: "SIGUSR1: the ranks are asked" in job.screen, "the request was noticed")
    (job.folder / "signal_sent").touch()
    assert job.end() == 0
    assert (job.folder / "saved_0").exists() and (job.folder / "saved_1").exists()


def test_a_request_before_any_rank_has_started(start: Callable[..., Job]) -> None:
    job = start("hang", exit_code_on_signal=9)
    torchrun = job.torchrun()
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 9
    assert "before any rank had started" in job.last_lines
    assert not job.running(torchrun)


def test_ranks_that_outstay_the_grace_are_killed(start: Callable[..., Job]) -> None:
    job = start("hang", "wait", exit_grace=2)
    job.wait_for("pid")
    torchrun = job.torchrun()
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 1
    assert "did not end within 2 s after SIGTERM (exit_grace)" in job.last_lines
    assert (job.folder / "saved_1").exists()
    assert not job.running(torchrun)


def test_second_ctrl_c_kills_at_once(start: Callable[..., Job]) -> None:
    job = start("hang", "hang", burst=0.1)
    job.wait_for("pid")
    job.process.send_signal(signal.SIGINT)
    job.wait_for("signals")
    time.sleep(0.2)  # longer than the burst
    job.process.send_signal(signal.SIGINT)
    assert job.end() == 1
    assert "second Ctrl-C" in job.last_lines
    assert not job.running()


def test_a_killed_rank_ends_all_and_is_named_before_those_it_took_along(start: Callable[..., Job]) -> None:
    job = start("hang", "hang", "peer_of_1")
    job.wait_for("pid")
    torchrun = job.torchrun()
    victim = job.number("pid", 1)
    os.kill(victim, signal.SIGKILL)
    # Alone, torchrun would wait 30 s for the rank that hangs.
    assert job.process.wait(timeout=15) == 1
    assert not job.running(torchrun)
    assert "rank 1" in job.last_lines and f"(pid {victim})" in job.last_lines
    assert "SIGKILL" in job.last_lines or UNSEEN in job.last_lines
    assert "closed by peer" not in job.screen


def test_the_users_error_is_the_last_line(start: Callable[..., Job]) -> None:
    job = start("hang", "user_error")
    assert job.end() == 2
    assert job.last_lines.count("\n") == 1
    assert job.last_lines.endswith("failed first: the rule; seen: 1; change: that\n") and "rank 1" in job.last_lines
    assert "torch/distributed" not in job.screen  # torchrun has a traceback and a table for what it takes for failed
    assert not job.running()


def test_the_fault_is_shown_last_and_not_its_consequences(start: Callable[..., Job]) -> None:
    job = start("peer_of_1", "fault")
    assert job.end() == 1
    assert "rank 1" in job.last_lines and job.screen.endswith("ZeroDivisionError: the true cause\n")
    assert "closed by peer" not in job.screen


def test_a_rank_that_ends_without_a_word(start: Callable[..., Job]) -> None:
    job = start("hang", "end_without_report")
    assert job.end() == 1
    assert "rank 1" in job.last_lines
    assert "exit code 5" in job.last_lines or UNSEEN in job.last_lines


def test_when_torchrun_is_killed_the_ranks_end_too(start: Callable[..., Job]) -> None:
    job = start("hang", "hang")
    job.wait_for("pid")
    torchrun = job.torchrun()
    os.kill(torchrun, signal.SIGKILL)
    assert job.end() == 1
    # Killed before the supervisor had seen them, they are ended by the kernel alone, a moment later.
    wait_until(lambda: not job.running(), "the ranks ended")
    assert f"torchrun (pid {torchrun}) failed" in job.last_lines and "killed by signal 9" in job.last_lines


def test_when_the_supervisor_is_killed_the_kernel_ends_the_rest(start: Callable[..., Job]) -> None:
    job = start("hang", "hang")
    job.wait_for("pid")
    torchrun = job.torchrun()
    ranks = [job.number("pid", rank) for rank in range(2)]
    job.process.kill()
    job.end()

    def left() -> list[int]:
        return [row.pid for row in read_processes([torchrun, *ranks]).values() if not row.zombie]

    wait_until(lambda: not left(), "torchrun and the ranks ended")


def test_only_leaders_of_a_session_are_ranks_and_they_are_in_rank_order(tmp_path: Path) -> None:
    """torchrun has other, short-lived children (ldconfig, compilers): their end is no failure of a rank."""
    script = (
        "import subprocess, sys, time\n"
        "starts = [False, True, True]\n"
        "print(*[subprocess.Popen(['sleep', '60'], start_new_session=new).pid for new in starts], flush=True)\n"
        "time.sleep(60)\n"
    )
    plan = LaunchPlan(nnodes=1, node_rank=0, nproc_per_node=2, master_addr="x", master_port=1, sources={})
    watcher = Attempt(plan, tmp_path, Limits(exit_grace=0, exit_code_on_signal=0), StopSignals())
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True) as parent:
        assert parent.stdout is not None
        other, *ranks = map(int, parent.stdout.readline().split())
        watcher._torchrun = parent
        watcher._find_ranks()
        for group in (parent.pid, *ranks):  # `other` is in the parent's group
            kill_group(group)
    assert [rank.pid for rank in watcher._ranks] == ranks and other not in ranks


def test_an_end_that_a_signal_did_not_cause_keeps_its_own_exit_code(start: Callable[..., Job]) -> None:
    """The run was complete when the signal came: a platform that starts stopped jobs again has nothing to do."""
    job = start("wait_0", exit_code_on_signal=143)
    job.wait_for("pid")
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 0
    assert job.last_lines == "launcher: all ranks ended in order after SIGTERM\n"


def test_a_fault_starts_all_ranks_again_until_it_goes_well(start: Callable[..., Job]) -> None:
    job = start("return_0", "fail_2", max_restarts=3)
    assert job.end() == 0, job.screen
    assert "restart 1 of 3" in job.screen and "restart 2 of 3" in job.screen and "restart 3" not in job.screen
    assert "RuntimeError: failure 1\n" in job.screen and "RuntimeError: failure 2\n" in job.screen
    number, reason = (job.folder / "restart_1").read_text().split(" ", 1)
    assert number == "2" and reason.startswith("rank 1 on ") and reason.endswith("RuntimeError: failure 2")
    assert not job.running()


def test_the_last_failure_is_shown_when_no_restart_is_left(start: Callable[..., Job]) -> None:
    job = start("fail_9", max_restarts=1)
    assert job.end() == 1
    assert job.screen.endswith("RuntimeError: failure 2\n")
    assert "restart 1 was the last one (max_restarts); at first rank 0 on" in job.screen
    assert job.screen.count("starting ") == 2


def test_a_killed_torchrun_is_a_fault_too(start: Callable[..., Job]) -> None:
    job = start("busy", max_restarts=1)
    job.wait_for("stepped")
    first = job.number("pid", 0)
    os.kill(job.torchrun(), signal.SIGKILL)
    wait_until(lambda: job.number("pid", 0) != first, "a second start")
    job.wait_for("pid")
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 0, job.screen
    assert "killed by signal 9; the ranks were killed with it" in job.screen and "restart 1 of 1" in job.screen
    assert not job.running()


def test_what_the_user_has_to_mend_is_not_repeated(start: Callable[..., Job]) -> None:
    job = start("hang", "user_error", max_restarts=3)
    assert job.end() == 2
    assert "restart 1" not in job.screen


def test_a_failure_after_a_request_to_stop_is_not_repeated(start: Callable[..., Job]) -> None:
    job = start("hang", "wait", max_restarts=3)
    job.wait_for("pid")
    job.process.send_signal(signal.SIGTERM)
    job.wait_for("signals")
    os.kill(job.number("pid", 0), signal.SIGKILL)
    assert job.end() == 1
    assert "restart 1" not in job.screen
    assert not job.running()


def test_ranks_that_hang_show_their_stacks_and_are_named(start: Callable[..., Job]) -> None:
    """One hangs in C code that holds the interpreter's lock, one waits for its data, one would like to save."""
    job = start("stuck_step", "stuck_waiting_for_data", "stuck_save", step_timeout=2)
    assert job.end() == 1
    assert not job.running()
    for rank in range(3):
        stacks = job.screen.split(f"stacks of rank {rank} (pid {job.number('pid', rank)}):\n")[1]
        assert stacks.startswith(("Current thread 0x", "Thread 0x")) and " in step\n" in stacks.split("stacks of")[0]
    assert job.last_lines.startswith("launcher: no step was finished for 2 s (step_timeout): rank 0: step 7 finished, ")
    for rank, phase in enumerate(("step", "waiting for data", "save")):
        assert f"rank {rank}: step 7 finished, then " in job.last_lines and f" s in {phase}" in job.last_lines
    assert job.last_lines.count("\n") == 1


def test_nodes_start_their_ranks_again_together(start: Callable[..., Job], tmp_path: Path) -> None:
    """A rank of node 1 fails once; node 0, whose rank is well until its peer has gone, starts again with it."""
    port = free_port()
    jobs = []
    for node in range(2):
        folder = tmp_path / str(node)
        folder.mkdir()
        environ = {"NNODES": "2", "NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        behaviours = ["lost_peer", "fail_1"]
        jobs.append(start(*behaviours, folder=folder, node=environ | {"NPROC_PER_NODE": "1"}, max_restarts=1))
    assert [job.end() for job in jobs] == [0, 0], jobs[0].screen + jobs[1].screen
    for job in jobs:
        assert "restart 1 of 1" in job.screen and not job.running()
    assert "RuntimeError: connection closed by peer" in jobs[0].screen
    assert "RuntimeError: failure 1" in jobs[1].screen


def test_b90_two_jobs_of_one_machine_where_torchs_own_port_is_taken(start: Callable[..., Job], tmp_path: Path) -> None:
    """Nothing is set, so each takes a free port."""
    folders = [tmp_path / "one", tmp_path / "other"]
    with socket.socket() as listener:
        with suppress(OSError):  # someone else's is as good
            listener.bind(("", 29500))
            listener.listen(1)
        for folder in folders:
            folder.mkdir()
        jobs = [start("wait", folder=folder) for folder in folders]
        for job in jobs:
            job.wait_for("pid")
        for job in jobs:
            job.process.send_signal(signal.SIGTERM)
        assert [job.end() for job in jobs] == [0, 0], jobs[0].screen + jobs[1].screen
    ports = [job.screen.split("--master_port ")[1].split()[0] for job in jobs]
    assert len({*ports, "29500"}) == 3
