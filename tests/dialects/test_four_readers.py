"""The same operations read in all four dialects, by readers that share only `struct`, give equal maps."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

import tailrace.testing
from dialects.raw_peer import (
    ACK,
    KEYS_ONLY,
    NEVER,
    REGISTERED,
    TIMEOUT_S,
    Packet,
    Peer,
    TapReader,
    Upr,
    UprReader,
    packet,
)
from dialects.stored import all_documents, without_empty
from tailrace.server.node import Node
from tailrace.testing.running import RunningNode

VBUCKETS = 4


@dataclass
class RawDcpReader:
    """The plainest DCP reader."""

    peer: Peer
    documents: dict[int, dict[bytes, tuple[Any, ...]]] = field(default_factory=dict)
    position: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # seqno, range
    uuids: dict[int, int] = field(default_factory=dict)

    def open(self) -> None:
        assert self.peer.ask(packet(0x80, 0x50, struct.pack(">II", 0, 1), b"dcp-reader")).half == 0
        for number in range(VBUCKETS):
            self.request(number)

    def request(self, number: int) -> None:
        seqno, start, end = self.position.get(number, (0, 0, 0))
        uuid = self.uuids.get(number, 0)
        extras = struct.pack(">IIQQQQQ", 0, 0, seqno, NEVER, uuid, start, end)
        self.peer.send(packet(0x80, 0x53, extras, half=number, opaque=number))

    def take(self, packet: Packet) -> None:
        number = packet.opaque
        held = self.documents.setdefault(number, {})
        if packet.magic == 0x81:
            if packet.half == 0x23:
                # only ever to what this reader has completely, here the beginning
                self.documents[number] = {}
                self.position.pop(number, None)
                self.uuids.pop(number, None)
                self.request(number)
            else:
                assert packet.half == 0
                self.uuids[number] = struct.unpack_from(">Q", packet.body)[0]
        elif packet.opcode == 0x56:
            start, end, _ = struct.unpack(">QQI", packet.extras)
            self.position[number] = (self.position.get(number, (0,))[0], start, end)
        elif packet.opcode in (0x57, 0x58):
            seqno, rev = struct.unpack_from(">QQ", packet.body)
            _, start, end = self.position[number]
            self.position[number] = (seqno, start, end)
            if packet.opcode == 0x57:
                flags, expiry = struct.unpack_from(">II", packet.body, 16)
                held[packet.key] = (packet.value, packet.cas, rev, flags, expiry)
            else:
                held.pop(packet.key, None)
        else:
            assert packet.opcode == 0x55
            self.request(number)


class Readers:
    """One reader of each dialect, which come back after the node has gone away."""

    def __init__(self, node: RunningNode) -> None:
        self.node = node
        self.drafts = [Upr("upr-a"), Upr("upr-b")]
        self.upr = {
            draft.name: {number: UprReader(draft, number) for number in range(VBUCKETS)}
            for draft in self.drafts
        }
        self.upr_uuids: dict[tuple[str, int], int] = {}
        self.tap: TapReader | None = None
        self.dcp: RawDcpReader | None = None
        self.peers: list[Peer] = []

    def connect(self) -> None:
        node = self.node
        self.peers = [Peer(node) for _ in range(4)]
        held = {} if self.tap is None else self.tap.documents
        self.tap = TapReader(self.peers[0], documents=held).connect(b"tap-reader", ACK | REGISTERED)
        old = self.dcp
        self.dcp = RawDcpReader(self.peers[1])
        if old is not None:
            self.dcp = RawDcpReader(self.peers[1], old.documents, old.position, old.uuids)
        self.dcp.open()
        for peer, draft in zip(self.peers[2:], self.drafts, strict=True):
            for number in range(VBUCKETS):
                self._request(peer, draft, number)

    def _request(self, peer: Peer, draft: Upr, number: int) -> None:
        """The branch that a reader is on is asked for together with the stream."""
        reader = self.upr[draft.name][number]
        reader._inside = False
        if reader.committed != reader._seqno:
            # a snapshot that broke off counts for nothing: begin again, as the simplest reader does
            self.upr[draft.name][number] = reader = UprReader(draft, number)
        uuid = self.upr_uuids.get((draft.name, number), 0)
        peer.send(draft.request(number, reader.committed, uuid, opaque=number))
        peer.send(draft.log_request(number, opaque=number))

    def read(self) -> None:
        """Read until all four have what the node has."""
        expected = all_documents(self.node)
        deadline = time.monotonic() + 2 * TIMEOUT_S
        for peer in self.peers:
            peer.socket.settimeout(0.05)
        while any(without_empty(held) != expected for held in self.maps().values()):
            assert time.monotonic() < deadline, {
                name: without_empty(held) == expected for name, held in self.maps().items()
            }
            self._read_some()
        for peer in self.peers:
            peer.socket.settimeout(TIMEOUT_S)

    def _read_some(self) -> None:
        assert self.tap is not None and self.dcp is not None
        for _ in range(500):
            if not self._once(self.tap.take):
                break
        for _ in range(500):
            if not self._once(lambda: self.dcp.take(self.peers[1].next())):
                break
        for peer, draft in zip(self.peers[2:], self.drafts, strict=True):
            for _ in range(500):
                if not self._once(lambda peer=peer, draft=draft: self._take_upr(peer, draft)):
                    break

    @staticmethod
    def _once(step: Callable[..., Any]) -> bool:
        try:
            step()
        except TimeoutError:
            return False
        return True

    def _take_upr(self, peer: Peer, draft: Upr) -> None:
        packet = peer.next()
        number = packet.opaque
        word = draft.word(packet)
        if word == "rollback":
            self.upr[draft.name][number] = UprReader(draft, number)
            self.upr_uuids.pop((draft.name, number), None)
            self._request(peer, draft, number)
        elif word == "log":
            self.upr_uuids[draft.name, number] = struct.unpack_from(">Q", packet.body)[0]
        elif word == "over-state":
            self._request(peer, draft, number)
        else:
            self.upr[draft.name][number].take(packet)

    def maps(self) -> dict[str, dict[int, dict[bytes, tuple[Any, ...]]]]:
        assert self.tap is not None and self.dcp is not None
        return {
            "tap": self.tap.documents,
            "dcp": self.dcp.documents,
            **{
                name: {number: reader.documents for number, reader in readers.items()}
                for name, readers in self.upr.items()
            },
        }

    def close(self) -> None:
        for peer in self.peers:
            peer.socket.close()


def operate(node: RunningNode, rng: random.Random, count: int) -> None:
    """Sets, overwrites, deletes and expiries, in one call on the node's thread."""

    def act(inner: Node) -> None:
        vbuckets = inner.buckets["default"].store.vbuckets
        now_s = inner.clock.time_ns() // 1_000_000_000
        for _ in range(count):
            vbucket = vbuckets[rng.randrange(VBUCKETS)]
            key = b"\0k%d" % rng.randrange(200)
            what = rng.random()
            if what < 0.7:
                vbucket.set(key, rng.randbytes(rng.randrange(300)), rng.randrange(1 << 32), 0, 0)
            elif what < 0.8:
                vbucket.set(key, b"short-lived", 0, now_s - 5, 0)
                vbucket.get(key)  # becomes an expiration
            elif what < 0.85:
                vbucket.set(key, b"long-lived", 0, now_s + 10_000, 0)
            elif vbucket.get(key) is not None:
                vbucket.delete(key)

    node.call(act)


def run(node: RunningNode, seed: int, rounds: int, operations: int) -> list[str]:
    """Operate, let something happen, read, and repeat; returns what happened."""
    rng = random.Random(seed)
    happened = []
    readers = Readers(node)
    operate(node, rng, operations)
    readers.connect()
    for _ in range(rounds):
        operate(node, rng, operations)
        readers.read()
        what = rng.choice(["restart", "kill", "flush", "rewind", "none", "close checkpoints"])
        happened.append(what)
        if what in ("restart", "kill"):
            operate(node, rng, operations)
            readers.close()
            node.persist()
            if what == "kill":
                operate(node, rng, operations // 4)  # none of this is promised: it may be lost
                node.kill()
                node.start()
            else:
                node.restart()
            readers.connect()
        elif what == "flush":
            node.flush()
        elif what == "rewind":
            number = rng.randrange(VBUCKETS)
            high = node.high_seqno(number)
            node.rewind(number, max(0, high - rng.randrange(1, 50)))
        elif what == "close checkpoints":
            node.call(lambda inner: [v.close_checkpoint() for v in inner.buckets["default"].store])
    operate(node, rng, operations)
    readers.read()
    readers.close()
    return happened


@pytest.mark.parametrize("seed", range(4))
def test_four_readers_end_in_equal_maps(seed: int) -> None:
    with tailrace.testing.node(vbuckets=VBUCKETS, settings={"checkpoint_items": 50}) as node:
        run(node, seed, rounds=6, operations=150)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_four_readers_of_a_hundred_thousand_operations() -> None:
    with tailrace.testing.node(vbuckets=VBUCKETS, settings={"memory_quota": "16m"}) as node:
        assert {"kill", "restart", "flush", "rewind"} <= set(run(node, 4711, rounds=20, operations=4_600))


def test_keys_only_sees_the_same_keys() -> None:
    rng = random.Random(3)
    with tailrace.testing.node(vbuckets=VBUCKETS) as node:
        operate(node, rng, 500)
        with Peer(node) as peer:
            reader = TapReader(peer).connect(b"keys", ACK | KEYS_ONLY)
            reader.read_until(lambda: reader.words().count("opaque 8") == VBUCKETS)
        expected = {number: set(held) for number, held in all_documents(node).items()}
        assert {number: set(held) for number, held in reader.documents.items()} == expected
