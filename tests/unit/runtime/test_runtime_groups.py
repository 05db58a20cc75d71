"""How long ranks wait for each other."""

from __future__ import annotations

from helpers.ranks import pool
from helpers.runtime_checks import group_timeouts


def test_every_group_has_the_time_out_that_was_asked_for() -> None:
    assert pool(2).run(group_timeouts, seconds=90.0) == [{90.0}, {90.0}]
