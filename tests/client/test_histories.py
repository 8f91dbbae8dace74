"""The whole promise, at random: whatever happens to a node, who follows the events has what the node has.

Writes, deletions, rewinds, kills that lose what was not on disk, restarts, purges, flushes and broken
connections, in any order; the reader stops in the middle of things, forgets and resumes. A seed replays a
failure.
"""

from __future__ import annotations

import random

import pytest
from application import Application, server_state

import tailrace.testing
from tailrace.client.checkpoints import MemoryState

VBUCKETS = 2
KEYS = [f"key-{number}".encode() for number in range(12)]


class World:
    """A node, an application, and what happens to both."""

    def __init__(self, node, connect, seed, dialect):
        self.random = random.Random(seed)
        self.dialect = dialect
        self.node = node
        self.connect = connect
        self.application = Application()
        self.state = MemoryState()
        self.source = None
        self.changes = None

    def run(self, steps):
        for _ in range(steps):
            weights = [12, 4, 3, 1, 1, 1, 1, 1, 1, 6, 2]
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
                ],
                weights,
            )
            act()
        self.forget()
        self.catch_up()

    def write(self):
        for _ in range(self.random.randrange(1, 6)):
            self.node.set(self.random.choice(KEYS), self.random.randrange(1_000_000))

    def delete(self):
        key = self.random.choice(KEYS)
        if self.node.get(key) is not None:
            self.node.delete(key)

    def rewind(self):
        vbucket = self.random.randrange(VBUCKETS)
        floor = self.node.call(lambda n: n.buckets["default"].store.vbuckets[vbucket].rollback_floor)
        target = self.random.choice([0, self.random.randint(floor, self.node.high_seqno(vbucket))])
        if target >= floor or target == 0:
            self.node.rewind(vbucket, target)

    def kill(self):
        self.node.kill()
        self.node.start()

    def restart(self):
        self.node.restart()

    def flush(self):
        self.node.flush()

    def persist(self):
        self.node.persist()

    def purge(self):
        self.node.persist()
        self.node.compact(drop_tombstones=True)

    def break_connections(self):
        self.node.drop_connections()

    def open(self):
        return self.connect(self.node.url, state=self.state, retry_for_s=15, dialect=self.dialect)

    def read_some(self):
        """Take some events of an endless reading; only so many that there is no need to wait."""
        if self.changes is None:
            self.source = self.open()
            self.changes = self.source.changes()
        behind = any(self.application.last.get(vb, 0) < self.node.high_seqno(vb) for vb in range(VBUCKETS))
        if behind:
            for _ in range(self.random.randrange(1, 20)):
                self.application.handle(next(self.changes))
                if all(
                    self.application.last.get(vb, 0) >= self.node.high_seqno(vb) for vb in range(VBUCKETS)
                ):
                    break
            self.source.save()

    def forget(self):
        """The process ends: what is left is what was saved, and a state of the application to match."""
        if self.changes is None:
            return
        self.changes.close()
        self.source.save()
        self.source.close()
        self.changes = self.source = None
        # an application that keeps its own state with the positions goes back to the last whole one
        for vbucket, one in self.state.load().items():
            seqno = one.position.seqno
            self.application.documents[vbucket] = dict(self.application.whole.get(vbucket, {}).get(seqno, {}))
            self.application.last[vbucket] = seqno
        for vbucket in set(self.application.documents) - set(self.state.load()):
            self.application.documents[vbucket] = {}
            self.application.last[vbucket] = 0

    def catch_up(self):
        source = self.open()
        self.application.take(source.changes(end="now"))
        assert self.application.state() == server_state(self.node, KEYS)


def campaign(connect, seed, steps, dialect):
    with tailrace.testing.node(vbuckets=VBUCKETS, settings={"history_changes": 50}) as node:
        World(node, connect, seed, dialect).run(steps)


@pytest.mark.parametrize("seed", range(6))
def test_a_short_history(connect, seed):
    campaign(connect, seed, 60, "dcp")


@pytest.mark.parametrize("dialect", ["upr-a", "upr-b"])
@pytest.mark.parametrize("seed", range(10, 14))
def test_a_short_history_in_older_words(connect, seed, dialect, monkeypatch):
    # so little is held back of a snapshot that it breaks off in the middle now and then
    monkeypatch.setattr("tailrace.protocol.upr_translation.HELD_BYTES", 100)
    campaign(connect, seed, 60, dialect)


@pytest.mark.long
@pytest.mark.parametrize("dialect", ["dcp", "upr-a", "upr-b"])
@pytest.mark.parametrize("seed", range(100, 140))
def test_a_long_history(connect, seed, dialect):
    campaign(connect, seed, 600, dialect)
