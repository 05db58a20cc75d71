"""One pool of gloo worker processes per world size, started once and used by every multi-rank test.

A test calls `pool.run(function, **kwargs)`: each rank runs `function(**kwargs)` (a module-level function, arguments and result
pickled) and the results come back as a list by rank. A failed or late call kills the pool; the next call builds a new one.
"""

from __future__ import annotations

import atexit
import multiprocessing as mp
import os
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

from mcore_qwen3.launch.ports import free_port

TIMEOUT_S = 240.0
STARTUP_S = 240.0
# Groups that something still holds leave their threads behind, and they all poll.
MOST_THREADS = 300


class RankFailure(AssertionError):
    """A rank raised, died or did not answer in time."""


def _worker(rank: int, world_size: int, port: int, pipe: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
    )
    import torch

    torch.set_num_threads(1)
    from mcore_qwen3.runtime import groups
    from mcore_qwen3.runtime.device import choose_device

    device = choose_device("cpu")
    groups.prepare_megatron(device)
    groups.start_process_group(device, timeout_s=TIMEOUT_S)
    pipe.send(("ready", None))
    while True:
        task = pipe.recv()
        if task is None:
            return
        function, kwargs = task
        try:
            pipe.send(("ok", function(**kwargs)))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))


def _threads(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))


class RankPool:
    """Workers of one world size."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def _start(self) -> None:
        context = mp.get_context("spawn")
        port = free_port()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(rank, self.world_size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._collect(time.monotonic() + STARTUP_S)

    def stop(self) -> None:
        """End the workers, if any."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def run(self, function: Callable[..., Any], *, timeout_s: float = TIMEOUT_S, **kwargs: Any) -> list[Any]:
        """Run the function on every rank; returns the results by rank.

        Raises:
            RankFailure: with the tracebacks of the ranks that failed.
        """
        if not self._processes:
            self._start()
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            pipe.send((function, kwargs))
        results = self._collect(time.monotonic() + timeout_s)
        if any(_threads(process.pid) > MOST_THREADS for process in self._processes):
            self.stop()
        self._signal(signal.SIGSTOP)
        return results

    def _signal(self, signum: int) -> None:
        """Stop or continue the workers: gloo's threads poll, and idle pools would take a core from those that work."""
        for process in self._processes:
            os.kill(process.pid, signum)

    def _collect(self, deadline: float) -> list[Any]:
        results: list[Any] = [None] * self.world_size
        waiting = set(range(self.world_size))
        errors: dict[int, str] = {}
        while waiting:
            if time.monotonic() > deadline:
                errors.update(dict.fromkeys(waiting, "no answer in time"))
                break
            for rank in sorted(waiting):
                try:
                    if not self._pipes[rank].poll(0.01):
                        continue
                    kind, value = self._pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    kind, value = "error", "the process died"
                waiting.discard(rank)
                if kind == "error":
                    errors[rank] = value
                    deadline = min(deadline, time.monotonic() + 5)  # the others may hang in a collective
                else:
                    results[rank] = value
        if errors:
            self.stop()
            text = "\n".join(f"--- rank {rank} of {self.world_size} ---\n{error}" for rank, error in errors.items())
            raise RankFailure(text)
        return results


_POOLS: dict[int, RankPool] = {}


def pool(world_size: int) -> RankPool:
    """The shared pool of that world size."""
    return _POOLS.setdefault(world_size, RankPool(world_size))


def stop_all() -> None:
    """End every pool; called once at the end of the test session."""
    for each in _POOLS.values():
        each.stop()


atexit.register(stop_all)  # before multiprocessing's own end, which would wait for stopped workers for ever
