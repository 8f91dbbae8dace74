"""The writer of the simulated cluster, and what it was promised.

The client runs the product's own handshake and cluster map over simulated connections.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.sim_network import HOST, Dial, Wire
from tailrace.client.cluster_map import ClusterMap, vbucket_of
from tailrace.connstr import Address
from tailrace.protocol.handshake import KV_FEATURES, Introduction, handshake
from tailrace.protocol.script import ScriptRunner
from tailrace.wire.admin import GetClusterConfig
from tailrace.wire.codes import DurabilityLevel, Magic, Op, Status
from tailrace.wire.fields import Durability, encode_frame_infos
from tailrace.wire.framing import Framer
from tailrace.wire.header import Frame
from tailrace.wire.kv import Delete, Set

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
    cas: int = 0
    number: int = 0
    """The number of the write."""
    failures: set[str] = field(default_factory=set)
    """Nodes that were lost since it was answered."""
    is_void: bool = False
    """Its answer may come late: what that says was true, but has been taken back since."""


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
                    ack.cas = frame.cas
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
    """Writes, and reports what was answered as done."""

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
        self.last_ends: dict[bytes, int] = {}
        """By key: the last write that was to delete it, at once or by an expiry."""

    def name_of(self, port: int) -> str:
        return next(name for name, known in self._ports.items() if known == port)

    def learn(self, text: bytes | None, port: int) -> None:
        if text:
            offered = ClusterMap.parse(text, Address(HOST, port))
            if offered is not None and offered.is_newer_than(self._map):
                self._map = offered

    def forget(self, connection: _Connection) -> None:
        if self._connections.get(connection.port) is connection:
            del self._connections[connection.port]

    def write(self, keys: list[bytes], level: DurabilityLevel | None = None) -> str:
        """Write to one of the keys, sent or not; return what the write was."""
        key = self.rng.choice(keys)
        vbucket = vbucket_of(key, self._vbuckets)
        owner = None if self._map is None else self._map.node_of(vbucket)
        port = self.rng.choice(list(self._ports.values())) if owner is None else owner.port
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
        request: Delete | Set
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
        connection.operations[self._opaque] = Ack(
            vbucket, wire_key, self.name_of(port), level, number=self._number
        )
        if isinstance(request, Delete) or request.expiry:
            self.last_ends[wire_key] = self._number
        connection.out += request.encode()
        durably = "" if level is None else f", {level.name}"
        return f"write {self._number} of {key.decode()} to {self.name_of(port)}{durably}"

    def answered(self, wires: list[Wire]) -> list[Ack]:
        """Writes whose answers are decided but have not come yet."""
        return [
            wire.end.operations[frame.opaque]
            for wire in wires
            if isinstance(wire.end, _Connection) and wire.is_open
            for frame in wire.end.peek(wire.on_its_way())
            if frame.opaque in wire.end.operations
        ]

    def connect(self) -> None:
        """Connect to all nodes."""
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
        ready = [connection for connection in self._connections.values() if connection.ready]
        if ready:
            self.rng.choice(ready).out += GetClusterConfig(opaque=1).encode()
        else:
            self._map = None
