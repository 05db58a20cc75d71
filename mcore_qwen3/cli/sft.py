"""``megatron sft``, and ``pt`` alike: check, prepare the data, start the ranks.

In a process that is a rank: hand over to the rank.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence

from mcore_qwen3.cli.agreement import setting_facts
from mcore_qwen3.cli.dry_run import dry_run_lines
from mcore_qwen3.cli.resolve import (
    MODEL_VARIABLE,
    ResolvedRun,
    resolve,
    train_iters,
    with_steps,
    with_weights,
)
from mcore_qwen3.cli.resume import TRACKER_VARIABLE, tracker_stamp, ways_out
from mcore_qwen3.cli.run_lines import plan_lines
from mcore_qwen3.config import ParsedRun, RunConfig, parse_args
from mcore_qwen3.data.sources import check_entries
from mcore_qwen3.errors import McoreQwen3Error
from mcore_qwen3.launch import (
    Company,
    LaunchPlan,
    Limits,
    StopSignals,
    check_in,
    count_gpus,
    decline,
    expected_ranks,
    is_rank,
    resolve_environment,
    started_now,
    visible_gpus,
)
from mcore_qwen3.launch import run as run_ranks


def run(argv: list[str], command: str = "sft") -> int:
    """The words after ``megatron sft`` (or pt) -> exit code."""
    began = started_now()
    parsed = parse_args(argv, command)
    if parsed.config.launch.device == "cpu":
        # Before anything imports torch, here and in the ranks: the suite runs on a machine with GPUs too.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if is_rank(os.environ):
        from mcore_qwen3.cli.sft_rank import run_rank

        return run_rank(parsed)
    with StopSignals() as signals:
        with signals.ending_at_once(parsed.config.train.exit_code_on_signal):
            job = _prepare(parsed)
        if job is None:
            return 0
        plan, company, environment = job
        words, extra_env = ["-m", "mcore_qwen3", command, *argv], began | environment
        return run_ranks(plan, words, limits(parsed.config), signals, extra_env=extra_env, company=company)


def _prepare(parsed: ParsedRun) -> tuple[LaunchPlan, Company, dict[str, str]] | None:
    """All that comes before the ranks: what to start, with whom, and what to tell the ranks; None where nothing starts."""
    config, gpus = parsed.config, usable_gpus(parsed.config)
    if config.launch.dry_run:
        resolved = resolve(parsed, expected_ranks(os.environ, gpus=gpus, platform=config.launch.platform))
        _say(dry_run_lines(resolved, _data_files(resolved)))
        return None
    plan = resolve_environment(os.environ, gpus=gpus, platform=config.launch.platform)
    _say([*plan.table(), *(f"note: {note}" for note in plan.notes)])
    seconds = limits(config).meeting_seconds
    company = check_in(plan, setting_facts(config), visible_gpus(os.environ) if gpus else (), seconds)
    try:
        environment = _prepare_node(parsed, plan)
    except McoreQwen3Error as error:
        decline(plan, company, str(error))
        raise
    if environment is None:
        decline(plan, company, "there is nothing to do")
        return None
    return plan, company, environment


def _prepare_node(parsed: ParsedRun, plan: LaunchPlan) -> dict[str, str] | None:
    """Check, and prepare the data; what to tell the ranks, or None when all steps are done."""
    resolved = resolve(parsed, plan.world_size)
    _data_files(resolved)
    _say(plan_lines(resolved))
    if resolved.finished:
        _say([_finished_text(resolved)])
        return None
    from mcore_qwen3.cli.prepare import PREPARED_VARIABLE, epoch_line, prepare_data

    resolved = with_weights(resolved)
    check_weights(resolved)
    with progress_on_screen():
        prepared = prepare_data(resolved)
    resolved = with_steps(resolved, prepared.train.rows)
    global_batch_size = resolved.config.train.global_batch_size
    _say([*prepared.report, epoch_line(prepared, global_batch_size), f"steps: {train_iters(resolved.config):,}"])
    if resolved.finished:
        _say([_finished_text(resolved)])
        return None
    return {
        PREPARED_VARIABLE: str(prepared.path),
        MODEL_VARIABLE: str(resolved.model.directory),
        TRACKER_VARIABLE: tracker_stamp(resolved.config),
    }


def _data_files(run: ResolvedRun) -> list[str]:
    """The training and validation files, all of which exist."""
    data = run.config.data
    return check_entries((*data.dataset, *data.val_dataset))


def limits(config: RunConfig) -> Limits:
    """How long the ranks get, and how often they start."""
    return Limits(
        exit_grace=config.train.exit_grace,
        exit_code_on_signal=config.train.exit_code_on_signal,
        step_timeout=config.launch.step_timeout,
        max_restarts=config.launch.max_restarts,
        # A node learns of another's failure when an operation over the ranks times out; then it ends its own ranks.
        meeting_seconds=60 * config.launch.distributed_timeout_minutes + 60,
    )


def usable_gpus(config: RunConfig) -> int | None:
    """GPUs of this node that the run may use; None for one on CPU. A dry run may plan for one that is not there."""
    if config.launch.device == "cpu":
        return None
    planned = config.launch.device == "cuda" and config.launch.dry_run
    return max(int(planned), count_gpus(os.environ))


def check_weights(run: ResolvedRun) -> None:
    """Refuse weights that do not fit the model, before data is prepared and ranks are started: headers alone are read.

    Raises:
        ConversionError: files or tensors missing, stray, damaged, unsafe, or of a wrong shape.
    """
    from mcore_qwen3.converters import open_source  # imports torch: two seconds, once all that is cheaper is right

    open_source(run.weights, run.shape).close()


def _finished_text(run: ResolvedRun) -> str:
    assert run.resume is not None
    return (
        f"nothing to do: {run.resume.directory} has {run.resume.iteration} of {train_iters(run.config)} steps; to train "
        f"on, give a larger --train_iters or --num_train_epochs ({ways_out(run.resume)})"
    )


@contextlib.contextmanager
def progress_on_screen() -> Iterator[None]:
    """Let this package's own log lines, such as which file is being encoded, reach the screen for a while."""
    logger, handler = logging.getLogger("mcore_qwen3"), logging.StreamHandler(sys.stdout)
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _say(lines: Sequence[str]) -> None:
    print("\n".join(lines), flush=True)
