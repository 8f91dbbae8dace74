"""Input that means harm: one error or a close, the process alive, others unaffected, memory flat."""

from __future__ import annotations

import contextlib
import random
import resource
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tailrace.testing
from server.serverkit import TIMEOUT_S, Bench, Wire, take
from tailrace.server.call import COMMANDS
from tailrace.server.node import Node
from tailrace.testing.running import RunningNode
from tailrace.wire import admin, kv
from tailrace.wire.codes import Feature, Op, Status
from tailrace.wire.header import HEADER

MAGICS = st.sampled_from([0x80, 0x80, 0x80, 0x08, 0x81, 0x18, 0x82, 0x83]) | st.integers(0, 255)
OPCODES = st.sampled_from(sorted(COMMANDS)) | st.integers(0, 255)
SMALL = st.integers(0, 64)


@st.composite
def packets(draw: st.DrawFn) -> bytes:
    """Something like a packet: often with lengths that fit, sometimes with ones that don't."""
    body = draw(st.binary(max_size=80))
    extras = draw(st.sampled_from([0, 0, 1, 3, 4, 8, 9, 16, 20, 24]) | st.integers(0, 255))
    key = draw(SMALL | st.integers(0, 0xFFFF))
    total = len(body)
    if draw(st.booleans()):
        extras = min(extras, total)
        key = min(key, total - extras)
    elif draw(st.booleans()):
        total = draw(st.integers(0, 0xFFFFFFFF))
    magic, opcode = draw(MAGICS), draw(OPCODES)
    if magic in (0x08, 0x18):
        key &= 0xFFFF
    header = HEADER.pack(
        magic,
        opcode,
        key,
        extras,
        draw(st.sampled_from([0, 0, 0, 1, 2, 4, 7, 255])),
        draw(st.sampled_from([0, 0, 0, 1, 3, 4, 0xFFFF])),
        total,
        draw(st.integers(0, 0xFFFFFFFF)),
        draw(st.sampled_from([0, 0, 1, (1 << 64) - 1])),
    )
    return header + body


FEATURES = (Feature.XERROR, Feature.JSON, Feature.SNAPPY, Feature.XATTR, Feature.COLLECTIONS)
bench = None


@settings(max_examples=400)
@given(st.lists(packets() | st.binary(max_size=60), max_size=8), st.sets(st.sampled_from(FEATURES)))
def test_any_bytes_give_answers_or_a_close(sent: list[bytes], features: set[int]) -> None:
    """... and never a bug: an internal error is one."""
    global bench  # noqa: PLW0603 - a bench for all examples: what one breaks the next one sees
    bench = bench or Bench()
    session = bench.session()
    hello = admin.Hello(value=b"".join(struct.pack(">H", feature) for feature in sorted(features)))
    session.receive_data(hello.encode() + b"".join(sent), bench.now)
    bench.run_jobs()
    bench.advance(1)
    bench.run_jobs()
    if not session.closed or session._answers.ready:
        for frame in take(session):
            assert frame.status not in (Status.EINTERNAL, Status.ENOMEM), frame
    session.connection_lost()
    # others are served, on whatever is left of the bucket
    other = bench.session()
    other.receive_data(admin.Noop().encode(), bench.now)
    assert take(other)[0].status == 0
    other.connection_lost()
    for vbucket in range(4):
        if bench.engine.buckets["default"].vbuckets[vbucket] is None:
            bench.engine.buckets["default"].set_state(vbucket, 1)


@pytest.mark.parametrize("opcode", range(256))
def test_every_opcode_survives_every_shape(opcode: int, shared_node: RunningNode) -> None:
    """Empty, short and long extras, keys and values, for every opcode there is."""
    with (
        Wire(shared_node.port) as control,
        socket.create_connection(("127.0.0.1", shared_node.port), 30) as attacker,
    ):
        control.ok(admin.Noop())
        for extras in (0, 1, 4, 8, 20, 24, 48, 255):
            for key in (0, 1, 251, 252, 5000):
                for value in (0, 1, 300):
                    body = bytes(extras) + b"k" * key + b"v" * value
                    header = HEADER.pack(0x80, opcode, key, extras, 0, 77, len(body), 1, 0)
                    try:
                        attacker.sendall(header + body)
                    except ConnectionError:
                        break
        control.ok(admin.Noop())


def test_lengths_that_wrap(shared_node: RunningNode) -> None:
    lengths = [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFE7, 0xFFFFFFE8, 0xFFFFFFFF]
    with Wire(shared_node.port) as control:
        for magic in (0x80, 0x08):
            for total in lengths:
                for key in (0, 1, 0xFF, 0xFFFF):
                    with Wire(shared_node.port) as wire:
                        wire.send(HEADER.pack(magic, Op.SET, key, 255, 0, 0, total, 0, 0))
                        assert wire.is_closed()
        control.ok(admin.Noop())


def set_timeouts(node: RunningNode, inner: Node, **seconds: float) -> None:
    """Set timeouts, for existing connections, too."""
    for timeout, value in seconds.items():
        setattr(inner.settings, timeout, value)
    for connection in node._server.connections:
        connection._arm()


def test_who_is_idle_after_the_login_is_closed_before_the_time_for_the_login_is_over() -> None:
    settings = {"idle_timeout": "0.2", "auth_timeout": "1h"}
    with (
        tailrace.testing.node(vbuckets=1, users={"a": "b"}, settings=settings) as node,
        Wire(node.port) as inside,
    ):
        inside.ok(admin.SaslAuth(key=b"PLAIN", value=b"\0a\0b"))
        assert inside.is_closed()


def test_slow_loris_before_and_after_the_login() -> None:
    with (
        tailrace.testing.node(vbuckets=1, users={"a": "b"}, settings={"idle_timeout": "4"}) as node,
        Wire(node.port) as inside,
    ):
        inside.ok(admin.SaslAuth(key=b"PLAIN", value=b"\0a\0b"))
        inside.send(HEADER.pack(0x80, Op.SET, 1, 8, 0, 0, 1000, 0, 0))

        node.call(lambda inner: set_timeouts(node, inner, auth_timeout=3.0))
        with Wire(node.port) as silent, Wire(node.port) as dripping:
            inside.socket.settimeout(0.01)
            with contextlib.suppress(ConnectionError):
                for byte in HEADER.pack(0x80, Op.HELLO, 0, 0, 0, 0, 1000, 0, 0) + bytes(900):
                    dripping.send(bytes([byte]))
                    inside.send(b"x")  # never the whole frame
                    with contextlib.suppress(TimeoutError):
                        if not inside.socket.recv(1):
                            break
            inside.socket.settimeout(TIMEOUT_S)
            assert silent.is_closed()
            assert dripping.is_closed()
            assert inside.is_closed()


def test_a_flood_of_connections_that_never_log_in() -> None:
    with tailrace.testing.node(
        vbuckets=1, users={"a": "b"}, settings={"max_connections": 50, "auth_timeout": 1}
    ) as node:
        flood = [socket.create_connection(("127.0.0.1", node.port), timeout=30) for _ in range(150)]
        try:
            for attacker in flood:
                with contextlib.suppress(ConnectionError):
                    attacker.sendall(b"\x80" * 10)
            assert node.call(lambda inner: len(inner.sessions)) <= 50
            closed = 0
            for attacker in flood:
                try:
                    closed += attacker.recv(1) == b""
                except ConnectionError:
                    closed += 1
            assert closed == 150  # too many, or too slow
        finally:
            for attacker in flood:
                attacker.close()
        node.call(lambda inner: set_timeouts(node, inner, auth_timeout=TIMEOUT_S))
        with Wire(node.port) as wire:
            wire.ok(admin.SaslAuth(key=b"PLAIN", value=b"\0a\0b"))
            wire.ok(kv.Set(key=b"k", value=b"v"))


def test_a_flood_of_wrong_passwords() -> None:
    with tailrace.testing.node(vbuckets=1, users={"a": "b"}) as node:
        for mechanism in (b"PLAIN", b"SCRAM-SHA512"):
            for _ in range(20):
                with Wire(node.port) as wire:
                    value = b"\0a\0x" if mechanism == b"PLAIN" else b"n,,n=nobody,r=abc"
                    wire.send(*[admin.SaslAuth(key=mechanism, value=value, opaque=at) for at in range(10)])
                    statuses = []
                    try:
                        while len(statuses) < 10:
                            statuses.append(wire.frame().status)
                    except (EOFError, ConnectionError):  # it is closed, perhaps with some of ours unread
                        pass
                    assert set(statuses) <= {Status.AUTH_ERROR, Status.AUTH_CONTINUE}


def wait_until(condition: Callable[..., Any]) -> None:
    """Wait for something that comes by itself."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_memory_stays_flat() -> None:
    """Large requests and answers to peers that don't read: what one peer can make grow has a limit."""
    with tailrace.testing.node(vbuckets=1, settings={"max_value": "4m"}) as node:
        with Wire(node.port) as wire:
            wire.ok(kv.Set(key=b"big", value=random.Random(1).randbytes(1 << 20)))
        peers = []
        before = rss()
        try:
            for _ in range(20):
                peer = Wire(node.port)
                peers.append(peer)
                peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                peer.send(*[kv.Get(key=b"big", opaque=at) for at in range(500)])
            wait_until(lambda: not_read(node) == 20)
            with Wire(node.port) as control:
                control.ok(admin.Noop())
            # 10,000 MiB of answers are asked for; a few MiB a peer are made
            assert rss() - before < 20 * (8 << 20)
            assert not_read(node) == 20
        finally:
            for peer in peers:
                peer.close()


def not_read(node: RunningNode) -> int:
    """How many peers the node does not read from."""
    reads: list[bool] = node.call(lambda _: [connection._reading for connection in node._server.connections])
    return reads.count(False)


def name(peer: Wire) -> str:
    """What the node calls this peer."""
    host, port = peer.socket.getsockname()
    return f"{host}:{port}"


def test_many_who_never_read_are_not_too_many() -> None:
    """Each keeps to its limits. Together they would take 300 MiB, so those that last read long ago go."""
    limits = {"max_unread": "32m"}
    with tailrace.testing.node(vbuckets=1, settings=limits) as node:
        unread = node._server.unread

        def waits_for(peer: Wire) -> bool:
            """Whether answers wait that this peer does not take."""
            return name(peer) in node.call(lambda _: {connection.peer for connection in unread.bytes_of})

        value = random.Random(1).randbytes(12 << 20)  # far more than a socket's buffers take
        node.set("big", value)
        node.set("small", b"x" * 300_000)
        with contextlib.ExitStack() as stack:
            patient = stack.enter_context(Wire(node.port))
            patient.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            patient.send(*[kv.Get(key=b"small")] * 30)
            wait_until(lambda: waits_for(patient))
            deaf = [stack.enter_context(Wire(node.port)) for _ in range(40)]
            for peer in deaf:
                peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                peer.send(kv.Get(key=b"big"))
                wait_until(lambda peer=peer: waits_for(peer))
                with Wire(node.port) as control:
                    control.ok(admin.Noop())
            total, counted = node.call(lambda _: (unread.total, sum(unread.bytes_of.values())))
            assert counted == total <= 32 << 20
            with Wire(node.port) as reader:
                assert reader.ok(kv.Get(key=b"big")).value == value
            there = node.call(lambda inner: {session.peer for session in inner.sessions})
            assert name(deaf[0]) not in there
            assert name(deaf[-1]) in there, "there is room for the newest"
            assert name(patient) in there, "who has little to wait for is never the one to go"
        wait_until(lambda: not node.call(lambda _: unread.total))


def test_many_who_never_end_their_requests_are_not_too_many() -> None:
    """Each may send a large document. Together they would take 100 MiB, so those that began first go."""
    limits = {"max_unprocessed": "16m", "max_value": "4m"}
    with tailrace.testing.node(vbuckets=1, settings=limits) as node:
        server = node._server

        def held() -> dict[str, int]:
            return node.call(
                lambda _: {connection.peer: size for connection, size in server.unprocessed.bytes_of.items()}
            )

        large = kv.Set(key=b"large", value=bytes(3 << 20)).encode()
        with contextlib.ExitStack() as stack:
            patient = stack.enter_context(Wire(node.port))
            patient.send(kv.Set(key=b"patient", value=b"x" * 1000).encode()[:-10])
            wait_until(lambda: name(patient) in held())
            slow = [stack.enter_context(Wire(node.port)) for _ in range(40)]
            for peer in slow:
                with contextlib.suppress(ConnectionError):
                    peer.send(large[: 5 << 19])
                wait_until(lambda peer=peer: held().get(name(peer), 0) >= 5 << 19)
            total, counted = node.call(
                lambda _: (server.unprocessed.total, sum(server.unprocessed.bytes_of.values()))
            )
            assert counted == total <= 16 << 20
            there = node.call(lambda inner: {session.peer for session in inner.sessions})
            assert name(slow[0]) not in there
            assert name(slow[-1]) in there, "there is room for the newest"
            assert name(patient) in there, "who has sent little is never the one to go"
            slow[-1].send(large[5 << 19 :])
            assert slow[-1].receive().status == Status.SUCCESS
            patient.send(b"x" * 10)
            assert patient.receive().status == Status.SUCCESS
            with Wire(node.port) as other:
                assert len(other.ok(kv.Get(key=b"large")).value) == 3 << 20
        wait_until(lambda: not node.call(lambda _: server.unprocessed.total))


def test_a_request_in_single_bytes_counts_for_what_it_takes() -> None:
    bench = Bench()
    session = bench.session()
    request = kv.Set(key=b"k", value=bytes(5000)).encode()
    for at in range(4000):
        session.receive_data(request[at : at + 1], 0.0)
    assert session.unprocessed_bytes > 10 * 4000
    session.receive_data(request[4000:], 0.0)
    assert session.unprocessed_bytes == 0


@pytest.mark.parametrize("last", ["silence", "quit", "half-closed", "garbage"])
def test_who_never_reads_does_not_keep_its_connection(last: str) -> None:
    """The answers that wait for the peer are no reason to wait for ever."""
    limits = {"drain_timeout": "0.2", "max_output": "32m"}  # all its requests are processed
    with tailrace.testing.node(vbuckets=1, settings=limits) as node:
        node.set("big", bytes(16 << 20))
        with Wire(node.port) as deaf:
            request = kv.Get(key=b"big").encode()
            deaf.send(request + {"quit": admin.Quit().encode(), "garbage": bytes(24)}.get(last, b""))
            if last == "half-closed":
                deaf.socket.shutdown(socket.SHUT_WR)
            wait_until(lambda: node.call(lambda inner: inner.counters.cmd_get))
            node.call(lambda inner: set_timeouts(node, inner, idle_timeout=1.0))
            wait_until(lambda: node.call(lambda inner: not inner.sessions))


def test_who_reads_slowly_gets_all_of_its_last_answer() -> None:
    """However long that takes: at each timeout the peer has taken some more."""
    with tailrace.testing.node(vbuckets=1, settings={"drain_timeout": "1h"}) as node:
        node.set("big", bytes(12 << 20))

        def time_is_over(_: Node) -> int:
            """Let the timeout pass, if something was taken since it began."""
            for connection in node._server.connections:
                if connection._session.closed:
                    transport, unsent = connection._timer._args
                    if transport.get_write_buffer_size() < unsent:
                        connection._timer.cancel()
                        connection._end_lingering(transport, unsent)
                        return 1
            return 0

        with Wire(node.port) as slow:
            slow.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
            slow.send(kv.Get(key=b"big"))
            wait_until(
                lambda: node.call(lambda _: any(connection._full for connection in node._server.connections))
            )

            def close_all(inner: Node) -> None:
                for session in list(inner.sessions):
                    session.close("nothing more is wanted")

            node.call(close_all)
            size = times = 0
            while data := slow.socket.recv(64 << 10):
                size += len(data)
                times += node.call(time_is_over)
        assert size == 24 + 4 + (12 << 20)
        assert times > 2


def test_announced_and_never_sent_costs_nothing() -> None:
    with tailrace.testing.node(vbuckets=1) as node:
        before = rss()
        peers = []
        try:
            for _ in range(100):
                peer = Wire(node.port)
                peers.append(peer)
                peer.send(HEADER.pack(0x80, Op.SET, 1, 8, 0, 0, 29 << 20, 0, 0) + bytes(100))
            peers[0].send(b"x")
            unprocessed = node._server.unprocessed
            wait_until(lambda: node.call(lambda _: len(unprocessed.bytes_of)) == 100)
            with Wire(node.port) as control:
                control.ok(admin.Noop())
            assert rss() - before < 32 << 20
        finally:
            for peer in peers:
                peer.close()


def test_a_dead_peer_in_the_middle_of_everything(shared_node: RunningNode) -> None:
    for script in (
        HEADER.pack(0x80, Op.SET, 1, 8, 0, 0, 1000, 0, 0) + b"half",
        b"".join(admin.Stat(key=b"vbucket-seqno").encode() for _ in range(500)),
        kv.Set(key=b"k", value=b"v", framing=b"\x11\x03").encode() * 20,
        admin.Compact().encode(),
    ):
        attacker = socket.create_connection(("127.0.0.1", shared_node.port), timeout=30)
        attacker.sendall(script)
        attacker.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        attacker.close()  # a reset, not a farewell
        with Wire(shared_node.port) as control:
            control.ok(admin.Noop())
