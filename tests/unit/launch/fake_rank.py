"""A rank without torch: `fake_rank.py FOLDER BEHAVIOUR_OF_RANK_0 BEHAVIOUR_OF_RANK_1 ...`, started by torchrun.

It leaves its pid, the signals it got and its "checkpoint" in FOLDER, where the tests look.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

from mcore_qwen3.errors import ConfigError
from mcore_qwen3.launch import Heartbeat, on_stop_request, rank_main, restarted

FOLDER, RANK = Path(sys.argv[1]), int(os.environ["RANK"])
BEHAVIOUR = sys.argv[2:][RANK]
stop: list[int] = []


def leave(name: str, text: str = "") -> None:
    temporary = FOLDER / f".{name}_{RANK}"
    temporary.write_text(text)
    temporary.replace(FOLDER / f"{name}_{RANK}")


def got_signal(signum: int) -> None:
    stop.append(signum)
    leave("signals", " ".join(map(str, stop)))


def wait_for(name: str) -> None:
    while not (FOLDER / name).exists():
        time.sleep(0.02)


def work() -> int:
    helper = subprocess.Popen(["sleep", "300"])  # as a data loader's worker: it must not outlive the rank either
    leave("helper", str(helper.pid))
    if BEHAVIOUR == "slow_start":  # signals are still ignored here
        leave("pid", str(os.getpid()))
        wait_for("signal_sent")
    on_stop_request(got_signal)
    leave("pid", str(os.getpid()))
    if BEHAVIOUR == "user_error":
        wait_for("pid_0")
        raise ConfigError("the rule", seen=1, fix="that")
    if BEHAVIOUR == "fault":
        raise ZeroDivisionError("the true cause")
    if BEHAVIOUR == "lost_peer":  # of node 1's rank, in the folder beside this one; all is well when that one ends well
        return follow(FOLDER.parent / "1")
    if BEHAVIOUR.startswith("peer_of_"):  # loses its connection when that process ends
        wait_for(f"pid_{BEHAVIOUR[-1]}")
        peer = (FOLDER / f"pid_{BEHAVIOUR[-1]}").read_text()
        while Path(f"/proc/{peer}").exists() and "\nState:\tZ" not in Path(f"/proc/{peer}/status").read_text():
            time.sleep(0.001)
        raise RuntimeError("connection closed by peer")
    if BEHAVIOUR.startswith("return_"):
        return int(BEHAVIOUR.removeprefix("return_"))
    if BEHAVIOUR == "end_without_report":
        os._exit(5)
    if BEHAVIOUR.startswith("fail_"):  # in so many starts, then all is well
        restart = restarted(os.environ)
        leave("restart", f"{restart.number} {restart.reason}" if restart else "")
        number = restart.number if restart else 0
        fails = number < int(BEHAVIOUR[-1])
        (FOLDER / ".start").write_text("fails" if fails else "")
        (FOLDER / ".start").replace(FOLDER / f"start_{number}")
        if fails:
            raise RuntimeError(f"failure {1 + number}")
        return 0
    if BEHAVIOUR.startswith(("stuck_", "busy")):
        step(Heartbeat(enabled=True))
    while BEHAVIOUR == "hang" or not stop:
        time.sleep(0.02)
    time.sleep(0.5)  # so that a kill during the save would show
    leave("saved")
    return int(BEHAVIOUR.removeprefix("wait_")) if BEHAVIOUR.startswith("wait_") else 0


def follow(peer: Path) -> int:
    restart = restarted(os.environ)
    number = restart.number if restart else 0
    while not (peer / f"start_{number}").exists():
        time.sleep(0.02)
    if (peer / f"start_{number}").read_text() == "fails":
        raise RuntimeError("connection closed by peer")
    return 0


def step(heartbeat: Heartbeat) -> None:
    """A first step, then one that never ends: in C code that holds the interpreter's lock, or waiting for the others."""
    for iteration in (6, 7):
        heartbeat.enter("waiting for data", iteration)
        for _ in heartbeat.around("step", iter([1])):
            time.sleep(0.1)
    leave("stepped")
    if BEHAVIOUR == "busy":  # as a rank that lets itself be asked to stop
        return
    phase = BEHAVIOUR.removeprefix("stuck_").replace("_", " ")
    heartbeat.enter(phase)
    sleep = ctypes.PyDLL(None).sleep if phase == "step" else time.sleep
    while True:
        sleep(300)


sys.exit(rank_main(work))
