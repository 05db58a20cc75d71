"""A small program that becomes torchrun: `python -m mcore_qwen3.launch.shielded_exec SUPERVISOR_PID COMMAND...`.

It does what has to be done between fork and exec, in a process of its own because the supervisor may have threads
(tokenizers, torch), after which running Python code in a forked child can lock up:
* SIGTERM, SIGINT and SIGUSR1 are ignored, which torchrun and the ranks inherit: without a handler of its own no process
  may die of a signal that asks for a save;
* the kernel kills the process when the supervisor ends;
* the pid, which stays the same, is passed to the ranks, so that they can see whether torchrun still lives.
"""

from __future__ import annotations

import os
import signal
import sys

from mcore_qwen3.launch.processes import die_with_parent
from mcore_qwen3.launch.rank_report import STOP_SIGNALS, TORCHRUN_PID


def main(supervisor: int, command: list[str]) -> None:
    """Prepare this process and replace it by `command`."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    die_with_parent(supervisor)
    os.environ[TORCHRUN_PID] = str(os.getpid())
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
