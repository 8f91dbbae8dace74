"""The simulated network: connections as two queues of bytes, delivered in pieces of any size.

Bytes of one connection stay in order, connections get ahead of each other, anything between two places can be
held up (a partition) or cut. The side that dials is an `End`; on the other side is a session of a node.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Protocol

from tailrace.server.call import Pending
from tailrace.server.session import Session
from tailrace.server.upstream import Upstream
from tailrace.wire.header import HEADER_SIZE, frame_size


class End(Protocol):
    """The side of a connection that dialled."""

    @property
    def wants_data(self) -> bool: ...

    @property
    def closed(self) -> bool: ...

    def take(self) -> bytes:
        """What it has to send."""
        ...

    def give(self, data: bytes, now: float) -> None: ...

    def tick(self, now: float) -> None:
        """Time has passed."""
        ...

    def lost(self) -> None: ...


HOST = "127.0.0.1"
Dial = Callable[[str, int, End], bool]
"""From a place to the node at a port; returns whether a node answers."""


class UpstreamEnd:
    """A node that receives from another one."""

    def __init__(self, link: Upstream) -> None:
        self.link = link

    @property
    def wants_data(self) -> bool:
        return self.link.wants_data

    @property
    def closed(self) -> bool:
        return self.link.closed

    def take(self) -> bytes:
        return b"".join(self.link.data_to_send())

    def give(self, data: bytes, now: float) -> None:
        self.link.exchange(data, now)

    def tick(self, now: float) -> None:
        timer = self.link.next_timer()
        if timer is not None and timer <= now:
            self.link.handle_timer(now)

    def lost(self) -> None:
        self.link.connection_lost()


class FrameCount:
    """How many frames were sent in one direction."""

    def __init__(self) -> None:
        self.frames = 0
        self._begun = bytearray()
        self._rest = 0

    def add(self, data: bytes | bytearray | memoryview) -> None:
        at = self._rest
        if at >= len(data):
            self._rest = at - len(data)
            return
        self._begun += memoryview(data)[at:]
        at = 0
        while len(self._begun) - at >= HEADER_SIZE:
            at += frame_size(memoryview(self._begun)[at : at + HEADER_SIZE])
            self.frames += 1
        self._rest = max(0, at - len(self._begun))
        self._begun = self._begun[at:]


class Wire:
    """A connection from one place to another."""

    def __init__(self, end: End, session: Session, places: tuple[str, str]) -> None:
        self.end, self.session, self.places = end, session, places
        self.there = bytearray()
        self.back = bytearray()
        self.is_open = True
        self.counted = (FrameCount(), FrameCount())

    def _collect(self) -> None:
        sent = self.end.take()
        self.counted[0].add(sent)
        self.there += sent
        while parts := self.session.data_to_send(1 << 16):
            for part in parts:
                self.counted[1].add(part)
                self.back += part

    def deliver(self, rng: random.Random | None, now: float) -> bool:
        """Some bytes arrive on one side or both, or (without ``rng``) all; return whether there were any."""
        if rng is None:
            return self._deliver(_all, now)
        side = rng.random()
        return self._deliver(lambda queue: _some(queue, rng), now, there=side < 0.6, back=side > 0.4)

    def deliver_part(self, rng: random.Random, now: float) -> bool:
        """A good part of what was sent back arrives, but not all, which tears apart what belongs together."""

        def take(queue: bytearray) -> bytes:
            return _piece(queue, rng.randint(len(queue) // 4, 3 * len(queue) // 4))

        return self._deliver(take, now, there=False)

    def deliver_frames(self, now: float, *, unless_short: int = 0) -> bool:
        """One frame arrives on each side (or all, if those have at most ``unless_short`` bytes); return
        whether there was any. All that came before must have been whole frames.
        """
        return self._deliver(lambda queue: (_all if len(queue) <= unless_short else _first)(queue), now)

    def _deliver(
        self, take: Callable[[bytearray], bytes], now: float, *, there: bool = True, back: bool = True
    ) -> bool:
        if not self.is_open:
            return False
        self._collect()
        moved = False
        if there and self.there and self.session.wants_data:
            self.session.receive_data(take(self.there), now)
            moved = True
        if back and self.back and self.end.wants_data:
            self.end.give(take(self.back), now)
            moved = True
        if self.end.closed or (self.session.closed and not self.back):
            self.cut()
        return moved

    def on_its_way(self) -> bytes:
        """What the session has sent but its peer has not got yet, including answers that are decided but wait
        behind one that is not.
        """
        self._collect()
        waiting = (
            entry.answer if isinstance(entry, Pending) else entry for entry in self.session._answers.waiting
        )
        return b"".join((bytes(self.back), *(answer for answer in waiting if answer)))

    def tick(self, now: float) -> None:
        if self.is_open and not self.end.closed:
            self.end.tick(now)
        if self.is_open and not self.session.closed:
            timer = self.session.next_timer()
            if timer is not None and timer <= now:
                self.session.handle_timer(now)

    def cut(self) -> None:
        if self.is_open:
            self.is_open = False
            self.end.lost()
            self.session.connection_lost()


def _all(queue: bytearray) -> bytes:
    return _piece(queue, len(queue))


def _some(queue: bytearray, rng: random.Random) -> bytes:
    return _piece(queue, len(queue) if rng.random() < 0.4 else rng.randint(1, len(queue)))


def _piece(queue: bytearray, count: int) -> bytes:
    data = bytes(queue[:count])
    del queue[:count]
    return data


def _first(queue: bytearray) -> bytes:
    return _piece(queue, frame_size(queue))


class Network:
    """All connections, and which places can't reach each other."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.wires: list[Wire] = []
        self._counts: list[FrameCount] = []
        self.partitions: set[frozenset[str]] = set()

    def reaches(self, here: str, other: str) -> bool:
        return frozenset((here, other)) not in self.partitions

    def connect(self, wire: Wire) -> None:
        self.wires.append(wire)
        self._counts += wire.counted

    @property
    def frames(self) -> int:
        """How many were sent on all connections so far."""
        return sum(count.frames for count in self._counts)

    def of(self, place: str) -> list[Wire]:
        return [wire for wire in self.wires if place in wire.places]

    def candidates(self, stopped: Iterable[str]) -> list[Wire]:
        """Connections on which bytes can arrive now."""
        self.wires = [wire for wire in self.wires if wire.is_open]
        stuck = set(stopped)
        return [wire for wire in self.wires if self.reaches(*wire.places) and not stuck & set(wire.places)]
