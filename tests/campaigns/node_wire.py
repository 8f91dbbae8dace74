"""The node at its connections: commands, frames and clocks in any order, and an independent account of what
may come.

Everything is sent and read with `struct`; the node runs without sockets on a manual clock, so a seed plays
the same everywhere.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import numpy as np

from campaigns.bug import Bug, Tally
from dialects.raw_peer import ACK, BACKFILL, FROM_NOW, REGISTERED, delete, mutation, packet, tap_connect
from server.serverkit import Bench, frames_of
from tailrace.protocol.dcp.flow_control import SendWindow
from tailrace.protocol.dcp.producer import DcpProducer
from tailrace.protocol.sasl import SaslServer
from tailrace.protocol.tap.clients import TapClients, TapHops
from tailrace.server.node import Node
from tailrace.server.session import Session
from tailrace.wire.header import Frame

__all__ = ["BUGS", "play_wire"]

VBUCKETS = 4
KEYS = 12
_NAMES = (b"a", b"b", b"replication:c")
_COUNTED = frozenset({0x55, 0x56, 0x57, 0x58, 0x59, 0x5F, 0x64})
"""Messages of a stream, which flow control counts."""
_PASSWORD = "secret"


class Line:
    """A connection, and what must be true of it."""

    def __init__(self, world: NodeWorld, name: bytes) -> None:
        self.world = world
        self.name = name
        self.session: Session = world.bench.session()
        self.window = 0
        self.outstanding = 0
        self.interval_s = 0.0
        self.heard = self.last_noop = world.bench.now
        self.documents: dict[int, dict[bytes, bytes]] = {}
        self.seqnos: dict[int, int] = {}
        self.snapshots: dict[int, tuple[int, int]] = {}
        self.is_dcp = False

    def send(self, data: bytes) -> list[Frame]:
        """Send, and take all that comes."""
        self.heard = self.world.bench.now
        self.session.receive_data(data, self.world.bench.now)
        return self.take()

    def ask(self, data: bytes) -> Frame:
        """The answer to a request."""
        opcode = data[1]
        answers = [frame for frame in self.send(data) if not frame.is_request and frame.opcode == opcode]
        assert len(answers) == 1, f"{len(answers)} answers to 0x{opcode:02x}"
        return answers[0]

    def take(self, *, limit: int = 1 << 20) -> list[Frame]:
        frames = list(frames_of(b"".join(bytes(part) for part in self.session.data_to_send(limit))))
        self.world.frames += len(frames)
        for frame in frames:
            if self.is_dcp and frame.is_request:
                self._check(frame)
        return frames

    def _check(self, frame: Frame) -> None:
        if frame.opcode == 0x5C:
            self.last_noop = self.world.bench.now
            self.session.receive_data(packet(0x81, 0x5C, opaque=frame.opaque), self.world.bench.now)
            return
        assert frame.opcode in _COUNTED, f"a stream has 0x{frame.opcode:02x}"
        if self.window:
            assert self.outstanding < self.window, "more is on its way than the window allows"
            self.outstanding += 24 + len(frame.body)
        vbucket, held = frame.vbucket, self.documents.setdefault(frame.vbucket, {})
        if frame.opcode == 0x56:
            start, end = struct.unpack_from(">QQ", frame.body)
            self.snapshots[vbucket] = start, end
        elif frame.opcode in (0x57, 0x58, 0x59):
            (seqno,) = struct.unpack_from(">Q", frame.body)
            low, high = self.snapshots[vbucket]
            assert low <= seqno <= high, "a change is outside of its snapshot"
            assert seqno > self.seqnos.get(vbucket, 0), "seqnos do not rise"
            self.seqnos[vbucket] = seqno
            if frame.opcode == 0x57:
                held[frame.key] = frame.value
            else:
                held.pop(frame.key, None)


class NodeWorld:
    """A node, its peers, and what they know."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.bench = Bench(
            vbuckets=VBUCKETS, users=None, memory_quota=1 << 20, history_changes=8, idle_timeout=100_000
        )
        self.lines: list[Line] = []
        self.frames = 0
        self.faults = 0
        self._value = 0
        self._writer = Line(self, b"")
        self._hops: dict[bytes, int] = {}

    def run(self, steps: int) -> None:
        actions: list[tuple[Callable[[], None], float]] = [
            (self.write, 8),
            (self.open_dcp, 2),
            (self.acknowledge, 5),
            (self.pass_time, 3),
            (self.garbage, 1),
            (self.forward_tap, 1),
            (self.registered_tap, 0.3),
            (self.close, 0.5),
        ]
        chosen, weights = zip(*actions, strict=True)
        for _ in range(steps):
            self.rng.choices(chosen, weights)[0]()
            self.run_node()
        self.finish()

    def run_node(self) -> None:
        self.bench.run_jobs()
        for line in self.lines:
            if not line.session.closed:
                line.take()

    # writing

    def write(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            key = b"key-%d" % self.rng.randrange(KEYS)
            vbucket = self.rng.randrange(VBUCKETS)
            if self.rng.random() < 0.2:
                assert self._writer.ask(packet(0x80, 0x04, key=key, half=vbucket)).vbucket in (0, 1)
            else:
                self._value += 1
                value = b"%d" % self._value + b"x" * self.rng.choice((0, 100, 3_000))
                request = packet(0x80, 0x01, bytes(8), key, value, half=vbucket)
                assert self._writer.ask(request).vbucket == 0

    # DCP

    def open_dcp(self) -> None:
        """A connection that takes the name of an older one, which must go."""
        name = self.rng.choice(_NAMES)
        line = Line(self, name)
        older = [line for line in self.lines if line.name == name and not line.session.closed]
        assert line.ask(packet(0x80, 0x50, struct.pack(">II", 0, 1), name)).vbucket == 0
        for earlier in older:
            assert earlier.session.closed, f"two connections are called {name!r}"
        line.is_dcp = True
        if self.rng.random() < 0.8:
            line.window = self.rng.choice((500, 4_000, 20_000))
            self._control(line, b"connection_buffer_size", b"%d" % line.window)
        line.interval_s = float(self.rng.choice((1, 7, 20)))
        self._control(line, b"set_noop_interval", b"%d" % line.interval_s)
        self._control(line, b"enable_noop", b"true")
        line.last_noop = self.bench.now
        for vbucket in self.rng.sample(range(VBUCKETS), self.rng.randint(1, VBUCKETS)):
            extras = struct.pack(">IIQQQQQ", 0, 0, 0, 2**64 - 1, 0, 0, 0)
            assert line.ask(packet(0x80, 0x53, extras, half=vbucket, opaque=vbucket + 1)).vbucket == 0
        self.lines.append(line)

    def _control(self, line: Line, key: bytes, value: bytes) -> None:
        assert line.ask(packet(0x80, 0x5E, key=key, value=value)).vbucket == 0

    def acknowledge(self) -> None:
        """Some of what came, all of it, or more than there was."""
        line = self._line()
        if line is None or not line.window:
            return
        share = self.rng.choice((0.3, 1.0, 1.0, 3.0))
        acknowledged = int(line.outstanding * share) + (500 if share > 1 else 0)
        line.outstanding = max(0, line.outstanding - acknowledged)
        line.send(packet(0x80, 0x5D, struct.pack(">I", acknowledged)))

    def pass_time(self) -> None:
        """No-ops come in time, whatever else waits."""
        self.bench.advance(self.rng.choice((0.5, 3.0, 10.0, 25.0)))
        for line in self._open_lines():
            line.take()
            late = self.bench.now - line.last_noop
            assert late <= line.interval_s + 0.01, f"no no-op for {late:g} s of {line.interval_s:g}"

    def garbage(self) -> None:
        """A stranger sends garbage; nobody else is affected."""
        line = Line(self, b"")
        self.faults += 1
        if self.rng.random() < 0.5:
            line.session.receive_data(self.rng.randbytes(self.rng.randrange(1, 60)), self.bench.now)
        else:
            body = self.rng.randbytes(self.rng.randrange(40))
            extras, key = self.rng.randrange(8), self.rng.randrange(8)
            head = struct.pack(
                ">BBHBBHIIQ", 0x80, self.rng.randrange(256), key, extras, 0, 0, len(body), 0, 0
            )
            line.session.receive_data(head + body, self.bench.now)
        line.session.data_to_send(1 << 20)
        line.session.close("enough")

    # TAP

    def forward_tap(self) -> None:
        """What comes by TAP is passed on with one hop less, and not at all if none is left."""
        vbucket = self.rng.randrange(VBUCKETS)
        reader = Line(self, b"")
        reader.session.receive_data(tap_connect(b"hops", BACKFILL, FROM_NOW), self.bench.now)
        reader.take()
        ttl = self.rng.choice((255, 9, 2, 1))
        self._value += 1
        key, cas = b"hop-%d" % self.rng.randrange(4), (self._value << 16) + 5
        sender = Line(self, b"")
        data = (
            delete(key, self._value + 1000, cas, ttl=ttl, vbucket=vbucket)
            if self.rng.random() < 0.2
            else mutation(key, b"v", self._value + 1000, cas, ttl=ttl, vbucket=vbucket)
        )
        sender.send(data)
        self.bench.run_jobs()
        came = [frame for frame in reader.take() if frame.opcode in (0x41, 0x42)]
        for frame in came:
            assert frame.body[4] == ttl - 1 > 0, (
                f"a change that came with TTL {ttl} goes on with {frame.body[4]}"
            )
        for line in (reader, sender):
            line.session.close("enough")

    def registered_tap(self) -> None:
        """A registered reader that is away holds nothing in memory."""
        line = Line(self, b"")
        line.session.receive_data(tap_connect(b"registered", ACK | REGISTERED), self.bench.now)
        line.take()
        line.session.close("it went away")
        self.bench.run_jobs()
        for client in self.bench.node.buckets["default"].tap:
            if client.producer is None and client.is_registered:
                assert not client.cursors and client.kept is None, "a reader that is away is held in memory"

    # the rest

    def close(self) -> None:
        line = self._line()
        if line is not None:
            line.session.close("enough")

    def _open_lines(self) -> list[Line]:
        return [line for line in self.lines if not line.session.closed]

    def _line(self) -> Line | None:
        lines = self._open_lines()
        return self.rng.choice(lines) if lines else None

    def finish(self) -> None:
        """A reader that acknowledges everything ends with what the node has."""
        for line in self._open_lines():
            for _ in range(10_000):
                acknowledged, line.outstanding = line.outstanding, 0
                if line.window:
                    line.send(packet(0x80, 0x5D, struct.pack(">I", acknowledged)))
                self.bench.run_jobs()
                line.take()
                if not line.window or not line.outstanding:
                    break
            for vbucket, held in line.documents.items():
                assert held == self._documents(vbucket), f"vbucket {vbucket} is not what the node has"

    def _documents(self, vbucket: int) -> dict[bytes, bytes]:
        store = self.bench.node.buckets["default"].store.vbuckets[vbucket]
        assert store is not None
        values = {}
        names = [b"key-%d" % number for number in range(KEYS)] + [b"hop-%d" % number for number in range(4)]
        for key in names:
            frame = store.get(b"\0" + key)
            if frame is not None:
                extras = frame[4]
                values[key] = bytes(frame[24 + extras + int.from_bytes(frame[2:4], "big") :])
        return values


def _log_in(seed: int) -> None:
    """A login with wrong channel binding, as from somebody between two peers."""
    rng = random.Random(seed)
    bench = Bench(users={"ada": _PASSWORD})
    session = bench.session()

    def ask(opcode: int, value: bytes) -> Frame:
        session.receive_data(packet(0x80, opcode, key=b"SCRAM-SHA256", value=value), bench.now)
        for _ in range(3):
            bench.run_jobs()
        (answer,) = frames_of(b"".join(bytes(part) for part in session.data_to_send(1 << 20)))
        return answer

    said, header = rng.choice((b"n,,", b"y,,")), rng.choice((b"n,,", b"y,,"))
    bare = b"n=ada,r=%x" % rng.getrandbits(80)
    challenge = ask(0x21, said + bare).value
    fields = dict(part.split(b"=", 1) for part in challenge.split(b","))
    without_proof = b"c=" + base64.b64encode(header) + b",r=" + fields[b"r"]
    salted = hashlib.pbkdf2_hmac(
        "sha256", _PASSWORD.encode(), base64.b64decode(fields[b"s"]), int(fields[b"i"])
    )
    client_key = hmac.digest(salted, b"Client Key", "sha256")
    signed = b",".join([bare, challenge, without_proof])
    signature = hmac.digest(hashlib.sha256(client_key).digest(), signed, "sha256")
    proof = bytes(ours ^ other for ours, other in zip(client_key, signature, strict=True))
    answer = ask(0x22, without_proof + b",p=" + base64.b64encode(proof))
    assert (answer.vbucket == 0) == (said == header), f"{said!r} became {header!r}: 0x{answer.vbucket:02x}"


def play_wire(seed: int) -> Tally:
    """One schedule."""
    if seed % 8 == 1:
        _log_in(seed)
    world = NodeWorld(seed)
    world.run(60)
    return Tally(schedules=1, frames=world.frames, faults=world.faults)


# bugs


def _too_many_acks_widen_the_window() -> AbstractContextManager[Any]:
    def acknowledge(self: SendWindow, acked_bytes: int) -> None:
        self.acknowledged_bytes += acked_bytes
        self.outstanding -= acked_bytes

    return mock.patch.object(SendWindow, "acknowledge", acknowledge)


def _noop_waits_for_room() -> AbstractContextManager[Any]:
    original = DcpProducer.handle_timer

    def handle_timer(self: DcpProducer, now: float) -> None:
        if self._window.room > 0:
            original(self, now)

    def next_timer(self: DcpProducer) -> float | None:
        return timer(self) if self._window.room > 0 else None

    timer = DcpProducer.next_timer
    return mock.patch.multiple(DcpProducer, handle_timer=handle_timer, next_timer=next_timer)


def _older_connection_kept() -> AbstractContextManager[Any]:
    original = Node.claim_name

    def claim_name(self: Node, bucket: str, name: bytes, session: Session) -> None:
        self._names.clear()
        original(self, bucket, name, session)

    return mock.patch.object(Node, "claim_name", claim_name)


def _ttl_not_lowered() -> AbstractContextManager[Any]:
    original = TapHops.ttls

    def ttls(self: TapHops, vbucket: int, seqnos: Any) -> Any:
        lowered = original(self, vbucket, seqnos)
        return None if lowered is None else np.where(lowered == 255, lowered, lowered + 1)

    return mock.patch.object(TapHops, "ttls", ttls)


def _registered_reader_pins_memory() -> AbstractContextManager[Any]:
    original = TapClients.disconnected

    def disconnected(self: TapClients, client: Any, now: float, keepalive_s: float) -> None:
        cursors = client.cursors
        original(self, client, now, keepalive_s)
        client.cursors = cursors

    return mock.patch.object(TapClients, "disconnected", disconnected)


def _channel_binding_not_checked() -> AbstractContextManager[Any]:
    original = SaslServer._final

    def final(self: SaslServer, exchange: Any, value: bytes) -> Any:
        said = base64.b64decode(value.split(b",", 1)[0].removeprefix(b"c="))
        return original(self, exchange._replace(channel=said), value)

    return mock.patch.object(SaslServer, "_final", final)


def _bugs() -> Iterator[Bug]:
    yield Bug(
        "too many acks widen the window",
        "Bytes that are acknowledged twice leave room for more than the window.",
        _too_many_acks_widen_the_window,
    )
    yield Bug(
        "a no-op blocked by a full window",
        "A no-op waits behind the changes: a slow reader takes its producer for dead.",
        _noop_waits_for_room,
    )
    yield Bug(
        "the older connection of a name kept",
        "Two connections go by one name, and both are served.",
        _older_connection_kept,
    )
    yield Bug("TTL not lowered", "What came by TAP goes on as it came, in a ring for ever.", _ttl_not_lowered)
    yield Bug(
        "a registered TAP client pins memory",
        "A registered reader that never comes back keeps its cursors in memory.",
        _registered_reader_pins_memory,
        1,
    )
    yield Bug(
        "SCRAM's channel binding not checked",
        "A login is accepted whose last message names another channel binding than its first.",
        _channel_binding_not_checked,
        25,
    )


BUGS = tuple(_bugs())
