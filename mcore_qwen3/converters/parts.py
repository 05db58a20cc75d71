"""Work in parts: one process a part on this node, the results and the bytes done coming back over pipes."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_qwen3.errors import ConversionError

Report = Callable[[int], None]
Task = Callable[[Any, Report], dict[str, Any]]
"""A module-level function: (what to do, report(bytes done)) -> a result that JSON can hold."""


@dataclass(frozen=True)
class Team:
    """Who does the work.

    Attributes:
        workers: processes on each node.
        nodes: machines that share the disk, each running the same command.
        node_rank: this one's number.
        report: called with bytes as they are done on this node.
    """

    workers: int = 1
    nodes: int = 1
    node_rank: int = 0
    report: Report = lambda nbytes: None

    @property
    def parts(self) -> int:
        """Parts of the whole work."""
        return self.workers * self.nodes

    @property
    def own_parts(self) -> range:
        """The parts of this node."""
        return range(self.node_rank * self.workers, (self.node_rank + 1) * self.workers)


def split_evenly[Item](items: Sequence[Item], sizes: Sequence[int], parts: int) -> list[list[Item]]:
    """Cut a sequence into runs of nearly equal total size, in order; a run may be empty."""
    whole, done, runs = sum(sizes), 0, [[] for _ in range(parts)]  # type: tuple[int, int, list[list[Item]]]
    for item, size in zip(items, sizes, strict=True):
        middle = done + size / 2
        runs[min(parts - 1, int(middle * parts / max(whole, 1)))].append(item)
        done += size
    return runs


def run_parts(task: Task, payloads: Sequence[Any], report: Report) -> list[dict[str, Any]]:
    """Run the task on each payload; several run in processes of their own, which end with this one.

    Args:
        task: a module-level function.
        payloads: what to do; anything that can be pickled where there are several.
        report: gets the bytes as they are done.

    Returns:
        The results, in the order of the payloads.

    Raises:
        ConversionError: from a part, or because its process died; the other parts are stopped.
        OSError: from a part that could not write.
    """
    if len(payloads) == 1:
        return [task(payloads[0], report)]
    context = multiprocessing.get_context("spawn")  # a fork would share file positions and locks
    processes: list[Any] = []
    pipes: list[Any] = []
    try:
        for payload in payloads:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(task, payload, theirs, os.getpid()), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        return _collect(pipes, report)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _collect(pipes: list[Any], report: Report) -> list[dict[str, Any]]:
    results: dict[int, dict[str, Any]] = {}
    while len(results) < len(pipes):
        waiting = [pipe for number, pipe in enumerate(pipes) if number not in results]
        for pipe in multiprocessing.connection.wait(waiting):
            number = pipes.index(pipe)
            try:
                kind, value = pipes[number].recv()
            except EOFError:
                raise ConversionError(
                    "every worker must finish",
                    seen=f"worker {number} ended early",
                    fix="read what it printed; if it printed nothing it was killed: look for a lack of memory",
                ) from None
            if kind == "bytes":
                report(value)
            elif kind == "failed":
                raise value
            else:
                results[number] = value
    return [results[number] for number in range(len(pipes))]


def _work(task: Task, payload: Any, pipe: Any, parent: int) -> None:
    """The life of one worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets the same one, and ends its workers

    def report(nbytes: int) -> None:
        if os.getppid() != parent:  # killed: nobody will ever complete what is being written
            os._exit(1)
        pipe.send(("bytes", nbytes))

    try:
        pipe.send(("done", task(payload, report)))
    except (ConversionError, OSError) as error:
        pipe.send(("failed", error))
