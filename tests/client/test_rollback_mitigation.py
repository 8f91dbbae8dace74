"""What is not on the server's disk yet is held back; what never gets there is never shown."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import tailrace
from client.fake_server import FakeServer, accepted, marker, mutation
from tailrace import Mutation, Rollback
from tailrace.client.held_portion import HeldPortion
from tailrace.client.nodes import KnownNode
from tailrace.client.progress import Progress
from tailrace.client.retry import Backoff
from tailrace.connstr import Address
from tailrace.errors import NotPersistedYet, UsageError
from tailrace.history import FailoverLog
from tailrace.model import Position
from tailrace.protocol.dcp.reader_stream import ReaderStream
from tailrace.protocol.questions import Patience
from tailrace.wire.admin import ObserveSeqnoResponse
from tailrace.wire.codes import DcpOpcode, Op, Status
from tailrace.wire.header import Frame
from tailrace.wire.message import Response

LOST, NEW = 0x1111, 0x2222


def observed(frame: Frame, *, persisted: int) -> bytes:
    """An answer about the new branch says what is on disk; the lost one has ended at 0."""
    asked = int.from_bytes(frame.value, "big")
    numbers = struct.pack(">HQQQ", frame.vbucket, NEW, persisted, 2)
    value = b"\0" + numbers if asked == NEW else b"\1" + numbers + struct.pack(">QQ", asked, 0)
    return ObserveSeqnoResponse(opcode=Op.OBSERVE_SEQNO, opaque=frame.opaque, value=value).encode()


def gone(frame: Frame) -> bytes:
    """The server does not know the lost branch at all."""
    if int.from_bytes(frame.value, "big") == NEW:
        return observed(frame, persisted=2)
    made = Response(opcode=Op.OBSERVE_SEQNO, opaque=frame.opaque, status=Status.KEY_ENOENT)
    return made.encode()


@pytest.mark.parametrize("answer", [lambda frame: observed(frame, persisted=2), gone])
def test_a_branch_that_was_left_is_taken_back(connect: Any, answer: Any) -> None:
    """The server failed over while changes were held: they are forgotten, and read again on its branch."""

    def stream(connection: Any, request: Any) -> None:
        connection.server.asked.append(request)
        if len(connection.server.asked) == 1:
            lost = [mutation(request, seqno, key=b"\0lost-%d" % seqno) for seqno in (1, 2, 3)]
            connection.send(accepted(request, [(LOST, 0)]), marker(request, 1, 3), *lost)
        else:
            new = [mutation(request, seqno, key=b"\0new-%d" % seqno) for seqno in (1, 2)]
            connection.send(accepted(request, [(NEW, 0)]), marker(request, 1, 2), *new)

    with FakeServer(stream) as server:
        server.answers[Op.OBSERVE_SEQNO] = lambda _, frame: answer(frame)
        source = connect(server.url, persisted_only=True, retry_for_s=60)
        changes = source.changes()
        seen = list(itertools.takewhile(lambda event: getattr(event, "key", b"") != b"new-2", changes))
        assert [event.key for event in seen if isinstance(event, Mutation)] == [b"new-1"]
        assert not [event for event in seen if isinstance(event, Rollback)], "nothing of it was ever shown"
        assert [request.start_seqno for request in server.asked] == [0, 0]
        assert DcpOpcode.CLOSE_STREAM in [request.opcode for request in server.requests]
        assert source.positions()[0].vb_uuid == NEW


# replicas


def persisted_at(frame: Frame, seqno: int) -> bytes:
    asked = int.from_bytes(frame.value, "big")
    value = b"\0" + struct.pack(">HQQQ", frame.vbucket, asked, seqno, 9)
    return ObserveSeqnoResponse(opcode=Op.OBSERVE_SEQNO, opaque=frame.opaque, value=value).encode()


def two_changes(connection: Any, request: Any) -> None:
    connection.send(accepted(request, [(NEW, 0)]), marker(request, 1, 2))
    for seqno, key in ((1, b"\0first"), (2, b"\0second")):
        if seqno > request.start_seqno:
            connection.send(mutation(request, seqno, key=key))


class Pair:
    """An active with everything on disk, and the server of the replica of its one vbucket."""

    def __init__(self, active: FakeServer, replica: FakeServer) -> None:
        self.active, self.replica = active, replica
        self.persisted = 0
        for server in (active, replica):
            server.nodes = [active, replica]
            server.owners = [[0, 1]]
        active.answers[Op.OBSERVE_SEQNO] = lambda _, frame: persisted_at(frame, 9)
        replica.answers[Op.OBSERVE_SEQNO] = lambda _, frame: persisted_at(frame, self.persisted)

    def asked_of_replica(self) -> int:
        return sum(frame.opcode == Op.OBSERVE_SEQNO for frame in self.replica.requests)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with FakeServer(two_changes) as active, FakeServer(two_changes) as replica:
        yield Pair(active, replica)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Delivered:
    """What a reader in a thread of its own has been given."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.keys: list[bytes] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for event in self.source.changes():
            if isinstance(event, Mutation):
                self.keys.append(event.key)
                if event.key == b"second":
                    return

    def all(self) -> list[bytes]:
        self._thread.join(60)
        return self.keys


def test_a_replica_that_has_not_persisted_holds_changes_back(connect: Any, pair: Pair) -> None:
    reader = Delivered(connect(pair.active.url, persisted_only=True))
    until(lambda: pair.asked_of_replica() >= 3)
    assert reader.keys == []
    assert f"the replica at 127.0.0.1:{pair.replica.port}" in reader.source.stats()["waits_for"]
    pair.persisted = 1
    asked = pair.asked_of_replica()
    until(lambda: pair.asked_of_replica() >= asked + 3)
    assert b"second" not in reader.keys
    pair.persisted = 2
    assert reader.all() == [b"first", b"second"]


def test_what_is_held_when_a_reading_ends_is_acknowledged(pair: Pair) -> None:
    """The connection is kept: unacknowledged bytes would stay in its window for ever."""

    async def read() -> tuple[int, int]:
        async with tailrace.connect(pair.active.url, persisted_only=True) as source:
            reading = await source.begin()
            while reading._held.is_empty:  # portions without changes come before
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(source.next_portion(reading), 0.2)
            held = reading._held._portion
            assert held is not None
            window = held.link._window
            before = window.unacknowledged_bytes + window.acknowledged_bytes
            source.end(reading)
            after = window.unacknowledged_bytes + window.acknowledged_bytes
            return after - before, held.delivery.chunk.size_bytes

    used, held = asyncio.run(read())
    assert used == held


def test_a_replica_on_another_branch_holds_changes_back(connect: Any, pair: Pair) -> None:
    """It does not know the active's branch yet: what it has on disk may be another history."""
    answers = iter([Response(opcode=Op.OBSERVE_SEQNO, status=Status.KEY_ENOENT)] * 2)

    def answer(_: object, frame: Frame) -> bytes:
        made = next(answers, None)
        if made is None:
            return persisted_at(frame, 2)
        made.opaque = frame.opaque
        return made.encode()

    pair.replica.answers[Op.OBSERVE_SEQNO] = answer
    reader = Delivered(connect(pair.active.url, persisted_only=True))
    assert reader.all() == [b"first", b"second"]
    assert pair.asked_of_replica() == 3
    streams = [frame for frame in pair.active.requests if frame.opcode == DcpOpcode.STREAM_REQUEST]
    assert len(streams) == 1, "nothing was taken back"


def test_a_replica_that_is_down_holds_changes_back_until_a_map_leaves_it_out(
    connect: Any, pair: Pair
) -> None:
    pair.replica.stop()
    reader = Delivered(connect(pair.active.url, persisted_only=True, retry_for_s=0.1))
    where = f"the replica at 127.0.0.1:{pair.replica.port} ("
    until(lambda: where in reader.source.stats()["waits_for"])
    assert reader.keys == []
    pair.active.owners, pair.active.revision = [[0, -1]], 2
    assert reader.all() == [b"first", b"second"]


def test_a_replica_that_is_down_is_not_waited_for_longer_than_one_wants(connect: Any, pair: Pair) -> None:
    pair.replica.stop()
    reader = Delivered(connect(pair.active.url, persisted_only=True, replica_patience_s=0.3))
    assert reader.all() == [b"first", b"second"]


def test_somebody_may_not_want_to_wait(connect: Any, pair: Pair) -> None:
    source = connect(pair.active.url, persisted_only=True, persisted_timeout_s=0.5)
    with pytest.raises(NotPersistedYet, match=f"the replica at 127.0.0.1:{pair.replica.port}"):
        for _ in source.changes():
            pass


def test_the_copies_of_a_bucket_can_be_asked(connect: Any, pair: Pair) -> None:
    source = connect(pair.active.url, persisted_only=True)
    vb_uuid = source.failover_logs()[0].newest.vb_uuid
    assert source.persisted_seqnos({0: vb_uuid}).seqnos == {0: 0}
    pair.persisted = 2
    copies = source.persisted_seqnos({0: vb_uuid})
    assert (copies.seqnos, set(copies.slowest)) == ({0: 2}, {0})
    pair.replica.stop()
    until(lambda: source.persisted_seqnos({0: vb_uuid}).seqnos == {0: 0})
    slowest = source.persisted_seqnos({0: vb_uuid}).slowest[0]
    assert slowest.startswith(f"the replica at 127.0.0.1:{pair.replica.port} (")
    with pytest.raises(UsageError, match="with persisted_only"):
        connect(pair.active.url).persisted_seqnos({0: vb_uuid})


def test_an_ephemeral_bucket_has_nothing_on_disk(connect: Any, pair: Pair) -> None:
    config = json.loads(pair.active.config()) | {"bucketType": "ephemeral"}
    pair.active.config = lambda: json.dumps(config).encode()  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="ephemeral"):
        next(iter(connect(pair.active.url, persisted_only=True).changes()))


# only what depends on a disk waits


def two_changes_of_each(connection: Any, request: Any) -> None:
    connection.send(accepted(request, [(NEW, 0)]), marker(request, 1, 2))
    for seqno in (1, 2):
        connection.send(mutation(request, seqno, key=b"\0%d-%d" % (request.vbucket, seqno)))


def test_only_the_vbuckets_of_a_late_copy_wait(connect: Any) -> None:
    with FakeServer(two_changes_of_each) as active, FakeServer(two_changes_of_each) as replica:
        pair = Pair(active, replica)
        for server in (active, replica):
            server.owners = [[0, 1], [0, -1]]
        source = connect(active.url, persisted_only=True)
        keys: list[bytes] = []

        def read(last: bytes) -> None:
            for event in changes:
                if isinstance(event, Mutation):
                    keys.append(event.key)
                    if event.key == last:
                        return

        changes = source.changes()
        read(b"1-2")
        assert keys == [b"1-1", b"1-2"], "of vbucket 0 the replica has nothing on disk"
        assert f"1 vbuckets: the replica at 127.0.0.1:{replica.port}" in source.stats()["waits_for"]
        pair.persisted = 2
        read(b"0-2")
        assert keys[2:] == [b"0-1", b"0-2"]
        assert source.positions()[0].seqno == source.positions()[1].seqno == 2


def test_what_is_on_all_disks_of_a_late_vbucket_is_delivered(connect: Any, pair: Pair) -> None:
    pair.persisted = 1
    changes = connect(pair.active.url, persisted_only=True).changes()
    assert next(event.key for event in changes if isinstance(event, Mutation)) == b"first"
    pair.persisted = 2
    assert next(event.key for event in changes if isinstance(event, Mutation)) == b"second"
    streams = [frame for frame in pair.active.requests if frame.opcode == DcpOpcode.STREAM_REQUEST]
    starts = [int.from_bytes(frame.extras[8:16], "big") for frame in streams]
    assert starts[0] == 0
    assert starts[-1] == 1, "it goes on behind what was delivered"


class Questions:
    """A connection of which only the questions matter."""

    granted = True

    def __init__(self) -> None:
        self.answers: list[Callable[[int | None], None]] = []

    def ask(self, _: object, then: Callable[[int | None], None], now: float) -> None:
        self.answers.append(then)


def test_what_only_waits_for_the_application_is_not_said_to_be_held_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    link, now = Questions(), [0.0]
    node = KnownNode(Address("127.0.0.1", 1), Backoff(random.Random(1)), Patience())
    node.link = link  # type: ignore[assignment]
    nodes: Any = SimpleNamespace(
        map=SimpleNamespace(version=(1, 1)),
        node_of=lambda _: node,
        copies_of=lambda _: [node],
        on_change=lambda: None,
    )
    progress = Progress(ReaderStream(0), Backoff(random.Random(1)))
    progress.stream.log = FailoverLog.of([(NEW, 0)])
    portion: Any = SimpleNamespace(ends={0: Position.at(NEW, 5)}, link=link)

    def held() -> HeldPortion:
        held = HeldPortion(nodes, {0: progress}, lambda: now[0])
        held.hold(portion)
        assert held.take() is None
        return held

    late, answered = held(), held()
    link.answers[1](5)
    now[0] += 6
    answered.turn()
    assert not caplog.records, "every disk has it: it waits for nobody but the application"
    late.turn()
    assert "held_back" in caplog.text
    assert "1 vbuckets: 127.0.0.1:1" in caplog.text
    link.answers[0](5)
    assert late.take() is portion
    late.turn()
    assert "on_disk_everywhere waited_s=6" in caplog.text
    assert answered.take() is portion
