"""Node to node by TAP: replicas that are equal, rings that fall silent, vbuckets that move under writers."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import tailrace.testing
from dialects.raw_peer import (
    ACK,
    CHECKPOINT,
    LIST,
    TAKEOVER,
    Peer,
    TapReader,
    packet,
    tap_connect,
    until,
    vbucket_list,
)
from dialects.relay import Relay
from dialects.stored import all_documents, documents_of
from server.serverkit import Wire
from tailrace.client.kv import KvClient
from tailrace.client.manifest import with_changes
from tailrace.model import MAX_CAS, MAX_REV
from tailrace.testing.running import RunningNode
from tailrace.wire.codes import VBucketState
from tailrace.wire.kv import SetWithMeta


@contextlib.contextmanager
def nodes(count: int, vbuckets: int = 8, **options: Any) -> Iterator[list[RunningNode]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(tailrace.testing.node(vbuckets=vbuckets, **options)) for _ in range(count)]


def make_replica(node: RunningNode) -> None:
    for number in range(node.vbuckets):
        node.set_vbucket_state(number, VBucketState.REPLICA)


def write_some(node: RunningNode, rng: random.Random, count: int, keys: int = 60) -> None:
    for _ in range(count):
        key = f"k{rng.randrange(keys)}"
        if rng.random() < 0.25:
            with contextlib.suppress(Exception):
                node.delete(key)
        else:
            expiry = int(time.time()) + 9999 if rng.random() < 0.2 else 0
            value = {"n": rng.random()} if rng.random() < 0.5 else bytes([rng.randrange(256)]) * 50
            node.set(key, value, expiry=expiry)


def equal(*several: RunningNode) -> bool:
    states = [all_documents(node, deletions=True) for node in several]
    return all(state == states[0] for state in states)


@pytest.mark.parametrize("flags", [0, ACK, ACK | CHECKPOINT])
def test_a_replica_is_equal(flags: int) -> None:
    rng = random.Random(flags)
    with nodes(2) as (source, target):
        make_replica(target)
        write_some(source, rng, 300)
        with Relay(source, target, b"replica", flags):
            until(lambda: equal(source, target))
            write_some(source, rng, 200)
            until(lambda: equal(source, target))
        assert len(all_documents(target)) == 8


def test_documents_that_counted_on_from_the_highest_rev() -> None:
    """A client may give a document the highest rev, and its replicas were never equal again."""
    with nodes(2) as (source, target):
        make_replica(target)
        with Wire(source.port) as client:
            for key in ("a", "b"):
                request = SetWithMeta(key=key.encode(), value=b"1", rev_seqno=MAX_REV, meta_cas=MAX_CAS)
                request.vbucket = source.vbucket_of(key)
                client.ok(request)
        with Relay(source, target, b"replica", ACK):
            until(lambda: equal(source, target))
            source.set("a", 2)
            source.delete("b")
            source.set("c", 3)
            until(lambda: equal(source, target))
        assert sum(map(len, all_documents(target).values())) == 2


def test_a_replica_that_comes_back_is_equal() -> None:
    rng = random.Random(5)
    with nodes(2, settings={"tap_keepalive": 60, "tap_ack_interval": 7}) as (source, target):
        make_replica(target)
        for _ in range(5):
            write_some(source, rng, 100)
            with Relay(source, target, b"replica", ACK) as relay:
                until(lambda relay=relay: relay.moved > 1000)
        with Relay(source, target, b"replica", ACK):
            until(lambda: equal(source, target))
        assert not any(target.high_seqno(number) == 0 for number in range(8))


def test_a_replica_follows_a_rewind() -> None:
    rng = random.Random(6)
    with nodes(2) as (source, target):
        make_replica(target)
        write_some(source, rng, 200)
        with Relay(source, target, b"replica", ACK):
            until(lambda: equal(source, target))
            source.rewind(3, 2)
            write_some(source, rng, 20)
            until(lambda: equal(source, target))


def test_a_chain_of_replicas() -> None:
    rng = random.Random(7)
    with nodes(3) as (first, second, third):
        make_replica(second)
        make_replica(third)
        listed = vbucket_list(*range(8))  # a replica is served if it is asked for by number
        with (
            Relay(first, second, b"r", ACK | LIST, listed),
            Relay(second, third, b"r", ACK | LIST, listed),
        ):
            write_some(first, rng, 200)
            until(lambda: equal(first, second, third))
            first.flush()
            until(lambda: all_documents(third, deletions=True) == {})
            write_some(first, rng, 30)
            until(lambda: equal(first, second, third))


def test_a_ring_of_three_ends_equal_and_silent() -> None:
    rng = random.Random(8)
    with nodes(3) as ring, contextlib.ExitStack() as stack:
        for node in ring:
            write_some(node, rng, 80, keys=40)  # the same keys everywhere, in different versions
        relays = [
            stack.enter_context(Relay(node, ring[(at + 1) % 3], b"ring", ACK)) for at, node in enumerate(ring)
        ]
        until(lambda: equal(*ring))
        for _ in range(5):
            for node in ring:
                write_some(node, rng, 15, keys=40)
        until(lambda: equal(*ring))

        def seqnos() -> list[int]:
            return [node.high_seqno(number) for node in ring for number in range(8)]

        def is_still() -> bool:
            for node in ring:  # it has sent what it had when it was asked
                with Peer(node) as peer:
                    assert peer.is_silent()
            return not any(unacked(node) for node in ring)

        # silent: whatever was on its way has arrived, and no node has anything to add
        until(is_still)
        before, moved = seqnos(), [relay.moved for relay in relays]
        for node in ring:
            with Peer(node) as peer:
                assert peer.is_silent()
        assert (seqnos(), [relay.moved for relay in relays]) == (before, moved)
        assert equal(*ring)


def unacked(node: RunningNode) -> int:
    with Peer(node) as peer:
        return sum(int(value) for name, value in peer.stats("tap").items() if name.endswith(":unacked"))


def state_of(node: RunningNode, number: int) -> int | None:
    vbucket = node.call(lambda inner: inner.buckets["default"].store.vbuckets[number])
    return None if vbucket is None else vbucket.state


@pytest.mark.covers("tap.connect.flag.0x08", "tap.vbucket-set")
def test_vbuckets_move_under_writers() -> None:
    """No acknowledged write is lost, and there are never two active ones."""
    with nodes(2) as (source, target):
        moving = [1, 4]
        for number in moving:
            target.set_vbucket_state(number, VBucketState.DEAD)
        for number in range(200):
            source.set(f"old{number}", b"v", vbucket=moving[number % 2])
        stop = threading.Event()
        acknowledged: dict[int, dict[bytes, bytes]] = {number: {} for number in moving}
        both_active = []

        def write(number: int) -> None:
            at = 0
            with Peer(source) as first, Peer(target) as other:
                while not stop.is_set():
                    key, value = b"w%d" % (at % 50), b"%d" % at
                    for peer in (first, other):
                        status = peer.ask(packet(0x80, 0x01, bytes(8), key, value, half=number)).half
                        if status == 0:
                            acknowledged[number][key] = value
                            at += 1
                            break
                        assert status in (0x07, 0x86)

        def watch() -> None:
            while not stop.is_set():
                for number in moving:
                    # the target first: had it become active, the source must have been dead before
                    if state_of(target, number) == VBucketState.ACTIVE == state_of(source, number):
                        both_active.append(number)

        threads = [threading.Thread(target=write, args=(number,)) for number in moving]
        threads.append(threading.Thread(target=watch))
        for thread in threads:
            thread.start()
        try:
            until(lambda: all(len(acknowledged[number]) >= 20 for number in moving))
            with Relay(source, target, b"move", LIST | TAKEOVER | ACK, vbucket_list(*moving)) as relay:
                relay.join()
            until(lambda: all(state_of(target, number) == VBucketState.ACTIVE for number in moving))
            counts = {number: len(acknowledged[number]) for number in moving}
            until(lambda: all(int(acknowledged[n][b"w0"]) > counts[n] for n in moving))
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not both_active
        steps = source.call(
            lambda node: [event for event in node.events.recent if event["event"] == "takeover"]
        )
        assert [event["step"] for event in steps] == ["dead here", "active there"]
        assert len({event["vbuckets"] for event in steps}) == 1
        for number in moving:
            assert state_of(source, number) == VBucketState.DEAD
            values = {key: value[0] for key, value in documents_of(target, number).items()}
            assert acknowledged[number].items() <= values.items()
            assert sum(key.startswith(b"old") for key in values) == 100


@pytest.mark.parametrize("kill_at", ["pending", "backfill", "active"])
def test_a_takeover_that_breaks_never_leaves_two_active(kill_at: str) -> None:
    with nodes(2) as (source, target):
        for number in range(50):
            source.set(f"k{number}", b"v", vbucket=1)
        target.set_vbucket_state(1, VBucketState.DEAD)
        with Peer(source) as peer:
            reader = TapReader(peer).connect(b"move", LIST | TAKEOVER | ACK, vbucket_list(1))
            if kill_at == "pending":
                reader.read("state 3")
            elif kill_at == "backfill":
                reader.read("mutation")
                assert state_of(source, 1) == VBucketState.ACTIVE
            else:
                reader.acks = True
                while reader.words()[-1:] != ["state 1"]:
                    packet = reader.next()
                    reader.acks = packet.opcode != 0x45 or packet.code != 1
                assert set(reader.documents[1]) == {b"k%d" % number for number in range(50)}
        if kill_at == "active":
            # what the reader was told is on disk: after a crash it is still not active here
            source.kill()
            source.start()
            assert state_of(source, 1) == VBucketState.DEAD
        else:
            with Peer(source) as peer:
                until(lambda: peer.stats("tap")["ep_tap_count"] == "0")
            assert state_of(source, 1) == VBucketState.ACTIVE
            source.set("still", b"here", vbucket=1)


def test_a_takeover_that_would_lose_collections_is_refused() -> None:
    with nodes(1) as (source,), Peer(source) as peer:
        with KvClient(source.url) as client:
            client.set_manifest(with_changes(client.manifest(), ["shop.carts"], ()))
            client.set("k", b"1", collection="shop.carts")
        answer = peer.ask(tap_connect(b"move", LIST | TAKEOVER | ACK, vbucket_list(*range(8))))
        assert (answer.magic, answer.opcode, answer.half) == (0x81, 0x40, 0x83)
        assert peer.is_closed()
        assert all(state_of(source, number) == VBucketState.ACTIVE for number in range(8))


def test_a_takeover_that_was_called_off_makes_nobody_active() -> None:
    with nodes(1) as (source,), Peer(source) as peer:
        source.set("k", b"v", vbucket=1)
        reader = TapReader(peer).connect(b"move", LIST | TAKEOVER | ACK, vbucket_list(1))
        reader.read("mutation")
        reader.acks = False
        last = reader.read("opaque 8")
        source.set_vbucket_state(1, VBucketState.REPLICA)
        reader.ack(last)
        reader.read_all()
        assert "state 1" not in reader.words()
