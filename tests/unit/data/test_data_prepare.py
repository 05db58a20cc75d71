"""From files to a cache folder: counts, splits, what is reused and what is built again, several processes at once."""

from __future__ import annotations

import dataclasses
import functools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from mcore_qwen3.data import prepare as prepare_module
from mcore_qwen3.data.cache import open_or_build, read_manifest
from mcore_qwen3.data.prepare import Prepared, PrepareRequest, load_prepared, prepare
from mcore_qwen3.data.reader import SplitReader
from mcore_qwen3.errors import DataError

Request = Callable[..., PrepareRequest]


def write(path: Path, pairs: list[tuple[str, str]]) -> str:
    rows = [{"query": question, "response": answer} for question, answer in pairs]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def numbered(number: int, word: str = "q") -> list[tuple[str, str]]:
    return [(f"{word} {index}", "yes " * (1 + index % 7)) for index in range(number)]


@pytest.fixture
def request_for(material_dir: Path, tmp_path: Path) -> Request:
    """A request with the tokenizer that writes no think blocks, so that token counts are easy to say."""

    def make(dataset: str, **changes: Any) -> PrepareRequest:
        settings: dict[str, Any] = {"max_length": 64, "cache_dir": tmp_path / "cache"}
        folder = material_dir / "tokenizer-instruct-2507"
        return PrepareRequest(dataset=(dataset,), **{**settings, "tokenizer_dir": folder, **changes})

    return make


@functools.cache
def load_backend(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def texts(prepared: Prepared, split: str, folder: Path) -> list[str]:
    backend = load_backend(folder)
    reader = SplitReader(prepared.path, split)
    return [
        backend.decode(ids.tolist(), skip_special_tokens=False)
        for row in range(len(reader))
        for ids, _ in reader.samples(row)
    ]


def built(prepared: Prepared) -> bool:
    last = prepared.report[-1]
    assert str(prepared.path) in last and last.endswith(("(built now)", "(reused)"))
    return last.endswith("(built now)")


def test_samples_are_the_rows_in_order(request_for: Request, tmp_path: Path) -> None:
    request = request_for(write(tmp_path / "a.jsonl", [("你好", "世界🙂"), ("b", "c")]))
    prepared = prepare(request)
    expected = [
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
        for question, answer in (("你好", "世界🙂"), ("b", "c"))
    ]
    assert texts(prepared, "train", request.tokenizer_dir) == expected
    reader = SplitReader(prepared.path, "train")
    assert prepared.train.tokens == reader.tokens.sum() and prepared.train.trained_tokens == reader.trained_tokens.sum()
    # Trained: c and the end token. The header's last token predicts c.
    ((ids, mask),) = reader.samples(1)
    assert mask.tolist() == [0] * (len(ids) - 3) + [1, 1, 0]
    assert (prepared.pad_token_id, prepared.largest_token_id) == (151643, 151645)


def test_prompt_10_answer_3_limit_8(request_for: Request, tmp_path: Path) -> None:  # known fault B31
    data = write(tmp_path / "a.jsonl", [("hello world", "a b"), ("a", "a b")])
    whole = prepare(request_for(data))
    (_, mask), *_ = SplitReader(whole.path, "train").samples(0)
    assert (int(mask.argmax()), int(mask.sum())) == (10, 3)
    request = request_for(data, max_length=11, truncation_strategy="right")
    report = prepare(request).report[0]
    assert report.endswith("2 rows, 2 kept (2 of them cut to max_length)")
    with pytest.raises(DataError, match="the train data has at least one trained token") as caught:
        prepare(dataclasses.replace(request, max_length=8))
    assert "dropped 2 rows without trained tokens (first at" in str(caught.value)
    assert len([path for path in request.cache_dir.iterdir() if path.is_dir()]) == 2  # nothing of the refused one
    report = prepare(dataclasses.replace(request, max_length=10)).report[0]
    assert "1 kept (1 of them cut to max_length); dropped 1 row without trained tokens (first at" in report


def test_rows_longer_than_the_limit_are_deleted_and_counted(request_for: Request, tmp_path: Path) -> None:
    data = write(tmp_path / "a.jsonl", [("a", "b"), ("a", "b " * 40), ("a", "")])
    report = prepare(request_for(data, max_length=20)).report[0]
    assert "form query/response, 3 rows, 1 kept; dropped 1 row with an empty assistant turn" in report
    assert f"dropped 1 row longer than max_length 20 (first at {data}:2)" in report
    with pytest.raises(DataError, match="at least one trained token"):
        prepare(request_for(data, max_length=5))


def test_packing_is_reported(request_for: Request, tmp_path: Path) -> None:
    request = request_for(write(tmp_path / "a.jsonl", numbered(50)), packing=True, row_multiple=3)
    prepared = prepare(request)
    assert (prepared.train.samples, prepared.full_row_length) == (50, 66)
    fill = prepared.train.tokens / (66 * prepared.train.rows)
    share = prepared.train.trained_tokens / prepared.train.tokens
    assert prepared.report[1] == (
        f"train: 50 samples, {prepared.train.tokens:,} tokens, {100 * share:.1f} % trained, "
        f"{prepared.train.rows} packs of 66 tokens, {100 * fill:.1f} % full"
    )
    plain = prepare(dataclasses.replace(request, packing=False))
    assert plain.train.rows == 50 and sorted(texts(plain, "train", request.tokenizer_dir)) == sorted(
        texts(prepared, "train", request.tokenizer_dir)
    )


def test_validation_data(request_for: Request, tmp_path: Path) -> None:  # known fault B39
    data, own = write(tmp_path / "a.jsonl", numbered(100)), write(tmp_path / "v.jsonl", numbered(5, "v"))

    def sizes(**changes: Any) -> tuple[int, int]:
        prepared = prepare(request_for(data, **changes))
        return prepared.train.samples, prepared.validation.samples if prepared.validation else 0

    assert sizes(val_dataset=(own,), split_dataset_ratio=0.01) == (100, 5)
    assert sizes(split_dataset_ratio=0.01) == (99, 1)
    assert sizes(split_dataset_ratio=0.001) == (99, 1)
    assert sizes(split_dataset_ratio=0.25) == (75, 25)
    assert sizes() == (100, 0)
    request = request_for(data, split_dataset_ratio=0.25)
    split = prepare(request)
    parts = [texts(split, name, request.tokenizer_dir) for name in ("train", "validation")]
    assert sorted(parts[0] + parts[1]) == sorted(texts(prepare(request_for(data)), "train", request.tokenizer_dir))
    numbers = [int(one.split("q ")[1].split("<")[0]) for one in parts[1]]
    assert numbers == sorted(numbers) and numbers != list(range(25)) and numbers != list(range(75, 100))
    other = prepare(dataclasses.replace(request, seed=43))
    assert texts(other, "validation", request.tokenizer_dir) != parts[1]
    with pytest.raises(DataError, match="leaves samples to train on"):
        prepare(request_for(write(tmp_path / "b.jsonl", numbered(1)), split_dataset_ratio=0.5))


def test_what_is_reused_and_what_is_built_again(request_for: Request, tmp_path: Path) -> None:  # known fault B36
    data = write(tmp_path / "a.jsonl", numbered(20))
    request = request_for(data)
    first = prepare(request)
    assert built(first)
    again = prepare(request)
    assert not built(again) and again == dataclasses.replace(first, report=again.report)
    assert again.report[:-1] == first.report[:-1]
    assert load_prepared(first.path) == dataclasses.replace(first, report=first.report[:-1])
    copied = str(shutil.copy(data, tmp_path / "elsewhere.jsonl"))
    assert not built(prepare(dataclasses.replace(request, dataset=(copied,))))
    assert not built(prepare(dataclasses.replace(request, seed=43, dataset_num_proc=2)))  # nothing is split

    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(request.tokenizer_dir, tokenizer)
    moved = dataclasses.replace(request, tokenizer_dir=tokenizer)
    assert not built(prepare(moved))
    with (tokenizer / "tokenizer.json").open("a") as handle:
        handle.write("\n")
    assert built(prepare(moved))
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    config["chat_template"] = config["chat_template"].replace("<|im_end|>\\n", "<|im_end|>")
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    changed = prepare(moved)
    assert built(changed) and changed.train.tokens < first.train.tokens
    for change in (
        {"max_length": 63},
        {"packing": True},
        {"truncation_strategy": "right"},
        {"row_multiple": 2},
        {"sample_multiple": 2},
        {"split_dataset_ratio": 0.1},
        {"val_dataset": (data,)},
        {"dataset": (data, data)},
    ):
        assert built(prepare(dataclasses.replace(request, **change))), change
    write(tmp_path / "a.jsonl", numbered(21))
    assert built(prepare(request))
    assert len(list(request.cache_dir.glob("*/manifest.json"))) == 12


def test_a_folder_that_is_not_complete_is_never_taken(request_for: Request, tmp_path: Path) -> None:
    request = request_for(write(tmp_path / "a.jsonl", numbered(20)))
    folder = prepare(request).path
    for damage in (
        lambda: (folder / "manifest.json").unlink(),
        lambda: (folder / "manifest.json").write_text("{"),
        lambda: (folder / "ids.npy").write_bytes((folder / "ids.npy").read_bytes()[:-4]),
        lambda: (folder / "train_rows.npy").unlink(),
    ):
        damage()
        with pytest.raises(DataError, match="has a manifest and all its files"):
            load_prepared(folder)
        assert built(prepare(request))
        assert read_manifest(folder) is not None


def test_a_failed_build_leaves_nothing_to_be_taken(tmp_path: Path) -> None:
    def fail(folder: Path) -> dict[str, Any]:
        np.save(folder / "ids.npy", np.zeros(3))
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError):
        open_or_build(tmp_path, "key", fail)
    assert not (tmp_path / "key").exists()
    folder, was_built = open_or_build(tmp_path, "key", lambda folder: {})
    assert was_built and (read_manifest(folder) or {})["files"] == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "key.lock"]


def test_a_cache_folder_that_cannot_be_written_is_refused(request_for: Request, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"can be written.*--data_cache_path"):
        prepare(request_for(write(tmp_path / "a.jsonl", numbered(2)), cache_dir=tmp_path / "file"))


def test_two_processes_give_what_one_gives(request_for: Request, tmp_path: Path) -> None:
    data = write(tmp_path / "a.jsonl", [*numbered(300), ("too long", "b " * 90)])
    one = prepare(request_for(data))
    two = prepare(request_for(data, dataset_num_proc=2, cache_dir=tmp_path / "other"))
    assert two.report[:-1] == one.report[:-1]
    assert one.report[0].endswith(f"300 kept; dropped 1 row longer than max_length 64 (first at {data}:301)")
    for file in sorted(one.path.iterdir()):
        assert file.read_bytes() == (two.path / file.name).read_bytes(), file.name


def _die(*_: object) -> None:
    os._exit(9)


def test_a_data_process_that_dies_is_one_clear_error(
    request_for: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcore_qwen3.data.encode._start_process", _die)
    with pytest.raises(DataError, match=r"every data process lives.*--dataset_num_proc"):
        prepare(request_for(write(tmp_path / "a.jsonl", numbered(3)), dataset_num_proc=2))


def _prepare_and_count(request: PrepareRequest) -> tuple[bool, int]:
    """Prepare, slowly: (built by this process, builds that this process began)."""
    begun = []
    original = prepare_module._build

    def slow(*arguments: Any) -> dict[str, Any]:
        begun.append(1)
        time.sleep(1)
        return original(*arguments)

    prepare_module._build = slow  # type: ignore[assignment]
    return built(prepare(request)), len(begun)


def test_processes_that_prepare_at_once_build_once(request_for: Request, tmp_path: Path) -> None:
    request = request_for(write(tmp_path / "a.jsonl", numbered(20)))
    with ProcessPoolExecutor(3, multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(_prepare_and_count, [request] * 3))
    assert sorted(results) == [(False, 0), (False, 0), (True, 1)]


def alive_in_group(group: int) -> list[str]:
    """Processes of the group that are not zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(stat.parent.name)
    return found


def assert_group_ends(group: int) -> None:
    deadline = time.monotonic() + 30
    while alive_in_group(group):
        assert time.monotonic() < deadline, "data processes outlive the one that started them"
        time.sleep(0.1)


def test_a_killed_preparation_leaves_no_process_and_no_lock(
    request_for: Request, tmp_path: Path, repo_root: Path
) -> None:
    data = write(tmp_path / "a.jsonl", numbered(20_000))
    request = request_for(data, dataset_num_proc=2)
    script = tmp_path / "run.py"
    script.write_text(f"""
from pathlib import Path, PosixPath
from mcore_qwen3.data.marks import TrainRule
from mcore_qwen3.data.placeholders import Identity
from mcore_qwen3.data.prepare import PrepareRequest, prepare
if __name__ == "__main__":
    prepare({request!r})
""")
    environment = {**os.environ, "PYTHONPATH": str(repo_root)}
    process = subprocess.Popen([sys.executable, script], start_new_session=True, env=environment)
    while not list(request.cache_dir.glob("*.building-*")) or len(alive_in_group(process.pid)) < 3:
        assert process.poll() is None, "ended before it was killed"
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert_group_ends(process.pid)
    assert not list(request.cache_dir.glob("*/manifest.json"))
    write(tmp_path / "a.jsonl", numbered(20))
    left = next(request.cache_dir.glob("*.building-*"))
    assert built(prepare(dataclasses.replace(request, dataset_num_proc=1)))
    # The key of the killed run is another one; with its own key the half-built folder goes away.
    open_or_build(request.cache_dir, left.name.partition(".")[0], lambda folder: {})
    assert not left.exists()


def test_each_sample_knows_its_line_and_another_folder_changes_no_sum(request_for: Request, tmp_path: Path) -> None:
    """300 rows are three chunks of work; line 11 is too long, and dropped."""
    rows = numbered(300)
    rows[10] = ("q", "yes " * 500)
    digests = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        data = write(tmp_path / folder / "a.jsonl", rows)
        prepared = prepare(request_for(data, max_length=64, cache_dir=tmp_path / folder / "cache"))
        reader = SplitReader(prepared.path, "train")
        places = [place for row in range(len(reader)) for place in reader.places(row)]
        assert places == [f"{data}:{line}" for line in range(1, 301) if line != 11]
        digests.append(prepared.digest)
    assert digests[0] == digests[1]


def test_a_killed_data_process_is_one_clear_error(request_for: Request, tmp_path: Path, repo_root: Path) -> None:
    """What the kernel does to a process when memory runs out: signal 9 for one of two."""
    request = request_for(write(tmp_path / "a.jsonl", numbered(20_000)), dataset_num_proc=2)
    script = tmp_path / "run.py"
    script.write_text(f"""
from pathlib import Path, PosixPath
from mcore_qwen3.data.marks import TrainRule
from mcore_qwen3.data.placeholders import Identity
from mcore_qwen3.data.prepare import PrepareRequest, prepare
from mcore_qwen3.errors import DataError
if __name__ == "__main__":
    try:
        prepare({request!r})
    except DataError as error:
        print(error)
""")
    environment = {**os.environ, "PYTHONPATH": str(repo_root)}
    process = subprocess.Popen(
        [sys.executable, script], start_new_session=True, env=environment, stdout=subprocess.PIPE, text=True
    )
    victim = None
    while victim is None:
        assert process.poll() is None, "ended before it was killed"
        time.sleep(0.05)
        victim = next(iter(data_processes(process.pid)), None)
    os.kill(victim, signal.SIGKILL)
    printed, _ = process.communicate(timeout=50)
    assert process.returncode == 0
    assert printed == (
        f"every data process lives to the end; seen: pid {victim} was killed by signal 9 (out of memory? the kernel's log, "
        "dmesg, names what it killed); change: a lower --dataset_num_proc, or more memory\n"
    )
    assert_group_ends(process.pid)
    assert [path.suffix for path in request.cache_dir.iterdir()] == [".lock"], "nothing half-built is left"


def data_processes(parent: int) -> list[int]:
    """The children of a process that multiprocessing has started to work (not its resource tracker)."""
    children = Path(f"/proc/{parent}/task/{parent}/children")
    found = [int(pid) for pid in children.read_text().split()]
    return [pid for pid in found if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_no_dataset(request_for: Request) -> None:
    with pytest.raises(DataError, match="training needs data"):
        prepare(dataclasses.replace(request_for("x"), dataset=()))
