"""`megatron data`, the steps of an epoch, and the same data on every rank."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from helpers import ranks

from mcore_qwen3.cli import prepare as cli_prepare
from mcore_qwen3.cli.main import main
from mcore_qwen3.cli.prepare import check_same_data, epoch_line, prepare_data, prepare_request
from mcore_qwen3.cli.resolve import resolve, with_steps
from mcore_qwen3.config import decay_iters, parse_args
from mcore_qwen3.data.marks import TrainRule
from mcore_qwen3.data.placeholders import Identity
from mcore_qwen3.data.prepare import prepare
from mcore_qwen3.data.request import Prepared, SplitInfo
from mcore_qwen3.errors import ConfigError, DataError

GREEN = "\x1b[1;32m"


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    rows = [{"query": f"Hi {index}", "response": "你好 " * (1 + index)} for index in range(6)]
    return write(tmp_path / "chat.jsonl", [*rows, {"query": "Hi", "response": ""}])


def test_rows_are_shown_counted_and_written(
    chat: Path,
    tmp_path: Path,
    qwen3_tokenizer_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    words = ["--load", qwen3_tokenizer_dir, "--dataset", chat, "--max_length", 40, "--packing", "true"]
    words += ["--show", 1, "--show_ids", "--global_batch_size", 2, "--output", tmp_path / "out"]
    assert main(["data", *map(str, words)]) == 0
    screen = capsys.readouterr().out
    shown = screen.split("sample 1:")[1]
    assert f"{GREEN}你好 <|im_end|>" in shown  # trained, in colour; the prompt and the empty block are not
    assert f"{GREEN}<think>" not in shown and "<|im_start|>user" in shown
    assert f"{GREEN}151645" in shown and "\x1b[2m151644" in shown
    for part in ("query/response", "with an empty assistant turn (first at", "tokens a sample: p50", "% full"):
        assert part in screen
    assert "an epoch: " in screen and "/ 2 a step" in screen
    assert (tmp_path / "out" / "lengths.png").read_bytes().startswith(b"\x89PNG")
    # The folder is what training takes with the same flags.
    (folder,) = (path for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert f"prepared data: {folder} (built now)" in screen
    assert main(["data", *map(str, words)]) == 0
    assert f"prepared data: {folder} (reused)" in capsys.readouterr().out


def test_the_length_limit_comes_from_the_model_or_the_flag(
    chat: Path, moe_dir: Path, tmp_path: Path, qwen3_tokenizer_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["data", "--dataset", str(chat), "--data_cache_path", str(tmp_path / "c"), "--show", "0", "--load"]
    assert main([*words, str(qwen3_tokenizer_dir)]) == 2
    assert "the length limit is --max_length" in capsys.readouterr().err
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (moe_dir / name).write_bytes((qwen3_tokenizer_dir / name).read_bytes())
    assert main([*words, str(moe_dir), "--histogram", str(tmp_path / "h.png")]) == 0
    assert (tmp_path / "h.png").exists()


def test_raw_text_is_shown_too(tmp_path: Path, qwen3_tokenizer_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("one two\n")
    words = ["--raw_text", "--load", qwen3_tokenizer_dir, "--dataset", tmp_path / "a.txt", "--max_length", 8]
    assert main(["data", *map(str, words), "--data_cache_path", str(tmp_path / "c")]) == 0
    assert "one two<|endoftext|>" in capsys.readouterr().out


def resolved(load: Path, dataset: str, *words: str, command: str = "sft") -> Any:
    length = [] if "--max_length" in words else ["--max_length", "8"]
    line = ["--load", str(load), "--dataset", dataset, "--device", "cpu", *length, *words]
    return resolve(parse_args(line, command), 1, {})


def test_epochs_give_the_steps_and_the_end_of_the_schedule(moe_dir: Path) -> None:  # known fault B35
    words = ["--packing", "true", "--global_batch_size", "2", "--num_train_epochs", "3", "--lr_warmup_fraction", "0.5"]
    run = with_steps(resolved(moe_dir, "a.jsonl", *words), rows=4)  # 4 packs: see the packing tests
    assert (run.config.train.train_iters, decay_iters(run.config)) == (6, 6)
    assert with_steps(resolved(moe_dir, "a.jsonl", *words), rows=5).config.train.train_iters == 8  # 15 rows, 2 a step
    assert with_steps(run, rows=99) is run
    with pytest.raises(ConfigError, match=r"warm-up must be shorter.*train_iters 6"):
        with_steps(resolved(moe_dir, "a.jsonl", *words[:-2], "--lr_warmup_iters", "6"), rows=4)
    with pytest.raises(ConfigError, match="in steps or in epochs"):
        resolved(moe_dir, "a.jsonl", "--num_train_epochs", "3", "--train_iters", "3")
    with pytest.raises(ConfigError, match="--train_iters or --num_train_epochs"):
        resolved(moe_dir, "a.jsonl")


def prepared_of(path: Path, digest: str) -> Prepared:
    info = SplitInfo("train", samples=6, rows=4, tokens=24, trained_tokens=12)
    return Prepared(path, info, None, True, 8, 1, 1, 0, 9, [], (), digest)


def test_what_an_epoch_is(tmp_path: Path) -> None:
    line = epoch_line(prepared_of(tmp_path, ""), 2)
    assert line == "an epoch: 4 rows / 2 a step = 2.00 steps; 12 tokens a step, 6 of them trained"


def test_flags_reach_the_request(moe_dir: Path) -> None:
    words = ["--train_iters", "1", "--loss_scale", "last_round", "--ignore_empty_think", "false"]
    words += ["--preserve_thinking", "true", "--system", "S", "--model_name", "甲", "A", "--model_author", "B"]
    words += ["--columns", '{"q": "query"}', "--strict", "true", "--use_hf", "true", "--packing_strategy", "sequential"]
    words += ["--interleave_prob", "1"]
    run = resolved(moe_dir, "a/b", *words)
    request = prepare_request(run)
    assert request.rule == TrainRule(
        loss_scale="last_round", ignore_empty_think=False, preserve_thinking=True, enable_thinking=True, system="S"
    )
    assert request.identity == Identity(("甲", "A"), ("B",))
    assert (request.columns, request.strict, request.use_hf, request.interleave_prob) == (
        {"q": "query"},
        True,
        True,
        (1,),
    )
    assert (request.packing_strategy, request.raw_text) == ("sequential", False)
    assert "--packing_strategy has no effect in this run: packing is off" in run.notes
    text = resolved(moe_dir, "a.txt", "--train_iters", "1", "--truncation_strategy", "split", command="pt")
    assert prepare_request(text).raw_text and prepare_request(text).truncation_strategy == "split"
    idle = resolved(moe_dir, "a.txt", "--train_iters", "1", "--loss_scale", "all", command="pt")
    assert (
        "--loss_scale has no effect in this run: megatron pt takes raw text, and trains every token of it" in idle.notes
    )


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["--truncation_strategy", "split"], "split is for megatron pt"),
        (["--columns", "[1]"], "columns is a JSON object"),
        (["--columns", '{"a": "query", "b": "query"}'], "a name of its own"),
        (["--interleave_prob", "0.5", "0.5"], "one share above 0 for each dataset"),
        (["--interleave_prob", "0.9"], "they sum to 1"),
        (["--interleave_prob", "x"], "one or more finite numbers"),
        (["--model_name", "a", "b", "c"], "a Chinese and an English"),
        (["--enable_thinking", "false", "--preserve_thinking", "true"], "either removed or kept"),
        (["--loss_scale", "half"], "one of default, last_round, all"),
    ],
)
def test_data_flags_that_are_refused(moe_dir: Path, words: list[str], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        resolved(moe_dir, "a.jsonl", "--train_iters", "1", *words)


def test_a_rank_takes_the_folder_of_its_parent(
    moe_dir: Path, chat: Path, tmp_path: Path, qwen3_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (moe_dir / name).write_bytes((qwen3_tokenizer_dir / name).read_bytes())
    words = ["--train_iters", "1", "--data_cache_path", str(tmp_path / "c"), "--max_length", "64"]
    run = resolved(moe_dir, str(chat), *words)
    run = dataclasses.replace(run, shape=dataclasses.replace(run.shape, vocab_size=151936))
    folder = prepare_data(run, {}).path
    chat.unlink()
    monkeypatch.setattr(cli_prepare, "prepare", prepare)
    assert prepare_data(run, {cli_prepare.PREPARED_VARIABLE: str(folder)}).path == folder
    with pytest.raises(DataError, match="no file"):
        prepare_data(run, {})


def _refusal(folders: list[str], digests: list[str]) -> str:
    import torch.distributed as dist

    rank = dist.get_rank()
    try:
        check_same_data(prepared_of(Path(folders[rank]), digests[rank]))
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.timeout(150)  # the pool may have to start
def test_ranks_with_different_prepared_data_are_refused() -> None:  # known fault B38
    pool = ranks.pool(2)
    assert pool.run(_refusal, folders=["/a", "/b"], digests=["same", "same"]) == ["", ""]
    both = pool.run(_refusal, timeout_s=10, folders=["/a", "/b"], digests=["one", "two"])
    for refusal in both:
        assert "all ranks train on the same prepared data" in refusal
        assert "rank 0 has /a on" in refusal and "rank 1 has /b on" in refusal and "--data_cache_path" in refusal
