"""VBuckets whose node can't be asked: when that is reported, and when it is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from table.memory_table import MemoryTable
from tailrace.clock import ManualClock
from tailrace.errors import ConnectError, OutOfReach
from tailrace.spark.rounds import bucket_watch
from tailrace.spark.rounds.bucket_watch import BucketState, BucketWatch, UnaskedVBuckets
from tailrace.spark.rounds.freshness import Freshness, Stands
from tailrace.spark.source.options import parse_mirror_options


def test_it_is_said_when_it_lasts_and_now_and_then() -> None:
    said: list[str] = []
    unasked = UnaskedVBuckets(600.0, said.append)
    why = dict.fromkeys(range(3), "127.0.0.1:1 (refused)")
    unasked.note(why, 0.0)
    unasked.note(why, 2.9)
    assert said == []
    for now in (3.0, 4.0, 62.0):
        unasked.note(why, now)
    assert said == ["continues without vbuckets that can't be read; 3 vbuckets: 127.0.0.1:1 (refused)"]
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


class AwaySource:
    """A source for a bucket without nodes; it gives up a moment before the driver does."""

    vbucket_count, bucket_uuid = 2, "b"

    def __init__(self, clock: ManualClock) -> None:
        self._clock, self._ends = clock, clock.monotonic() + 59

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def failover_logs(self, *, reachable_only: bool) -> dict[int, object]:
        assert reachable_only
        if self._clock.monotonic() >= self._ends:
            raise ConnectError("127.0.0.1:1 could not be reached for 60 s")
        return {}

    def high_seqnos(self, *, reachable_only: bool) -> dict[int, int]:
        assert reachable_only
        return {}

    def unreachable(self) -> dict[int, str]:
        return dict.fromkeys(range(2), "127.0.0.1:1 (refused)")

    def homes(self) -> dict[int, None]:
        return {}


def test_a_source_that_gave_up_does_not_begin_another_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mirror whose bucket is gone ends after --retry-for, not after twice that. A new connection is tried
    once: it may find nodes that the old one did not know.
    """
    clock, opened = ManualClock(), list[float]()

    def open_source(*_: object) -> AwaySource:
        opened.append(clock.monotonic())
        if len(opened) > 1:
            raise ConnectError("refused")
        return AwaySource(clock)

    def wait(seconds: float) -> bool:
        clock.advance(seconds)
        return False

    monkeypatch.setattr(bucket_watch, "open_source", open_source)
    began = clock.monotonic()
    options = parse_mirror_options({"connectionString": "couchbase://127.0.0.1", "retryFor": "60"})
    watch = BucketWatch(options, clock=clock, wait=wait)
    with pytest.raises(OutOfReach):
        while True:
            watch.look()
            clock.advance(1)
    assert 59 <= clock.monotonic() - began < 63
    assert len(opened) > 1


def test_a_look_at_a_part_of_the_bucket_does_not_make_tables_fresh(tmp_path: Path) -> None:
    freshness = Freshness([MemoryTable(tmp_path)], Stands(), 0.0)
    freshness.reached(BucketState(5.0, {0: 0}, {}, {}, unasked={1: "away"}))
    assert freshness.as_of == 0.0
    freshness.went_back(BucketState(6.0, {0: 0}, {}, {}, unasked={1: "away"}))
    freshness.reached(BucketState(7.0, {0: 0, 1: 0}, {}, {}))
    assert freshness.as_of == 7.0
