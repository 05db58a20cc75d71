"""The quickstart's own parts; the whole of it is `make quickstart`."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from helpers.scripts import load_script

from mcore_qwen3.arch import ModelShape, count_parameters
from mcore_qwen3.config import parse_args


@pytest.fixture
def quickstart(repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module, with an empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return load_script(repo_root / "examples" / "quickstart.py")


def test_the_model_is_the_one_that_is_promised(quickstart: ModuleType) -> None:
    """Tied embedding 151936 x 128; a layer: attention, router, 8 experts of 3 x 128 x 384, norms; the last norm."""
    attention = 128 * 4 * 32 + 2 * 128 * 2 * 32 + 4 * 32 * 128 + 2 * 32
    layer = attention + 128 * 8 + 8 * 3 * 128 * 384 + 2 * 128
    assert count_parameters(ModelShape.from_hf_config(quickstart.SHAPE)).total == 151936 * 128 + 4 * layer + 128
    assert list(quickstart.SHAPE) == sorted(quickstart.SHAPE)  # as the official files


def test_the_command_is_one_that_is_understood(quickstart: ModuleType) -> None:
    variables, words = quickstart.training_command()
    config = parse_args(words[1:], "sft").config
    assert config.parallel.expert_model_parallel_size == int(variables["NPROC_PER_NODE"]) == 2
    assert config.train.train_iters == config.checkpoint.save_interval == 100
    assert config.checkpoint.save_hf
    assert config.optim.lr == 3e-3


def test_rows_are_english_and_chinese_in_turn(quickstart: ModuleType, material_dir: Path) -> None:
    quickstart.OUTPUT.mkdir()
    quickstart.write_rows()
    rows = [json.loads(line) for line in quickstart.ROWS.read_text(encoding="utf-8").splitlines()]
    chinese = [any("\u4e00" <= letter <= "\u9fff" for letter in row["output"]) for row in rows]
    assert len(rows) == 2 * 999
    assert sum(chinese[1::2]) > 950  # some answers are code or a number
    assert sum(chinese[0::2]) < 10


def test_the_loss_must_fall_over_a_whole_log(quickstart: ModuleType) -> None:
    quickstart.RUN.mkdir(parents=True)
    losses = [12.0] + [10.0] * 89 + [8.0, 9.0] * 5
    lines = [{"event": "start", "iteration": 0}] + [{"iteration": i + 1, "loss": x} for i, x in enumerate(losses)]
    log = quickstart.RUN / "train_log.jsonl"
    log.write_text("\n".join(map(json.dumps, lines)))
    assert quickstart.loss_drop() == pytest.approx(12.0 - 8.5)
    log.write_text("\n".join(map(json.dumps, lines[:-1])))
    with pytest.raises(SystemExit, match="holds 99 losses"):
        quickstart.loss_drop()


@pytest.mark.parametrize(("drop", "difference", "code"), [(3.0, 9e-5, 0), (2.9, 9e-5, 1), (3.0, 1e-4, 1)])
def test_it_fails_when_a_number_is_missed(
    quickstart: ModuleType, monkeypatch: pytest.MonkeyPatch, drop: float, difference: float, code: int
) -> None:
    for step in ("write_model", "write_rows", "train"):
        monkeypatch.setattr(quickstart, step, lambda: None)
    monkeypatch.setattr(quickstart, "loss_drop", lambda: drop)
    monkeypatch.setattr(quickstart, "largest_logit_difference", lambda: difference)
    monkeypatch.setattr(quickstart, "generate", lambda question: "words")
    assert quickstart.main() == code
