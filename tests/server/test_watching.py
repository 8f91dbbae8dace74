"""Which callbacks are called when something happens to a vbucket."""

from __future__ import annotations

import random
from functools import partial

import pytest

from tailrace.clock import ManualClock
from tailrace.files import MemoryFiles
from tailrace.server.bucket import ServedBucket, run_inline
from tailrace.server.events import EventLog
from tailrace.server.settings import Settings
from tailrace.store.engine import Engine
from tailrace.wire.codes import VBucketState


@pytest.fixture
def served() -> ServedBucket:
    clock = ManualClock()
    engine = Engine(files=MemoryFiles(), clock=clock, rng=random.Random(7))
    engine.create_bucket("default", 2)
    return ServedBucket(engine.buckets["default"], Settings(), clock, run_inline, EventLog(clock))


def write(served: ServedBucket, vbucket: int = 0) -> None:
    served.store.vbuckets[vbucket].set(b"\0k", b"v")


def test_a_write_calls_once_who_asked_for_it(served: ServedBucket) -> None:
    calls: list[str] = []
    for name in "ab":
        callback = partial(calls.append, name)
        served.watchers.watch(0, callback)
        served.watchers.await_append(0, callback)
        served.watchers.await_append(0, callback)
    served.watchers.watch(0, partial(calls.append, "has enough to do"))
    write(served, 1)
    assert calls == []
    write(served)
    write(served)
    assert calls == ["a", "b"]


def test_who_asks_again_while_called_is_called_again(served: ServedBucket) -> None:
    calls: list[int] = []

    def callback() -> None:
        calls.append(served.store.vbuckets[0].high_seqno)
        served.watchers.await_append(0, callback)

    served.watchers.watch(0, callback)
    served.watchers.await_append(0, callback)
    for _ in range(3):
        write(served)
    assert calls == [1, 2, 3]


def test_a_change_of_history_calls_all_who_watch(served: ServedBucket) -> None:
    calls: list[str] = []
    served.watchers.watch(0, partial(calls.append, "a"))
    served.store.set_state(0, VBucketState.REPLICA)
    assert calls == ["a"]


def test_who_left_is_not_called_and_not_kept(served: ServedBucket) -> None:
    """Readers come and go on a vbucket that nobody writes to."""
    calls: list[int] = []
    for number in range(100):
        callback = partial(calls.append, number)
        unwatch = served.watchers.watch(0, callback)
        served.watchers.await_append(0, callback)
        unwatch()
    assert not served.watchers._waiting and not served.watchers._watchers
    write(served)
    served.vbucket_changed(0)
    assert calls == []


def test_a_vbucket_that_is_made_anew_is_watched_too(served: ServedBucket) -> None:
    calls: list[str] = []
    callback = partial(calls.append, "a")
    served.watchers.watch(0, callback)
    served.watchers.await_append(0, callback)
    served.store.delete_vbucket(0)
    served.store.set_state(0, VBucketState.ACTIVE)
    served.vbucket_changed(0)
    calls.clear()
    write(served)
    assert calls == ["a"]
