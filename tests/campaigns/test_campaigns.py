"""Each campaign plays a few schedules, and catches the bugs that are planted in it.

Those of the mirror and of the cluster are in `chaos.test_planted_bugs` and `cluster.test_simulation`.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from campaigns import run
from campaigns.bug import Bug, Campaign, Tally
from campaigns.registry import CAMPAIGNS

NODE, READER, MIRROR, CLUSTER = CAMPAIGNS
PAGE = Path(__file__).parents[2] / "docs" / "proof.md"
SCHEDULES = 100
ISSUE = (
    *("ack before fsync", "fsync error ignored", "a second fsync counts as success", "no CRC on the tail"),
    *("clean marker not cleared at start", "uuid not renewed after a kill"),
    *("failover entry at the high seqno instead of the snapshot's end", "`<` for `<=` in the rollback rule"),
    *("one of its rules left out", "purge compared with the snapshot's start"),
    *("snapshot collapsed to (s, s, s) after a rollback", "pre-images not restored"),
    *("deduplication without vb_uuid", "events at or below the old seqno skipped after a rollback"),
    *("position saved before the rows", "commit keyed by another run's number", "partial snapshot published"),
    *("too many acks widen the window", "a no-op blocked by a full window"),
    *("the older connection of a name kept", "TTL not lowered", "a registered TAP client pins memory"),
    *("seqnos compared as signed", "SCRAM's channel binding not checked"),
    *("masked the wrong row", "mask lost by a compaction", "undo without what a compaction moved"),
    *("position ahead of its rows", "orphan taken for a file of the table"),
    "cleaning takes a file that is still named",
)
"""The required bugs, each of which some campaign must have."""


@pytest.mark.parametrize(
    ("campaign", "seeds"), [(NODE, range(20)), (READER, range(8))], ids=["node", "reader"]
)
def test_a_few_schedules(campaign: Campaign, seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        assert campaign.play(seed, tmp_path).schedules == 1


@pytest.mark.parametrize(
    ("campaign", "bug"),
    [pytest.param(campaign, bug, id=bug.name) for campaign in (NODE, READER) for bug in campaign.bugs],
)
def test_a_planted_bug_is_caught(campaign: Campaign, bug: Bug, tmp_path: Path) -> None:
    for seed in (bug.seed, *range(SCHEDULES)):
        try:
            with bug.plant():
                campaign.play(seed, tmp_path)
        except campaign.catches:
            return
    pytest.fail(f"{SCHEDULES} schedules did not catch it: {bug.about}")


@pytest.mark.parametrize(
    ("error", "is_caught"), [(AssertionError("wrong"), True), (AttributeError("no such thing"), False)]
)
def test_a_planted_bug_that_is_broken_is_not_caught(error: Exception, *, is_caught: bool) -> None:
    """What is planted changes the product's code, which may have changed since."""

    def play(_seed: int, _directory: Path) -> Tally:
        raise error

    campaign = Campaign("some", "", play)
    told = run._catch(campaign, Bug("bug", "", contextlib.nullcontext), 0, 0.0)
    assert told["is_caught"] is is_caught
    assert str(error) in told["said"]
    assert ("broken" in told["said"]) is not is_caught


def test_every_bug_that_was_asked_for_is_planted() -> None:
    planted = {bug.name for campaign in CAMPAIGNS for bug in campaign.bugs}
    assert not {name for name in ISSUE if name not in planted}


def test_the_page_lists_the_bugs_and_their_campaigns() -> None:
    lines = PAGE.read_text().splitlines()
    for campaign in CAMPAIGNS:
        for bug in campaign.bugs:
            assert any(
                line.startswith(f"| {bug.name} | {campaign.name} | {bug.about} |") for line in lines
            ), bug
