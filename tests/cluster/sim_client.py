"""Who uses the simulated cluster: a client that writes, and a model of a mirror that reads.

Both run the product's own code over simulated connections: the handshake and the cluster map, and for the
mirror the whole resume policy (`client.resume`). The mirror is a model in what it does with the changes: it
keeps them in a list per vbucket, publishes a state only where a snapshot ends, and goes back where it is told
to.
"""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.sim_network import Wire
from tailrace.client.catalog import Catalog
from tailrace.client.cluster_map import ClusterMap, vbucket_of
from tailrace.client.events import Deletion, Expiration, Mutation, Rollback, SeqnoAdvanced
from tailrace.client.nodes import Nodes
from tailrace.client.progress import SavedPosition
from tailrace.client.resume import Reading, ReadOptions
from tailrace.connstr import Address, ConnectionString
from tailrace.errors import ConnectError, TailraceError
from tailrace.protocol.dcp_consumer import ConsumerSettings, DcpConsumer
from tailrace.protocol.handshake import KV_FEATURES, Introduction, handshake
from tailrace.protocol.script import ScriptRunner
from tailrace.wire.admin import GetClusterConfig
from tailrace.wire.codes import DurabilityLevel, Magic, Op, Status
from tailrace.wire.fields import Durability, encode_frame_infos
from tailrace.wire.framing import Framer
from tailrace.wire.header import Frame
from tailrace.wire.kv import Delete, Set

HOST = "127.0.0.1"
Dial = Callable[[str, int, object], bool]
"""From a place to the node at a port; whether somebody answers."""

_FIRST_OPAQUE = 1 << 20


@dataclass
class Ack:
    """A write that is under way, or was answered as done."""

    vbucket: int
    key: bytes
    by: str
    level: DurabilityLevel | None
    vb_uuid: int = 0
    seqno: int = 0
    failures: set[str] = field(default_factory=set)
    """Nodes that were lost since it was answered."""
    is_void: bool = False
    """Its answer may come late: what it says was true, and has been taken back since."""


class _Connection:
    """A client's connection to a node."""

    def __init__(self, client: Client, port: int) -> None:
        self.port = port
        self.closed = False
        self.ready = False
        self.operations: dict[int, Ack] = {}
        self._client = client
        self._unread = b""
        self._runner = ScriptRunner(
            handshake(Introduction("sim", "default", features=KV_FEATURES), client.rng)
        )
        self.out = bytearray(self._runner.start())

    @property
    def wants_data(self) -> bool:
        return not self.closed

    def take(self) -> bytes:
        data = bytes(self.out)
        self.out.clear()
        return data

    def give(self, data: bytes, now: float) -> None:
        self._unread += data
        frames = self.peek(b"")
        self._unread = self._unread[sum(frame.size for frame in frames) :]
        for frame in frames:
            if frame.magic == Magic.SERVER_REQUEST:
                continue
            if not self.ready:
                self.out += self._runner.receive(frame)
                if self._runner.done:
                    self.ready = True
                    assert self._runner.result is not None
                    self._client.learn(self._runner.result.config, self.port)
            elif frame.opcode == Op.GET_CLUSTER_CONFIG:
                self._client.learn(frame.body, self.port)
            elif (ack := self.operations.pop(frame.opaque, None)) is not None:
                if frame.status == Status.SUCCESS and not ack.is_void:
                    ack.vb_uuid, ack.seqno = struct.unpack_from(">QQ", frame.body)
                    self._client.on_ack(ack)
                elif frame.status == Status.NOT_MY_VBUCKET:
                    self._client.learn(frame.body, self.port)

    def peek(self, more: bytes) -> list[Frame]:
        """The frames that will be whole with these bytes."""
        framer = Framer()
        framer.feed(self._unread + more)
        return list(framer.frames())

    def tick(self, now: float) -> None:
        """The node has its own timeouts."""

    def lost(self) -> None:
        self.closed = True
        self._client.forget(self)


class Client:
    """Writes, and tells who wants to know what was answered as done."""

    PLACE = "client"

    def __init__(self, rng: random.Random, vbuckets: int, ports: dict[str, int], dial: Dial) -> None:
        self.rng = rng
        self.on_ack: Callable[[Ack], None] = lambda ack: None
        self._vbuckets = vbuckets
        self._ports = ports
        self._dial = dial
        self._map: ClusterMap | None = None
        self._connections: dict[int, _Connection] = {}
        self._opaque = _FIRST_OPAQUE
        self._number = 0

    def name_of(self, port: int) -> str:
        return next(name for name, one in self._ports.items() if one == port)

    def learn(self, text: bytes | None, port: int) -> None:
        if text:
            found = ClusterMap.parse(text, Address(HOST, port))
            if found is not None and found.is_newer_than(self._map):
                self._map = found

    def forget(self, connection: _Connection) -> None:
        if self._connections.get(connection.port) is connection:
            del self._connections[connection.port]

    def write(self, keys: list[bytes], level: DurabilityLevel | None = None) -> str:
        """One write to one of the keys, sent or not; what it was."""
        key = self.rng.choice(keys)
        vbucket = vbucket_of(key, self._vbuckets)
        found = None if self._map is None else self._map.node_of(vbucket)
        port = self.rng.choice(list(self._ports.values())) if found is None else found.port
        connection = self._connection(port)
        if connection is None:
            self._ask_somebody()
            return f"client can't reach {self.name_of(port)}"
        if not connection.ready:
            return f"client waits for {self.name_of(port)}"
        self._opaque += 1
        self._number += 1
        framing = b"" if level is None else encode_frame_infos([Durability(level, 20_000).encode()])
        wire_key = b"\0" + key
        if self.rng.random() < 0.15:
            request = Delete(vbucket=vbucket, key=wire_key, opaque=self._opaque, framing=framing)
        else:
            expiry = self.rng.randint(1, 30) if self.rng.random() < 0.05 else 0
            request = Set(
                vbucket=vbucket,
                key=wire_key,
                value=b"value %d" % self._number,
                flags=0,
                expiry=expiry,
                opaque=self._opaque,
                framing=framing,
            )
        connection.operations[self._opaque] = Ack(vbucket, wire_key, self.name_of(port), level)
        connection.out += request.encode()
        durably = "" if level is None else f", {level.name}"
        return f"write {self._number} of {key.decode()} to {self.name_of(port)}{durably}"

    def answered(self, wires: list[Wire]) -> list[Ack]:
        """Writes whose answers are decided and have not come yet."""
        return [
            wire.end.operations[frame.opaque]
            for wire in wires
            if isinstance(wire.end, _Connection) and wire.is_open
            for frame in wire.end.peek(wire.on_its_way())
            if frame.opaque in wire.end.operations
        ]

    def connect(self) -> None:
        """Call all nodes."""
        for port in self._ports.values():
            self._connection(port)

    def _connection(self, port: int) -> _Connection | None:
        connection = self._connections.get(port)
        if connection is None:
            connection = self._connections[port] = _Connection(self, port)
            if not self._dial(self.PLACE, port, connection):
                self.forget(connection)
                return None
        return connection

    def _ask_somebody(self) -> None:
        """A node is gone: another may know a newer map."""
        ready = [one for one in self._connections.values() if one.ready]
        if ready:
            self.rng.choice(ready).out += GetClusterConfig(opaque=1).encode()
        else:
            self._map = None


class _Link:
    """The mirror's connection to a node."""

    def __init__(self, mirror: Mirror, address: Address) -> None:
        self.closed = False
        self.opened = False
        self.error: Exception = ConnectError("the connection was cut")
        self.address = address
        self.mirror = mirror
        self.consumer: DcpConsumer | None = None

    @property
    def wants_data(self) -> bool:
        return not self.closed and self.consumer is not None and not self.consumer.is_swamped

    def take(self) -> bytes:
        return b"" if self.consumer is None else self.consumer.data_to_send()

    def give(self, data: bytes, now: float) -> None:
        assert self.consumer is not None
        try:
            self.consumer.receive_data(data)
            self.consumer.process(now)
            if not self.opened and self.consumer.granted is not None:
                self.opened = True
                self.mirror.nodes.opened(self.address, now)
        except TailraceError as error:
            self.error = error
            self.closed = True

    def tick(self, now: float) -> None:
        assert self.consumer is not None
        timer = self.consumer.next_timer()
        if timer is not None and timer <= now:
            try:
                self.consumer.handle_timer(now)
            except ConnectError as error:
                self.error = error
                self.closed = True

    def lost(self) -> None:
        self.closed = True
        self.mirror.lose(self)


class Mirror:
    """A model of a mirror: what it holds and what it has published of each vbucket."""

    PLACE = "mirror"

    def __init__(
        self, rng: random.Random, ports: dict[str, int], dial: Dial, now: Callable[[], float]
    ) -> None:
        self._rng = rng
        self._dial = dial
        self._now = now
        self._where = ConnectionString(tuple(Address(HOST, port) for port in ports.values()))
        self.on_publish: Callable[[int, int, int, dict[bytes, bytes]], None] = lambda *_: None
        self.on_rollback: Callable[[int, int], None] = lambda vbucket, seqno: None
        self.held: dict[int, list[tuple[int, bytes, bytes | None]]] = {}
        self.published: dict[int, tuple[int, dict[bytes, bytes]]] = {}
        self._saved: dict[int, SavedPosition] = {}
        self._links: list[_Link] = []
        self._begin()

    def _begin(self) -> None:
        settings = ConsumerSettings("mirror", buffer_bytes=64 << 10, noop_interval_s=20.0)
        self.nodes = Nodes(
            self._where, settings, agent="sim", allow_plain=False, retry_for_s=1e9, rng=self._rng
        )
        self.reading = Reading(
            self.nodes, Catalog("default"), ReadOptions(retry_for_s=1e9), self._saved, rng=self._rng
        )

    def restart(self) -> None:
        """A kill: what was published stays, with the positions that were saved with it."""
        for link in self._links:
            link.closed = True
        self._links = []
        for vbucket, held in self.held.items():
            kept = self._saved[vbucket].position.seqno if vbucket in self._saved else 0
            held[:] = [one for one in held if one[0] <= kept]
        self._begin()

    def lose(self, link: _Link) -> None:
        if link in self._links:
            self._links.remove(link)
            self.reading.link_closed(link.address, link.error)

    def turn(self) -> None:
        """Do what is due: connect, ask, take what came."""
        now = self._now()
        self.reading.turn(now)
        for address in sorted(self.nodes.to_connect(now), key=lambda one: one.port):
            link = _Link(self, address)
            if not self._dial(self.PLACE, address.port, link):
                self._unreachable(address, now)
                continue
            link.consumer = self.nodes.connected(address, now)
            self._links.append(link)
        for address in self.nodes.to_disconnect():
            for link in self._links:
                assert link.consumer is not None
                if link.address == address and link.consumer.next_chunk() is None:
                    link.closed = True
                    self._links.remove(link)
                    self.nodes.dropped(address)
                    break
        try:
            while (piece := self.reading.take(now)) is not None:
                for event in piece.events():
                    self._apply(event)
                self.reading.finish(piece)
                self._saved = self.reading.to_save()
        except ConnectError:
            self.restart()  # nobody could be reached: a real one ends, and is started again

    def _unreachable(self, address: Address, now: float) -> None:
        with contextlib.suppress(ConnectError):
            self.nodes.lost(address, ConnectError("refused"), now)

    def _apply(self, event: object) -> None:
        if isinstance(event, Rollback):
            self.on_rollback(event.vbucket, event.seqno)
            held = self.held.setdefault(event.vbucket, [])
            held[:] = [one for one in held if one[0] <= event.seqno]
            self._publish(event.vbucket, event.vb_uuid, event.seqno)
        elif isinstance(event, Mutation | Deletion | Expiration):
            value = event.value if isinstance(event, Mutation) else None
            self.held.setdefault(event.vbucket, []).append((event.seqno, event.key, value))
            if event.seqno == event.snapshot[1]:
                self._publish(event.vbucket, event.vb_uuid, event.seqno)
        elif isinstance(event, SeqnoAdvanced) and event.seqno == event.snapshot[1]:
            self._publish(event.vbucket, event.vb_uuid, event.seqno)

    def _publish(self, vbucket: int, vb_uuid: int, seqno: int) -> None:
        state: dict[bytes, bytes] = {}
        for _, key, value in self.held.get(vbucket, []):
            if value is None:
                state.pop(key, None)
            else:
                state[key] = value
        self.published[vbucket] = seqno, state
        self.on_publish(vbucket, vb_uuid, seqno, state)
