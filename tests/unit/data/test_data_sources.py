"""What --dataset may name, and how sources are sampled and mixed."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from mcore_qwen3.data.mix import chosen_below, interleave, with_copies
from mcore_qwen3.data.rows import read_rows
from mcore_qwen3.data.sources import check_entries, find_sources
from mcore_qwen3.errors import DataError


def write(path: Path, number: int, word: str = "q") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"query": f"{word} {index}", "response": "a"} for index in range(number)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_folder_is_all_its_data_files(tmp_path: Path) -> None:
    write(tmp_path / "d" / "b.jsonl", 1)
    write(tmp_path / "d" / "a" / "c.jsonl", 1)
    write(tmp_path / "d" / ".hidden" / "c.jsonl", 1)
    (tmp_path / "d" / "README.md").write_text("x")
    (tmp_path / "d" / "dataset_info.json").write_text("{}")
    (source,) = find_sources([f"{tmp_path}/d/"])
    assert [file.name for file in source.files] == [f"{tmp_path}/d/a/c.jsonl", f"{tmp_path}/d/b.jsonl"]
    assert (source.origin, source.number) == ("local", None)


def test_a_folder_that_the_datasets_library_saved(tmp_path: Path) -> None:
    rows = [{"query": "q", "response": "a"}, {"query": "q2", "response": "a2"}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    (source,) = find_sources([str(tmp_path / "saved")])
    assert [row.fields for file in source.files for row in read_rows(file)] == rows


def test_a_number_of_rows(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", 3)
    assert [source.number for source in find_sources([f"{file}#5", file])] == [5, None]
    write(tmp_path / "d#5" / "a.jsonl", 1)  # a folder of that very name wins
    assert [source.number for source in find_sources([f"{tmp_path}/d#5", f"{tmp_path}/d#5#2"])] == [None, 2]
    with pytest.raises(DataError, match="at least one row"):
        find_sources([f"{file}#0"])


class FakeHub:
    """Stands in for a hub's library: what it is asked for, and a small data set kept in an Arrow file."""

    def __init__(self, folder: Path, fails: bool = False) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self._folder, self._fails = folder, fails

    def load(self, identifier: str, subset: str | None = None, *, split: str, subset_name: str = "") -> Any:
        self.asked.append((identifier, subset or subset_name or None, split))
        if self._fails:
            raise ConnectionError("no route\nto the hub")
        made = datasets.Dataset.from_list([{"query": "from the hub", "response": "a"}])
        made.save_to_disk(self._folder)
        return datasets.load_from_disk(self._folder)


@pytest.fixture
def hubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeHub]:
    found = {"hf": FakeHub(tmp_path / "hf"), "ms": FakeHub(tmp_path / "ms")}
    monkeypatch.setattr(datasets, "load_dataset", found["hf"].load)
    module = types.ModuleType("modelscope")
    module.MsDataset = found["ms"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "modelscope", module)
    return found


def test_data_sets_of_a_hub(hubs: dict[str, FakeHub]) -> None:
    (source,) = find_sources(["liucong/Chinese-DeepSeek-R1-Distill-data-110k-SFT:part#7"])
    name = "liucong/Chinese-DeepSeek-R1-Distill-data-110k-SFT"
    assert hubs["hf"].asked == [(name, "part", "train")] and hubs["ms"].asked == []
    assert (source.origin, source.number, source.name) == ("Hugging Face", 7, f"{name}:part")
    assert [row.fields["query"] for row in read_rows(source.files[0])] == ["from the hub"]
    assert source.files[0].name.startswith(f"{name}/")
    (source,) = find_sources([f"ms::{name}"])
    assert (source.origin, hubs["ms"].asked) == ("ModelScope", [(name, "default", "train")])
    find_sources([f"hf::{name}", name], use_hf=False)
    assert [len(hubs[one].asked) for one in ("hf", "ms")] == [2, 2]


def test_one_hub_then_the_other(hubs: dict[str, FakeHub]) -> None:
    hubs["hf"]._fails = True
    (source,) = find_sources(["a/b"])
    assert source.origin == "ModelScope"
    hubs["ms"]._fails = True
    with pytest.raises(DataError, match="a/b is a data set that can be downloaded") as caught:
        find_sources(["a/b"])
    seen = "Hugging Face: ConnectionError: no route to the hub; ModelScope: ConnectionError: no route to the hub"
    assert seen in str(caught.value) and "\n" not in str(caught.value)


def test_modelscope_needs_its_library(hubs: dict[str, FakeHub], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(DataError, match=r"ModelScope: ModuleNotFoundError.*modelscope"):
        find_sources(["ms::a/b"])


def test_entries_are_checked_without_a_hub(hubs: dict[str, FakeHub], tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", 1)
    assert check_entries([f"{file}#3", "a/b"]) == [file, "a/b (on a hub, not looked at)"]
    with pytest.raises(DataError, match="a dataset is a local file"):
        check_entries(["no.jsonl"])
    assert hubs["hf"].asked == []


def test_fewer_rows_than_there_are() -> None:
    chosen = chosen_below(100, 30, 7, "a")
    assert len(set(chosen.tolist())) == 30 and chosen.tolist() == sorted(chosen.tolist()) and chosen.max() < 100
    assert chosen.tolist() == chosen_below(100, 30, 7, "a").tolist()
    assert chosen.tolist() != chosen_below(100, 30, 8, "a").tolist() != chosen_below(100, 30, 8, "b").tolist()


def test_more_rows_than_there_are() -> None:
    counts = np.bincount(with_copies(10, 10, 34, 7, "a"))
    assert counts.sum() == 34 and sorted(counts.tolist()) == [3] * 6 + [4] * 4
    assert np.bincount(with_copies(8, 10, 25, 7, "a")).sum() == 2 * 8 + 4  # 2 of 10 rows gave no sample


def test_interleaving_draws_by_share_until_one_is_used_up() -> None:
    parts = [np.arange(1000), np.arange(1000, 4000), np.arange(4000, 9000)]
    mixed = interleave(parts, (0.5, 0.3, 0.2), 7)
    counts = [int(((mixed >= part[0]) & (mixed <= part[-1])).sum()) for part in parts]
    assert counts[0] == 1000 and mixed[-1] == 999  # the first is used up by its last row
    # Binomial with mean 600 and 400 and standard deviations of 31 and 24: within four of them.
    assert abs(counts[1] - 600) < 124 and abs(counts[2] - 400) < 100
    for part in parts:
        drawn = [one for one in mixed.tolist() if part[0] <= one <= part[-1]]
        assert drawn == sorted(drawn) and len(set(drawn)) == len(drawn)
    assert mixed.tolist() == interleave(parts, (0.5, 0.3, 0.2), 7).tolist()
    assert len(mixed) != len(interleave(parts, (0.5, 0.3, 0.2), 8))
    small = interleave([np.arange(10), np.arange(10, 20)], (0.5, 0.5), 7)
    assert 10 < len(small) < 20 and small[-1] in (9, 19)  # it ends with the first that is used up
