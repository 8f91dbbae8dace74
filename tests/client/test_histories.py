"""The whole promise, at random: whatever happens to a node, an application that follows the events is equal.

Writes, deletions, rewinds one after the other, kills that lose what was not on disk, restarts, purges,
flushes, a bucket that is created again and broken connections, in any order. The reader takes events or
batches, right away or only what is on disk, pauses vbuckets, stops in the middle, forgets and resumes.
A seed replays a failure.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tailrace.testing
from client.application import Application, events_of, server_state
from tailrace.client.state_store import MemoryState
from tailrace.testing.running import RunningNode

VBUCKETS = 2
KEYS = [f"key-{number}".encode() for number in range(12)]


class World:
    """A node, an application, and what happens to both."""

    def __init__(self, node: RunningNode, connect: Callable[..., Any], seed: int, dialect: str) -> None:
        self.random = random.Random(seed)
        self.dialect = dialect
        self.is_columnar = self.random.random() < 0.4
        self.options = {"persisted_only": True} if dialect == "dcp" and self.random.random() < 0.3 else {}
        self.paused = set()
        self.node = node
        self.connect = connect
        self.application = Application()
        self.state = MemoryState()
        self.source: Any = None
        self.changes: Any = None

    def run(self, steps: int) -> None:
        for _ in range(steps):
            weights = [12, 4, 3, 1, 1, 1, 1, 1, 1, 8, 2, 1, 0.5, 3, 2]
            (act,) = self.random.choices(
                [
                    self.write,
                    self.delete,
                    self.rewind,
                    self.kill,
                    self.restart,
                    self.purge,
                    self.flush,
                    self.persist,
                    self.break_connections,
                    self.read_some,
                    self.forget,
                    self.rewind_again_and_again,
                    self.make_anew,
                    self.pause,
                    self.resume,
                ],
                weights,
            )
            act()
        self.forget()
        self.catch_up()

    def write(self) -> None:
        for _ in range(self.random.randrange(1, 6)):
            self.node.set(self.random.choice(KEYS), self.random.randrange(1_000_000))

    def delete(self) -> None:
        key = self.random.choice(KEYS)
        if self.node.get(key) is not None:
            self.node.delete(key)

    def rewind(self) -> None:
        vbucket = self.random.randrange(VBUCKETS)
        floor = self.node.call(lambda n: n.buckets["default"].store.vbuckets[vbucket].rollback_floor)
        target = self.random.choice([0, self.random.randint(floor, self.node.high_seqno(vbucket))])
        if target >= floor or target == 0:
            self.node.rewind(vbucket, target)

    def rewind_again_and_again(self) -> None:
        for _ in range(self.random.randrange(2, 4)):
            self.write()
            self.rewind()
            if self.random.random() < 0.3:
                self.break_connections()
        self.write()

    def make_anew(self) -> None:
        self.forget()  # a reader that stays connected to a bucket that is made anew gets an error
        port = self.node.port
        self.node.stop()
        self.node = new_node()
        self.node.port = port
        self.node.start()
        self.write()

    def kill(self) -> None:
        self.node.kill()
        self.node.start()

    def restart(self) -> None:
        self.node.restart()

    def flush(self) -> None:
        self.node.flush()

    def persist(self) -> None:
        self.node.persist()

    def purge(self) -> None:
        self.node.persist()
        self.node.compact(drop_tombstones=True)

    def break_connections(self) -> None:
        self.node.drop_connections()

    def open(self) -> Any:
        return self.connect(
            self.node.url, state=self.state, retry_for_s=60, dialect=self.dialect, **self.options
        )

    def read(self, **options: Any) -> Iterator[list[Any]]:
        """Events, in the pieces in which the application gets them."""
        if self.is_columnar:
            for batch in self.source.batches(**options):
                yield list(events_of(batch))
        else:
            for event in self.source.changes(**options):
                yield [event]

    def is_behind(self) -> bool:
        """Whether something will come of vbuckets that are not paused."""
        return any(
            self.application.last.get(vb, 0) < self.node.high_seqno(vb)
            for vb in range(VBUCKETS)
            if vb not in self.paused
        )

    def pause(self) -> None:
        if self.changes is not None and self.dialect == "dcp" and self.source.stats()["vbuckets"]:
            vbucket = self.random.randrange(VBUCKETS)
            self.source.pause([vbucket])
            self.paused.add(vbucket)

    def resume(self) -> None:
        if self.paused:
            vbucket = self.random.choice(sorted(self.paused))
            self.source.resume([vbucket])
            self.paused.remove(vbucket)

    def read_some(self) -> None:
        """Take some events of an endless reading; only so many that there is no need to wait."""
        if self.changes is None:
            self.source = self.open()
            self.changes = self.read()
        for _ in range(self.random.randrange(1, 20)):
            if not self.is_behind():
                break
            self.application.take(next(self.changes))
        self.source.save()

    def forget(self) -> None:
        """The process ends: what is left is what was saved, and a state of the application to match."""
        if self.changes is None:
            return
        self.changes.close()
        self.source.save()
        self.source.close()
        self.changes = self.source = None
        self.paused.clear()
        # an application that keeps its own state with the positions goes back to the last whole one
        for vbucket, saved in self.state.load().items():
            seqno = saved.position.seqno
            self.application.documents[vbucket] = dict(self.application.whole.get(vbucket, {}).get(seqno, {}))
            self.application.last[vbucket] = seqno
        for vbucket in set(self.application.documents) - set(self.state.load()):
            self.application.documents[vbucket] = {}
            self.application.last[vbucket] = 0

    def catch_up(self) -> None:
        self.source = self.open()
        for events in self.read(end="now"):
            self.application.take(events)
        assert self.application.state() == server_state(self.node, KEYS)


def new_node() -> RunningNode:
    return tailrace.testing.node(vbuckets=VBUCKETS, settings={"history_changes": 50})


def campaign(connect: Callable[..., Any], seed: int, steps: int, dialect: str) -> None:
    node = new_node()
    node.start()
    world = World(node, connect, seed, dialect)
    try:
        world.run(steps)
    finally:
        world.node.stop()


@pytest.mark.parametrize("seed", range(6))
def test_a_short_history(connect: Callable[..., Any], seed: int) -> None:
    campaign(connect, seed, 60, "dcp")


@pytest.mark.parametrize("dialect", ["upr-a", "upr-b"])
@pytest.mark.parametrize("seed", range(10, 14))
def test_a_short_history_in_older_words(
    connect: Callable[..., Any], seed: int, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # so little of a snapshot is held back that it breaks off in the middle now and then
    monkeypatch.setattr("tailrace.protocol.upr.translation.HELD_BYTES", 100)
    campaign(connect, seed, 60, dialect)


@pytest.mark.long
@pytest.mark.parametrize("dialect", ["dcp", "upr-a", "upr-b"])
@pytest.mark.parametrize("seed", range(100, 140))
def test_a_long_history(connect: Callable[..., Any], seed: Any, dialect: Any) -> None:
    campaign(connect, seed, 600, dialect)
