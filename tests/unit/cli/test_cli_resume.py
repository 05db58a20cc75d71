"""Which earlier checkpoint a run continues."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_qwen3.cli.resume import ResumePoint, check_optimizer_state, find_resume_point
from mcore_qwen3.config import RunConfig, with_values
from mcore_qwen3.errors import ConfigError

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
