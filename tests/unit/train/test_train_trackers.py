"""tensorboard, wandb and swanlab are told what `train_log.jsonl` is told; a trace holds the steps that were asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.ranks import pool
from helpers.tracker_checks import AT_THE_END, profiled_loop, tensorboard_scalars, tracked

IN_BOTH = {"grad_norm": 0.5, "lr": 1e-3, "tokens": 100, "step_seconds": 0.5, "data_wait_seconds": 0.1}


def test_tensorboard_has_every_number_of_the_log(tmp_path: Path) -> None:
    pool(1).run(tracked, directory=str(tmp_path), names=["tensorboard"], words=[])
    found = pool(1).run(tensorboard_scalars, directory=str(tmp_path / "runs"))[0]
    for name, value in IN_BOTH.items():
        assert found[f"train/{name}"] == [(1, pytest.approx(value)), (2, pytest.approx(value))]
    assert found["train/loss"] == [(1, 2.0), (2, 1.0)]
    assert found["train/balance_loss"] == [(1, 1.5)]
    assert found["train/dataset_loss/a.jsonl"] == [(1, 2.5)]
    assert found["eval/loss"] == [(2, 0.75)] and found["eval/ppl"] == [(2, 2.5)]
    assert "train/iteration" not in found


def test_tensorboard_goes_where_it_is_told(tmp_path: Path) -> None:
    words = ["--tensorboard_dir", str(tmp_path / "elsewhere")]
    pool(1).run(tracked, directory=str(tmp_path / "save"), names=["tensorboard"], words=words)
    assert pool(1).run(tensorboard_scalars, directory=str(tmp_path / "elsewhere"))[0]["train/loss"]


@pytest.mark.parametrize(
    ("name", "names", "own"),
    [
        ("wandb", {"project": "p", "name": "n"}, "dir"),
        ("swanlab", {"project": "p", "experiment_name": "n"}, "logdir"),
    ],
)
def test_a_tracker_is_opened_told_and_closed(name: str, names: dict[str, str], own: str, tmp_path: Path) -> None:
    words = [f"--{name}_project", "p", f"--{name}_exp_name", "n"]
    told = pool(1).run(tracked, directory=str(tmp_path), names=[name], words=words)[0][name]
    (_, settings, config), first, second, evaluation, end = told
    assert settings.pop(own).startswith(str(tmp_path))
    assert settings == names
    assert config["train_iters"] == 10 and config["report_to"] == [name]
    assert [line[1] for line in (first, second, evaluation)] == [1, 2, 2]
    assert first[2]["train/loss"] == 2.0 and first[2]["train/dataset_loss/a.jsonl"] == 2.5
    assert evaluation[2] == {"eval/loss": 0.75, "eval/ppl": 2.5, "eval/token_acc": 0.125}
    assert end == ["finish"]
    told = pool(1).run(tracked, directory=str(tmp_path / "run 7"), names=[name], words=[])[0][name]
    unnamed = {"project": "mcore-qwen3", list(names)[1]: "run 7"}
    assert {key: told[0][1][key] for key in unnamed} == unnamed


def test_a_tracker_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    args = {"directory": str(tmp_path), "names": ["wandb", "tensorboard"], "words": []}
    found = pool(1).run(tracked, **args, fails_at=2)[0]
    assert "wandb gets nothing more: ConnectionError: no route to the server" in found["screen"]
    assert [line[0] for line in found["wandb"]] == ["init", "log"]
    assert len((tmp_path / "train_log.jsonl").read_text().splitlines()) == 4
    assert len(pool(1).run(tensorboard_scalars, directory=str(tmp_path / "runs"))[0]["train/loss"]) == 2


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_a_tracker_that_fails_at_the_end_does_not_fail_the_run(name: str, tmp_path: Path) -> None:
    args = {"directory": str(tmp_path), "names": [name], "words": [], "fails_at": AT_THE_END}
    found = pool(1).run(tracked, **args)[0]
    assert found[name][-1] == ["finish"] and f"{name} gets nothing more: ConnectionError" in found["screen"]
    assert (tmp_path / "loss.png").exists()


@pytest.mark.parametrize(
    ("words", "start", "steps"),
    [
        ("--profile_step_start 2 --profile_step_end 3", 0, [2, 3]),
        ("--profile_step_start 4", 0, [4]),
        ("--profile_step_start 2 --profile_step_end 4", 2, [3, 4]),  # continued inside the range
        ("--profile_step_start 5 --profile_step_end 9", 0, [5]),  # the run ends inside the range
    ],
)
def test_a_trace_holds_the_steps_asked_for(words: str, start: int, steps: list[int], tmp_path: Path) -> None:
    args = {"directory": str(tmp_path), "words": words.split(), "train_iters": 5, "start": start}
    assert pool(1).run(profiled_loop, **args)[0] == {"rank_0.json.gz": steps}


@pytest.mark.parametrize("words", ["", "--profile_step_start 2 --profile_ranks 1", "--profile_step_start 6"])
def test_no_trace_where_none_is_asked_for(words: str, tmp_path: Path) -> None:
    args = {"directory": str(tmp_path), "words": words.split(), "train_iters": 5, "start": 0}
    assert pool(1).run(profiled_loop, **args)[0] == {}
