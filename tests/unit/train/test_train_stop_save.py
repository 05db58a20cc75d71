"""The loop's order of things, stops that all ranks agree on, and saves that are whole or not there."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from helpers.log_checks import save_beside_steps, save_with_fault
from helpers.ranks import pool
from helpers.train_checks import loop_story, stop_requests, tracker_writes

from mcore_qwen3.train.state import TrainState

TRACKER = "latest_checkpointed_iteration.txt"


@pytest.mark.parametrize(
    ("signals", "name"),
    [
        ([0, 0], ""),
        ([signal.SIGTERM, 0], "SIGTERM"),
        ([0, signal.SIGUSR1], "SIGUSR1"),
        ([signal.SIGINT, signal.SIGINT], "SIGINT"),
    ],
)
def test_a_signal_that_one_rank_got_is_known_to_all(signals: list[int], name: str) -> None:
    assert pool(2).run(stop_requests, signals_by_rank=[int(number) for number in signals]) == [name, name]


@pytest.mark.parametrize(("signals", "name"), [([0, 0], "exit_duration_in_mins"), ([signal.SIGTERM, 0], "SIGTERM")])
def test_a_time_limit_that_one_rank_has_reached_is_known_to_all(signals: list[int], name: str) -> None:
    """Clocks differ; a signal goes before, because its exit code does."""
    assert pool(2).run(stop_requests, signals_by_rank=[int(each) for each in signals], late_rank=1) == [name, name]


def test_steps_evaluations_and_saves_in_order(tmp_path: Path) -> None:
    args = {"directory": str(tmp_path), "train_iters": 5, "eval_interval": 2, "save_interval": 3}
    assert pool(1).run(loop_story, **args, stop_at=0)[0] == [
        "step lr 10.0",
        "poll",
        "step lr 9.0",
        "poll",
        *["evaluate"] * 2,
        "step lr 8.0",
        "poll",
        "save 3 12 - without moments",
        "step lr 7.0",
        "poll",
        *["evaluate"] * 2,
        "step lr 6.0",
        "poll",
        *["evaluate"] * 2,
        "save 5 20 end without moments",
        "wait",
        "stopped by end after 5, 25 trained",
    ]


def test_an_evaluation_before_the_first_step(tmp_path: Path) -> None:
    args = {"directory": str(tmp_path), "train_iters": 2, "eval_interval": 9, "save_interval": 9}
    story = pool(1).run(loop_story, **args, stop_at=0, eval_on_start=True)[0]
    assert story[:3] == ["evaluate", "evaluate", "step lr 10.0"]


def test_a_stop_saves_after_the_step_and_ends(tmp_path: Path) -> None:
    args = {"directory": str(tmp_path), "train_iters": 5, "eval_interval": 9, "save_interval": 9}
    assert pool(1).run(loop_story, **args, stop_at=2)[0] == [
        "step lr 10.0",
        "poll",
        "step lr 9.0",
        "poll",
        "save 2 8 SIGTERM with moments",
        "wait",
        "stopped by SIGTERM after 2, 10 trained",
    ]


def test_a_save_that_is_pending_outlives_a_bad_step(tmp_path: Path) -> None:
    args = {"directory": str(tmp_path), "train_iters": 5, "eval_interval": 9, "save_interval": 1}
    assert pool(1).run(loop_story, **args, stop_at=0, bad_at=2)[0] == [
        "step lr 10.0",
        "poll",
        "save 1 4 - without moments",
        "step lr 9.0",
        "wait",
        "the loss must be finite",
    ]


def test_a_stop_during_a_save_is_written_into_that_checkpoint(tmp_path: Path) -> None:
    args = {"directory": str(tmp_path), "train_iters": 5, "eval_interval": 9, "save_interval": 2}
    assert pool(1).run(loop_story, **args, stop_at=0, stop_in_save=2)[0] == [
        *["step lr 10.0", "poll"],
        *["step lr 9.0", "poll"],
        "save 2 8 - without moments",
        "mark 2 SIGUSR1",
        "wait",
        "stopped by SIGUSR1 after 2, 10 trained",
    ]


def test_a_time_limit_saves_after_the_step_and_ends(tmp_path: Path) -> None:
    args = {"directory": str(tmp_path), "train_iters": 5, "eval_interval": 9, "save_interval": 9}
    assert pool(1).run(loop_story, **args, stop_at=0, time_limit=0.0)[0] == [
        *["step lr 10.0", "poll"],
        "save 1 4 exit_duration_in_mins without moments",
        "wait",
        "stopped by exit_duration_in_mins after 1, 5 trained",
    ]


def test_a_run_that_was_complete_does_nothing(tmp_path: Path) -> None:
    """Its ranks died between the last save and their end, and were started again."""
    args = {"directory": str(tmp_path), "train_iters": 5, "eval_interval": 9, "save_interval": 9}
    assert pool(1).run(loop_story, **args, stop_at=0, iteration=5)[0] == ["wait", "stopped by end after 5, 0 trained"]


def test_who_watches_is_told_what_begins(tmp_path: Path) -> None:
    args = {"directory": str(tmp_path), "train_iters": 3, "eval_interval": 9, "save_interval": 2}
    story = pool(1).run(loop_story, **args, stop_at=0, watched=True, iteration=1)[0]
    assert [line for line in story if " after " in line or line.startswith(("step", "save"))] == [
        "waiting for data after 1",
        "step lr 9.0",
        "save after 2",
        "save 2 4 - without moments",
        "waiting for data after 2",
        "step lr 8.0",
        "save after 3",
        "save 3 8 end without moments",
        "stopped by end after 3, 10 trained",
    ]


def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    args = {"directory": str(tmp_path), "train_iters": 5, "eval_interval": 9, "save_interval": 9}
    assert pool(1).run(loop_story, **args, stop_at=0, iteration=3, consumed_samples=12, stopped_by="SIGTERM")[0] == [
        "step lr 7.0",
        "poll",
        "step lr 6.0",
        "poll",
        *["evaluate"] * 2,
        "save 5 20 end without moments",
        "wait",
        "stopped by end after 5, 10 trained",
    ]


def test_the_tracker_is_replaced_in_one_move(tmp_path: Path) -> None:
    args = {"directory": str(tmp_path)}
    assert pool(1).run(tracker_writes, **args, texts=["10", "20"], full_disk=False) == [""]
    assert (tmp_path / TRACKER).read_text() == "20"
    assert [path.name for path in tmp_path.iterdir()] == [TRACKER]
    assert pool(1).run(tracker_writes, **args, texts=["30"], full_disk=True) == ["no space left on device"]
    assert (tmp_path / TRACKER).read_text() == "20", "what was there stays whole until the new one is"


def save(
    root: Path, iteration: int, fault: str = "", on_rank: int = 0, asynchronous: bool = False, stopped_by: str = ""
) -> list[str]:
    args = {"root": str(root), "iteration": iteration, "fault": fault, "on_rank": on_rank, "stopped_by": stopped_by}
    return pool(2).run(save_with_fault, **args, asynchronous=asynchronous)


def visible(root: Path) -> dict[str, set[str]]:
    return {path.name: {file.name for file in path.iterdir()} for path in root.glob("iter_*")}


WHOLE = {"rank_0", "rank_1", "sides", "train_state.json"}


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_an_async_save_is_of_its_own_step(tmp_path: Path, slow_rank: int) -> None:
    """B56: a slow writer, a save at 2, steps up to 5: no tracker before all files are there, then one that says 2."""
    for seen in pool(2).run(save_beside_steps, root=str(tmp_path), slow_rank=slow_rank):
        # The writer waits for step 5; the poll after it may come before or after the end of the writing.
        assert seen[:4] == ["", "", "", ""] and seen[4] in ("", "2") and seen[5] == "2"
    saved = tmp_path / "iter_0000002"
    assert TrainState.read(saved) == TrainState(iteration=2, has_optimizer=False, checkpoints=(2,))
    assert [(saved / f"rank_{rank}").read_text() for rank in (0, 1)] == ["[2.0, 2.0, 2.0]"] * 2
    assert {path.name for path in tmp_path.iterdir()} == {TRACKER, "iter_0000002"}


def test_a_save_is_whole_and_named_last(tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert save(root, 3) == ["", ""]
    assert save(root, 6) == ["", ""]
    (root / "iter_0000006" / "stray").write_text("of an earlier run")
    assert save(root, 6) == ["", ""]  # an earlier run's checkpoint of the same step is replaced
    assert visible(root) == {"iter_0000003": WHOLE, "iter_0000006": WHOLE}
    assert {path.name for path in root.iterdir()} == {TRACKER, "iter_0000003", "iter_0000006"}
    assert (root / TRACKER).read_text() == "6"
    assert (root / "iter_0000006" / "sides").read_text() == "6 part 0 part 1"
    expected = TrainState(iteration=6, optimizer_steps=6, has_optimizer=False, checkpoints=(6,))
    assert TrainState.read(root / "iter_0000006") == expected


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_finished_checkpoint_is_told_why_the_run_ended(tmp_path: Path, asynchronous: bool) -> None:
    """A signal that came during the save, which is not repeated for it."""
    assert save(tmp_path, 6, asynchronous=asynchronous, stopped_by="SIGUSR1") == ["", ""]
    assert visible(tmp_path) == {"iter_0000006": WHOLE} and (tmp_path / TRACKER).read_text() == "6"
    state = TrainState(iteration=6, optimizer_steps=6, checkpoints=(6,), has_optimizer=False, stopped_by="SIGUSR1")
    assert TrainState.read(tmp_path / "iter_0000006") == state


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("fault", "on_rank", "what"),
    [
        ("create", 0, "could not create a directory for the checkpoint"),
        ("tensors", 1, "could not write the tensors of the checkpoint"),
        ("sides", 0, "could not complete the checkpoint"),
    ],
)
def test_a_failed_save_is_told_on_every_rank_and_leaves_no_checkpoint(
    tmp_path: Path, fault: str, on_rank: int, what: str, asynchronous: bool
) -> None:
    assert save(tmp_path, 3) == ["", ""]
    first, second = save(tmp_path, 6, fault, on_rank, asynchronous)
    assert first == second
    assert first.startswith(f"{what}; seen: rank {on_rank}, {tmp_path}/")
    assert "OSError: no space left on device" in first
    assert visible(tmp_path) == {"iter_0000003": WHOLE}
    assert {path.name for path in tmp_path.iterdir()} <= {TRACKER, "iter_0000003"}, "its bytes are given back"
    assert (tmp_path / TRACKER).read_text() == "3"
    assert save(tmp_path, 6) == ["", ""], "what a failed save has left is no obstacle"
    assert visible(tmp_path) == {"iter_0000003": WHOLE, "iter_0000006": WHOLE}
