"""VBuckets move between real nodes, by both protocols, while clients write and read."""

from __future__ import annotations

import contextlib
import json
import select
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest

import tailrace
import tailrace.testing
from certificates import make_certificate
from tailrace.cli.main import main
from tailrace.client.kv import KvClient
from tailrace.client.manifest import with_changes
from tailrace.cluster import takeover
from tailrace.cluster.takeover import Moved, take_over
from tailrace.connstr import parse
from tailrace.errors import ConnectError, StatusError, TailraceError, UsageError
from tailrace.model import SnapshotRange
from tailrace.protocol.dcp.replica import DcpReplica
from tailrace.protocol.states import TapTakeoverState
from tailrace.protocol.tap.replica import TapReplica
from tailrace.protocol.tap.takeover import TapTakeover
from tailrace.server.node import Node
from tailrace.server.settings import Settings
from tailrace.testing.running import RunningNode
from tailrace.wire.codes import AddStreamFlag, DcpOpcode, VBucketState
from tailrace.wire.dcp import DcpSetVBucketState, DcpStreamRequestResponse
from tailrace.wire.fields import encode_failover_log
from tailrace.wire.framing import Framer
from tailrace.wire.header import Frame
from tailrace.wire.message import Response
from tailrace.wire.tap import TapVBucketSet

VBUCKETS = 8
MOVING = [1, 4, 6]
KEYS = [b"key-%d" % number for number in range(64)]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[RunningNode]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(tailrace.testing.node(vbuckets=VBUCKETS, data=tmp_path / str(number)))
            for number in range(2)
        ]


def move(source: RunningNode, target: RunningNode, vbuckets: Any, **options: Any) -> Moved:
    return take_over(parse(source.url), parse(target.url), vbuckets, **options)


def states(node: RunningNode) -> list[str | None]:
    vbuckets = node.call(lambda inner: list(inner.buckets["default"].store.vbuckets))
    return [None if vbucket is None else VBucketState(vbucket.state).name.lower() for vbucket in vbuckets]


class Writer(threading.Thread):
    """Writes through the cluster map, and remembers what was acknowledged."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(daemon=True)
        self.client = KvClient(url, timeout_s=60, **options)
        self.acknowledged: dict[bytes, int] = {}
        self.stops = threading.Event()
        self.error: TailraceError | None = None
        self.writes = 0

    def run(self) -> None:
        try:
            with self.client:
                while not self.stops.is_set():
                    key = KEYS[self.writes % len(KEYS)]
                    self.client.set(key, self.writes)
                    self.acknowledged[key] = self.writes
                    self.writes += 1
        except TailraceError as error:
            self.error = error


class Reader(threading.Thread):
    """Follows the events."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.source = tailrace.connect_sync(url, retry_for_s=60)
        self.documents: dict[bytes, Any] = {}
        self.stops = False
        self.error: TailraceError | None = None
        self.rollbacks = 0

    def run(self) -> None:
        try:
            with self.source as source:
                for event in source.changes():
                    if isinstance(event, tailrace.Mutation):
                        self.documents[event.key] = json.loads(event.value)
                    elif isinstance(event, tailrace.Rollback):
                        assert event.seqno == 0
                        self.rollbacks += 1
        except TailraceError as error:
            if not self.stops:
                self.error = error


class Watcher(threading.Thread):
    """Looks for a vbucket that is active twice."""

    def __init__(self, source: RunningNode, target: RunningNode) -> None:
        super().__init__(daemon=True)
        self.nodes = source, target
        self.stops = threading.Event()
        self.twice: list[int] = []

    def run(self) -> None:
        source, target = self.nodes
        while not self.stops.is_set():
            # the target first: had it become active, the source must have been dead before
            for number, pair in enumerate(zip(states(target), states(source), strict=True)):
                if pair == ("active", "active"):
                    self.twice.append(number)


def wait_until(done: Callable[..., Any], *threads: Writer | Reader) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert not [thread.error for thread in threads if thread.error]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.covers("tap.connect.flag.0x08", "tap.vbucket-set")
@pytest.mark.parametrize("dialect", ["dcp", "tap"])
def test_they_move_under_writers_and_readers(nodes: list[RunningNode], dialect: str) -> None:
    source, target = nodes
    writer, reader = Writer(source.url), Reader(source.url)
    watcher = None
    try:
        writer.start()
        reader.start()
        wait_until(lambda: writer.writes > 200 and len(reader.documents) == len(KEYS), writer, reader)
        assert move(source, target, [], dialect=dialect).vbuckets == []  # what both have dies at the target
        assert states(source) == ["active"] * VBUCKETS and states(target) == ["dead"] * VBUCKETS
        watcher = Watcher(source, target)
        watcher.start()
        assert move(source, target, MOVING, dialect=dialect).vbuckets == MOVING
        assert [number for number, state in enumerate(states(target)) if state == "active"] == MOVING
        assert [number for number, state in enumerate(states(source)) if state == "dead"] == MOVING
        written = writer.writes
        wait_until(lambda: writer.writes > written + 2 * len(KEYS), writer, reader)
        writer.stops.set()
        writer.join()
        wait_until(lambda: reader.documents == writer.acknowledged, reader)
    finally:
        for thread in (writer, watcher):
            if thread is not None:
                thread.stops.set()
                thread.join()
        reader.stops = True
        reader.source.close()
        reader.join()
    assert not watcher.twice and not writer.error
    assert bool(reader.rollbacks) == (dialect == "tap")
    for url in (source.url, target.url):  # whichever node a client asks
        with KvClient(url) as client:
            documents = {key: json.loads(client.get(key).value) for key in KEYS}
        assert documents == writer.acknowledged
    # and back again
    assert move(target, source, MOVING, dialect=dialect).vbuckets == MOVING
    assert states(source) == ["active"] * VBUCKETS
    with KvClient(target.url) as client:
        assert {key: json.loads(client.get(key).value) for key in KEYS} == writer.acknowledged


@pytest.mark.parametrize("dialect", ["dcp", "tap"])
def test_documents_keep_their_metadata(nodes: list[RunningNode], dialect: str) -> None:
    source, target = nodes
    expiry = int(time.time()) + 9_000
    with KvClient(source.url) as client:
        for key in KEYS:
            client.set(key, key, flags=77, expiry=expiry)
            client.set(key, key * 2, flags=77, expiry=expiry)
        client.delete(KEYS[0])
        before = {key: (client.get(key), client.get_meta(key)) for key in KEYS}
    if dialect == "tap":
        del before[KEYS[0]]  # TAP does not say when a tombstone was made
    move(source, target, range(VBUCKETS), dialect=dialect)
    target.restart()
    with KvClient(target.url) as client:
        assert {key: (client.get(key), client.get_meta(key)) for key in before} == before
        assert client.get(KEYS[0]) is None and client.get_meta(KEYS[0]).rev == 3


def break_off(monkeypatch: pytest.MonkeyPatch, *, when: str) -> None:
    """The line breaks once, before or after the target has learnt that it is active."""
    real, broken = takeover._carry, []

    def carry(source: socket.socket, target: socket.socket) -> None:
        if broken:
            return real(source, target)
        broken.append(True)

        class Cut:
            """The target's socket, which goes dead at its time."""

            def __init__(self, to: socket.socket) -> None:
                self.to, self.seen = to, b""

            def sendall(self, data: bytes) -> None:
                self.seen += data
                active = self.seen.find(b"\x80\x45", self.seen.find(b"\x80\x45\x00\x00\x08") + 30)
                if when == "pending" or (when == "active" and active >= 0):
                    raise ConnectionResetError
                self.to.sendall(data)

            def __getattr__(self, name: str) -> Any:
                return getattr(self.to, name)

        return real(source, Cut(target))  # type: ignore[arg-type]

    monkeypatch.setattr(takeover, "_carry", carry)


@pytest.mark.parametrize("when", ["pending", "active"])
def test_a_takeover_by_tap_that_breaks_is_undone(
    nodes: list[RunningNode], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    source, target = nodes
    for number in range(20):
        source.set(f"k{number}", number, vbucket=1)
    break_off(monkeypatch, when=when)
    with pytest.raises(TailraceError, match="1 of 1 vbuckets could not be moved"):
        move(source, target, [1], dialect="tap")
    assert states(source) == ["active"] * VBUCKETS and states(target) == ["dead"] * VBUCKETS
    assert all(source.get(f"k{number}", vbucket=1) == number for number in range(20))
    assert move(source, target, [1], dialect="tap").vbuckets == [1]
    assert all(target.get(f"k{number}", vbucket=1) == number for number in range(20))


def test_a_source_that_sees_late_that_a_takeover_by_tap_broke(
    nodes: list[RunningNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for its disk before it gives the vbucket up, long after the target has released it."""
    source, target = nodes
    move(source, target, [])
    server, disk = source._server, threading.Event()
    monkeypatch.setattr(server, "run", lambda job: (disk.wait(60), job.run()))
    for number in range(5):
        source.set(f"k{number}", number, vbucket=1)
    source.call(lambda inner: inner.buckets["default"].work.after_flush(lambda error: None))
    sockets, transports = [], []

    def phases(_: Node) -> list[TapTakeoverState]:
        handlers = {
            connection: getattr(connection._session, "handler", None) for connection in server.connections
        }
        takeovers = {
            connection: handler._takeover for connection, handler in handlers.items() if handler is not None
        }
        transports[:] = [connection._transport for connection in takeovers]
        return [takeover.state for takeover in takeovers.values()]

    def carry(old: socket.socket, new: socket.socket) -> None:
        sockets.append(old)
        while source.call(phases) != [TapTakeoverState.GIVING_UP]:
            for ready in select.select([old, new], [], [], 0.05)[0]:
                (new if ready is old else old).sendall(ready.recv(1 << 16))
        source.call(lambda _: transports[0].pause_reading())
        raise ConnectionResetError

    def see_the_end() -> None:
        disk.set()
        source.persist()
        if transports:
            source.call(lambda _: transports.pop().resume_reading())

    def drain(connection: socket.socket, *rest: str) -> None:
        if connection in sockets:
            see_the_end()
        real_drain(connection, *rest)

    real_drain = takeover._drain
    monkeypatch.setattr(takeover, "_carry", carry)
    monkeypatch.setattr(takeover, "_drain", drain)
    with pytest.raises(TailraceError, match="1 of 1 vbuckets could not be moved"):
        move(source, target, [1], dialect="tap")
    see_the_end()
    assert (states(source)[1], states(target)[1]) == ("active", "dead")


@pytest.mark.parametrize("victim", ["source", "target"])
@pytest.mark.parametrize("dialect", ["dcp", "tap"])
@pytest.mark.parametrize("turns", [0, 1, 3])
def test_a_node_that_dies_in_the_middle(
    nodes: list[RunningNode], monkeypatch: pytest.MonkeyPatch, dialect: str, victim: str, turns: int
) -> None:
    """The command says so; when the node is back, the same command finishes it. Nothing is lost."""
    source, target = nodes
    for number in range(300):
        source.set(f"k{number}", "x" * 200, vbucket=MOVING[number % 3])
    source.persist()
    move(source, target, [])
    dying = source if victim == "source" else target
    left = [turns]

    def dies(*_: float) -> None:
        left[0] -= 1
        if left[0] == -1:
            dying.kill()

    def select_(*arguments: Any) -> Any:
        dies()
        return select.select(*arguments)

    monkeypatch.setattr(takeover, "select", SimpleNamespace(select=select_))
    monkeypatch.setattr(takeover, "sleep", dies)
    with contextlib.suppress(TailraceError):  # it may have been over before
        move(source, target, MOVING, dialect=dialect)
    monkeypatch.undo()
    dying.start()
    # the target first, as above
    for number, pair in enumerate(zip(states(target), states(source), strict=True)):
        assert number not in MOVING or pair != ("active", "active")
    move(source, target, MOVING, dialect=dialect)
    assert [states(target)[number] for number in MOVING] == ["active"] * 3
    assert [states(source)[number] for number in MOVING] == ["dead"] * 3
    assert all(target.get(f"k{number}", vbucket=MOVING[number % 3]) == "x" * 200 for number in range(300))


def test_what_somebody_else_left_half_done_is_finished(nodes: list[RunningNode]) -> None:
    source, target = nodes
    source.set("k", 1, vbucket=3)
    move(source, target, [])
    source.set_vbucket_state(3, VBucketState.DEAD)  # given up, and no other node knows that it is active
    target.set_vbucket_state(3, VBucketState.PENDING)
    assert move(source, target, [3], dialect="tap").vbuckets == [3]
    assert states(source)[3] == "dead" and states(target)[3] == "active"
    assert target.get("k", vbucket=3) == 1
    assert move(source, target, [3]).vbuckets == []  # it is there


def test_a_takeover_by_dcp_whose_command_was_killed(nodes: list[RunningNode]) -> None:
    source, target = nodes
    for number in (2, 3):
        source.set("k", 1, vbucket=number)
    move(source, target, [])
    target.replicate([3], source, takeover=True)  # ordered, and then nothing follows what becomes of it
    wait_until(lambda: states(target)[3] == "active")
    assert move(source, target, [2, 3]).vbuckets == [2]
    with KvClient(source.url) as client:
        assert client.high_seqnos() == dict.fromkeys(range(VBUCKETS), 0) | {2: 1, 3: 1}
    assert [states(target)[number] for number in (2, 3)] == ["active", "active"]


def test_what_can_not_be_moved(nodes: list[RunningNode]) -> None:
    source, target = nodes
    source.set("k", 1, vbucket=3)
    target.set("mine", 1, vbucket=3)
    with pytest.raises(UsageError, match="the target has changes in it"):
        move(source, target, [3])
    assert states(target) == ["active"] * VBUCKETS
    target.flush()
    target.set_vbucket_state(3, VBucketState.DEAD)
    for number, match in ((9, "0 to 7"), (-1, "0 to 7")):
        with pytest.raises(UsageError, match=match):
            move(source, target, [number])
    with pytest.raises(UsageError, match="the same node"):
        move(source, source, [3])
    with pytest.raises(UsageError, match="one of dcp, tap"):
        move(source, target, [3], dialect="upr-b")
    with tailrace.testing.node(vbuckets=4) as other, pytest.raises(UsageError, match="8 vbuckets"):
        move(source, other, [3])
    source.set_vbucket_state(2, VBucketState.REPLICA)
    target.set_vbucket_state(2, VBucketState.REPLICA)
    with pytest.raises(UsageError, match="neither"):
        move(source, target, [2])
    target.replicate([2], source)
    with pytest.raises(UsageError, match="something else directs it"):
        move(source, target, [3])
    target.replicate([2], None)
    with KvClient(source.url) as client:
        client.set_manifest(with_changes(client.manifest(), ["shop.carts"], ()))
    with pytest.raises(UsageError, match="only the default collection"):
        move(source, target, [3], dialect="tap")
    with socket.socket() as nobody, pytest.raises(ConnectError):
        nobody.bind(("127.0.0.1", 0))
        take_over(parse(source.url), parse(f"couchbase://127.0.0.1:{nobody.getsockname()[1]}"), [3])


def test_a_third_node_that_has_what_another_one_has(nodes: list[RunningNode]) -> None:
    first, second = nodes
    for key in KEYS:
        first.set(key, 1)
    move(first, second, [0, 1, 2])
    with tailrace.testing.node(vbuckets=VBUCKETS) as third:  # a fresh one: all are active, and empty
        third.set("mine", 1, vbucket=5)
        with pytest.raises(UsageError, match=f"127.0.0.1:{first.port} has vbucket 5 active, too"):
            move(second, third, [2])
        assert (states(second)[2], states(third)) == ("active", ["active"] * VBUCKETS)
        third.flush()
        with pytest.raises(UsageError, match="vbucket 5 is active at neither"):
            move(second, third, [5])
        move(second, third, [2])
        move(third, second, [])
        assert [states(node) for node in (first, second, third)] == [
            ["dead"] * 3 + ["active"] * 5,
            ["active", "active"] + ["dead"] * 6,
            ["dead", "dead", "active"] + ["dead"] * 5,
        ]
        for node in (first, second, third):
            with KvClient(node.url) as client:
                assert all(client.get(key) is not None for key in KEYS)
    with tailrace.testing.node(vbuckets=VBUCKETS) as fourth:
        first.stop()
        with pytest.raises(UsageError, match="may have some of the vbuckets active"):
            move(second, fourth, [0])
        first.start()


def test_collections_go_along_by_dcp(nodes: list[RunningNode]) -> None:
    source, target = nodes
    with KvClient(source.url) as client:
        client.set_manifest(with_changes(client.manifest(), ["shop.carts"], ()))
        for key in KEYS:
            client.set(key, 1, collection="shop.carts")
    move(source, target, range(VBUCKETS))
    with KvClient(target.url) as client:
        assert all(client.get(key, collection="shop.carts") for key in KEYS)


@pytest.mark.parametrize("dialect", ["dcp", "tap"])
def test_the_command_with_users(dialect: str, capfd: pytest.CaptureFixture[str]) -> None:
    with contextlib.ExitStack() as stack:
        source, target = (
            stack.enter_context(tailrace.testing.node(vbuckets=VBUCKETS, users={"me": "secret"}))
            for _ in range(2)
        )
        for number in range(20):
            source.set(f"k{number}", number)
        urls = [
            node.url.replace("//", "//me:secret@", 1) if "@" not in node.url else node.url
            for node in (source, target)
        ]
        assert main(["takeover", *urls, "--vbucket", "0-3", "--dialect", dialect, "--json"]) == 0
        assert json.loads(capfd.readouterr().out)["vbuckets"] == [0, 1, 2, 3]
        assert main(["takeover", *urls, "--vbucket", "3,4", "--dialect", dialect]) == 0
        assert capfd.readouterr().out.startswith(f"1 vbucket moved to 127.0.0.1:{target.port}, map ")
        assert states(target)[:5] == ["active"] * 5
        assert main(["takeover", *urls, "--vbucket", "9"]) == 2


# TLS


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Path, Path]]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates")
    directory = tmp_path_factory.mktemp("pki")
    authority = make_certificate(directory, "authority")
    return authority[0], make_certificate(directory, "server", issuer=authority)


@pytest.fixture
def tls_nodes(pki: tuple[Path, tuple[Path, Path]]) -> Iterator[list[RunningNode]]:
    """Three nodes that have a port for TLS, and want a login."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*pki[1])
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(tailrace.testing.node(vbuckets=VBUCKETS, tls=context, users={"me": "secret"}))
            for _ in range(3)
        ]


def tls_url(node: RunningNode) -> str:
    return f"couchbases://me:secret@127.0.0.1:{node.tls_port}"


def refuse_plain(node: RunningNode) -> None:
    """From now on the node closes what comes without TLS."""

    def act(inner: Node) -> None:
        accept = inner.accept
        deaf: Any = inner
        deaf.accept = lambda peer, now, *, tls=False: accept(peer, now, tls=tls) if tls else None

    node.call(act)


@pytest.mark.parametrize("dialect", ["dcp", "tap"])
def test_they_move_by_tls(
    tls_nodes: list[RunningNode],
    pki: tuple[Path, tuple[Path, Path]],
    dialect: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    source, target, third = tls_nodes
    for tls_node in tls_nodes:
        refuse_plain(tls_node)
    for number in range(300):
        source.set(f"k{number}", "v" * 1_000)
    urls = [tls_url(tls_node) for tls_node in tls_nodes]
    options = ["--dialect", dialect, "--tls-ca", str(pki[0])]
    assert main(["takeover", *urls[:2], "--vbucket", "0-3", *options]) == 0
    assert main(["takeover", *urls[1:], "--vbucket", "2-3", *options]) == 0
    assert states(target)[:4] == ["active", "active", "dead", "dead"]
    assert states(third)[2:4] == ["active", "active"]
    # all of them have the map, and say where the others can be reached: with TLS and without
    tls = tailrace.TlsOptions(ca_file=pki[0])
    for url in urls:
        with KvClient(url, tls=tls) as client:
            assert all(client.get(f"k{number}") is not None for number in range(300))
    from_map = source.call(lambda inner: json.loads(inner.map_of(inner.buckets["default"]).text))
    services = [node["services"] for node in from_map["nodesExt"]]
    assert {(service["kv"], service["kvSSL"]) for service in services} == {
        (tls_node.port, tls_node.tls_port) for tls_node in tls_nodes
    }


def test_the_connection_string_says_what_to_trust(
    tls_nodes: list[RunningNode], pki: tuple[Path, tuple[Path, Path]]
) -> None:
    source, target, _ = tls_nodes
    urls = [parse(f"{tls_url(node)}/?ca_cert_path={quote(str(pki[0]))}") for node in (source, target)]
    assert take_over(urls[0], urls[1], [1]).vbuckets == [1]


@pytest.mark.parametrize("dialect", ["dcp", "tap"])
def test_under_a_writer_by_tls(
    tls_nodes: list[RunningNode], pki: tuple[Path, tuple[Path, Path]], dialect: str
) -> None:
    source, target, _ = tls_nodes
    tls = tailrace.TlsOptions(ca_file=pki[0])
    urls = [parse(tls_url(node)) for node in (source, target)]
    take_over(urls[0], urls[1], [], tls=tls)
    writer = Writer(tls_url(source), tls=tls)
    writer.start()
    wait_until(lambda: writer.writes > 100, writer)
    moved = take_over(urls[0], urls[1], MOVING, dialect=dialect, tls=tls)
    assert moved.vbuckets == MOVING
    before = writer.writes
    wait_until(lambda: writer.writes > before + 200, writer)
    writer.stops.set()
    writer.join()
    assert writer.error is None
    with KvClient(tls_url(target), tls=tls) as client:
        assert {key: json.loads(client.get(key).value) for key in KEYS} == writer.acknowledged


@pytest.mark.parametrize("when", ["pending", "active"])
def test_a_takeover_by_tap_and_tls_that_breaks_is_undone(
    tls_nodes: list[RunningNode],
    pki: tuple[Path, tuple[Path, Path]],
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    source, target, _ = tls_nodes
    tls = tailrace.TlsOptions(ca_file=pki[0])
    urls = [parse(tls_url(node)) for node in (source, target)]
    for number in range(20):
        source.set(f"k{number}", number, vbucket=1)
    break_off(monkeypatch, when=when)
    with pytest.raises(TailraceError, match="1 of 1 vbuckets could not be moved"):
        take_over(urls[0], urls[1], [1], dialect="tap", tls=tls)
    assert states(source) == ["active"] * VBUCKETS and states(target) == ["dead"] * VBUCKETS
    assert take_over(urls[0], urls[1], [1], dialect="tap", tls=tls).vbuckets == [1]
    assert all(target.get(f"k{number}", vbucket=1) == number for number in range(20))


@pytest.mark.parametrize("dialect", ["dcp", "upr-a", "upr-b"])
def test_a_replica_by_tls(
    tls_nodes: list[RunningNode], pki: tuple[Path, tuple[Path, Path]], dialect: str
) -> None:
    source, target, _ = tls_nodes
    refuse_plain(source)
    source.set("k", 1, vbucket=0)
    target.set_vbucket_state(0, VBucketState.REPLICA)
    order: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": source.tls_port,
        "vbuckets": [0],
        "dialect": dialect,
    }
    order |= {"username": "me", "password": "secret", "tls": {"ca": pki[0].read_text()}}
    plain = f"couchbase://me:secret@127.0.0.1:{target.port}"
    with takeover._Node(parse(plain), tailrace.TlsOptions()) as node:
        node.report([order])
    wait_until(lambda: target.get("k", vbucket=0) == 1)
    assert target.failover_log(0) == source.failover_log(0)


def test_whom_a_target_trusts(tls_nodes: list[RunningNode], pki: tuple[Path, tuple[Path, Path]]) -> None:
    source, target, _ = tls_nodes
    source.set("k", 1, vbucket=0)
    urls = [tls_url(tls_node) for tls_node in tls_nodes]
    assert main(["takeover", *urls[:2], "--vbucket", "0"]) != 0  # an authority that nobody knows
    assert main(["takeover", *urls[:2], "--vbucket", "0", "--tls-no-verify"]) == 0
    assert states(target)[0] == "active"
    # the same node by both of its ports is one node
    plain = f"couchbase://me:secret@127.0.0.1:{source.port}"
    assert main(["takeover", urls[0], plain, "--vbucket", "0", "--tls-ca", str(pki[0])]) == 2


@pytest.mark.parametrize(
    "tls", [7, [], {"ca": 1}, {"verify": "no"}, {"ca": "no certificate"}, {"ca": "\u00e4"}]
)
def test_orders_by_tls_that_make_no_sense(nodes: list[RunningNode], tls: Any) -> None:
    source, target = nodes
    order = {"host": "127.0.0.1", "port": source.port, "vbuckets": [0], "tls": tls}
    with pytest.raises(StatusError), takeover._Node(parse(target.url), tailrace.TlsOptions()) as node:
        node.report([order])
    assert states(target)[0] == "active"


# what waits and comes too late


class Waiting:
    """A host whose vbuckets can't be rewritten immediately."""

    peer = "test"
    features = frozenset()

    def __init__(self) -> None:
        vbucket = SimpleNamespace(
            id=0,
            state=VBucketState.PENDING,
            high_seqno=0,
            complete_seqno=0,
            received=SnapshotRange(0, 0),
            undecided=(),
            set_failover_log=lambda log: None,
        )
        self.bucket = SimpleNamespace(vbuckets=[vbucket], set_state=self.set_state)
        self.settings = Settings()
        self.own_name = "test"
        self.waiting = []
        self.states = []

    def set_state(self, vbucket: int, state: int, **_: Any) -> None:
        self.states.append(state)

    def rewrite(self, act: Callable[..., Any], done: Callable[..., Any]) -> None:
        self.waiting.append((act, done))

    def claim_vbucket(self, *_: DcpReplica | int) -> bool:
        return True

    def release_vbucket(self, *_: DcpReplica | int) -> None:
        pass


def frame_of(data: bytes) -> Frame:
    framer = Framer()
    framer.feed(data)
    frame = framer.maybe_frame()
    assert frame is not None
    return frame


@pytest.mark.parametrize("goes", [True, False])
def test_a_state_that_waits_is_not_set_when_the_connection_is_gone(goes: bool) -> None:
    """The command that gave the takeover up may have made the vbucket active elsewhere."""
    by_tap, by_dcp = Waiting(), Waiting()
    tap = TapReplica(by_tap, lambda: None, 0.0)  # type: ignore[arg-type]
    tap.receive_frame(frame_of(TapVBucketSet(state=1, vbucket=0).encode()), 0.0)
    dcp = DcpReplica(by_dcp, lambda: None, 0.0, dialled=True)  # type: ignore[arg-type]
    while (sent := b"".join(dcp.data_to_send(1 << 16))) and sent[1] == DcpOpcode.CONTROL:
        dcp.receive_frame(frame_of(Response(opcode=DcpOpcode.CONTROL).encode()), 0.0)
    dcp.add_stream(0, int(AddStreamFlag.TAKE_OVER), lambda *_: None)
    log = DcpStreamRequestResponse(
        opcode=DcpOpcode.STREAM_REQUEST, opaque=1, value=encode_failover_log([(7, 0)])
    )
    dcp.receive_frame(frame_of(log.encode()), 0.0)
    dcp.receive_frame(frame_of(DcpSetVBucketState(state=1, opaque=1, vbucket=0).encode()), 0.0)
    for handler, host in ((tap, by_tap), (dcp, by_dcp)):
        if goes:
            handler.close("gone")
        ((act, done),) = host.waiting
        act(host.bucket)
        done(None)
        assert host.states == ([] if goes else [VBucketState.ACTIVE])


@pytest.mark.parametrize("goes", [True, False])
def test_a_vbucket_is_not_given_up_when_nobody_takes_it_any_more(goes: bool) -> None:
    """The command that gave the takeover up may have seen that it is still active, and left it at that."""
    host = Waiting()
    giving = TapTakeover(host, 0.0, lambda failed: None)  # type: ignore[arg-type]
    assert giving.advance([0], 0) == []
    if goes:
        giving.close()
    ((act, _),) = host.waiting
    act(host.bucket)
    assert host.states == ([] if goes else [VBucketState.DEAD])
