"""The reader: a server that lies, a node that has accidents, and the rollback rule in a world that knows
nothing of it.

A server that lies sends a history with something in it that can't be true. What was delivered must be the
beginning of the history, and the lie an error.
"""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from campaigns.bug import Bug, Tally
from client.application import events_of
from client.conftest import AsyncAsSync, Blocking
from client.fake_server import UUID, FakeServer, accepted, marker, mutation
from client.test_histories import campaign as play_history
from properties import test_history_properties as rollbacks
from tailrace import Deletion, Mutation, history, model
from tailrace.errors import MalformedMessage, TailraceError
from tailrace.history import FailoverLog, Retreat
from tailrace.model import MAX_SEQNO, Position, SnapshotRange
from tailrace.wire.codes import Magic, Status
from tailrace.wire.dcp import DcpDeletion, DcpStreamEnd
from tailrace.wire.header import Frame

__all__ = ["BUGS", "play_reader"]

CASES = 100
"""How many cases of the rollback rule there are in a schedule."""
HISTORY_STEPS = 60


def play_reader(seed: int, _directory: Path) -> Tally:
    """One schedule."""
    match seed % 4:
        case 0 | 1:
            rollbacks.run_cases(seed * CASES, CASES)
            return Tally(schedules=1)
        case 2:
            return LyingServer(seed).play()
        case _:
            return _play_history(seed)


def _play_history(seed: int) -> Tally:
    rng = random.Random(seed)
    with contextlib.ExitStack() as stack:
        kind = rng.choice((AsyncAsSync, Blocking))

        def connect(where: str, **options: Any) -> Any:
            return stack.enter_context(kind(where, **options))

        play_history(connect, seed, HISTORY_STEPS, rng.choice(("dcp", "dcp", "upr-a", "upr-b")))
    return Tally(schedules=1, kills=2, faults=HISTORY_STEPS // 4)


Told = tuple[int, bytes, bytes | None]


class LyingServer:
    """A history of one vbucket, told in frames, and a lie in it."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._told: list[Told] = []
        """What is true, in the order in which it is sent, before the lie."""
        self._frames = 0
        self._high = self._rng.choice((0, 0, 5, 1 << 40, MAX_SEQNO - 200))

    def play(self) -> Tally:
        rng = self._rng
        lies = rng.random() < 0.8
        story = self._story(SimpleNamespace(opaque=0, vbucket=0), lies=lies)
        was_told = False

        def on_stream(connection: Any, request: Any) -> None:
            nonlocal was_told
            if was_told:
                connection.close()  # there is no more
                return
            was_told = True
            connection.send(*(_with_opaque(frame, request.opaque) for frame in story))

        delivered: list[Told] = []
        error: Exception | None = None
        kind = rng.choice((AsyncAsSync, Blocking))
        with FakeServer(on_stream) as server:
            server.high_seqnos = {0: MAX_SEQNO if lies else self._told[-1][0]}
            with kind(server.url, retry_for_s=1) as source:
                try:
                    if rng.random() < 0.5:
                        for event in source.changes(end="now"):
                            delivered += self._true(len(delivered), [event])
                    else:
                        for batch in source.batches(end="now"):
                            delivered += self._true(len(delivered), events_of(batch))
                except TailraceError as raised:
                    error = raised
        assert len({seqno for seqno, _, _ in delivered}) == len(delivered)
        assert (error is not None) == lies, f"a lie was believed, or the truth was not: {error}"
        if not lies:
            assert delivered == self._told
        return Tally(schedules=1, frames=self._frames, faults=int(lies))

    def _true(self, index: int, events: Iterable[Any]) -> list[Told]:
        """What was delivered after `index` changes; it must be what was sent there. Checked on arrival: a
        reader that believes a lie would wait long for what was never sent.
        """
        delivered = [told for event in events for told in _told_by(event)]
        assert delivered == self._told[index:][: len(delivered)], (
            f"delivered: {delivered}, told: {self._told}"
        )
        return delivered

    def _story(self, request: Any, *, lies: bool) -> list[bytes]:
        rng = self._rng
        frames = [accepted(request, [(UUID, 0)])]
        stop = rng.randint(1, 30) if lies else 1_000
        seqno = 0
        for _ in range(rng.randint(1, 4)):
            count = rng.randint(1, 10)
            start = seqno + 1
            seqnos = sorted(rng.sample(range(start, start + 2 * count), count))
            if seqno == 0 and self._high:
                seqnos = [self._high + seqno for seqno in seqnos]
            end = seqnos[-1]
            frames.append(marker(request, start, end))
            for seqno in seqnos:
                if len(self._told) == stop:
                    return [*frames, *self._lie(request, seqno, start, end)]
                key = b"key-%d" % rng.randrange(6)
                value = None if rng.random() < 0.2 else b"%d" % rng.getrandbits(30)
                self._told.append((seqno, key, value))
                frames.append(_change(request, seqno, key, value))
            seqno = end
        self._frames = len(frames)
        if not lies:
            return [*frames, DcpStreamEnd(opaque=request.opaque, vbucket=request.vbucket).encode()]
        return [*frames, *self._lie(request, seqno + 1, seqno + 1, seqno + 1)]

    def _lie(self, request: Any, seqno: int, start: int, end: int) -> list[bytes]:
        """What no server may say here."""
        last = self._told[-1][0] if self._told else 0
        beyond = self._rng.choice((1 << 55, (1 << 63) - 1, 1 << 63, (1 << 64) - 2))
        lies: list[Callable[[], list[bytes]]] = [
            lambda: [_without_seqno(_change(request, 1, b"k", b"zero"))],
            lambda: [_change(request, end + 1, b"k", b"above its snapshot")],
            lambda: [
                _marker(request, beyond, beyond + 1),
                _change(request, beyond, b"k", b"beyond all seqnos"),
            ],
            lambda: [_marker(request, end + 1, beyond), _change(request, beyond, b"k", b"beyond all seqnos")],
            lambda: [_marker(request, end + 9, end + 1), _change(request, end + 1, b"k", b"backwards")],
            lambda: [_change(request, seqno, b"k", b"other opaque", opaque=request.opaque ^ 0xFF)],
            lambda: [_change(request, seqno, b"k", b"other vbucket", vbucket=request.vbucket + 1)],
            lambda: [accepted(request, [(UUID, 0)])],
            lambda: [b"\x42" * 24],
            lambda: [struct.pack(">BBHBBHIIQ", 0x80, 0x57, 1, 31, 0, 0, 1 << 31, request.opaque, 0)],
            lambda: [
                DcpStreamEnd(opaque=request.opaque, vbucket=request.vbucket).encode(),
                _change(request, seqno, b"k", b"after the end"),
            ],
        ]
        if last:
            lies += [
                lambda: [_change(request, last, b"k", b"twice")],
                lambda: [_change(request, max(1, last - 1), b"k", b"falling")],
                lambda: [marker(request, max(1, last - 1), last), _change(request, last, b"k", b"again")],
            ]
        self._frames += 2
        return self._rng.choice(lies)()


def _with_opaque(frame: bytes, opaque: int) -> bytes:
    """A frame with the request's opaque: the story was made before the request."""
    told = int.from_bytes(frame[12:16], "big") ^ opaque
    return frame[:12] + told.to_bytes(4, "big") + frame[16:]


def _marker(request: Any, start: int, end: int) -> bytes:
    """As our own encoder does not write it."""
    extras = struct.pack(">QQI", start, end, 1)
    where = {"opaque": request.opaque, "vbucket": request.vbucket}
    return Frame(Magic.REQUEST, 0x56, 0, len(extras), body=extras, **where).encode()


def _without_seqno(frame: bytes) -> bytes:
    """A change with seqno 0, which our own encoder does not write."""
    return frame[:24] + bytes(8) + frame[32:]


def _change(request: Any, seqno: int, key: bytes, value: bytes | None, **fields: Any) -> bytes:
    if value is None:
        given = {"opaque": request.opaque, "vbucket": request.vbucket, "cas": 1} | fields
        return DcpDeletion(by_seqno=seqno, rev_seqno=1, key=b"\0" + key, **given).encode()
    return mutation(request, seqno, key=b"\0" + key, value=value, **fields)


def _told_by(event: Any) -> list[Told]:
    if isinstance(event, Mutation):
        return [(event.seqno, event.key, event.value)]
    return [(event.seqno, event.key, None)] if isinstance(event, Deletion) else []


# bugs


def _smaller_for_smaller_or_equal() -> AbstractContextManager[Any]:
    def rollback_seqno(request: Position, log: FailoverLog, *, high_seqno: int, **rest: Any) -> int | None:
        answer = original(request, log, high_seqno=high_seqno, **rest)
        branch = log.range_of(request.vb_uuid, high_seqno)
        if answer is None and branch is not None and request.seqno and request.reach == branch.upper:
            return min(branch.upper, request.exact_at)
        return answer

    original = history.rollback_seqno
    return _patched_rule(rollback_seqno)


def _a_rule_left_out() -> AbstractContextManager[Any]:
    """The rule of the snapshot's end is left out: only the seqno is looked at."""

    def rollback_seqno(request: Position, log: FailoverLog, **rest: Any) -> int | None:
        return original(Position.at(request.vb_uuid, request.seqno), log, **rest)

    original = history.rollback_seqno
    return _patched_rule(rollback_seqno)


def _purge_compared_with_the_start() -> AbstractContextManager[Any]:
    def rollback_seqno(
        request: Position, log: FailoverLog, *, purge_seqno: int = 0, **rest: Any
    ) -> int | None:
        if 0 < request.snapshot_start < purge_seqno:
            return 0
        return original(request, log, purge_seqno=0, **rest)

    original = history.rollback_seqno
    return _patched_rule(rollback_seqno)


def _patched_rule(rule: Callable[..., int | None]) -> AbstractContextManager[Any]:
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(history, "rollback_seqno", rule))
    stack.enter_context(mock.patch.object(rollbacks, "rollback_seqno", rule))
    return stack


def _collapsed_after_a_rollback() -> AbstractContextManager[Any]:
    def retreat(sent: Position, rollback_to: int, *, log: Any = None, **_: Any) -> Retreat:
        position = Position.at(sent.vb_uuid, rollback_to) if rollback_to else Position.BEGINNING
        return Retreat(position, log, rollback_to)

    return mock.patch.object(rollbacks, "retreat", retreat)


def _seqnos_as_signed() -> AbstractContextManager[Any]:
    def signed(number: int) -> int:
        return number - (1 << 64) if number >> 63 else number

    def received_marker(self: Position, start: int, end: int) -> SnapshotRange:
        if start > end or signed(end) > MAX_SEQNO:
            raise MalformedMessage("it can't be", Status.ERANGE)
        if start < self.seqno and end <= self.seqno:
            raise MalformedMessage("it lies behind", Status.ERANGE)
        return SnapshotRange(start, end)

    return mock.patch.object(model.Position, "received_marker", received_marker)


def _bugs() -> Iterator[Bug]:
    yield Bug(
        "`<` for `<=` in the rollback rule",
        "A reader that stands exactly where a branch ends is sent back.",
        _smaller_for_smaller_or_equal,
    )
    yield Bug(
        "one of its rules left out",
        "The snapshot that a reader is in is not looked at, only its seqno.",
        _a_rule_left_out,
    )
    yield Bug(
        "purge compared with the snapshot's start",
        "A reader inside a snapshot that began before the first change is let in below the purge.",
        _purge_compared_with_the_start,
    )
    yield Bug(
        "snapshot collapsed to (s, s, s) after a rollback",
        "A reader goes back to the very seqno that it was told, and calls itself exact there.",
        _collapsed_after_a_rollback,
    )
    yield Bug(
        "seqnos compared as signed",
        "A seqno above 2^63 is smaller than all limits.",
        _seqnos_as_signed,
        22,
    )


BUGS = tuple(_bugs())
