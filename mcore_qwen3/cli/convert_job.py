"""What both conversions do before and while they write: nodes, notes, progress."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_qwen3.arch import ModelShape, find_config_file, read_model_shape
from mcore_qwen3.cli.hub_model import find_model
from mcore_qwen3.errors import ConfigError
from mcore_qwen3.launch import resolve_environment

if TYPE_CHECKING:
    from mcore_qwen3.converters import Team

DTYPES = {"keep": None, "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# Where nobody watches a bar, one line in this many seconds.
_LINE_S = 30.0


def say(lines: Sequence[str]) -> None:
    """Print, at once; nothing where there are no lines."""
    print("".join(f"{line}\n" for line in lines), end="", flush=True)


def read_reference(path: Path, hf_config: str | None, use_hf: bool | None) -> tuple[Path, ModelShape]:
    """(directory with config.json and the tokenizer, the model's shape).

    Args:
        path: the checkpoint.
        hf_config: a directory, or a hub's model, that stands in for the checkpoint's own hf/.
        use_hf: the hub of such a model.

    Raises:
        ConfigError: no config.json; the message names `--hf_config`.
    """
    if hf_config is not None:
        model = find_model(hf_config, use_hf)
        say(model.note)
        return find_config_file(model.directory).parent, read_model_shape(model.directory)
    try:
        return find_config_file(path).parent, read_model_shape(path)
    except ConfigError as error:
        if "holds config.json" not in error.rule:
            raise
        raise ConfigError(
            error.rule, seen=error.seen, fix="name the model's Hugging Face directory with --hf_config"
        ) from error


def node_numbers(environ: Mapping[str, str]) -> tuple[int, int]:
    """(nodes, number of this one) from NNODES and NODE_RANK.

    Raises:
        LaunchError: they are no whole numbers in range, or NODE_RANK is missing.
    """
    # In a SLURM job a conversion is often one process of the batch script: only what was set for it splits it.
    platform = "local" if "SLURM_JOB_ID" in environ else "auto"
    environ = {"MASTER_ADDR": "localhost", **environ, "MASTER_PORT": ""}
    plan = resolve_environment(environ, gpus=None, platform=platform)
    return plan.nnodes, plan.node_rank


@contextmanager
def working_team(workers: int, nbytes: int, what: str) -> Iterator[Team]:
    """The team of a job, its progress on the screen; at the end one line with the speed.

    Args:
        workers: processes on this node.
        nbytes: bytes of the whole job.
        what: shown beside the bar.
    """
    from mcore_qwen3.converters import Team

    nodes, rank = node_numbers(os.environ)
    team = Team(workers=workers, nodes=nodes, node_rank=rank)
    own = nbytes // nodes
    start = time.monotonic()
    with _bar(own, what) if sys.stderr.isatty() else _lines(own, what) as report:
        yield dataclasses.replace(team, report=report)
    seconds = time.monotonic() - start
    place = f" (node {rank} of {nodes})" if nodes > 1 else ""
    say([f"{what}: {own / 1e9:.2f} GB in {seconds:.1f} s, {own / 1e9 / max(seconds, 1e-9):.2f} GB/s{place}"])


@contextmanager
def _bar(total: int, what: str) -> Iterator:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total)
        yield lambda nbytes: progress.advance(task, nbytes)


@contextmanager
def _lines(total: int, what: str) -> Iterator:
    start = last = time.monotonic()
    done = 0

    def report(nbytes: int) -> None:
        nonlocal last, done
        done += nbytes
        now = time.monotonic()
        if now - last >= _LINE_S:
            last = now
            speed = done / (now - start)
            left = max(0, total - done) / speed
            say([f"{what}: {done / 1e9:.1f} of {total / 1e9:.1f} GB, {speed / 1e9:.2f} GB/s, {left:.0f} s left"])

    yield report
