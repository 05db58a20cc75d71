"""Saves on a disk that refuses, and loads of damaged files, inside a rank and by the trainer's own reader and writer."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from helpers.resuming import trainers_saver
from helpers.training import Layout, build

NOBODY = 65534


@contextmanager
def refusing(fault: str, root: Path) -> Iterator[None]:
    """Make the system refuse: a file may not grow ("full"), or the folder may not be written to ("read-only").

    A limit on file sizes needs no rights, and every write past it fails as on a full disk, with another number. Root may
    write anywhere, so it becomes nobody for a while.
    """
    if fault == "full":
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    elif fault == "read-only":
        user = os.geteuid()
        root.chmod(0o555)
        if user == 0:
            os.seteuid(NOBODY)
        try:
            yield
        finally:
            if user == 0:
                os.seteuid(0)
            root.chmod(0o755)
    else:
        yield


def save_twice(model_dir: str, root: str, layout: Layout, fault: str, on_rank: int, *, asynchronous: bool) -> str:
    """A good save after step 2, then one after step 3 that the system refuses on one rank. Returns its error, or ""."""
    import torch.distributed as dist

    from mcore_qwen3.train.checkpoint import SaveError
    from mcore_qwen3.train.optimizer import OptimizerSettings, build_optimizer, wrap_for_data_parallel
    from mcore_qwen3.train.state import TrainState

    _, models = build(model_dir, layout)
    chunks = wrap_for_data_parallel(models)
    optimizer = build_optimizer(chunks, OptimizerSettings())
    saver = trainers_saver(Path(root), model_dir, asynchronous=asynchronous)
    state = saver.save(TrainState(iteration=2), chunks, optimizer)
    saver.wait()
    with refusing(fault if dist.get_rank() == on_rank else "", Path(root)):
        try:
            saver.save(replace(state, iteration=3), chunks, optimizer)
            saver.wait()
        except SaveError as error:
            return str(error)
    return ""


def load_checkpoint(model_dir: str, iteration_dir: str, layout: Layout) -> str:
    """Read weights and moments as a continued run does. Returns the error, or ""."""
    from mcore_qwen3.arch.shape import read_model_shape
    from mcore_qwen3.converters import OptimizerSource, TorchDistSource
    from mcore_qwen3.errors import ConversionError
    from mcore_qwen3.model.weights import read_weights
    from mcore_qwen3.train.optimizer import OptimizerSettings, build_optimizer, wrap_for_data_parallel
    from mcore_qwen3.train.optimizer_state import read_state

    _, models = build(model_dir, layout)
    try:
        with TorchDistSource(iteration_dir, read_model_shape(model_dir)) as source:
            for model in models:
                read_weights(model, source)
        optimizer = build_optimizer(wrap_for_data_parallel(models), OptimizerSettings())
        with OptimizerSource(iteration_dir) as moments:
            read_state(models, optimizer, moments, step=2, with_master=False)
    except ConversionError as error:
        return str(error)
    return ""
