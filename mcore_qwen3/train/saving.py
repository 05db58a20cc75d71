"""Saves that run beside training: values and progress are frozen at once, the files are written in threads.

A save has two stages. First each rank's thread writes its own file. When all files are durable, rank 0's thread completes
the directory and makes it visible. Between two steps the ranks ask each other whether a stage is over; a synchronous save
is the same, waited for at once.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer

from mcore_qwen3.model.build import unwrapped
from mcore_qwen3.runtime.device import current_device
from mcore_qwen3.train.checkpoint import (
    BEST_TRACKER,
    CheckpointWriter,
    Place,
    SavedTensor,
    SaveError,
    iteration_name,
    partial_path,
    publish,
    state_held,
    weights_held,
    write_tracker,
)
from mcore_qwen3.train.optimizer import Chunks
from mcore_qwen3.train.retention import clear_unfinished, delete_checkpoints, kept_iterations
from mcore_qwen3.train.shares import Shares
from mcore_qwen3.train.state import TrainState


class _Job:
    """Work in a thread of its own. It holds the process open until it is over, so no file is cut in the middle."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.result: Any = None
        self.reason: str | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint")
        self._thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self.result = work()
        except Exception as exc:  # every kind of failure has to reach the other ranks, or they wait for ever
            self.reason = f"{type(exc).__name__}: {exc}"

    @property
    def over(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait until it is over."""
        self._thread.join()


@dataclass(frozen=True, slots=True)
class _Pending:
    """A save that is not over.

    Attributes:
        final: where it will be.
        state: progress to store.
        surplus: iterations to delete once it is there.
        job: this rank's work in the present stage.
        what: what the stage does, for messages.
    """

    final: Path
    state: TrainState
    surplus: Sequence[int]
    job: _Job
    what: str
    is_last: bool = False


class CheckpointSaver:
    """Writes the checkpoints of a run, one at a time. All methods are collective.

    Args:
        root: the run's save directory.
        writer: the file format.
        total_limit: checkpoints to keep; None keeps all.
        asynchronous: training goes on while the files are written; each rank keeps a copy of what it writes in host memory.
        say: prints a line, on rank 0.
        saved: told the iteration of every checkpoint that is complete, on all ranks.
    """

    def __init__(
        self,
        root: Path,
        writer: CheckpointWriter,
        *,
        total_limit: int | None,
        asynchronous: bool,
        say: Callable[[str], None],
        saved: Callable[[int], None] = lambda iteration: None,
    ) -> None:
        self._saved = saved
        self._root, self._writer, self._total_limit = root, writer, total_limit
        self._asynchronous, self._say = asynchronous, say
        self._shares, self._host_copies = Shares(), _HostCopies()
        self._pending: _Pending | None = None
        if dist.get_rank() == 0:
            clear_unfinished(root)

    def save(self, state: TrainState, chunks: Chunks, optimizer: ChainedOptimizer | None) -> TrainState:
        """Write `<root>/iter_<n>` and make the tracker name it; an earlier save is waited for.

        Then checkpoints past the limit are deleted.

        Args:
            state: progress to store.
            chunks: the wrapped model.
            optimizer: None leaves the moments out.

        Returns:
            The state, with the checkpoints that the run then has.

        Raises:
            SaveError: on every rank, if any rank could not write; nothing that looks complete is left. With `asynchronous`
                it may come from a later call.
        """
        self.wait()
        written = (*(number for number in state.checkpoints if number != state.iteration), state.iteration)
        kept = kept_iterations(written, self._total_limit, state.best_iteration)
        final = self._root / iteration_name(state.iteration)
        partial = partial_path(final)

        def clear() -> None:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

        rank = dist.get_rank()
        job = _Job(clear if rank == 0 else _nothing)
        job.join()
        _together(job, "create a directory for the checkpoint", partial)
        inner = [unwrapped(chunk) for chunk in chunks]
        state_tensors = [] if optimizer is None else state_held(inner, optimizer, with_master=inner[0].config.bf16)
        weights = self._shares.own(weights_held(inner), sum(each.values.nbytes for each in state_tensors))
        tensors = [*weights, *state_tensors]
        if self._asynchronous:
            tensors = self._host_copies.take(tensors)
        self._pending = _Pending(
            final,
            # The ones to be deleted are named too: whoever continues deletes what a kill here has left.
            replace(state, checkpoints=written, has_optimizer=optimizer is not None),
            [number for number in written if number not in kept],
            _Job(lambda: self._writer.write_part(partial, tensors, rank)),
            "write the tensors of the checkpoint",
        )
        if not self._asynchronous:
            self.wait()
        return replace(state, checkpoints=tuple(kept))

    @property
    def is_pending(self) -> bool:
        """Whether a save is not over yet; the same on every rank."""
        return self._pending is not None

    def poll(self) -> None:
        """Go on with a save whose stage is over on all ranks; call it between steps.

        Raises:
            SaveError: as `save`.
        """
        if self._pending is None:
            return
        over = torch.tensor(self._pending.job.over, dtype=torch.int32, device=current_device())
        dist.all_reduce(over, op=dist.ReduceOp.MIN)
        if over:
            self._advance()

    def wait(self) -> None:
        """Wait until no save is pending.

        Raises:
            SaveError: as `save`.
        """
        while self._pending is not None:
            self._pending.job.join()
            self._advance()

    def mark_stopped(self, state: TrainState) -> None:
        """Write into the checkpoint of this state, which was saved last, why the run ends with it.

        Raises:
            SaveError: as `save`.
        """
        self.wait()
        final = self._root / iteration_name(state.iteration)

        def mark() -> None:
            replace(TrainState.read(final), stopped_by=state.stopped_by).write(final)

        job = _Job(mark if dist.get_rank() == 0 else _nothing)
        job.join()
        _together(job, "write why the run stopped", final)

    def _advance(self) -> None:
        """End a stage that is over on this rank, and start the next one."""
        pending, self._pending = self._pending, None
        assert pending is not None
        partial = partial_path(pending.final)
        try:
            results = _together(pending.job, pending.what, pending.final if pending.is_last else partial)
        except SaveError:
            if dist.get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)  # no rank writes any more; it may have filled the disk
            raise
        if pending.is_last:
            self._say(f"saved {pending.final}")
            self._saved(pending.state.iteration)
            return

        def complete() -> None:
            pending.state.write(partial)
            self._writer.complete(partial, results, pending.state.iteration)
            self._writer.sync(partial)
            publish(pending.final)
            if pending.state.best_iteration is not None:
                write_tracker(self._root, str(pending.state.best_iteration), BEST_TRACKER)
            self._writer.after(pending.final)
            delete_checkpoints(self._root, pending.surplus, self._say)

        job = _Job(complete if dist.get_rank() == 0 else _nothing)
        self._pending = replace(pending, job=job, what="complete the checkpoint", is_last=True)


class _HostCopies:
    """Copies in host memory, in the same buffers at every save: new memory would cost a page fault for every 4 KiB."""

    def __init__(self) -> None:
        self._buffers: dict[Place, torch.Tensor] = {}

    def take(self, tensors: Sequence[SavedTensor]) -> list[SavedTensor]:
        """The tensors with values that later steps do not change."""
        return [replace(tensor, values=self._copy(tensor)) for tensor in tensors]

    def _copy(self, tensor: SavedTensor) -> torch.Tensor:
        values = tensor.values
        if tensor.place not in self._buffers:
            self._buffers[tensor.place] = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        return self._buffers[tensor.place].copy_(values)


def _nothing() -> None:
    """The job of a rank that has none in a stage."""


def _together(job: _Job, what: str, where: Path) -> Sequence[Any]:
    """The results of a job that is over, by rank, on rank 0; if it failed on any rank, fail on all with the first reason."""
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, job.reason)
    for rank, text in enumerate(reasons):
        if text is not None:
            raise SaveError(
                f"could not {what}",
                seen=f"rank {rank}, {where}: {text}",
                fix="make room or mend the rights, then start again: earlier checkpoints are complete",
            )
    results: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(job.result, results)
    return results or []
