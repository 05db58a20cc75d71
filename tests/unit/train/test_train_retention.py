"""`--save_total_limit`: the newest and the best stay, and nothing goes before the new one is complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import pool
from helpers.retaining import saves

TRACKER, BEST = "latest_checkpointed_iteration.txt", "best_checkpointed_iteration.txt"


def run(root: Path, iterations: list[int], **options: Any) -> str:
    (error,) = pool(1).run(saves, root=str(root), iterations=iterations, **options)
    return error


def there(root: Path) -> list[int]:
    """The iterations on disk; each has its `-hf` folder, and nothing else is left."""
    names = {path.name for path in root.iterdir()} - {TRACKER, BEST}
    found = sorted(int(name.removeprefix("iter_")) for name in names if not name.endswith("-hf"))
    assert names == {f"iter_{number:07d}{end}" for number in found for end in ("", "-hf")}
    return found


def best(root: Path, iteration: int) -> tuple[float | None, int | None, str]:
    """(best metric, its iteration, its name) that a checkpoint holds."""
    state = json.loads((root / f"iter_{iteration:07d}" / "train_state.json").read_text())
    return state["best_metric"], state["best_iteration"], state["metric_for_best_model"]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_the_newest_stay(tmp_path: Path, asynchronous: bool) -> None:
    """B57: limit 2, saves at 1..5: 4 and 5 stay; without a limit all do."""
    assert run(tmp_path / "two", [1, 2, 3, 4, 5], limit=2, asynchronous=asynchronous) == ""
    assert there(tmp_path / "two") == [4, 5]
    assert (tmp_path / "two" / TRACKER).read_text() == "5"
    assert run(tmp_path / "all", [1, 2, 3], limit=None) == ""
    assert there(tmp_path / "all") == [1, 2, 3]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_nothing_goes_for_a_save_that_fails(tmp_path: Path, asynchronous: bool) -> None:
    """B57: limit 2, save 5 fails: 3 and 4 are still there."""
    error = run(tmp_path, [1, 2, 3, 4, 5], limit=2, fail_at=5, asynchronous=asynchronous)
    assert "no space left on device" in error
    assert there(tmp_path) == [3, 4]
    assert (tmp_path / TRACKER).read_text() == "4"


def test_the_best_stays_in_place_of_an_older_one(tmp_path: Path) -> None:
    losses = [3.0, 1.0, float("nan"), 2.0, 1.0]  # an equal value is no better
    assert run(tmp_path, [10, 20, 30, 40, 50], limit=2, metrics=losses) == ""
    assert there(tmp_path) == [20, 50]
    assert (tmp_path / BEST).read_text() == "20"
    assert best(tmp_path, 50) == (1.0, 20, "loss")
    assert run(tmp_path / "one", [10, 20], limit=1, metrics=[1.0, 2.0]) == ""
    assert there(tmp_path / "one") == [10, 20], "the newest has to stay to continue from"


def test_a_continued_run_goes_on_counting(tmp_path: Path) -> None:
    assert run(tmp_path, [1, 2, 3], limit=2, metrics=[1.0, 2.0, 3.0]) == ""
    assert there(tmp_path) == [1, 3]
    before = json.loads((tmp_path / "iter_0000003" / "train_state.json").read_text())
    assert run(tmp_path, [4, 5], limit=2, metrics=[4.0, 0.5], before=before) == ""
    assert there(tmp_path) == [4, 5]
    assert best(tmp_path, 5) == (0.5, 5, "loss")


def test_what_a_kill_before_the_deletion_left_goes_at_the_next_save(tmp_path: Path) -> None:
    assert run(tmp_path, [1, 2, 3], limit=2) == ""
    before = json.loads((tmp_path / "iter_0000003" / "train_state.json").read_text())
    for end in ("", "-hf"):
        (tmp_path / f"iter_0000001{end}").mkdir()
    assert run(tmp_path, [4], limit=2, before=before) == ""
    assert there(tmp_path) == [3, 4]


def test_another_runs_checkpoints_and_other_names_are_left_alone(tmp_path: Path) -> None:
    others = ["iter_0000001", "iter_0000900", "iter_0000002.backup", "release", "notes", ".iter_1.partial", ".cache"]
    for name in others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("mine")
    (tmp_path / ".iter_0000900.replaced").mkdir()
    for name in (".iter_0000007.partial", ".iter_0000008.deleted", ".iter_0000009-hf.deleted"):  # a killed run's
        (tmp_path / name / "deep").mkdir(parents=True)
    assert run(tmp_path, [2, 3, 4], limit=1) == ""
    kept = {TRACKER, "iter_0000004", "iter_0000004-hf"}
    assert {path.name for path in tmp_path.iterdir()} == {*others, *kept}
    assert all((tmp_path / name / "file").read_text() == "mine" for name in others)


def test_a_folder_that_cannot_be_deleted_stops_nothing(tmp_path: Path) -> None:
    assert run(tmp_path, [1], limit=1) == ""
    before = json.loads((tmp_path / "iter_0000001" / "train_state.json").read_text())
    (tmp_path / ".iter_0000001.deleted").write_text("in the way")
    assert run(tmp_path, [2], limit=1, before=before) == ""
    assert {"iter_0000001", "iter_0000002"} <= {path.name for path in tmp_path.iterdir()}
