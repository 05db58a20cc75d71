"""Preparing with the options that choose and change rows: sampling, mixing, columns, strict, names, raw text."""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

from mcore_qwen3.arch import resolve_batch
from mcore_qwen3.data.batches import train_batches
from mcore_qwen3.data.marks import TrainRule
from mcore_qwen3.data.placeholders import Identity
from mcore_qwen3.data.prepare import Prepared, PrepareRequest, prepare
from mcore_qwen3.data.reader import SplitReader
from mcore_qwen3.errors import DataError

Request = Callable[..., PrepareRequest]
END = 151643  # <|endoftext|>


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def numbered(path: Path, number: int, word: str) -> str:
    return write(path, [{"query": f"{word}{index}", "response": "yes"} for index in range(number)])


@pytest.fixture
def request_for(material_dir: Path, tmp_path: Path) -> Request:
    def make(*dataset: str, **changes: Any) -> PrepareRequest:
        folder = material_dir / "tokenizer-instruct-2507"
        settings: dict[str, Any] = {"max_length": 64, "cache_dir": tmp_path / "cache", "tokenizer_dir": folder}
        return PrepareRequest(dataset=dataset, **{**settings, **changes})

    return make


@functools.cache
def backend(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def samples(prepared: Prepared, split: str = "train") -> list[tuple[list[int], list[int]]]:
    reader = SplitReader(prepared.path, split)
    return [(ids.tolist(), mask.tolist()) for row in range(len(reader)) for ids, mask in reader.samples(row)]


def questions(prepared: Prepared, request: PrepareRequest, split: str = "train") -> list[str]:
    texts = [backend(request.tokenizer_dir).decode(ids) for ids, _ in samples(prepared, split)]
    return [text.split("user\n")[1].split("\n")[0] for text in texts]


def test_numbers_of_rows_from_several_sources(request_for: Request, tmp_path: Path) -> None:
    few, many = numbered(tmp_path / "few.jsonl", 3, "f"), numbered(tmp_path / "many.jsonl", 50, "m")
    request = request_for(f"{few}#7", f"{many}#20")
    prepared = prepare(request)
    counts = Counter(questions(prepared, request))
    assert sorted(counts[f"f{index}"] for index in range(3)) == [2, 2, 3]
    chosen = [name for name in counts if name.startswith("m")]
    assert len(chosen) == 20 and {counts[name] for name in chosen} == {1} and chosen != [f"m{n}" for n in range(20)]
    assert prepared.train.samples == 27
    assert f"{few}: form query/response, 3 rows, 3 kept (#7 of the source's 3 usable rows)" in prepared.report
    again = prepare(request_for(f"{few}#7", f"{many}#20", seed=43))
    assert questions(again, request) != questions(prepared, request)


def test_no_copy_of_a_validation_row_is_trained_on(request_for: Request, tmp_path: Path) -> None:
    request = request_for(numbered(tmp_path / "a.jsonl", 10, "q") + "#30", split_dataset_ratio=0.2)
    prepared = prepare(request)
    train, validation = questions(prepared, request), questions(prepared, request, "validation")
    assert len(validation) == 2 and len(train) == 24 and not set(train) & set(validation)


def test_interleaved_sources(request_for: Request, tmp_path: Path) -> None:
    data = [numbered(tmp_path / f"{word}.jsonl", 40, word) for word in "ab"]
    request = request_for(*data, interleave_prob=(0.75, 0.25))
    found = questions(prepare(request), request)
    from_a = sum(name.startswith("a") for name in found)
    assert from_a == 40 and 2 <= len(found) - from_a <= 28 and found[-1] == "a39"
    assert [name for name in found if name.startswith("b")] == [f"b{n}" for n in range(len(found) - 40)]


@pytest.mark.parametrize("packing", [False, True])
def test_each_token_is_told_of_its_own_data_set(request_for: Request, tmp_path: Path, packing: bool) -> None:
    # 5 of a's 9 rows, b's 3 rows twice and one more, and a validation file behind them; words tell where a row is from.
    numbered(tmp_path / "a.jsonl", 9, "apple")
    numbered(tmp_path / "b.jsonl", 3, "bread")
    numbered(tmp_path / "v.jsonl", 4, "apple")
    names = (f"{tmp_path}/a.jsonl#5", f"{tmp_path}/b.jsonl#7")
    request = request_for(*names, val_dataset=(f"{tmp_path}/v.jsonl",), packing=packing)
    prepared = prepare(request)
    assert prepared.dataset_samples == (5, 3)
    plan = resolve_batch(1, 2, 1)
    stream = train_batches(
        prepared, plan, dp_rank=0, consumed_samples=0, seed=1, num_workers=0, datasets=("the first", "the second")
    )
    seen: Counter[str] = Counter()
    for step in itertools.islice(stream, -(-prepared.train.rows // 2)):
        assert step.datasets == ("the first", "the second")
        for batch in step.micro_batches:
            assert batch.datasets is not None and batch.datasets.shape == batch.tokens.shape
            for first, last in itertools.pairwise(batch.cu_seqlens.tolist()):
                if batch.padding_mask[0, first:last].all():
                    continue
                text = backend(request.tokenizer_dir).decode(batch.tokens[0, first:last].tolist())
                word = "apple" if "apple" in text else "bread"
                real = ~batch.padding_mask[0, first:last]
                assert set(batch.datasets[0, first:last][real].tolist()) == {("apple", "bread").index(word)}
                seen[word] += 1
    assert seen["apple"] >= 5 and seen["bread"] >= 7
    (plain,) = itertools.islice(train_batches(prepared, plan, dp_rank=0, consumed_samples=0, seed=1, num_workers=0), 1)
    assert plain.datasets == () and plain.micro_batches[0].datasets is None


def test_columns_are_renamed(request_for: Request, tmp_path: Path) -> None:
    rows = [{"problem": "q0", "solution": "long", "answer": "7"}]
    data = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match="one column of a file stands for response"):
        prepare(request_for(data))
    request = request_for(data, columns={"answer": "response"})
    prepared = prepare(request)
    assert backend(request.tokenizer_dir).decode(samples(prepared)[0][0]).endswith("assistant\n7\n")
    with pytest.raises(DataError, match=r"renames columns that the data has; seen: none called nothing"):
        prepare(request_for(data, columns={"answer": "response", "nothing": "x"}))


def test_strict_stops_at_what_is_otherwise_dropped(request_for: Request, tmp_path: Path) -> None:
    short, long = {"query": "q", "response": "a"}, {"query": "q", "response": "a " * 80}
    empty = {"query": "q", "response": ""}
    for bad, reason in ((empty, "an empty assistant turn"), (long, "longer than max_length 64")):
        data = write(tmp_path / "a.jsonl", [short, bad])
        assert prepare(request_for(data)).train.samples == 1
        with pytest.raises(DataError, match=f"with --strict true every row is used.*{reason}.*a.jsonl:2"):
            prepare(request_for(data, strict=True))


def test_names_of_self_cognition_rows(request_for: Request, tmp_path: Path) -> None:
    rows = [
        {"query": "who", "response": "I am {{NAME}} by {{AUTHOR}}"},
        {"query": "你是谁", "response": "我是{{name}}，由{{author}}开发"},
        {"query": "who", "response": "{{NAME}}", "tag": "zh"},
        {"query": "who", "response": "{{ other }}"},
    ]
    request = request_for(
        write(tmp_path / "a.jsonl", rows), identity=Identity(("小黄", "Xiao Huang"), ("团队", "The Team"))
    )
    prepared = prepare(request)
    texts = [backend(request.tokenizer_dir).decode(ids).split("assistant\n")[1] for ids, _ in samples(prepared)]
    assert texts == ["I am Xiao Huang by The Team\n", "我是小黄，由团队开发\n", "小黄\n", "{{ other }}\n"]
    one = prepare(request_for(request.dataset[0], identity=Identity(("Bot",))))
    texts = [backend(request.tokenizer_dir).decode(ids).split("assistant\n")[1] for ids, _ in samples(one)]
    assert texts[:2] == ["I am Bot by {{AUTHOR}}\n", "我是Bot，由{{author}}开发\n"]
    assert "  2 rows with placeholders that stay as they are: --model_author not given" in one.report


def test_reasoning_that_a_template_leaves_out_is_said(request_for: Request, tmp_path: Path, material_dir: Path) -> None:
    reply = {"role": "assistant", "content": "A", "reasoning_content": "T"}
    data = write(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "Q"}, reply]}])
    line = "  1 row with reasoning_content, which this chat template leaves out"
    assert line in prepare(request_for(data)).report
    assert line not in prepare(request_for(data, rule=TrainRule(enable_thinking=False))).report
    assert line not in prepare(request_for(data, tokenizer_dir=material_dir / "tokenizer")).report


def test_every_switch_makes_another_folder(request_for: Request, tmp_path: Path) -> None:  # known fault B36
    data = numbered(tmp_path / "a.jsonl", 4, "q")
    changes: list[dict[str, Any]] = [
        {},
        {"rule": TrainRule(loss_scale="last_round")},
        {"rule": TrainRule(system="S")},
        {"identity": Identity(("x",))},
        {"columns": {"query": "prompt"}},
        {"strict": True},
        {"packing": True},
        {"packing": True, "packing_strategy": "sequential"},
    ]
    paths = {prepare(request_for(data, **change)).path for change in changes}
    assert len(paths) == len(changes)
    assert prepare(request_for(data, packing_strategy="sequential")).path in paths  # nothing is packed
    assert prepare(request_for(data, seed=1)).path in paths  # nothing is chosen


def test_sequential_packs(request_for: Request, tmp_path: Path) -> None:
    data = write(tmp_path / "a.jsonl", [{"query": f"q{n}", "response": "a " * (n * 7 % 25) + "b"} for n in range(30)])
    request = request_for(data, packing=True, packing_strategy="sequential")
    prepared = prepare(request)
    assert questions(prepared, request) == [f"q{n}" for n in range(30)]
    assert prepared.train.rows >= prepare(request_for(data, packing=True)).train.rows


def test_padded_samples_fit_their_pack(request_for: Request, tmp_path: Path) -> None:
    rows = [{"query": f"q{n}", "response": "a " * (n * 7 % 25) + "b"} for n in range(60)]
    data = write(tmp_path / "a.jsonl", rows)
    prepared = prepare(request_for(data, packing=True, row_multiple=8, sample_multiple=8, max_length=63))
    assert prepared.full_row_length == 64
    reader = SplitReader(prepared.path, "train")
    padded = [sum(-(-len(ids) // 8) * 8 for ids, _ in reader.samples(row)) for row in range(len(reader))]
    assert max(padded) == 64
    assert prepared.train.rows > prepare(request_for(data, packing=True, max_length=63)).train.rows


def test_raw_text_has_every_token_trained_and_one_end_token(request_for: Request, tmp_path: Path) -> None:  # B42
    data = tmp_path / "a.txt"
    data.write_text("one two three four five\n\n你好\n", encoding="utf-8")
    prepared = prepare(request_for(str(data), raw_text=True))
    (first, first_mask), (second, _) = samples(prepared)
    words = backend(request_for("x").tokenizer_dir).encode("one two three four five").ids
    assert len(words) == 5 and first == [*words, END]  # 6 ids, 5 targets: nothing predicts the first token
    assert first_mask == [0, 1, 1, 1, 1, 1]
    assert second[-1] == END and second.count(END) == 1
    assert not {151644, 151645} & {*first, *second}  # no role markers
    assert prepared.report[0] == f"{data}: form text, 2 rows, 2 kept"
    assert "raw text and the end-of-text token behind it; no chat template" in prepared.report[-2]


def test_raw_text_is_split_without_losing_a_token(request_for: Request, tmp_path: Path) -> None:  # known fault B30
    data = tmp_path / "a.txt"
    data.write_text("word " * 18 + "end\n")
    whole = samples(prepare(request_for(str(data), raw_text=True)))[0][0]
    split = samples(prepare(request_for(str(data), raw_text=True, max_length=8, truncation_strategy="split")))
    assert [len(ids) for ids, _ in split] == [8] * (len(whole) // 8) + [len(whole) % 8]
    assert [token for ids, _ in split for token in ids] == whole


def test_raw_text_needs_no_chat_template(request_for: Request, tmp_path: Path, material_dir: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((material_dir / "tokenizer" / "tokenizer.json").read_bytes())
    data = write(tmp_path / "a.jsonl", [{"text": "hello"}])
    assert prepare(request_for(data, raw_text=True, tokenizer_dir=folder)).train.samples == 1


@pytest.fixture
def indexed(tmp_path: Path) -> str:
    """A ready-made data set of three documents, the last of two sequences."""
    prefix = str(tmp_path / "ready")
    builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype=np.int32)
    for document in ([[5, 6, END]], [[7, 8, 9, END]], [[1, 2], [3, END]]):
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=torch.int32))
        builder.end_document()
    builder.finalize(get_idx_path(prefix))
    return prefix


def test_ready_made_token_ids(request_for: Request, tmp_path: Path, indexed: str) -> None:
    prepared = prepare(request_for(indexed, raw_text=True))
    documents = [[5, 6, END], [7, 8, 9, END], [1, 2, 3, END]]
    assert samples(prepared) == [(ids, [0] + [1] * (len(ids) - 1)) for ids in documents]
    assert prepared.report[0] == f"{indexed}: form indexed (.bin, .idx), 3 rows, 3 kept"
    more = numbered(tmp_path / "x.jsonl", 1, "x")
    with pytest.raises(DataError, match="for megatron pt"):
        prepare(request_for(indexed, more))
    text = write(tmp_path / "t.jsonl", [{"text": f"{n}"} for n in range(400)])
    blended = prepare(request_for(f"{indexed}#300", text, raw_text=True, interleave_prob=(0.5, 0.5)))
    ready = sum(ids in documents for ids, _ in samples(blended))
    # Binomial: both are near 300 when the first is used up; four standard deviations of their ratio.
    assert ready == 300 and 200 < blended.train.samples - ready < 400
    (tmp_path / "ready.idx").write_bytes(b"none")
    with pytest.raises(DataError, match="that Megatron wrote"):
        prepare(request_for(indexed, raw_text=True))
