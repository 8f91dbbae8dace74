"""VBuckets that nobody can be asked about: when it is said, when it is an error, and what tables are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from table.memory_table import MemoryTable
from tailrace.errors import ConnectError
from tailrace.spark.rounds.bucket import BucketState, UnaskedVBuckets
from tailrace.spark.rounds.freshness import Freshness, Stands


def test_it_is_said_when_it_lasts_and_now_and_then() -> None:
    said: list[str] = []
    unasked = UnaskedVBuckets(600.0, said.append)
    why = dict.fromkeys(range(3), "127.0.0.1:1 (refused)")
    unasked.note(why, 0.0)
    unasked.note(why, 2.9)
    assert said == []
    for now in (3.0, 4.0, 62.0):
        unasked.note(why, now)
    assert said == ["goes on without vbuckets that can't be read; 3 vbuckets: 127.0.0.1:1 (refused)"]
    unasked.note(why, 63.0)
    assert len(said) == 2
    unasked.note({}, 64.0)
    unasked.note(why, 65.0)
    assert len(said) == 2, "it begins anew"


def test_each_vbucket_has_its_own_time() -> None:
    unasked = UnaskedVBuckets(60.0, lambda _: None)
    unasked.note({1: "a", 2: "b"}, 0.0)
    unasked.note({2: "b"}, 30.0)
    unasked.note({1: "a", 2: "b"}, 59.0)
    with pytest.raises(ConnectError, match="vbucket 2 can't be read for 60 s: b"):
        unasked.note({1: "a", 2: "b"}, 60.0)


def test_a_look_at_a_part_of_the_bucket_does_not_make_tables_fresh(tmp_path: Path) -> None:
    freshness = Freshness([MemoryTable(tmp_path)], Stands(), 0.0)
    freshness.reached(BucketState(5.0, {0: 0}, {}, {}, unasked={1: "away"}))
    assert freshness.as_of == 0.0
    freshness.went_back(BucketState(6.0, {0: 0}, {}, {}, unasked={1: "away"}))
    freshness.reached(BucketState(7.0, {0: 0, 1: 0}, {}, {}))
    assert freshness.as_of == 7.0
