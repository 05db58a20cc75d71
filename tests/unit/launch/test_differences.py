"""A table shows what differs, and nothing else."""

from __future__ import annotations

from mcore_qwen3.launch import code_facts, table_of_differences


def test_those_that_agree_stand_together() -> None:
    same, other = {"python": "3.12.1", "torch": "2.13.0"}, {"python": "3.12.1", "torch": "2.12.1"}
    facts = {"node 0 on a": same, "node 1 on b": other, "node 2 on c": same, "node 3 on d": same, "node 4 on e": same}
    assert table_of_differences(facts) == (
        "         node 0 on a, node 2 on c, node 3 on d and 1 more  node 1 on b\n"
        "  torch  2.13.0                                            2.12.1"
    )
    assert table_of_differences({"a": same, "b": dict(same)}) == ""


def test_a_name_that_one_lacks_differs_and_long_values_are_cut() -> None:
    table = table_of_differences({"a": {"x": "1" * 100}, "b": {"x": "1" * 100, "y": "2"}})
    assert [line.split() for line in table.split("\n")] == [["a", "b"], ["y", "-", "2"]]
    table = table_of_differences({"a": {"x": "1" * 100}, "b": {"x": "2" * 100}})
    assert "1" * 57 + "..." in table and "1" * 58 not in table


def test_many_rows_are_counted() -> None:
    facts = {place: {f"flag {number}": place for number in range(25)} for place in "ab"}
    assert table_of_differences(facts).split("\n")[-1] == "  and 5 more"


def test_the_facts_of_the_code() -> None:
    import platform

    import torch

    facts = code_facts()
    assert facts["python"] == platform.python_version() and facts["torch"] == torch.__version__.split("+")[0]
    assert facts == code_facts()
