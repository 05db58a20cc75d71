"""The process table against processes that the test started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from mcore_qwen3.launch import processes


def test_proc_and_ps_agree() -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as child:
        by_proc = processes.read_processes([child.pid])[child.pid]
        (by_ps,) = processes._read_ps([child.pid])
        child.kill()
    for row in (by_proc, by_ps):
        assert (row.pid, row.parent, row.group) == (child.pid, os.getpid(), child.pid)
        assert not row.zombie and row.wait_status is None
    assert child.pid not in processes.read_processes([child.pid])
    assert processes._read_ps([child.pid]) == []


def test_a_zombie_still_tells_how_it_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
    while not (row := processes.read_processes([child.pid])[child.pid]).zombie:
        time.sleep(0.01)
    assert row.wait_status is not None and os.waitstatus_to_exitcode(row.wait_status) == -signal.SIGKILL
    assert child.wait() == -signal.SIGKILL


def test_descendants_go_all_the_way_down_and_groups_end() -> None:
    script = "import subprocess; child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True); child.wait()"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        assert {child.pid, grandchild} <= processes.descendants([os.getpid()])
        assert processes.descendants([child.pid]) == {grandchild}
        assert not processes.wait_until_gone([child.pid], 0)
        processes.kill_group(child.pid)
        assert processes.wait_until_gone([child.pid], 30)  # though `child` is a zombie until the end of this block
    processes.kill_group(child.pid)
    processes.send_signal(child.pid, signal.SIGTERM)  # neither minds that it has gone
