"""A node that is written to and has accidents, and an account of every state that its bucket ever had.

All writes go through here, so it is known for every vbucket and seqno what the bucket held there, on
whichever branch. Every version of the mirror's table must be one of these states, which is more than being
equal in the end.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping
from typing import Any

import tailrace.testing
from spark.naive import Doc, bucket_state
from tailrace.clock import ManualClock
from tailrace.errors import DocumentRefused, RollbackImpossible
from tailrace.store.format import StoredDocument

VBUCKETS = 4
KEYS = 20
"""Keys of a vbucket: few, so most writes overwrite and most deletes hit."""

State = frozenset[tuple[bytes, Doc]]


class World:
    """The node, and what is done to it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.clock = ManualClock()
        self.node = tailrace.testing.node(vbuckets=VBUCKETS, clock=self.clock)
        self.trace: list[str] = []
        self._known: list[dict[int, set[State]]] = [{0: {frozenset()}} for _ in range(VBUCKETS)]
        self._value = 0
        self._overwritten = 0

    def __enter__(self) -> World:
        self.node.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.node.stop()

    # accidents

    def do(self, name: str) -> None:
        """Something that happens, by its name."""
        self.trace.append(name)
        ACCIDENTS[name](self)

    def write(self, count: int, vbuckets: list[int] | None = None) -> None:
        """Writes, overwrites, deletes; a few with keys and values that are not text."""
        rng = self.rng
        for _ in range(count):
            vbucket = rng.choice(vbuckets or range(VBUCKETS))
            key = b"key-%d" % rng.randrange(KEYS)
            if rng.random() < 0.05:
                key = b"\xfe" + key
            if rng.random() < 0.25:
                with contextlib.suppress(DocumentRefused):
                    self.node.delete(key, vbucket=vbucket)
            else:
                self._value += 1
                value: Any = {"n": self._value, "pad": "x" * rng.randrange(300)}
                if rng.random() < 0.05:
                    value = b"\x80%d" % self._value
                expiry = 0
                if rng.random() < 0.1:
                    expiry = self.clock.time_ns() // 1_000_000_000 + rng.randrange(5, 50)
                self.node.set(key, value, vbucket=vbucket, expiry=expiry)
            self._note(vbucket)

    def _writes(self) -> None:
        self.write(self.rng.randrange(1, 40))

    def _burst(self) -> None:
        """Snapshots that are larger than a batch."""
        self.write(self.rng.randrange(30, 90), [self.rng.randrange(VBUCKETS)])

    def _overwrites(self) -> None:
        """Write every document of a vbucket twice: its snapshot leaves out the first version of each."""
        self._overwritten = self.rng.randrange(VBUCKETS)
        for number in [*range(KEYS), *range(KEYS)]:
            self._value += 1
            value = {"n": self._value, "pad": "x" * 200}
            self.node.set(b"key-%d" % number, value, vbucket=self._overwritten)
            self._note(self._overwritten)

    def _tear(self) -> None:
        """Lose some of these: what they had overwritten is there again, with seqnos that a reader inside the
        snapshot has passed.
        """
        high = self.node.high_seqno(self._overwritten)
        with contextlib.suppress(RollbackImpossible):
            self.node.rewind(self._overwritten, max(0, high - self.rng.randint(1, KEYS // 3)))
        self._note(self._overwritten)

    def _expiry(self) -> None:
        """Time passes; a document is found to have expired when it is read."""
        self.clock.advance(20)
        for vbucket in range(VBUCKETS):
            for number in range(KEYS):
                self.node.get(b"key-%d" % number, vbucket=vbucket)
                self._note(vbucket)

    def _rewind(self) -> None:
        """A failover that loses changes, and other changes with the same seqnos after it."""
        chosen = self.rng.sample(range(VBUCKETS), self.rng.randint(1, 3))
        for vbucket in chosen:
            high = self.node.high_seqno(vbucket)
            with contextlib.suppress(RollbackImpossible):  # behind a purge
                self.node.rewind(vbucket, self.rng.randint(max(0, high - self.rng.choice((4, 25))), high))
            self._note(vbucket)
        if self.rng.random() < 0.8:
            self.write(self.rng.randrange(1, 20), chosen)

    def _failover(self) -> None:
        """A new branch and nothing lost."""
        vbucket = self.rng.randrange(VBUCKETS)
        self.node.rewind(vbucket, self.node.high_seqno(vbucket))
        self._note(vbucket)

    def _purge(self) -> None:
        self.write(6)
        self.node.compact(drop_tombstones=True)

    def _flush(self) -> None:
        self.node.flush()
        self._note_all()

    def _crash(self) -> None:
        """The node is killed with changes that are not on its disk."""
        self.node.persist()
        self.node.stop_persistence()
        self.write(self.rng.randrange(0, 12))
        self.node.kill()
        self.node.start()
        self._note_all()
        if self.rng.random() < 0.7:
            self.write(self.rng.randrange(1, 12))

    def _restart(self) -> None:
        self.node.restart()

    def _cut(self) -> None:
        self.node.drop_connections()

    # the account

    def state(self) -> dict[tuple[int, bytes], Doc]:
        """What the bucket holds, read over a socket by the naive reader."""
        return bucket_state("127.0.0.1", self.node.port)

    def seqnos(self) -> dict[int, int]:
        """High seqnos by vbucket."""
        return {vbucket: self.node.high_seqno(vbucket) for vbucket in range(VBUCKETS)}

    def had(self, vbucket: int, seqno: int, rows: Mapping[bytes, Doc]) -> bool:
        """Whether the bucket ever held exactly this in a vbucket, at that seqno."""
        return frozenset(rows.items()) in self._known[vbucket].get(seqno, ())

    def _note_all(self) -> None:
        for vbucket in range(VBUCKETS):
            self._note(vbucket)

    def _note(self, vbucket: int) -> None:
        held = self.node.call(lambda node: _documents(node.buckets["default"].store.vbuckets[vbucket]))
        self._known[vbucket].setdefault(self.node.high_seqno(vbucket), set()).add(frozenset(held.items()))


def _documents(vbucket: Any) -> dict[bytes, Doc]:
    """What a stream of the vbucket would send: documents not yet found to have expired are still there."""
    documents = {}
    for number in range(KEYS):
        for key in (b"key-%d" % number, b"\xfekey-%d" % number):
            frame = vbucket.get_any(b"\0" + key)
            if frame is not None and not (stored := StoredDocument.of(frame)).deleted:
                documents[key] = Doc(
                    stored.value, stored.seqno, stored.rev, stored.cas, stored.flags, stored.expiry
                )
    return documents


ACCIDENTS: dict[str, Callable[[World], None]] = {
    "writes": World._writes,
    "burst": World._burst,
    "overwrites": World._overwrites,
    "tear": World._tear,
    "expiry": World._expiry,
    "rewind": World._rewind,
    "failover": World._failover,
    "purge": World._purge,
    "flush": World._flush,
    "crash": World._crash,
    "restart": World._restart,
    "cut": World._cut,
}
