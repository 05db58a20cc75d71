"""A short kill test: `make kill-test` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_kit import Site
from kill_campaign import Campaign

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def campaign(site: Site, small_vocabulary_moe: Path, chat_rows: Path) -> Campaign:
    """Four kills: a rank, then all, with saves in step; the same with saves beside the steps."""
    campaign = Campaign(site, small_vocabulary_moe, chat_rows, train_iters=24, seed=20)
    campaign.run(kills=4, each=0)
    return campaign


def test_every_restart_goes_on_and_the_end_is_the_unbroken_ones(campaign: Campaign) -> None:
    """What `run` has seen: the tracker named a whole checkpoint after each kill, the next start went on from it, and the
    final weights and moments have the unbroken run's bits."""
    assert campaign.completed >= 1 and len(campaign.kills) >= 4
    assert {kill.victim for kill in campaign.kills} >= {"all"}


def test_saves_are_hit(campaign: Campaign) -> None:
    assert campaign.moments["save"] + campaign.moments["async save"] >= 1
