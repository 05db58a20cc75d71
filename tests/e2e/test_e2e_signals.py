"""A stop signal at every moment of a run: saved once if there is something to save, the right exit code, nothing left."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from e2e_kit import Job, Site, steps_of, wait_until, write_rows

pytestmark = pytest.mark.timeout(900)

SIGTERM, SIGUSR1 = signal.SIGTERM, signal.SIGUSR1
INTERVAL = 3  # steps between two saves and two evaluations


def command(load: Path, rows: Path, save: str, *more: object, step_timeout: int = 100000) -> list[object]:
    """The limit makes the ranks tell what they are doing."""
    words = f"""sft --load {load} --dataset {rows} --max_length 128 --global_batch_size 4 --lr_warmup_iters 2
        --save {save} --num_workers 1 --train_iters 100000 --exit_code_on_signal 143 --step_timeout {step_timeout}"""
    return [*words.split(), *more]


def phase_of(job: Job, site: Site) -> str:
    """What rank 0 is doing, by its own word."""
    beats = list(site.folder.glob("tmp/mcore_qwen3_run_*/rank_0.beat"))
    return str(json.loads(beats[0].read_text())["phase"]) if beats and job.process.poll() is None else ""


def saving(save: Path) -> bool:
    return any(save.glob(".iter_*.partial"))


def start(site: Site, words: Sequence[object], ranks: int) -> Job:
    (site.folder / "tmp").mkdir(exist_ok=True)
    return site.start(*words, NPROC_PER_NODE=str(ranks), TMPDIR=str(site.folder / "tmp"))


def stop_when(job: Job, moment: Callable[[], object], signals: Sequence[signal.Signals]) -> str:
    """Send the signals, half a second apart, at the moment; returns what the screen shows from the request on."""
    wait_until(lambda: moment() or job.process.poll() is not None, lambda: job.screen, pause=0.001)
    for number, signum in enumerate(signals):
        if number:
            time.sleep(0.5)
        job.process.send_signal(signum)
    assert job.end() == 143, job.screen
    job.assert_nothing_left()
    assert "Traceback" not in job.screen
    name = signals[0].name
    assert job.last_line == f"launcher: all ranks ended in order after {name}", job.screen
    return job.screen[job.screen.index(f"launcher: {name}: the ranks are asked to save and stop") :]


def assert_stopped(save: Path, signum: signal.Signals) -> int:
    """The last checkpoint is where the run stopped, and says why, and no other one does; returns its step."""
    assert not saving(save)
    states = [json.loads((path / "train_state.json").read_text()) for path in sorted(save.glob("iter_*"))]
    assert [state["stopped_by"] for state in states] == [""] * (len(states) - 1) + [signum.name]
    step = states[-1]["iteration"]
    assert (save / "latest_checkpointed_iteration.txt").read_text() == str(step)
    assert [record["iteration"] for record in steps_of(save)] == list(range(1, step + 1))
    return step


def test_while_data_is_prepared(site: Site, small_vocabulary_moe: Path) -> None:
    rows = write_rows(site.folder / "many.jsonl", 30000)
    cache = site.folder / "own-cache"
    words = command(small_vocabulary_moe, rows, "unborn", "--data_cache_path", cache, "--dataset_num_proc", 2)
    job = site.start(*words)
    wait_until(lambda: len(job.running()) > 2 or job.process.poll() is not None, lambda: job.screen)
    job.process.send_signal(SIGTERM)
    assert job.end() == 143, job.screen
    job.assert_nothing_left()
    assert job.last_line == "SIGTERM before any rank had started: stopped", job.screen
    assert not (site.folder / "unborn").exists() and not list(cache.glob("*/manifest.json"))


def test_while_ranks_import(site: Site, small_vocabulary_moe: Path, chat_rows: Path) -> None:
    """They ignore signals then, and learn of the request when they are able to save."""
    job = start(site, command(small_vocabulary_moe, chat_rows, "young"), ranks=1)
    stop_when(job, lambda: "launcher: starting" in job.screen and rank_started(site), [SIGUSR1])
    assert assert_stopped(site.folder / "young", SIGUSR1) == 1


def rank_started(site: Site) -> bool:
    return any(site.folder.glob("tmp/mcore_qwen3_run_*/rank_0.started"))


def test_in_a_step_and_twice_in_a_second(site: Site, small_vocabulary_moe: Path, chat_rows: Path) -> None:
    save = site.folder / "step"
    job = start(site, command(small_vocabulary_moe, chat_rows, "step"), ranks=2)
    after = stop_when(
        job, lambda: len(steps_of(save)) >= 2 and phase_of(job, site) == "step", [SIGUSR1, SIGTERM, SIGUSR1]
    )
    assert_stopped(save, SIGUSR1 if "by SIGUSR1" in after else SIGTERM)
    assert after.count("\nsaved ") == 1 and after.count("the ranks are asked") == 1


def test_in_an_evaluation(site: Site, small_vocabulary_moe: Path, chat_rows: Path) -> None:
    words = command(small_vocabulary_moe, chat_rows, "evaluation", "--val_dataset", chat_rows)
    job = start(site, [*words, "--eval_interval", INTERVAL], ranks=1)
    after = stop_when(job, lambda: phase_of(job, site) == "evaluation", [SIGTERM])
    assert assert_stopped(site.folder / "evaluation", SIGTERM) == INTERVAL
    assert after.index("eval loss") < after.index("\nsaved ") and after.count("\nsaved ") == 1


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_in_a_save(site: Site, tiny_moe: Path, chat_rows: Path, asynchronous: str) -> None:
    """A save in step is not repeated for the signal; one beside the steps is ended first, then the last step is saved."""
    name = f"save-{asynchronous}"
    words = command(tiny_moe, chat_rows, name, "--save_interval", INTERVAL, "--async_save", asynchronous)
    job = start(site, words, ranks=2)
    after = stop_when(job, lambda: saving(site.folder / name), [SIGTERM, SIGTERM])
    step = assert_stopped(site.folder / name, SIGTERM)
    assert (site.folder / name / f"iter_{INTERVAL:07d}").is_dir()
    if asynchronous == "false":
        assert step == INTERVAL and after.count("\nsaved ") == 1
    else:  # where the signal has come before the first step beside the save, that is not repeated either
        assert step >= INTERVAL


def test_a_time_limit_saves_and_ends_well(site: Site, small_vocabulary_moe: Path, chat_rows: Path) -> None:
    """The clock runs from the start of the command, so the first step is already past this one."""
    words = command(small_vocabulary_moe, chat_rows, "limit", "--exit_duration_in_mins", 0.01)
    job = start(site, words, ranks=1)
    assert job.end() == 0, job.screen
    assert "stopped by exit_duration_in_mins after step 1; the same command continues" in job.screen
    state = json.loads((site.folder / "limit" / "iter_0000001" / "train_state.json").read_text())
    assert (state["iteration"], state["stopped_by"]) == (1, "exit_duration_in_mins")


def test_a_rank_that_hangs_ends_all_and_a_restart_goes_on(
    site: Site, small_vocabulary_moe: Path, chat_rows: Path
) -> None:
    """Rank 1 is stopped, so rank 0 waits for it in a collective. The job's own checkpoints count, whatever --resume says.

    It is stopped just after a save: a save may take ten times as long as a step.
    """
    save = site.folder / "hang"
    more = ["--save_interval", 10, "--resume", "never", "--max_restarts", 1]
    job = start(site, command(small_vocabulary_moe, chat_rows, "hang", *more, step_timeout=20), ranks=2)
    wait_until(lambda: len(steps_of(save)) >= 11 or job.process.poll() is not None, lambda: job.screen)
    victim = job.rank(1)
    victim.suspend()
    wait_until(lambda: "restart 1 of 1" in job.screen or job.process.poll() is not None, lambda: job.screen)
    hung = len(steps_of(save))
    restored = int((save / "latest_checkpointed_iteration.txt").read_text())
    assert restored >= 10
    ranks = job.screen[job.screen.index("stacks of rank 0") : job.screen.index("restart 1 of 1")]
    first, second = ranks.split("stacks of rank 1", 1)
    assert "run_schedule" in first or "all_reduce" in first or "train" in first
    assert second.startswith(f" (pid {victim.pid}):\nnone: the process does not answer")
    assert f"no step was finished for 20 s (step_timeout): rank 0: step {hung} finished, then" in ranks
    wait_until(lambda: len(steps_of(save)) > hung or job.process.poll() is not None, lambda: job.screen)
    job.process.send_signal(SIGTERM)
    assert job.end() == 143, job.screen
    job.assert_nothing_left()
    events = [json.loads(line) for line in (save / "train_log.jsonl").read_text().splitlines() if '"event"' in line]
    assert (events[-1]["event"], events[-1]["reason"]) == ("stop", "SIGTERM")
    events = [event for event in events if event["event"] in ("start", "restart")]
    assert [(event["event"], event["iteration"]) for event in events] == [
        ("start", 0),
        ("start", restored),
        ("restart", restored),
    ]
    assert events[2]["restart"] == 1 and "step_timeout" in events[2]["reason"]
