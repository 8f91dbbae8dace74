"""Questions that a server never answers, or that it closes the connection over: an error, nothing hung."""

from __future__ import annotations

import contextlib
import json
import math
import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from client.fake_server import UUID, Connection, FakeServer, accepted, marker, mutation, noop
from tailrace import Mutation
from tailrace.client.catalog import Catalog
from tailrace.client.progress import Progress
from tailrace.client.retry import Backoff
from tailrace.errors import ConnectError, RemoteProtocolError
from tailrace.model import Position
from tailrace.protocol.dcp.reader_stream import ReaderStream
from tailrace.protocol.questions import ANSWER_S, Patience, Questions
from tailrace.protocol.script import ask
from tailrace.wire.admin import ClustermapChangeNotification, GetClusterConfig, ValueResponse
from tailrace.wire.codes import DcpOpcode, Magic, Op, StreamEndStatus
from tailrace.wire.dcp import DcpStreamEnd, DcpStreamRequest
from tailrace.wire.header import Frame


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("push", [True, False])
def test_the_bucket_has_another_number_of_vbuckets(
    connect: Callable[..., Any], count: int, push: bool
) -> None:
    """It was created again: going on would read another bucket, and not all of it."""

    def stream(connection: Connection, request: DcpStreamRequest) -> None:
        connection.send(accepted(request), marker(request, 1, 1), mutation(request, 1))

    with FakeServer(stream, vbuckets=4) as server:
        source = connect(server.url, retry_for_s=5)
        changes = source.changes()
        seen = 0
        while seen < 4:
            seen += isinstance(next(changes), Mutation)
        server.revision, server.owners = 2, [[0]] * count
        if push:
            pushed = ClustermapChangeNotification(epoch=1, revision=2, key=b"default", value=server.config())
            server.connections[0].send(pushed.encode())
        else:
            server.connections[0].close()
        with pytest.raises(RemoteProtocolError, match=f"{count} vbuckets"):
            next(changes)


@pytest.mark.parametrize("opcode", [Op.GET_ALL_VB_SEQNOS, Op.GET_FAILOVER_LOG])
def test_a_connection_that_is_closed_over_a_question(connect: Callable[..., Any], opcode: int) -> None:
    def close(server: FakeServer, frame: Frame) -> None:
        for connection in list(server.connections):  # it is not known on which of them it was asked
            connection.close()

    with FakeServer(lambda *_: None) as server:
        question = "high_seqnos" if opcode == Op.GET_ALL_VB_SEQNOS else "failover_logs"
        server.answers[opcode] = close
        with pytest.raises(ConnectError):
            getattr(connect(server.url, retry_for_s=1), question)()
        assert len(server.connections) >= 2
        # one connection is lost, and the next one brings the answer

        def close_once(server: FakeServer, frame: Frame) -> None:
            server.answers.clear()
            close(server, frame)

        server.answers[opcode] = close_once
        assert list(getattr(connect(server.url), question)()) == [0]


@pytest.mark.parametrize(
    "opcode", [Op.HELLO, Op.SELECT_BUCKET, Op.GET_ALL_VB_SEQNOS, Op.GET_COLLECTIONS_MANIFEST]
)
def test_a_server_that_is_alive_but_never_answers_a_question(
    connect: Callable[..., Any], opcode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.protocol.questions.ANSWER_S", 0.3)
    with FakeServer(lambda *_: None) as server:
        server.answers[opcode] = None
        over = threading.Event()

        def live() -> None:
            while not over.wait(0.05):
                for connection in server.connections:
                    with contextlib.suppress(OSError):
                        connection.send(noop(7))

        thread = threading.Thread(target=live)
        thread.start()
        try:
            with pytest.raises(ConnectError, match="not answered"):
                next(connect(server.url, retry_for_s=1).changes(end="now"))
        finally:
            over.set()
            thread.join()


@pytest.mark.parametrize(
    "manifest",
    [
        b"[]",
        b'{"scopes":[{"uid":"0","name":5,"collections":[]}]}',
        b'{"scopes":[{"uid":"0","name":"_default","collections":[{"uid":"8","name":null}]}]}',
        b'{"scopes":[{"uid":"0","name":"\\ud800","collections":[]}]}',
        b'{"scopes":[{"uid":"x","name":"_default","collections":[]}]}',
        b"[" * 100_000,
    ],
)
def test_a_manifest_that_is_none(connect: Callable[..., Any], manifest: bytes) -> None:
    with FakeServer(lambda *_: None) as server:
        server.answers[Op.GET_COLLECTIONS_MANIFEST] = lambda _, frame: ValueResponse(
            opcode=frame.opcode, value=manifest, opaque=frame.opaque
        ).encode()
        with pytest.raises(RemoteProtocolError, match="manifest"):
            next(connect(server.url, retry_for_s=5).changes())


@pytest.mark.parametrize("log", [b"", bytes(15), bytes(16) * 2000])
def test_a_failover_log_that_is_none(connect: Callable[..., Any], log: bytes) -> None:
    with FakeServer(lambda *_: None) as server:
        server.answers[Op.GET_FAILOVER_LOG] = lambda _, frame: ValueResponse(
            opcode=frame.opcode, value=log, opaque=frame.opaque
        ).encode()
        with pytest.raises(RemoteProtocolError):
            connect(server.url, retry_for_s=5).failover_logs()
        with pytest.raises(RemoteProtocolError):
            next(connect(server.url, retry_for_s=5).changes(start="now"))


def test_every_node_is_asked_for_names() -> None:
    """The manifest of one may be older than what another streams."""

    class Link:
        def __init__(self) -> None:
            self.granted = SimpleNamespace(handshake=SimpleNamespace(collections=True))
            self.asked: list[Callable[[bytes | None], None]] = []

        def ask(self, _script: Any, then: Callable[[bytes | None], None], _now: float) -> None:
            self.asked.append(then)

    def manifest(*collections: tuple[int, str]) -> bytes:
        made = [{"uid": f"{number:x}", "name": name} for number, name in collections]
        return json.dumps({"scopes": [{"uid": "0", "name": "_default", "collections": made}]}).encode()

    old, new = Link(), Link()
    nodes: Any = [SimpleNamespace(link=old), SimpleNamespace(link=new)]
    catalog = Catalog("default", collections=["late"])
    catalog.renew()
    catalog.turn([], 0.0)
    catalog.turn(nodes, 0.0)
    catalog.turn(nodes, 0.0)
    old.asked[0](manifest())
    assert len(old.asked) == len(new.asked) == 1
    assert not is_ready(catalog)
    new.asked[0](manifest((9, "late")))
    assert is_ready(catalog) and catalog.stream_filter == {"collections": ["9"]}
    third = Link()
    three: Any = [*nodes, SimpleNamespace(link=third)]
    catalog.turn(three, 0.0)
    assert not is_ready(catalog), "its streams wait until it has said what they hold"
    catalog.turn(nodes, 0.0)  # it is gone, and not waited for
    assert is_ready(catalog)
    catalog.renew()
    third.asked[0](manifest((10, "other")))  # an answer to an earlier reading
    assert not is_ready(catalog)
    catalog.turn(nodes[:1], 0.0)
    old.asked[1](manifest((9, "late")))
    assert is_ready(catalog) and catalog.stream_filter == {"collections": ["9"]}

    free = Catalog("default")
    free.renew()
    free.turn(nodes, 0.0)
    old.asked[-1](manifest())
    links: list[Any] = [old, new]
    assert is_ready(free) and [free.awaits_names_of(link) for link in links] == [False, True]
    new.asked[-1](manifest((9, "late")))
    assert not free.awaits_names_of(links[1]) and free.names.collections[9] == ("_default", "late")


def is_ready(catalog: Catalog) -> bool:
    return catalog.is_ready


def test_names_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream can name as many collections as it likes, one after the other."""
    monkeypatch.setattr("tailrace.client.catalog._MOST_NAMES", 10)
    catalog = Catalog("default")
    for number in range(1, 100):
        catalog.add_scope(number, f"scope {number}")
        catalog.add(number, "scope", f"collection {number}")
        catalog.cover([1000 + number])
    assert len(catalog.names.collections) == 10
    assert catalog.names.collections[0] == ("_default", "_default")
    assert catalog.names.collections[99] == ("scope", "collection 99")
    assert catalog.scope_name(99) == "scope 99"
    assert catalog.scope_name(1) == "0x1"


@pytest.mark.parametrize("opcode", [DcpOpcode.NOOP, 0x33])
def test_a_server_that_asks_and_never_reads_the_answers(connect: Callable[..., Any], opcode: int) -> None:
    """What it does not read piles up here, so that must be bounded."""
    sent = 0

    def stream(connection: Connection, request: DcpStreamRequest) -> None:
        nonlocal sent
        connection.send(accepted(request))
        flood = Frame(Magic.REQUEST, opcode, opaque=7).encode() * 40_000
        while sent < 100 << 20:
            connection.send(flood)
            sent += len(flood)

    with FakeServer(stream) as server, pytest.raises(RemoteProtocolError, match="does not read"):
        next(connect(server.url, retry_for_s=5).changes())
    assert sent < 100 << 20


def _closes_after(*parts: Any) -> Callable[..., Any]:
    """A stream that is accepted, and whose connection is closed after these parts."""

    def stream(connection: Connection, request: DcpStreamRequest) -> None:
        connection.send(accepted(request), *(part(request) for part in parts))
        connection.close()

    return stream


def _ends_after(*parts: Any) -> Callable[..., Any]:
    def stream(connection: Connection, request: DcpStreamRequest) -> None:
        end = DcpStreamEnd(status=StreamEndStatus.STATE_CHANGED, opaque=request.opaque)
        connection.send(accepted(request), *(part(request) for part in parts), end.encode())

    return stream


@pytest.mark.parametrize("stream", [_closes_after, _ends_after])
@pytest.mark.parametrize("parts", [(), (lambda r: marker(r, 1, 9),)], ids=["no marker", "a marker"])
def test_streams_that_begin_and_never_bring_anything(
    connect: Callable[..., Any], stream: Callable[..., Any], parts: tuple[()]
) -> None:
    """Accepting a request again and again is not progress: patience ends as if the server were away."""
    with FakeServer(stream(*parts)) as server, pytest.raises(ConnectError, match="vbucket 0 can't be read"):
        server.high_seqnos = {0: 9}
        for _ in connect(server.url, retry_for_s=0.5).changes():
            pass


@pytest.mark.parametrize("end", [False, True], ids=["closed", "ended"])
def test_streams_that_bring_something_each_time_are_taken_up_for_ever(
    connect: Callable[..., Any], end: bool
) -> None:
    def stream(connection: Connection, request: DcpStreamRequest) -> None:
        seqno = request.start_seqno + 1
        connection.send(accepted(request), marker(request, seqno, 9), mutation(request, seqno))
        if seqno == 9:
            return
        if end:
            made = DcpStreamEnd(status=StreamEndStatus.STATE_CHANGED, opaque=request.opaque)
            connection.send(made.encode())
        else:
            connection.close()

    with FakeServer(stream) as server:
        seen = []
        for change in connect(server.url, retry_for_s=60).changes():
            if isinstance(change, Mutation):
                seen.append(change.seqno)
                if change.seqno == 9:
                    break
        assert seen == list(range(1, 10))


def test_patience_begins_anew_with_a_stream_that_was_of_use() -> None:
    progress = Progress(ReaderStream(0), Backoff(random.Random(0)))

    def fails(
        opened_at: int, lost_at: int, *, marker: bool = False, seqno: int | None = None
    ) -> float | None:
        """Open and lose a stream; return since when it is in trouble then."""
        progress.make_ready()
        progress.requested(opened_at)
        progress.opened(progress.stream.position, opened_at)
        assert progress.error_due(60) == math.inf  # while it is open
        progress.is_owed |= marker
        if seqno is not None:
            progress.stream.position = Position.at(UUID, seqno)
        progress.leave(lost_at)
        progress.in_trouble("lost", lost_at)
        return progress.troubled_since

    assert fails(0, 1) == 1
    assert fails(2, 3) == 1  # nothing came
    assert fails(4, 50, marker=True) == 1  # something was to come
    assert progress.error_due(60) == 61
    assert fails(51, 52, seqno=3) == 52
    assert fails(53, 54, marker=True) == 52
    assert fails(55, 100) == 100  # nothing was to come


def _held_back(released: threading.Event) -> Callable[..., Any]:
    """Vbucket 0 has a change; the request of vbucket 1 is answered when the application comes back."""

    def stream(connection: Connection, request: DcpStreamRequest) -> None:
        if request.vbucket == 0:
            connection.send(accepted(request), marker(request, 1, 1), mutation(request, 1))
            return

        def answer() -> None:
            if released.wait(30):
                connection.send(accepted(request), marker(request, 1, 1), mutation(request, 1))

        threading.Thread(target=answer, daemon=True).start()

    return stream


def test_what_the_application_takes_does_not_count_as_the_servers_time(
    connect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer may be behind what the application has not taken, such as documents of 20 MiB."""
    monkeypatch.setattr("tailrace.client.progress.ANSWER_S", 1.0)
    released = threading.Event()
    with FakeServer(_held_back(released), vbuckets=2) as server:
        changes = connect(server.url, retry_for_s=1).changes()
        seen = []
        while len(seen) < 2:
            change = next(changes)
            if isinstance(change, Mutation):
                seen.append(change.vbucket)
                if not released.is_set():
                    time.sleep(1.5)  # it computes
                released.set()
        assert seen == [0, 1]


def test_a_stream_request_that_is_never_answered_is_noticed_beside_a_stream_that_is(
    connect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.client.progress.ANSWER_S", 0.3)

    def stream(connection: Connection, request: DcpStreamRequest) -> None:
        if request.vbucket == 0:
            connection.send(accepted(request), marker(request, 1, 1), mutation(request, 1))

    with (
        FakeServer(stream, vbuckets=2) as server,
        pytest.raises(ConnectError, match="the stream request of vbucket 1 is not answered"),
    ):
        for _ in connect(server.url, retry_for_s=0.3).changes():
            pass


def test_a_question_waits_for_the_application_too(
    connect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer may be behind what the application has not taken, or nothing processes it meanwhile."""
    answered = threading.Event()

    def stream(connection: Connection, request: DcpStreamRequest) -> None:
        requests.append(request)
        connection.send(accepted(request), marker(request, 1, 2), mutation(request, 1))

    def answer(server: FakeServer, frame: Frame) -> None:
        def later() -> None:
            if released.wait(30):
                server.connections[0].send(server.answer(frame), mutation(requests[0], 2))
                answered.set()

        asked.set()
        threading.Thread(target=later, daemon=True).start()

    asked, released = threading.Event(), threading.Event()
    requests: list[DcpStreamRequest] = []
    with FakeServer(stream) as server:
        source = connect(server.url, retry_for_s=30)
        changes = source.changes()
        first = next(change for change in changes if isinstance(change, Mutation))
        server.answers[Op.GET_CLUSTER_CONFIG] = answer
        server.revision = 2
        pushed = ClustermapChangeNotification(epoch=1, revision=2, key=b"default")
        server.connections[0].send(pushed.encode())
        source.stats()
        with monkeypatch.context() as impatient:
            impatient.setattr("tailrace.protocol.questions.ANSWER_S", 0.2)
            if asked.wait(0.5):  # one pump notices immediately, the other one when it is run again
                time.sleep(1.0)
        released.set()
        second = next(change for change in changes if isinstance(change, Mutation))
        assert (first.seqno, second.seqno) == (1, 2)
        assert answered.wait(30)
        assert source.stats()["lost_connections"] == 0


def test_the_time_of_the_application_is_not_the_time_of_a_question() -> None:
    sent: list[bytes] = []
    patience = Patience()
    questions = Questions(sent.append, patience)
    questions.ask(ask(GetClusterConfig(), "the map"), lambda _: None, 0.0)
    assert questions.due() == [ANSWER_S]
    patience.handed_over(1.0)
    assert not questions.due()
    questions.check(1_000.0)
    questions.ask(ask(GetClusterConfig(), "the map"), lambda _: None, 1_000.0)
    patience.came_back(2_000.0)
    assert questions.due() == [1_999 + ANSWER_S, 2_000 + ANSWER_S]
    questions.check(1_998 + ANSWER_S)
    with pytest.raises(ConnectError, match=f"is not answered for {ANSWER_S:.0f} s"):
        questions.check(1_999 + ANSWER_S)


def test_a_question_without_a_time_is_never_overdue() -> None:
    questions = Questions(lambda _: None, Patience())
    questions.ask(ask(GetClusterConfig(), "the map"), lambda _: None, None)
    assert questions.due() == [math.inf]
    questions.check(1e9)
