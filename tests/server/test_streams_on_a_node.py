"""Change streams through a whole node: binding, order of answers, names, rewinds. DCP itself is tested with
its producer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import tailrace.testing
from server.controller import until as wait_until
from server.serverkit import Wire
from tailrace.testing.running import RunningNode
from tailrace.wire import admin, dcp, kv
from tailrace.wire.codes import (
    CHANGE_STREAM_OPCODES,
    AddStreamFlag,
    DcpOpcode,
    Feature,
    Magic,
    Op,
    Status,
    StreamEndStatus,
    VBucketState,
)
from tailrace.wire.dcp import DcpStreamRequest
from tailrace.wire.header import HEADER, Frame
from tailrace.wire.message import Message

ALL = (1 << 64) - 1


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with tailrace.testing.node(vbuckets=4) as running:
        yield running


def opened(node: RunningNode, name: bytes = b"test") -> Wire:
    wire = Wire(node.port)
    wire.ok(dcp.DcpOpen(key=name, flags=1))
    return wire


def stream_request(
    vbucket: int = 0,
    opaque: int = 7,
    *,
    start: int = 0,
    uuid: int = 0,
    snapshot: tuple[int, int] = (0, 0),
    end: int = ALL,
) -> DcpStreamRequest:
    return dcp.DcpStreamRequest(
        vbucket=vbucket,
        opaque=opaque,
        start_seqno=start,
        end_seqno=end,
        vb_uuid=uuid,
        snapshot_start=snapshot[0],
        snapshot_end=snapshot[1],
    )


def until(wire: Wire, message_class: type[Message]) -> list[Any]:
    """What comes, up to and including the first of a kind."""
    messages = []
    while not messages or not isinstance(messages[-1], message_class):
        messages.append(wire.receive())
    return messages


def test_changes_come_as_they_are_made(node: RunningNode) -> None:
    node.set("a", 1, vbucket=0)
    with opened(node) as wire:
        wire.send(stream_request())
        first = until(wire, dcp.DcpMutation)
        assert first[-1].key in (b"a", b"\0a")
        node.set("b", 2, vbucket=0)
        assert until(wire, dcp.DcpMutation)[-1].value == b"2"
        with Wire(node.port) as other:
            other.ok(kv.Delete(key=b"a"))
        until(wire, dcp.DcpDeletion)


def test_key_value_commands_work_on_a_bound_connection_in_order(node: RunningNode) -> None:
    with opened(node) as wire:
        wire.send(
            stream_request(vbucket=1, opaque=1),
            kv.Set(key=b"a", value=b"1", opaque=2),
            dcp.DcpGetFailoverLog(vbucket=0, opaque=3),
            admin.GetAllVbSeqnos(opaque=4),
            stream_request(vbucket=9, opaque=5),
            kv.Get(key=b"a", opaque=6),
        )
        assert [wire.frame().opaque for _ in range(6)] == [1, 2, 3, 4, 5, 6]


def test_an_older_connection_of_the_name_is_closed(node: RunningNode) -> None:
    with opened(node, b"same") as first, opened(node, b"other") as other, opened(node, b"same") as second:
        assert first.is_closed()
        second.ok(admin.Noop())
        other.ok(admin.Noop())


def test_a_rewind_ends_the_stream_and_the_next_request_rolls_back(node: RunningNode) -> None:
    for at in range(5):
        node.set("k", at, vbucket=0)
    with opened(node) as wire:
        wire.send(stream_request())
        uuid = node.failover_log(0)[0][0]
        until(wire, dcp.DcpMutation)
        node.rewind(vbucket=0, to_seqno=2)
        end = until(wire, dcp.DcpStreamEnd)[-1]
        assert end.status == StreamEndStatus.STATE_CHANGED
        wire.send(stream_request(start=5, uuid=uuid, snapshot=(5, 5)))
        answer = wire.frame()
        assert answer.status == Status.ROLLBACK
        assert int.from_bytes(answer.value, "big") == 2


def test_a_flush_ends_the_stream(node: RunningNode) -> None:
    node.set("k", 1, vbucket=0)
    with opened(node) as wire, Wire(node.port) as other:
        wire.send(stream_request())
        until(wire, dcp.DcpMutation)
        other.ok(admin.Flush())
        until(wire, dcp.DcpStreamEnd)


def test_a_dead_vbucket_ends_the_stream(node: RunningNode) -> None:
    with opened(node) as wire, Wire(node.port) as other:
        wire.send(stream_request())
        wire.frame()
        other.ok(admin.SetVBucket(vbucket=0, state=4))
        until(wire, dcp.DcpStreamEnd)
        other.ok(admin.DelVBucket(vbucket=0))


def test_takeover_of_a_vbucket(node: RunningNode) -> None:
    """Writers are redirected before the reader is active, and that is on disk by then."""
    node.set("a", 1, vbucket=2)
    with opened(node) as wire, Wire(node.port) as writer:
        writer.hello(Feature.CLUSTERMAP_CHANGE_NOTIFICATION, Feature.DUPLEX, Feature.JSON)
        writer.ok(admin.SelectBucket(key=b"default"))
        request = stream_request(vbucket=2)
        request.flags = AddStreamFlag.TAKE_OVER
        wire.send(request)
        until(wire, dcp.DcpMutation)
        wire.send(response(DcpOpcode.SNAPSHOT_MARKER))
        assert until(wire, dcp.DcpSetVBucketState)[-1].state == VBucketState.PENDING
        writer.ok(kv.Set(vbucket=2, key=b"meanwhile", value=b"2"))
        wire.send(response(DcpOpcode.SET_VBUCKET_STATE))
        assert until(wire, dcp.DcpMutation)[-1].value == b"2"
        notification = writer.frame()
        assert notification.magic == Magic.SERVER_REQUEST
        owners = json.loads(notification.value)["vBucketServerMap"]["vBucketMap"]
        assert owners[2] == [-1] and owners[1] == [0]
        assert writer.refused(kv.Set(vbucket=2, key=b"too late", value=b"3")) == Status.NOT_MY_VBUCKET
        wire.send(response(DcpOpcode.SNAPSHOT_MARKER))
        assert until(wire, dcp.DcpSetVBucketState)[-1].state == VBucketState.ACTIVE
        wire.send(response(DcpOpcode.SET_VBUCKET_STATE))
        assert until(wire, dcp.DcpStreamEnd)[-1].status == StreamEndStatus.OK
        assert node.failover_log(2)


@pytest.mark.parametrize("is_completed", [True, False])
def test_writes_wait_for_a_takeover_that_takes_too_long(is_completed: bool) -> None:
    """Until it is complete, or its connection is gone; other vbuckets and reads go on."""
    settings = {"takeover_max_time": 0.1}
    with tailrace.testing.node(vbuckets=4, settings=settings) as node, Wire(node.port) as writer:
        node.set("a", 1, vbucket=2)

        def written(vbucket: int = 2) -> int:
            status: int = writer.call(kv.Set(vbucket=vbucket, key=b"k", value=b"v")).status
            return status

        with opened(node) as wire:
            request = stream_request(vbucket=2)
            request.flags = AddStreamFlag.TAKE_OVER
            wire.send(request)
            until(wire, dcp.DcpMutation)  # its marker is not acknowledged, so it waits
            while (status := written()) == Status.SUCCESS:
                pass
            assert status == Status.ETMPFAIL
            assert writer.refused(kv.Delete(vbucket=2, key=b"a")) == Status.ETMPFAIL
            assert writer.ok(kv.Get(vbucket=2, key=b"a")).value == b"1"
            assert written(vbucket=1) == Status.SUCCESS
            if is_completed:
                wire.send(response(DcpOpcode.SNAPSHOT_MARKER))
                while not isinstance(message := wire.receive(), dcp.DcpStreamEnd):
                    if message.OPCODE in (DcpOpcode.SNAPSHOT_MARKER, DcpOpcode.SET_VBUCKET_STATE):
                        wire.send(response(message.OPCODE))
                assert written() == Status.NOT_MY_VBUCKET
                node.set_vbucket_state(2, VBucketState.ACTIVE)
                assert written() == Status.SUCCESS
        while (status := written()) == Status.ETMPFAIL:
            pass
        assert status == Status.SUCCESS


def response(opcode: int, opaque: int = 7) -> bytes:
    return Frame(Magic.RESPONSE, opcode, opaque=opaque).encode()


def test_two_readers_of_a_vbucket(node: RunningNode) -> None:
    with opened(node, b"one") as first, opened(node, b"two") as two:
        for wire in (first, two):
            wire.send(stream_request())
            wire.frame()
        node.set("a", 1, vbucket=0)
        for wire in (first, two):
            until(wire, dcp.DcpMutation)
        first.close()
        node.set("a", 2, vbucket=0)
        assert until(two, dcp.DcpMutation)[-1].value == b"2"


def test_statistics_know_the_reader(node: RunningNode) -> None:
    with opened(node, b"reader") as wire, Wire(node.port) as other:
        wire.send(stream_request())
        wire.frame()
        other.send(admin.Stat(key=b"dcp"))
        names = set()
        while (frame := other.frame()).key:
            names.add(frame.key.decode())
        assert "ep_dcp_count" in names
        assert any(name.startswith("eq_dcpq:reader:") for name in names)


@pytest.mark.parametrize("opcode", [number for number in CHANGE_STREAM_OPCODES if number not in (0x50, 0x51)])
def test_dcp_before_open_is_refused_and_binds_nothing(node: RunningNode, opcode: int) -> None:
    with Wire(node.port) as wire:
        wire.send(HEADER.pack(0x80, opcode, 0, 0, 0, 0, 0, 5, 0))
        assert wire.frame().status == Status.EINVAL
        wire.ok(kv.Set(key=b"a", value=b"1"))
        wire.ok(dcp.DcpOpen(key=b"test", flags=1))


def test_a_refused_open_binds_nothing(node: RunningNode) -> None:
    with Wire(node.port) as wire:
        wire.send(HEADER.pack(0x80, DcpOpcode.OPEN, 1, 8, 0, 0, 9, 0, 0) + b"\0\0\0\0\0\0\0\x81n")
        assert wire.frame().status == Status.EINVAL
        wire.ok(admin.SelectBucket(key=b"default"))
        wire.ok(dcp.DcpOpen(key=b"test", flags=1))
        assert wire.refused(admin.SelectBucket(key=b"default")) == Status.NOT_SUPPORTED


def test_a_packet_of_another_dialect_closes(node: RunningNode) -> None:
    with opened(node) as wire:
        wire.send(HEADER.pack(0x80, 0x40, 1, 4, 0, 0, 5, 5, 0) + bytes(4) + b"n")  # TAP connect
        frame = wire.frame()
        assert (frame.opcode, frame.status) == (0x40, Status.EINVAL)
        assert wire.is_closed()
    with opened(node) as wire:
        wire.send(HEADER.pack(0x80, 0x50, 1, 40, 0, 0, 41, 5, 0) + bytes(40) + b"n")  # UPR draft B
        assert wire.frame().status == Status.EINVAL
        assert wire.is_closed()


def test_a_set_with_strange_extras_is_no_set(node: RunningNode) -> None:
    with Wire(node.port) as wire:
        wire.send(HEADER.pack(0x80, Op.SET, 0, 0, 0, 0, 0, 5, 0))
        assert wire.frame().status == Status.EINVAL
        wire.send(HEADER.pack(0x80, Op.SET, 1, 32, 0, 0, 33, 5, 0) + bytes(33))
        assert wire.frame().status == Status.EINVAL
        wire.ok(admin.Noop())


def test_unordered_execution_and_dcp_don_t_go_together(node: RunningNode) -> None:
    with Wire(node.port) as wire:
        wire.hello(Feature.UNORDERED_EXECUTION)
        assert wire.refused(dcp.DcpOpen(key=b"test", flags=1)) == Status.NOT_SUPPORTED


def test_buffer_acks_are_never_answered(node: RunningNode) -> None:
    with opened(node) as wire:
        wire.ok(dcp.DcpControl(key=b"connection_buffer_size", value=b"100000"))
        wire.send(dcp.DcpBufferAck(acked_bytes=0, opaque=1), admin.Noop(opaque=2))
        frame = wire.frame()
        assert (frame.opcode, frame.opaque) == (Op.NOOP, 2)


def test_a_large_backfill_and_a_slow_reader(node: RunningNode) -> None:
    node.set_many({f"k{at}": "x" * 1000 for at in range(3_000)}, vbucket=0)
    with opened(node) as wire, Wire(node.port) as other:
        wire.send(stream_request(end=3_000))
        for _ in range(200):  # the stream fills the sockets and waits; others don't
            other.ok(admin.Noop())
        messages = until(wire, dcp.DcpStreamEnd)
        assert sum(isinstance(message, dcp.DcpMutation) for message in messages) == 3_000


def test_a_backfill_that_nobody_reads_ends_when_the_disk_is_short() -> None:
    """The files that it reads could not be removed; while the disk has room, it may take its time."""
    settings = {"slow_backfill_timeout": 0.05}
    with tailrace.testing.node(vbuckets=1, settings=settings) as node, opened(node) as wire:
        node.set_many({f"k{at}": "x" * 1000 for at in range(20)}, vbucket=0)
        node.persist()
        used_shares = [0.95, 0.5]  # the last one first
        node.call(lambda inner: setattr(inner, "disk_used_share", used_shares.pop))
        wire.ok(dcp.DcpControl(key=b"connection_buffer_size", value=b"1024"))
        request = stream_request(end=20)
        request.flags = AddStreamFlag.DISK_ONLY
        wire.send(request)
        wait_until(lambda: not used_shares, "nobody looked at the disk twice")
        wire.send(dcp.DcpBufferAck(acked_bytes=1 << 20))
        messages = until(wire, dcp.DcpStreamEnd)
        assert messages[-1].status == StreamEndStatus.SLOW
        assert 0 < sum(isinstance(message, dcp.DcpMutation) for message in messages) < 20
