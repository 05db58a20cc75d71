"""What the doctor's ranks find together: numbers that arrive, and a folder that all share."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import doctor_ranks
from helpers.ranks import pool


def test_what_is_sent_arrives() -> None:
    for (found,) in pool(2).run(doctor_ranks.collectives):
        assert found.level == "ok" and "gloo: sums, gathers and broadcasts are right" in found.text
        assert "GB/s a rank in sums of 16 MiB" in found.text


@pytest.mark.parametrize("broken", ["all_reduce", "all_gather", "broadcast"])
def test_wrong_numbers_are_seen_by_all(broken: str) -> None:
    found = pool(2).run(doctor_ranks.collectives, broken=broken)
    assert [(one.level, one.text) for (one,) in found] == [("FAILS", "gloo: wrong numbers arrive on rank 1")] * 2


def test_a_folder_that_is_not_there_yet_is_asked_for_by_its_parent(tmp_path: Path) -> None:
    for (found,) in pool(2).run(doctor_ranks.shared, folders=[str(tmp_path / "not" / "yet")] * 2):
        assert (found.level, found.text) == ("ok", f"all ranks share {tmp_path}")
    assert list(tmp_path.iterdir()) == []


def test_two_folders_fail(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for (found,) in pool(2).run(doctor_ranks.shared, folders=[str(tmp_path / "a" / "save"), str(tmp_path / "b" / "save")]):
        assert found.level == "FAILS" and str(tmp_path / "a") in found.text
