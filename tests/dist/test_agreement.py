"""The first collective: who has joined, and whether all run the same code with the same settings and folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.agreeing import agreement_of_ranks
from helpers.ranks import pool

CODE = {"python": "3.12.1", "torch": "2.13.0"}


def told(tmp_path: Path, **changes: Any) -> list[str]:
    (tmp_path / "config.json").write_text("{}")
    options = {"code": [CODE] * 2, "hosts": ["a", "b"], "values": [{}] * 2, "hf_files": str(tmp_path)} | changes
    return list(pool(2).run(agreement_of_ranks, **options))


def test_ranks_that_agree_are_named_with_their_machines(tmp_path: Path) -> None:
    assert told(tmp_path) == ["rank 0 on a, rank 1 on b"] * 2
    assert told(tmp_path, hosts=["a", "a"]) == ["ranks 0-1 on a"] * 2
    own = [{"num_workers": 1, "log_dir": "x"}, {"num_workers": 2}]
    assert told(tmp_path, values=own) == ["rank 0 on a, rank 1 on b"] * 2


def test_every_rank_gets_the_table_of_who_differs(tmp_path: Path) -> None:
    code = [CODE, CODE | {"torch": "2.12.1"}]
    folders = [{"save": "/one", "data_cache_path": "/c"}, {"save": "/other", "data_cache_path": "/c"}]
    table = """all ranks must run the same code with the same settings; seen:\x20
          rank 0 on a  rank 1 on b
  torch   2.13.0       2.12.1
  --save  /one         /other
; change: start the same command with the same packages on every node"""
    assert told(tmp_path, code=code, values=folders) == [table] * 2
