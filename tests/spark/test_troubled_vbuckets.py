"""VBuckets that a round left out: how long they wait, when that is an error, and what is reported."""

from __future__ import annotations

import pytest

from tailrace.errors import ConnectError
from tailrace.spark.rounds.task import TaskAnswer
from tailrace.spark.rounds.troubled_vbuckets import TroubledVBuckets


def test_what_waits_for_a_disk_is_no_failure_and_does_not_count_as_one_later() -> None:
    said: list[str] = []
    troubled = TroubledVBuckets(retry_for_s=60.0, on_trouble=said.append)
    for now in range(0, 300, 10):
        troubled.note([TaskAnswer(held={7: "the replica at n3", 8: "the replica at n3"})], float(now))
        assert troubled.waiting(float(now)) == [7, 8]
    assert said == ["the replica at n3"] * 30, "once a round, however many vbuckets wait"
    troubled.note([TaskAnswer(failed={7: "connection lost"})], 300.0)
    with pytest.raises(ConnectError, match="vbucket 7 can't be read for 60 s: connection lost"):
        troubled.note([TaskAnswer(failed={7: "connection lost"})], 360.0)


def test_a_failure_is_tried_again_less_and_less_often() -> None:
    troubled = TroubledVBuckets(retry_for_s=60.0)
    troubled.note([TaskAnswer(failed={7: "connection lost"})], 0.0)
    assert (troubled.waiting(0.1), troubled.waiting(0.3)) == ([7], [])
    troubled.note([TaskAnswer(failed={7: "connection lost"})], 20.0)
    assert (troubled.waiting(24.9), troubled.waiting(25.1)) == ([7], [])
    assert troubled, "somebody waits"


def test_what_is_not_there_any_more_is_not_waited_for() -> None:
    """A failover took back what could not be read: nobody will ever read it."""
    troubled = TroubledVBuckets(retry_for_s=60.0)
    troubled.note([TaskAnswer(failed={7: "connection lost", 8: "connection lost"})], 0.0)
    troubled.nothing_left({7}, 0.1)
    assert troubled, "it is tried again first"
    troubled.nothing_left({7}, 1.0)
    assert troubled, "8 has no node yet"
    troubled.nothing_left({7, 8}, 1.0)
    assert not troubled
