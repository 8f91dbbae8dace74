"""Nodes that replicate each other over real sockets, and a controller that pushes changes by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

import tailrace.testing
from server.controller import Controller, marker, mutation, until
from server.serverkit import Bench, Wire
from tailrace.model import MAX_REPLICA_REV, MAX_SEQNO
from tailrace.protocol.handshake import Credentials
from tailrace.server.node import Node
from tailrace.server.served_map import NodeAddress, bucket_map
from tailrace.server.upstream import ReplicationSource
from tailrace.testing.running import RunningNode
from tailrace.wire import admin
from tailrace.wire.codes import (
    AddStreamFlag,
    DcpOpcode,
    Feature,
    MarkerFlag,
    Status,
    VBucketState,
)
from tailrace.wire.dcp import (
    DcpAddStream,
    DcpCloseStream,
    DcpControl,
    DcpDeletion,
    DcpGetFailoverLog,
    DcpMutation,
    DcpOpen,
    DcpSeqnoAdvanced,
    DcpSetVBucketState,
    DcpStreamEnd,
    DcpStreamRequest,
    DcpSystemEvent,
)
from tailrace.wire.header import Frame
from tailrace.wire.kv import Get, Set
from tailrace.wire.message import Message, Response


def contents(node: RunningNode, vbucket: int) -> tuple[list[bytes], list[tuple[int, int]]]:
    """Every frame that a reader from the beginning gets, and the failover log."""

    def read(inner: Node) -> list[bytes]:
        store = inner.buckets["default"].store.vbuckets[vbucket]
        assert store is not None
        frames: list[bytes] = []
        at = 0
        while (snapshot := store.snapshot_after(at)) is not None:
            at = snapshot.end
            while (chunk := snapshot.read()) is not None:
                data = chunk.data.tobytes()
                ends = [*chunk.offsets[1:].tolist(), len(data)]
                frames += [data[a:b] for a, b in zip(chunk.offsets.tolist(), ends, strict=True)]
        newest: dict[bytes, bytes] = {}
        for frame in frames:
            extras = frame[4]
            key = (
                frame[1:2] * (frame[1] == DcpOpcode.SYSTEM_EVENT)
                + frame[24 + extras :][: int.from_bytes(frame[2:4], "big")]
            )
            newest.pop(key, None)
            newest[key] = frame
        return [_plain(frame) for frame in sorted(newest.values(), key=lambda frame: frame[24:32])]

    return node.call(read), node.failover_log(vbucket)


def _plain(frame: bytes) -> bytes:
    """A frame; of a system event, which has two forms that say the same, what it says."""
    if frame[1] != DcpOpcode.SYSTEM_EVENT:
        return frame
    event = DcpSystemEvent.decode(Frame.parse(frame))
    says = (event.cas, event.by_seqno, event.event, event.key, event.content()[:4])
    return repr(says).encode()


def same(node: RunningNode, other: RunningNode, vbucket: int) -> bool:
    return contents(node, vbucket) == contents(other, vbucket)


@pytest.fixture
def nodes() -> Iterator[list[RunningNode]]:
    """Two nodes; the second has no active vbuckets."""
    with ExitStack() as stack:
        nodes = [stack.enter_context(tailrace.testing.node(vbuckets=4)) for _ in range(2)]
        for vbucket in range(4):
            nodes[1].set_vbucket_state(vbucket, VBucketState.DEAD)
        yield nodes


def write(node: RunningNode, count: int, *, first: int = 0, vbucket: int = 0) -> None:
    for number in range(first, first + count):
        node.set(f"key-{number}", {"n": number}, vbucket=vbucket)


# node to node


def test_a_replica_is_equal_to_its_active(nodes: list[RunningNode]) -> None:
    active, replica = nodes
    for vbucket in range(4):
        write(active, 50, vbucket=vbucket)
        write(active, 20, vbucket=vbucket)
        active.delete("key-7", vbucket=vbucket)
        active.set("dies", 1, expiry=2_000_000_000, vbucket=vbucket)
    replica.replicate(range(4), active)
    for vbucket in range(4):
        until(partial(same, active, replica, vbucket), f"vbucket {vbucket} is not equal")
    write(active, 10, first=100)
    active.delete("key-8", vbucket=0)
    until(lambda: same(active, replica, 0), "later changes did not come")
    row = replica.replication_status()["0"]
    assert (row["state"], row["stream"]) == ("replica", "open")
    assert row["source"] == f"127.0.0.1:{active.port}"


def test_xattrs_compressed_values_and_collections_arrive_as_they_are(nodes: list[RunningNode]) -> None:
    active, replica = nodes
    with Wire(active.port) as wire:
        wire.hello(Feature.COLLECTIONS, Feature.XATTR, Feature.SNAPPY, Feature.JSON, Feature.SELECT_BUCKET)
        wire.ok(admin.SelectBucket(key=b"default"))
        manifest = {
            "uid": "1",
            "scopes": [
                {
                    "name": "_default",
                    "uid": "0",
                    "collections": [{"name": "_default", "uid": "0"}, {"name": "fruit", "uid": "8"}],
                }
            ],
        }
        wire.ok(admin.SetCollectionsManifest(value=json.dumps(manifest).encode()))
    xattrs = b'\0\0\0\x0f\0\0\0\x0b_sys\0{"a":1}\0'
    xattrs = (len(xattrs) - 4).to_bytes(4, "big") + (len(xattrs) - 8).to_bytes(4, "big") + xattrs[8:]

    def put(node: Node) -> None:
        vbucket = node.buckets["default"].store.vbuckets[0]
        assert vbucket is not None
        vbucket.set(b"\0with-xattrs", xattrs + b"body", flags=7, datatype=4)
        vbucket.set(b"\0compressed", b"\x04\x0cbody", datatype=2)
        vbucket.set(b"\x08apple", b'{"a":1}', datatype=1)

    active.call(put)
    replica.replicate([0], active)
    until(lambda: same(active, replica, 0), "not equal")
    assert len(contents(replica, 0)[0]) == 4  # one of them is the collection's beginning


def test_a_replica_that_was_away_goes_on_where_it_was(nodes: list[RunningNode]) -> None:
    active, replica = nodes
    write(active, 30)
    replica.replicate([0], active)
    until(lambda: same(active, replica, 0), "not equal")
    replica.restart()
    write(active, 30, first=30)
    replica.replicate([0], active)
    until(lambda: same(active, replica, 0), "not equal after a restart")
    assert replica.call(lambda node: sum(map(_rollbacks, node.replication.values()))) == 0


def _rollbacks(replication: Any) -> int:
    return sum(link.handler.stats()["rollbacks"] for link in replication._upstreams.values() if link.handler)


def test_a_replica_with_another_history_rolls_back_exactly(nodes: list[RunningNode]) -> None:
    active, replica = nodes
    write(active, 20)
    replica.replicate([0], active)
    until(lambda: same(active, replica, 0), "not equal")
    write(active, 10)  # overwrites: a rollback must bring the older versions back
    until(lambda: same(active, replica, 0), "not equal")
    active.rewind(0, 20)
    write(active, 5, first=200)
    until(lambda: same(active, replica, 0), "not equal after the rewind")
    assert active.failover_log(0)[0][1] == 20
    assert replica.get("key-3", vbucket=0) == {"n": 3}


def test_a_former_active_joins_the_promoted_replica_and_loses_what_the_cluster_lost(
    nodes: list[RunningNode],
) -> None:
    old, new = nodes
    write(old, 20)
    new.replicate([0], old)
    until(lambda: same(old, new, 0), "not equal")
    new.replicate([0], None)
    write(old, 7, first=10)  # nobody else has these
    new.set_vbucket_state(0, VBucketState.ACTIVE)
    write(new, 3, first=500)
    old.replicate([0], new)
    until(lambda: same(old, new, 0), "not equal")
    assert [seqno for _, seqno in old.failover_log(0)] == [20, 0]
    assert old.high_seqno(0) == 23
    assert old.get("key-15", vbucket=0) == {"n": 15}


def test_connections_that_break_are_made_again(nodes: list[RunningNode]) -> None:
    active, replica = nodes
    replica.replicate([0], active)
    for round_ in range(3):
        write(active, 200, first=200 * round_)
        active.drop_connections()
    until(lambda: same(active, replica, 0), "not equal")


def test_a_reader_of_a_replica_sees_what_a_reader_of_the_active_sees(nodes: list[RunningNode]) -> None:
    active, replica = nodes
    write(active, 100)
    write(active, 50)
    replica.replicate([0], active)
    until(lambda: same(active, replica, 0), "not equal")
    with Wire(replica.port) as wire:
        wire.ok(DcpOpen(key=b"reader", flags=1))
        answer = wire.call(DcpStreamRequest(vbucket=0, flags=int(AddStreamFlag.TO_LATEST)))
        assert answer.status == Status.SUCCESS
        assert answer.failover_log == active.failover_log(0)
        seqnos = []
        while not isinstance(message := wire.receive(), DcpStreamEnd):
            if isinstance(message, DcpMutation):
                seqnos.append(message.by_seqno)
        assert seqnos == list(range(51, 151))


def test_takeover_moves_a_vbucket_under_a_writer_and_keeps_its_branch(nodes: list[RunningNode]) -> None:
    source, target = nodes
    write(source, 300)
    log = source.failover_log(0)
    target.replicate([0], source, takeover=True)
    acknowledged = 0
    refused = None
    while refused is None:
        with Wire(source.port) as wire:
            answer = wire.call(Set(key=b"w-%d" % acknowledged, value=b"1", flags=0, expiry=0, vbucket=0))
            if answer.status == Status.SUCCESS:
                acknowledged += 1
            else:
                refused = answer.status
    assert refused == Status.NOT_MY_VBUCKET
    until(lambda: target.replication_status()["0"]["state"] == "active", "the target did not become active")
    assert target.failover_log(0) == log
    assert source.call(lambda node: node.buckets["default"].store.vbuckets[0].state) == VBucketState.DEAD
    assert target.high_seqno(0) == 300 + acknowledged
    for number in range(acknowledged):
        assert target.get(f"w-{number}", vbucket=0) == 1
    until(lambda: target.replication_status()["0"].get("stream") == "over", "the stream did not end")


# a controller


def test_a_controller_adds_a_stream_and_pushes_a_snapshot(replica: RunningNode) -> None:
    with Controller(replica.port) as peer:
        opaque = peer.begin(log=[(0xBBBB, 5), (0xAAAA, 0)])
        assert peer.controls[b"enable_noop"] == b"true"
        assert int(peer.controls[b"connection_buffer_size"]) > 0
        peer.send(marker(opaque, 0, 9, int(MarkerFlag.MEMORY | MarkerFlag.ACK)))
        peer.send(mutation(opaque, 4, b"a", flags=5, expiry=2_000_000_000))
        peer.send(mutation(opaque, 6, b"b"))
        assert peer.status_of(DcpDeletion(key=b"a", by_seqno=8, rev_seqno=4, cas=78, opaque=opaque)) == 0
        row = replica.replication_status()["0"]
        assert (row["high_seqno"], row["complete_seqno"]) == (8, 0)
        peer.send(mutation(opaque, 9, b"c"))
        acked = peer.next()
        assert (acked.opcode, acked.status, acked.opaque) == (DcpOpcode.SNAPSHOT_MARKER, 0, opaque)
        row = replica.replication_status()["0"]
        assert (row["high_seqno"], row["complete_seqno"]) == (9, 9)
        assert peer.status_of(marker(opaque, 10, 11)) == 0
        assert not peer.seqnos, "there was nothing to prepare"
    assert replica.failover_log(0) == [(0xBBBB, 5), (0xAAAA, 0)]
    frames, _ = contents(replica, 0)
    assert [int.from_bytes(frame[24:32], "big") for frame in frames] == [6, 8, 9]
    assert [int.from_bytes(frame[16:24], "big") for frame in frames] == [77, 78, 77]


def advanced(opaque: int, seqno: int) -> DcpSeqnoAdvanced:
    return DcpSeqnoAdvanced(by_seqno=seqno, vbucket=0, opaque=opaque)


@pytest.mark.parametrize("on_disk", [True, False])
def test_without_a_purge_seqno_a_backfill_may_lack_deletions(replica: RunningNode, on_disk: bool) -> None:
    flags = MarkerFlag.DISK if on_disk else MarkerFlag.MEMORY
    with Controller(replica.port) as peer:
        opaque = peer.begin()
        peer.send(marker(opaque, 0, 7, int(flags)), mutation(opaque, 2), mutation(opaque, 7, b"l"))
        peer.send(marker(opaque, 8, 9, int(MarkerFlag.DISK)), mutation(opaque, 8), mutation(opaque, 9, b"l"))
        until(lambda: replica.high_seqno(0) == 9, "the snapshots did not come")
    assert replica.call(lambda node: node.buckets["default"].store.vbuckets[0].purge_seqno) == 7 * on_disk


@pytest.mark.parametrize("came", ["nothing", "a part", "no change"])
def test_a_purge_is_ours_when_something_of_its_snapshot_came(replica: RunningNode, came: str) -> None:
    """Readers below it have to start over, but not for a snapshot that was only announced."""

    def purge_seqno() -> int:
        return replica.call(lambda node: node.buckets["default"].store.vbuckets[0].purge_seqno)

    with Controller(replica.port) as peer:
        opaque = peer.begin()
        assert peer.status_of(marker(opaque, 0, 7, int(MarkerFlag.DISK))) == 0
        assert purge_seqno() == 0
        if came != "nothing":
            assert peer.status_of(mutation(opaque, 2) if came == "a part" else advanced(opaque, 7)) == 0
        assert purge_seqno() == (0 if came == "nothing" else 7)
        peer.send(DcpCloseStream(vbucket=0, opaque=98))
        assert {peer.next().opcode for _ in range(2)} == {DcpOpcode.CLOSE_STREAM}
        opaque = peer.begin()
        peer.send(marker(opaque, 0, 9))
        assert peer.status_of(mutation(opaque, 9)) == 0
    assert purge_seqno() == (0 if came == "nothing" else 7)


def test_a_part_of_a_snapshot_is_not_told_as_persisted(replica: RunningNode) -> None:
    """A promotion goes back to before it, though it is on disk."""
    with Controller(replica.port) as peer, Wire(replica.port) as wire:

        def told() -> tuple[int, int]:
            question = admin.ObserveSeqno(value=(0xAAAA).to_bytes(8, "big"))
            answer = wire.ok(question)
            return answer.persisted_seqno, answer.current_seqno

        opaque = peer.begin()
        for start, end in ((0, 2), (3, 6)):
            assert peer.status_of(marker(opaque, start, end)) == 0
            for seqno in range(max(start, 1), end):
                assert peer.status_of(mutation(opaque, seqno, b"%d" % seqno)) == 0
            wire.ok(admin.SeqnoPersistence(seqno=end - 1))
            assert told() == (max(start - 1, 0), end - 1)
            assert peer.status_of(mutation(opaque, end, b"%d" % end)) == 0
            wire.ok(admin.SeqnoPersistence(seqno=end))
            assert told() == (end, end)


def test_a_part_of_an_earlier_snapshot_is_not_told_as_persisted_either(replica: RunningNode) -> None:
    """All of it is here, but after a crash only the part would be."""
    with Controller(replica.port) as peer, Wire(replica.port) as wire:

        def told() -> tuple[int, int]:
            answer = wire.ok(admin.ObserveSeqno(value=(0xAAAA).to_bytes(8, "big")))
            return answer.persisted_seqno, answer.current_seqno

        opaque = peer.begin()
        assert peer.status_of(marker(opaque, 0, 4)) == 0
        for seqno in (1, 2, 3):
            assert peer.status_of(mutation(opaque, seqno, b"%d" % seqno)) == 0
        wire.ok(admin.SeqnoPersistence(seqno=3))
        wire.ok(admin.StopPersistence())
        assert peer.status_of(mutation(opaque, 4, b"4")) == 0
        assert peer.status_of(marker(opaque, 5, 8)) == 0
        assert peer.status_of(mutation(opaque, 5, b"5")) == 0
        assert told() == (0, 5)
        wire.ok(admin.StartPersistence())
        wire.ok(admin.SeqnoPersistence(seqno=5))
        assert told() == (4, 5)


def test_a_snapshot_ends_with_a_change_that_is_not_for_the_replica(replica: RunningNode) -> None:
    with Controller(replica.port) as peer:
        opaque = peer.begin()
        assert peer.status_of(advanced(opaque, 1)) == Status.ERANGE  # before any marker
        peer.send(marker(opaque, 0, 9, int(MarkerFlag.MEMORY | MarkerFlag.ACK)))
        peer.send(mutation(opaque, 2, b"a"))
        assert peer.status_of(advanced(opaque, 5)) == 0  # one of many that were passed over
        peer.send(mutation(opaque, 7, b"b"))
        assert peer.status_of(advanced(opaque, 7)) == Status.ERANGE
        assert peer.status_of(advanced(opaque, 10)) == Status.ERANGE
        assert replica.replication_status()["0"]["complete_seqno"] == 0
        peer.send(advanced(opaque, 9))
        acked = peer.next()
        assert (acked.opcode, acked.status, acked.opaque) == (DcpOpcode.SNAPSHOT_MARKER, 0, opaque)
        row = replica.replication_status()["0"]
        assert (row["high_seqno"], row["complete_seqno"]) == (7, 7)
        assert peer.status_of(mutation(opaque, 8)) == Status.ERANGE
        assert peer.status_of(marker(opaque, 10, 12)) == 0
        assert peer.status_of(advanced(opaque, 12)) == 0  # the only message of its snapshot
        assert peer.status_of(marker(opaque, 13, 13)) == 0
        assert peer.status_of(mutation(opaque, 13, b"c")) == 0
        row = replica.replication_status()["0"]
        assert (row["high_seqno"], row["complete_seqno"]) == (13, 13)
    replica.set_vbucket_state(0, VBucketState.ACTIVE)
    frames, _ = contents(replica, 0)
    assert [int.from_bytes(frame[24:32], "big") for frame in frames] == [2, 7, 13]


@pytest.mark.parametrize("has_part", [False, True])
def test_a_snapshot_of_which_nothing_came_is_not_waited_for(replica: RunningNode, has_part: bool) -> None:
    """The active that announced it is lost, and the next one may never have had it."""

    def ask() -> int:
        with Wire(replica.port) as wire:
            wire.ok(DcpOpen(key=b"reader", flags=1))
            return int(wire.call(DcpStreamRequest(vbucket=0, end_seqno=100)).status)

    with Controller(replica.port) as peer:
        opaque = peer.begin()
        assert peer.status_of(marker(opaque, 0, 5)) == 0
        if has_part:
            assert peer.status_of(mutation(opaque, 2)) == 0
        assert ask() == Status.ETMPFAIL
        peer.send(DcpCloseStream(vbucket=0, opaque=98))
        assert {peer.next().opcode for _ in range(2)} == {DcpOpcode.CLOSE_STREAM}
        opaque = peer.begin(log=[(0xBBBB, 0), (0xAAAA, 0)])
        assert ask() == (Status.ETMPFAIL if has_part else Status.SUCCESS)
        peer.send(marker(opaque, 0, 7))
        assert peer.status_of(mutation(opaque, 7)) == 0
        assert ask() == Status.SUCCESS


@pytest.mark.parametrize("number", [MAX_SEQNO + 1, 1 << 63, (1 << 64) - 1])
def test_numbers_that_are_too_high_are_refused_when_they_come(replica: RunningNode, number: int) -> None:
    """Once they were stored, nothing could be written after them."""
    with Controller(replica.port) as peer:
        opaque = peer.begin()
        assert peer.status_of(marker(opaque, 0, number)) == Status.ERANGE
        assert peer.status_of(marker(opaque, 0, MAX_SEQNO)) == 0
        assert peer.status_of(mutation(opaque, number)) == Status.ERANGE
        for rev, cas in ((max(number, MAX_REPLICA_REV + 1), 1), (1, max(number, 1 << 63))):
            change = DcpMutation(key=b"k", by_seqno=1, rev_seqno=rev, cas=cas, vbucket=0, opaque=opaque)
            assert peer.status_of(change) == Status.EINVAL
        all_bits = (1 << 32) - 1
        assert peer.status_of(mutation(opaque, MAX_SEQNO, flags=all_bits, expiry=all_bits)) == 0
    with Wire(replica.port) as wire:
        wire.ok(admin.SetVBucket(vbucket=0, state=VBucketState.ACTIVE))
        wire.ok(Set(key=b"k", value=b"overwritten"))
        wire.ok(Set(key=b"k", value=b"again"))
    replica.call(lambda node: node.buckets["default"].store.flush())


@pytest.mark.parametrize("number", [MAX_SEQNO, MAX_SEQNO + 1, 1 << 63, (1 << 64) - 1])
def test_a_failover_log_with_any_number(replica: RunningNode, number: int) -> None:
    """It is kept as it came, says nothing about what can be written, and is on disk."""
    with Controller(replica.port) as peer:
        opaque = peer.begin(log=[(number, number), (0xAAAA, 0)])
        assert peer.status_of(marker(opaque, 0, 5)) == 0
        assert peer.status_of(mutation(opaque, 5)) == 0
    replica.set_vbucket_state(0, VBucketState.ACTIVE)
    replica.set("k", b"v", vbucket=0)
    replica.persist()
    replica.restart()
    assert replica.high_seqno(0) == 6
    assert replica.get("k", vbucket=0) == b"v"


@pytest.mark.parametrize("v7", [True, False])
def test_what_does_not_fit_is_refused_and_nothing_of_it_is_stored(replica: RunningNode, v7: bool) -> None:
    refuse = Status.SUCCESS if v7 else Status.EINVAL
    with Controller(replica.port, controls=refuse) as peer:
        no_stream = Status.DCP_STREAM_NOT_FOUND if v7 else Status.KEY_ENOENT
        wrong_opaque = Status.OPAQUE_NO_MATCH if v7 else Status.KEY_EEXISTS
        opaque = peer.begin()
        assert peer.status_of(DcpMutation(key=b"k", by_seqno=1, rev_seqno=1, vbucket=1)) == no_stream
        assert peer.status_of(marker(opaque + 1, 0, 5)) == wrong_opaque
        assert peer.status_of(mutation(opaque, 1)) == Status.ERANGE  # before any marker
        assert peer.status_of(marker(opaque, 0, 5)) == 0
        assert peer.status_of(mutation(opaque, 3)) == 0
        assert peer.status_of(mutation(opaque, 3)) == Status.ERANGE
        assert peer.status_of(mutation(opaque, 2)) == Status.ERANGE
        assert peer.status_of(mutation(opaque, 6)) == Status.ERANGE
        assert peer.status_of(marker(opaque, 1, 2)) == Status.ERANGE
        assert peer.status_of(DcpSetVBucketState(state=1, vbucket=0, opaque=opaque)) == Status.EINVAL
        assert peer.status_of(mutation(opaque, 5)) == 0
    assert replica.high_seqno(0) == 5


def test_add_stream_refuses_what_can_not_be_received(replica: RunningNode) -> None:
    with Controller(replica.port) as peer, Controller(replica.port) as other:
        peer.begin()
        for connection, vbucket, status in [
            (peer, 0, Status.KEY_EEXISTS),
            (other, 0, Status.KEY_EEXISTS),
            (peer, 1, Status.NOT_MY_VBUCKET),  # it is active
            (peer, 900, Status.NOT_MY_VBUCKET),
        ]:
            connection.send(DcpAddStream(vbucket=vbucket, flags=0, opaque=5))
            answer = connection.next()
            assert (answer.opcode, answer.status) == (DcpOpcode.ADD_STREAM, status)


def test_a_closed_stream_swallows_what_still_comes(replica: RunningNode) -> None:
    with Controller(replica.port) as peer:
        opaque = peer.begin()
        assert peer.status_of(marker(opaque, 0, 5)) == 0
        peer.send(DcpCloseStream(vbucket=0, opaque=41))
        told = {(frame.opcode, frame.is_request) for frame in (peer.next(), peer.next())}
        assert told == {(DcpOpcode.CLOSE_STREAM, True), (DcpOpcode.CLOSE_STREAM, False)}
        assert peer.status_of(mutation(opaque, 1)) == 0
        assert peer.status_of(DcpStreamEnd(status=1, vbucket=0, opaque=opaque)) == 0
        assert peer.status_of(mutation(opaque, 2)) == Status.DCP_STREAM_NOT_FOUND
        peer.send(DcpCloseStream(vbucket=0, opaque=42))
        assert peer.next().status == Status.DCP_STREAM_NOT_FOUND
    assert replica.high_seqno(0) == 0


def test_a_refused_stream_request_answers_add_stream_with_its_status(replica: RunningNode) -> None:
    with Controller(replica.port) as peer:
        peer.send(DcpAddStream(vbucket=0, flags=0, opaque=99))
        request = peer.next()
        peer.send(
            Response(opcode=DcpOpcode.STREAM_REQUEST, opaque=request.opaque, status=Status.NOT_MY_VBUCKET)
        )
        assert peer.next().status == Status.NOT_MY_VBUCKET
        peer.begin()  # it can be asked for again


@pytest.mark.parametrize(
    "message", [DcpControl(key=b"a", value=b"b"), DcpGetFailoverLog(), DcpStreamRequest()]
)
def test_a_producers_request_ends_the_connection(replica: RunningNode, message: Message) -> None:
    with Controller(replica.port) as peer:
        peer.send(message)
        # a close with something of ours unread is a reset, or a broken pipe where we answer
        with pytest.raises((EOFError, ConnectionError)):
            while True:
                peer.next()


def test_takeover_by_a_controller_step_by_step(replica: RunningNode) -> None:
    with Controller(replica.port) as peer:
        opaque = peer.begin(log=[(0xCCCC, 0)], flags=int(AddStreamFlag.TAKE_OVER))
        peer.send(marker(opaque, 0, 1, int(MarkerFlag.MEMORY | MarkerFlag.ACK)), mutation(opaque, 1))
        assert peer.next().opcode == DcpOpcode.SNAPSHOT_MARKER
        for state, name in [(VBucketState.PENDING, "pending"), (VBucketState.ACTIVE, "active")]:
            peer.send(DcpSetVBucketState(state=state, vbucket=0, opaque=opaque))
            answer = peer.next()
            assert (answer.opcode, answer.status) == (DcpOpcode.SET_VBUCKET_STATE, 0)
            assert replica.replication_status()["0"]["state"] == name
        assert peer.status_of(DcpStreamEnd(status=0, vbucket=0, opaque=opaque)) == 0
    assert replica.failover_log(0) == [(0xCCCC, 0)]


def test_bytes_are_acknowledged(replica: RunningNode) -> None:
    with tailrace.testing.node(vbuckets=1, settings={"replication_buffer": "64k"}) as node:
        node.set_vbucket_state(0, VBucketState.REPLICA)
        with Controller(node.port) as peer:
            opaque = peer.begin()
            sent: list[Message] = [marker(opaque, 0, 1000)]
            sent += [mutation(opaque, at, b"k%d" % at) for at in range(1, 1001)]
            peer.send(*sent)
            acked = 0
            while acked < 0.8 * sum(len(message.encode()) for message in sent):
                frame = peer.frame()
                if frame.opcode == DcpOpcode.BUFFER_ACK:
                    acked += int.from_bytes(frame.extras, "big")


# orders


@pytest.mark.parametrize(
    "value",
    [
        b"[]",
        b"{",
        b'{"sources": 1}',
        b'{"sources": [1]}',
        b'{"sources": [{"port": 1}]}',
        b'{"sources": [{"host": "h", "port": 0}]}',
        b'{"sources": [{"host": "h", "port": true}]}',
        b'{"sources": [{"host": "h", "port": 1, "vbuckets": 1}]}',
        b'{"sources": [{"host": "h", "port": 1, "vbuckets": [2]}]}',
        b'{"sources": [{"host": "h", "port": 1, "vbuckets": [1], "takeover": [1]}]}',
        b'{"sources": [{"host": "h", "port": 1, "username": "u"}]}',
    ],
)
def test_orders_that_make_no_sense_change_nothing(replica: RunningNode, value: bytes) -> None:
    with Wire(replica.port) as wire:
        wire.hello(Feature.JSON)
        assert wire.refused(admin.Replicate(value=value, datatype=1)) == Status.EINVAL
        rows = json.loads(wire.ok(admin.Replicate()).value)["vbuckets"]
        assert {number: row["state"] for number, row in rows.items()} == {"0": "replica", "1": "active"}
        assert "source" not in rows["0"]


def test_a_node_with_users_replicates_another_with_users() -> None:
    with ExitStack() as stack:
        users = {"copier": "secret"}
        active, replica = (
            stack.enter_context(tailrace.testing.node(vbuckets=1, users=users)) for _ in range(2)
        )
        write(active, 5)
        replica.set_vbucket_state(0, VBucketState.REPLICA)

        def order(password: str) -> None:
            source = ReplicationSource("127.0.0.1", active.port, Credentials("copier", password))
            replica.call(
                lambda node: node.replication["default"].order({0: (source, 0)}, node.clock.monotonic())
            )

        order("wrong")
        until(lambda: "error" in replica.replication_status()["0"], "a wrong password is not noticed")
        order("secret")
        until(lambda: same(active, replica, 0), "not equal")


def test_a_fenced_node_serves_nothing_before_it_has_a_map() -> None:
    bench = Bench(vbuckets=1)
    bench.node.fenced = True
    session = bench.session()

    def status(message: Message) -> int:
        answer = session.exchange(message.encode(), bench.now) or b"".join(session.data_to_send())
        return Frame.parse(answer).status

    requests = [
        Set(key=b"k", value=b"v", flags=0, expiry=0, vbucket=0),
        Get(key=b"k", vbucket=0),
        DcpOpen(key=b"reader", flags=1),
    ]
    assert [status(request) for request in requests] == [Status.ETMPFAIL] * 3
    made = bucket_map("default", [NodeAddress(port=1)], [[0]], epoch=2, rev=1, this_node=0)
    config = admin.SetClusterConfig(key=b"default", value=made.text, epoch=2, revision=1)
    assert status(config) == Status.SUCCESS
    assert [status(request) for request in requests] == [Status.SUCCESS] * 3


def test_a_value_of_many_reads_arrives_whole(nodes: list[RunningNode]) -> None:
    active, replica = nodes
    active.set("large", b"\xff" * (8 << 20), vbucket=0)
    write(active, 3)
    replica.replicate([0], active)
    until(lambda: same(active, replica, 0), "not equal")
