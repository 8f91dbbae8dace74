"""Nobody has the loop for long: what a connection may do in one turn is bounded, whatever it sends.

Time passes here with every look at the clock, so that work can be counted.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from server.serverkit import Bench, ask, frames_of
from tailrace.clock import ManualClock
from tailrace.protocol.dcp.producer_stream import SMALL_READ_BYTES
from tailrace.protocol.handshake import Credentials
from tailrace.server import fastpath
from tailrace.server.aio import Server, ServerConnection
from tailrace.server.session import Session
from tailrace.server.transport import Poller, _for_one_call
from tailrace.server.turn import TURN_S
from tailrace.server.upstream import ReplicationSource, Upstream
from tailrace.wire import admin, dcp, kv, tap, upr
from tailrace.wire.codes import AddStreamFlag, Datatype, Feature, OpenFlag, Status
from tailrace.wire.fields import join_xattrs, split_xattrs
from tailrace.wire.header import HEADER_SIZE, Frame
from tailrace.wire.message import Message

STEP_S = TURN_S / 20
PER_TURN = 21
"""Looks at the clock in a turn."""


class RunningClock(ManualClock):
    """Every look at it takes a moment."""

    def monotonic(self) -> float:
        self.advance(STEP_S)
        return super().monotonic()


class Turns:
    """A session whose clock runs, and the answers of each turn."""

    def __init__(self, bench: Bench) -> None:
        bench.clock = bench.node.clock = RunningClock()
        self.session: Session = bench.session()

    def exchange(self, data: bytes) -> list[list[Frame]]:
        """Send, then ask for what there is, as the pump does: the answers by turn."""
        answers = self.session.exchange(data, self.session.node.clock.monotonic())
        turns = [list(frames_of(answers))] if answers else []
        while True:
            parts = self.session.data_to_send()
            turns.append(list(frames_of(b"".join(map(bytes, parts)))))
            if not self.session.has_backlog and not parts:
                return turns[:-1]
            assert self.session.wants_data is not self.session.has_backlog


def hello(*features: int) -> bytes:
    return admin.Hello(value=b"".join(code.to_bytes(2, "big") for code in features)).encode()


FLOODS: dict[str, Frame | Message] = {
    "refused without a login": kv.Get(key=b"a"),
    "unknown opcode": Frame(0x80, 0xEE),
    "the long way": admin.Version(),
    "malformed": Frame(0x80, 0x00, body=b"x"),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_is_taken_up_in_turns(flood: str) -> None:
    users = {"ada": "secret"} if "login" in flood else None
    turns = Turns(Bench(users=users))
    turns.exchange(hello(Feature.XERROR))
    request, count = FLOODS[flood].encode(), 5_000
    answers = turns.exchange(request * count)
    assert sum(map(len, answers)) == count
    assert max(map(len, answers)) <= PER_TURN


def test_the_answers_of_all_turns_stand_in_the_order_of_the_requests() -> None:
    turns = Turns(Bench())
    requests = b"".join(
        (admin.Version if opaque % 3 else kv.Get)(opaque=opaque, key=b"" if opaque % 3 else b"k").encode()
        for opaque in range(1_000)
    )
    answers = turns.exchange(requests)
    assert [frame.opaque for turn in answers for frame in turn] == list(range(1_000))


def test_quiet_requests_that_have_no_answer_are_taken_up_too() -> None:
    bench = Bench()
    turns = Turns(bench)
    count = 3_000
    requests = b"".join(kv.AddQ(key=b"k%d" % n, value=b"v").encode() for n in range(count))
    answers = turns.exchange(requests)
    assert len(answers) >= count // PER_TURN
    assert not any(answers)
    assert not turns.session.has_backlog
    assert bench.engine.buckets["default"].vbuckets[0].item_count == count


def test_the_fast_path_looks_at_the_clock_now_and_then() -> None:
    turns = Turns(Bench())
    request = kv.Set(key=b"key", value=b"v").encode()
    count = 20 * fastpath._TURN_BYTES // len(request)
    answers = turns.exchange(request * count)
    assert sum(map(len, answers)) == count
    # a look at the clock for each piece of _TURN_BYTES; otherwise all in one
    assert len(answers) >= 1
    assert turns.session.bucket is not None
    at, out = fastpath.run(turns.session, turns.session.bucket, request * count, 0)
    assert fastpath._TURN_BYTES <= at < fastpath._TURN_BYTES + len(request)
    assert out


def test_a_thousand_stream_openings_are_taken_up_in_turns() -> None:
    turns = Turns(Bench(vbuckets=1024))
    opening = dcp.DcpOpen(key=b"reader", flags=1).encode()
    turns.exchange(hello(Feature.XERROR) + opening)
    requests = b"".join(
        dcp.DcpStreamRequest(vbucket=n, opaque=n, end_seqno=2**64 - 1).encode() for n in range(1_000)
    )
    answers = turns.exchange(requests)
    opened = [frame for turn in answers for frame in turn if frame.magic == 0x81]
    assert [frame.opaque for frame in opened] == list(range(1_000))
    assert all(frame.status == Status.SUCCESS for frame in opened)
    assert max(map(len, answers)) <= 2 * PER_TURN  # the first two come to one


def test_what_waited_behind_an_unfinished_command_is_taken_up_in_turns() -> None:
    bench = Bench(vbuckets=1024)
    turns = Turns(bench)
    session = turns.session
    turns.exchange(hello(Feature.XERROR) + dcp.DcpOpen(key=b"reader", flags=1).encode())
    bench.engine.buckets["default"].vbuckets[0].set(b"\0k", b"v")
    session.receive_data(admin.Compact(vbucket=0).encode(), bench.now)
    assert session.unfinished == 1
    count = 500
    for n in range(count):
        session.receive_data(admin.Version(opaque=n).encode(), bench.now)
    bench.run_jobs()
    assert session.unfinished == 0
    answers = turns.exchange(b"")
    versions = [[frame for frame in turn if frame.opcode == admin.Version.OPCODE] for turn in answers]
    assert [frame.opaque for turn in versions for frame in turn] == list(range(count))
    assert max(map(len, versions)) <= PER_TURN


@pytest.mark.parametrize("max_output", [10_000, 20 << 20])
def test_a_connection_whose_requests_wait_has_no_turns_for_nothing(max_output: int) -> None:
    """It must not have turn after turn, and do nothing in them, while the command before them runs."""
    bench = Bench(vbuckets=1024, max_output=max_output)
    turns = Turns(bench)
    session = turns.session
    turns.exchange(hello(Feature.XERROR) + dcp.DcpOpen(key=b"reader", flags=1).encode())
    bench.engine.buckets["default"].vbuckets[0].set(b"\0k", b"v")
    session.receive_data(admin.Compact(vbucket=0).encode(), bench.now)
    count = 500
    session.receive_data(b"".join(admin.Version(opaque=n).encode() for n in range(count)), bench.now)
    had = 0
    while session.has_backlog:
        assert session.unfinished == 1
        assert not session.data_to_send()
        had += 1
        assert had <= count, "it makes no progress"
    assert session.wants_data is (max_output > 10_000), "more is read only if there is room for it"
    bench.run_jobs()
    answers = [frame for turn in turns.exchange(b"") for frame in turn]
    versions = [frame.opaque for frame in answers if frame.opcode == admin.Version.OPCODE]
    assert versions == list(range(count))


def test_a_replica_takes_up_what_comes_in_turns() -> None:
    bench = Bench()
    bench.clock = bench.node.clock = RunningClock()
    source = ReplicationSource("h", 1, Credentials("a", "b"))
    link = Upstream(bench.node, bench.node.buckets["default"], source, 0.0)
    taken: list[Frame] = []
    link._receive_frame = lambda frame, now: taken.append(frame)  # type: ignore[method-assign]
    link.exchange(dcp.DcpNoop().encode() * 1_000, bench.now)
    turns = [len(taken)]
    while link.has_backlog:
        assert not link.wants_data
        link.data_to_send()
        turns.append(len(taken) - sum(turns))
    assert sum(turns) == 1_000
    assert max(turns) <= PER_TURN
    assert link.wants_data


LARGE = bytes(range(256)) * (5 << 12)  # 5 MiB
DCP_OPEN = dcp.DcpOpen(key=b"peer", flags=OpenFlag.PRODUCER)


@pytest.mark.parametrize("piece_bytes", [200, 5_000, 256 << 10])
@pytest.mark.parametrize("with_framing", [False, True])
def test_a_large_write_comes_whole_however_it_is_cut(piece_bytes: int, with_framing: bool) -> None:
    bench = Bench()
    session = bench.session()
    framing = b"\x50" if with_framing else b""  # preserve ttl
    stored = kv.Set(key=b"large", value=LARGE, framing=framing, opaque=1).encode()
    data = stored + kv.Get(key=b"large", opaque=2).encode() + admin.Version(opaque=3).encode()
    out = b""
    for at in range(0, len(data), piece_bytes):
        session.receive_data(data[at : at + piece_bytes], bench.now)
        while parts := session.data_to_send(1 << 30):
            out += b"".join(map(bytes, parts))
    answers = list(frames_of(out))
    assert [(frame.opaque, frame.status) for frame in answers] == [(1, 0), (2, 0), (3, 0)]
    assert answers[1].value == LARGE


def _hello(*features: Feature) -> admin.Hello:
    return admin.Hello(value=b"".join(int(feature).to_bytes(2, "big") for feature in features))


@pytest.mark.parametrize("prefixed", [False, True])
@pytest.mark.parametrize("max_json_check", [1 << 20, 30 << 20])
def test_large_writes_are_stored_as_they_came(prefixed: bool, max_json_check: int) -> None:
    bench = Bench(max_json_check=max_json_check)
    session = bench.session()
    features = [Feature.COLLECTIONS, Feature.JSON, Feature.XATTR, Feature.SNAPPY] if prefixed else []
    ask(bench, session, _hello(*features))
    key = b"\0large" if prefixed else b"large"
    text = b'{"text": "%s"}' % LARGE.hex().encode()
    datatype = int(Datatype.JSON) if prefixed else 0
    writes: list[tuple[Message, bytes]] = [
        (kv.Add(key=key, value=LARGE, flags=7), LARGE),
        (kv.Add(key=key, value=text), LARGE),  # refused
        (kv.Set(key=key, value=text, datatype=datatype), text),
        (kv.Replace(key=key, value=LARGE, expiry=2_000_000_000), LARGE),
        (kv.Append(key=key, value=LARGE), LARGE + LARGE),
        (kv.SetQ(key=key, value=LARGE[::-1]), LARGE[::-1]),
    ]
    vbucket = bench.engine.buckets["default"].vbuckets[0]
    assert vbucket is not None
    for number, (message, expected) in enumerate(writes):
        data = message.encode()
        for at in range(0, len(data), 256 << 10):
            session.receive_data(data[at : at + (256 << 10)], bench.now)
        session.data_to_send(1 << 30)
        frame = vbucket.get(b"\0large")
        assert frame is not None
        stored = Frame.parse(frame)
        assert (stored.key, stored.value) == (b"\0large", expected), number
        assert HEADER_SIZE + len(stored.body) == len(frame)
    assert [Frame.parse(vbucket.frame_at(seqno) or b"").value for seqno in (1, 2, 3, 4, 5)] == [
        LARGE,
        text,
        LARGE,
        LARGE + LARGE,
        LARGE[::-1],
    ], "no write touches what was stored before"


def test_a_large_value_gets_the_xattrs_of_the_document_that_it_replaces() -> None:
    bench = Bench()
    session = bench.session()
    ask(bench, session, _hello(Feature.XATTR, Feature.JSON, Feature.SNAPPY))
    with_xattrs = join_xattrs({"_kept": b"1"}, b"small")
    ask(bench, session, kv.Set(key=b"large", value=with_xattrs, datatype=Datatype.XATTR))
    data = kv.Set(key=b"large", value=LARGE).encode()
    for at in range(0, len(data), 256 << 10):
        session.receive_data(data[at : at + (256 << 10)], bench.now)
    vbucket = bench.engine.buckets["default"].vbuckets[0]
    assert vbucket is not None
    frame = vbucket.get(b"\0large")
    assert frame is not None
    assert split_xattrs(Frame.parse(frame).value) == ({"_kept": b"1"}, LARGE)


@pytest.mark.parametrize("kind", ["plain", "json", "xattrs"])
@pytest.mark.parametrize("opcode", [kv.Get, kv.GetQ])
def test_a_document_whose_reading_takes_longer_than_a_turn_is_answered(
    opcode: type[kv.Get], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(vbuckets=1)
    vbucket = bench.engine.buckets["default"].vbuckets[0]
    assert vbucket is not None
    value = b'"%s"' % LARGE
    datatype = {"plain": 0, "json": Datatype.JSON, "xattrs": Datatype.XATTR | Datatype.JSON}[kind]
    stored = join_xattrs({"a": b"1"}, value) if kind == "xattrs" else value
    vbucket.set(b"\0large", stored, flags=7, datatype=datatype)
    vbucket.set(b"\0small", b"v")
    session = Turns(bench).session
    read, asked = vbucket.get, []

    def read_slowly(key: bytes) -> bytes | None:
        asked.append(key)
        bench.clock.advance(10 * TURN_S)
        return read(key)

    monkeypatch.setattr(type(vbucket), "get", lambda _, key: read_slowly(key))
    requests = opcode(key=b"large", opaque=1).encode() + kv.Get(key=b"small", opaque=2).encode()
    session.exchange(hello(Feature.JSON), bench.now)
    session.data_to_send()
    out = b""
    for _ in range(4):
        out += session.exchange(requests, bench.now)
        requests = b""
        out += b"".join(map(bytes, session.data_to_send()))
    assert not session.has_backlog
    large, small = frames_of(out)
    assert (large.opaque, small.opaque) == (1, 2)
    assert large.opcode == opcode.OPCODE
    assert large.status == small.status == Status.SUCCESS
    assert large.datatype == datatype & Datatype.JSON
    assert large.body[:4] == (7).to_bytes(4, "big")
    assert large.body[4:] == value
    if kind != "xattrs":
        assert asked == [b"\0large", b"\0small"], "it is read once"


def test_large_documents_are_read_one_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much may be queued for a peer (``max_output``)."""
    bench = Bench(vbuckets=1, max_output=100 << 20)
    vbucket = bench.engine.buckets["default"].vbuckets[0]
    assert vbucket is not None
    vbucket.set(b"\0large", LARGE)
    session = Turns(bench).session
    read = vbucket.get

    def read_slowly(key: bytes) -> bytes | None:
        bench.clock.advance(10 * TURN_S)
        return read(key)

    monkeypatch.setattr(type(vbucket), "get", lambda _, key: read_slowly(key))
    turns = Turns(bench)
    turns.session = session
    requests = b"".join(kv.Get(key=b"large", opaque=number).encode() for number in range(6))
    answers = turns.exchange(kv.Get(key=b"none").encode() + requests)
    assert [frame.opaque for turn in answers for frame in turn][1:] == list(range(6))
    assert max(map(len, answers)) <= 3  # the first two turns come to one, with what was asked for before


class EndlessSession:
    """A stream that always has more; counts how often it is asked for it."""

    closed = False
    handler = object()
    has_backlog = False
    has_more = wants_data = True
    unfinished = unprocessed_bytes = queued_bytes = 0

    def __init__(self) -> None:
        self.asked = 0

    def exchange(self, data: bytes, now: float) -> bytes:
        return b""

    def data_to_send(self, max_bytes: int) -> list[bytes]:
        self.asked += 1
        return [bytes(max_bytes)]

    def handle_timer(self, now: float) -> None: ...

    def next_timer(self) -> None: ...


class FastReader(asyncio.Transport):
    """Takes all that is written."""

    def write(self, data: object) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0


def test_a_connection_has_one_turn_at_a_time_whatever_happens_to_it() -> None:
    """An acknowledgement or a timer beside a long stream must not begin one more chain of turns."""

    async def run() -> list[int]:
        server = Server(lambda _: Bench().node)
        connection, session = ServerConnection(server, tls=False), EndlessSession()
        connection._is_new = False
        connection._session = session  # type: ignore[assignment]
        connection._transport = FastReader()
        connection._wake()
        turns = []
        for _ in range(20):
            before = session.asked
            connection.data_received(b"an acknowledgement")
            connection._tick()
            connection._wake()
            await asyncio.sleep(0)
            turns.append(session.asked - before)
        connection._session = None
        await asyncio.sleep(0)
        return turns

    assert max(asyncio.run(run())) == 1


class Loop:
    """Only what a poller asks of a loop; every look at its clock takes a moment."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        self.now += TURN_S / 2
        return self.now

    def add_reader(self, *_: object) -> None: ...

    def remove_reader(self, *_: object) -> None: ...


def test_many_sockets_that_are_always_ready_have_their_turns_one_as_often_as_the_other() -> None:
    loop = Loop()
    poller, served = Poller(loop), Counter[int]()  # type: ignore[arg-type]
    pairs = [socket.socketpair() for _ in range(64)]
    for here, there in pairs:
        there.send(b"x")  # nobody reads it
        poller.add_reader(here.fileno(), partial(served.update, [here.fileno()]))
    for _ in range(64):
        before = served.total()
        poller._poll()
        assert 1 <= served.total() - before <= 5
    assert len(served) == len(pairs)
    assert max(served.values()) - min(served.values()) <= 1
    for pair in pairs:
        for end in pair:
            end.close()


@pytest.fixture
def allocated() -> Iterator[Callable[[Callable[[], object]], int]]:
    """The peak of what some work allocates, beyond what was there before it."""

    def peak(work: Callable[[], object]) -> int:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        work()
        return tracemalloc.get_traced_memory()[1] - before

    tracemalloc.start()
    yield peak
    tracemalloc.stop()


def test_a_large_value_is_copied_once_in_a_turn(allocated: Callable[..., Any]) -> None:
    bench = Bench()
    session = bench.session()
    request = kv.Set(key=b"large", value=LARGE).encode()
    pieces = [request[at : at + 100_000] for at in range(0, len(request), 100_000)]
    peaks = [allocated(lambda piece=piece: session.receive_data(piece, bench.now)) for piece in pieces[:-1]]
    assert sum(peak > len(LARGE) / 2 for peak in peaks) <= 1, "room is made for it once, and not touched"
    assert allocated(lambda: session.receive_data(pieces[-1], bench.now)) < 0.1 * len(LARGE), "it lies there"
    get = kv.Get(key=b"large").encode()
    assert allocated(lambda: session.receive_data(get, bench.now)) < 1.5 * len(LARGE)


def test_a_large_value_is_copied_once_for_a_stream(allocated: Callable[..., Any]) -> None:
    bench = Bench()
    session = bench.session()
    vbucket = bench.engine.buckets["default"].vbuckets[0]
    assert vbucket is not None
    vbucket.set(b"\0large", LARGE)
    session.receive_data(DCP_OPEN.encode(), bench.now)
    session.receive_data(dcp.DcpStreamRequest().encode(), bench.now)
    assert allocated(session.data_to_send) < 1.5 * len(LARGE)


def test_many_streams_with_next_to_nothing_are_served_some_at_a_time() -> None:
    """Looking at each takes time, however little it has."""
    bench = Bench(vbuckets=512)
    session = bench.session()
    for vbucket in bench.engine.buckets["default"]:
        vbucket.set(b"\0k", b"v")
    session.receive_data(DCP_OPEN.encode(), bench.now)
    for number in range(512):
        session.receive_data(dcp.DcpStreamRequest(vbucket=number).encode(), bench.now)
    served = []
    while parts := session.data_to_send(1 << 20):
        frames = frames_of(b"".join(map(bytes, parts)))
        served.append(sum(frame.opcode == dcp.DcpMutation.OPCODE for frame in frames))
    assert sum(served) == 512
    assert max(served) <= (1 << 20) // SMALL_READ_BYTES


def test_a_stream_of_many_small_pieces_is_read_some_at_a_time() -> None:
    """Reading each takes time, however little is in it: 80 of them took 12 ms."""
    bench = Bench()
    session, bucket = bench.session(), bench.engine.buckets["default"]
    for number in range(40):
        bucket.vbuckets[0].set(b"\0k%d" % number, b"v")
        bucket.seal()
    bucket.forget_memory()
    assert len(bucket.vbuckets[0].pieces) == 40
    session.receive_data(DCP_OPEN.encode(), bench.now)
    session.receive_data(dcp.DcpStreamRequest().encode(), bench.now)
    served = []
    while parts := session.data_to_send(1 << 20):
        frames = frames_of(b"".join(map(bytes, parts)))
        served.append(sum(frame.opcode == dcp.DcpMutation.OPCODE for frame in frames))
    assert sum(served) == 40
    assert max(served) <= (1 << 20) // SMALL_READ_BYTES


def test_a_system_call_sends_a_part_of_what_is_large() -> None:
    assert list(map(len, _for_one_call([b"small", LARGE, b"small"]))) == [5, (1 << 20) - 5]
    assert list(map(len, _for_one_call([b"x"] * 1000))) == [1] * 64


OPENINGS: dict[str, list[Message]] = {
    "documents": [kv.Set(key=b"k", value=b"v"), kv.Get(key=b"k")],
    "dcp": [DCP_OPEN, *(dcp.DcpStreamRequest(vbucket=n) for n in range(4))],
    "takeover": [DCP_OPEN, dcp.DcpStreamRequest(flags=AddStreamFlag.TAKE_OVER)],
    "dcp replica": [dcp.DcpOpen(key=b"peer"), dcp.DcpAddStream(vbucket=1)],
    "upr draft a": [upr.UprAStreamRequest(vbucket=n) for n in range(4)],
    "tap": [tap.TapConnect(key=b"peer")],
}


@pytest.mark.parametrize("what", OPENINGS)
def test_a_closed_connection_leaves_nothing_to_the_garbage_collector(what: str) -> None:
    """It would find a thousand streams together, and hold everybody up."""
    bench = Bench()

    def connect() -> None:
        session = bench.session()
        for message in OPENINGS[what]:
            session.receive_data(message.encode(), bench.now)
            session.data_to_send()
        session.close("gone")
        session.connection_lost()

    connect()
    bench.run_jobs()
    gc.collect()
    gc.disable()
    try:
        connect()
        bench.run_jobs()
        assert not gc.collect()
    finally:
        gc.enable()
