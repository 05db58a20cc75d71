"""Which earlier checkpoint a run continues."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.ranks import pool
from helpers.resumed_part import same_point

from mcore_qwen3.cli.resume import (
    TRACKER_VARIABLE,
    ResumePoint,
    check_optimizer_state,
    find_resume_point,
    tracker_stamp,
)
from mcore_qwen3.config import RunConfig, with_values
from mcore_qwen3.errors import ConfigError
from mcore_qwen3.train.checkpoint import write_tracker

WriteCheckpoint = Callable[..., Path]
PARTS = (".metadata", "metadata.json", "train_state.json")


def config(save: Path, **values: object) -> RunConfig:
    return with_values(RunConfig(), {"load": "m", "save": str(save), "train_iters": 10, **values})


def test_auto_takes_what_the_tracker_names(write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 4)
    folder = write_checkpoint(tmp_path, 8, has_optimizer=False)
    write_checkpoint(tmp_path, 9, tracker=False)  # the tracker is written last
    expected = ResumePoint(directory=folder, iteration=8, has_optimizer=False, from_load=False)
    assert find_resume_point(config(tmp_path)) == expected


def test_nothing_to_continue(write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
    assert find_resume_point(config(tmp_path / "none")) is None
    write_checkpoint(tmp_path, 3, tracker=False)
    assert find_resume_point(config(tmp_path)) is None
    (tmp_path / "release").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert find_resume_point(config(tmp_path)) is None


def test_a_lost_tracker_is_told(write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
    for iteration, written in ((4, [4]), (8, [4, 8])):
        folder = write_checkpoint(tmp_path, iteration, tracker=False)
        state = {"iteration": iteration, "has_optimizer": True, "checkpoints": written}
        (folder / "train_state.json").write_text(json.dumps(state))
        if iteration == 4:  # killed between the first checkpoint's name and the tracker
            assert find_resume_point(config(tmp_path)) is None
    with pytest.raises(ConfigError, match="needs its tracker file") as caught:
        find_resume_point(config(tmp_path))
    for part in (str(folder), "write 8 into it", f"--resume {folder}", "--resume never"):
        assert part in str(caught.value)
    assert find_resume_point(config(tmp_path, resume="never")) is None
    point = find_resume_point(config(tmp_path, resume=str(folder)))
    assert point is not None and point.iteration == 8


def test_a_checkpoint_that_a_killed_run_was_replacing_is_put_back(
    write_checkpoint: WriteCheckpoint, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, 4)
    folder.rename(tmp_path / ".iter_0000004.replaced")
    point = find_resume_point(config(tmp_path))
    assert point is not None and point.directory == folder
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="iter_0000004 does not exist"):
        find_resume_point(config(tmp_path))


def test_never_and_path(write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
    first, second = write_checkpoint(tmp_path / "out", 4), write_checkpoint(tmp_path / "out", 8)
    assert find_resume_point(config(tmp_path / "out", resume="never")) is None
    for choice, folder in ((first, first), (tmp_path / "out", second)):
        point = find_resume_point(config(tmp_path / "other", resume=str(choice)))
        assert point is not None and point.directory == folder
    with pytest.raises(ConfigError, match="no folder"):
        find_resume_point(config(tmp_path, resume="latest"))


@pytest.mark.parametrize("resume", ["auto", "never", "PATH"])
def test_a_restarted_job_continues_what_it_has_saved_itself(
    write_checkpoint: WriteCheckpoint, tmp_path: Path, resume: str
) -> None:
    """Not what an earlier job has left: that is for --resume to decide, at a restart as at the first start."""
    named = write_checkpoint(tmp_path / "other", 50)
    earlier = write_checkpoint(tmp_path / "out", 4)
    run = config(tmp_path / "out", resume=str(named) if resume == "PATH" else resume)
    environ = {TRACKER_VARIABLE: tracker_stamp(run)}  # by the parent process, before its ranks
    at_first = {"auto": earlier, "never": None, "PATH": named}[resume]
    for _ in range(2):  # the first start, and a restart before anything was saved
        point = find_resume_point(run, environ)
        assert (None if point is None else point.directory) == at_first
    (tmp_path / "out" / "latest_checkpointed_iteration.txt").unlink()  # as a save does, which replaces it
    own = write_checkpoint(tmp_path / "out", 2)
    point = find_resume_point(run, environ)
    assert point is not None and point.directory == own


def test_an_own_checkpoint_of_the_same_step_as_an_earlier_ones_is_known(
    write_checkpoint: WriteCheckpoint, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, 4)
    run = config(tmp_path, resume="never")
    environ = {TRACKER_VARIABLE: tracker_stamp(run)}
    assert find_resume_point(run, environ) is None
    write_tracker(tmp_path, "4")
    point = find_resume_point(run, environ)
    assert point is not None and point.directory == folder


def test_ranks_that_see_different_checkpoints_do_not_start(tmp_path: Path) -> None:
    assert pool(2).run(same_point, iterations=[4, 4]) == ["", ""]
    assert pool(2).run(same_point, iterations=[None, None]) == ["", ""]
    for iterations, seen in (
        ([4, 2], "rank 0 has step 4 in iter_4, rank 1 has step 2 in iter_2"),
        ([None, 2], "rank 0 has none, rank 1 has step 2 in iter_2"),
    ):
        first, second = pool(2).run(same_point, iterations=iterations)
        assert first == second and first.startswith("all ranks continue the same checkpoint") and seen in first


@pytest.mark.parametrize("part", PARTS)
def test_incomplete_checkpoint_is_refused_by_name(write_checkpoint: WriteCheckpoint, tmp_path: Path, part: str) -> None:
    folder = write_checkpoint(tmp_path, 4)
    (folder / part).unlink()
    with pytest.raises(ConfigError, match=rf"iter_0000004 lacks {part}"):
        find_resume_point(config(tmp_path))


@pytest.mark.parametrize("text", ["", "[]", '{"iteration": 4}', '{"iteration": "x", "has_optimizer": true}'])
def test_unreadable_state_is_refused(write_checkpoint: WriteCheckpoint, tmp_path: Path, text: str) -> None:
    (write_checkpoint(tmp_path, 4) / "train_state.json").write_text(text)
    with pytest.raises(ConfigError, match=r"must hold iteration and has_optimizer; seen: .*train_state\.json"):
        find_resume_point(config(tmp_path))


def test_without_optimizer_state_there_are_three_ways_out(write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 4, has_optimizer=False)
    run = config(tmp_path)
    point = find_resume_point(run)
    assert point is not None
    with pytest.raises(ConfigError) as caught:
        check_optimizer_state(run, point)
    for way in ("--no_load_optim true", "--resume never", "another --save", "iter_0000004"):
        assert way in str(caught.value)
    check_optimizer_state(config(tmp_path, no_load_optim=True), point)


def test_finetune_false_continues_load(write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "load", 4)
    for load in (tmp_path / "load", folder):
        point = find_resume_point(config(tmp_path / "out", load=str(load), finetune=False))
        assert point == ResumePoint(directory=folder, iteration=4, has_optimizer=True, from_load=True)
    saved = write_checkpoint(tmp_path / "out", 6)
    point = find_resume_point(config(tmp_path / "out", load=str(folder), finetune=False))
    assert point is not None and point.directory == saved  # --resume auto wins
    with pytest.raises(ConfigError, match="--finetune true to take the weights alone"):
        find_resume_point(config(tmp_path / "none", load=str(tmp_path), finetune=False))
