"""Rules of the reference for a connection that is bound to DCP: what may come on it, and in which order it is
answered.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import tailrace.testing
from server.serverkit import Wire
from tailrace.testing.running import RunningNode
from tailrace.wire import admin, dcp, kv
from tailrace.wire.codes import Datatype, Feature, Op, Status
from tailrace.wire.dcp import DcpControl
from tailrace.wire.header import Frame


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    # what waits for the disk waits for the test, however slow the machine is
    with tailrace.testing.node(vbuckets=4, settings={"persist_timeout": "1h"}) as running:
        yield running


def opened(node: RunningNode, name: bytes = b"test", *features: int, flags: int = 1) -> Wire:
    wire = Wire(node.port)
    wire.hello(*features)
    wire.ok(dcp.DcpOpen(key=name, flags=flags))
    return wire


def control(key: bytes = b"enable_noop", value: bytes = b"true", **header: Any) -> DcpControl:
    return dcp.DcpControl(key=key, value=value, **header)


# opening


def test_a_producer_and_a_consumer_may_have_the_same_name(node: RunningNode) -> None:
    with opened(node, b"same") as producer, opened(node, b"same", flags=0) as consumer:
        producer.ok(admin.Noop())
        with opened(node, b"same") as other:
            assert producer.is_closed()
            other.ok(admin.Noop())
            consumer.send(dcp.DcpAddStream(vbucket=0, opaque=4))
            while (frame := consumer.frame()).opaque != 4:
                assert frame.opcode == dcp.DcpControl.OPCODE
            assert frame.status == Status.NOT_MY_VBUCKET  # alive: it is active here


def test_the_value_of_a_consumers_open_need_not_say_anything(node: RunningNode) -> None:
    with Wire(node.port) as wire:
        wire.ok(dcp.DcpOpen(key=b"empty", flags=0, value=b"{}", datatype=Datatype.JSON))


def test_unordered_execution_can_not_be_had_later_either(node: RunningNode) -> None:
    with opened(node, b"unordered", Feature.XERROR) as wire:
        wire.ok(control())
        wire.hello(Feature.UNORDERED_EXECUTION)
        for message in (control(), dcp.DcpStreamRequest(vbucket=0), dcp.DcpGetFailoverLog(vbucket=0)):
            assert wire.refused(message) == Status.NOT_SUPPORTED
        wire.hello()
        wire.ok(control())


# requests


def test_framing_extras_of_a_producers_requests(node: RunningNode) -> None:
    with opened(node, b"framing") as wire:
        for framing, status in [
            (b"\x30", Status.UNKNOWN_FRAME_INFO),
            (b"\xf0\x07", Status.UNKNOWN_FRAME_INFO),
            (b"\x35", Status.EINVAL),
            (b"\x21\1", Status.EINVAL),
        ]:
            assert wire.refused(control(framing=framing)) == status
            assert wire.refused(dcp.DcpGetFailoverLog(vbucket=0, framing=framing)) == status
        wire.ok(control(framing=b"\0"))  # a barrier
    with opened(node, b"framing", Feature.XERROR) as wire:
        assert wire.refused(dcp.DcpCloseStream(vbucket=0, framing=b"\x22\0\1")) == Status.DCP_STREAMID_INVALID


@pytest.mark.parametrize("features", [(), (Feature.XERROR,)])
def test_peers_without_extended_errors_do_not_see_them(features: tuple[int, ...]) -> None:
    """Some have an older status instead; for a stream id that makes no sense there is none: a disconnect."""
    without_default = {"uid": "1", "scopes": [{"name": "_default", "uid": "0", "collections": []}]}
    with tailrace.testing.node(vbuckets=4) as node:
        with Wire(node.port) as wire:
            wire.hello(Feature.COLLECTIONS, Feature.XERROR)
            wire.ok(admin.SetCollectionsManifest(value=json.dumps(without_default).encode()))
        with opened(node, b"errors", *features) as wire:
            request = dcp.DcpStreamRequest(vbucket=0)
            assert wire.refused(request) == (Status.UNKNOWN_COLLECTION if features else Status.EINVAL)
            close = dcp.DcpCloseStream(vbucket=0, framing=b"\x22\0\1")
            if features:
                assert wire.refused(close) == Status.DCP_STREAMID_INVALID
            else:
                wire.send(control(opaque=7), close)
                assert wire.frame().opaque == 7
                assert wire.is_closed()


def test_a_value_is_refused_without_collections_whatever_the_vbucket(node: RunningNode) -> None:
    with opened(node, b"value") as wire:
        for vbucket in (0, 900):
            request = dcp.DcpStreamRequest(vbucket=vbucket, value=b'{"uid":"0"}')
            assert wire.refused(request) == Status.EINVAL


@pytest.mark.parametrize(
    "wishes",
    ["1", "[]", '{"free_memory":-1}', '{"free_memory":"1"}', '{"free_memory":true}', '{"all_keys":1}'],
)
def test_wishes_for_a_cache_transfer_must_make_sense(node: RunningNode, wishes: str) -> None:
    with opened(node, b"cache", Feature.COLLECTIONS) as wire:
        wire.ok(control())
        request = dcp.DcpStreamRequest(vbucket=0, end_seqno=0, value=b'{"cts":%s}' % wishes.encode())
        assert wire.refused(request) == Status.EINVAL
        request.value = b'{"cts":{"free_memory":1,"all_keys":true,"more":0}}'
        wire.ok(request)


# beside the streams


def test_a_malformed_set_does_not_end_the_connection(node: RunningNode) -> None:
    with opened(node, b"set") as wire:
        for extras, byte_5 in [(b"", 0), (b"", 1), (bytes(32), 0), (bytes(40), 2)]:
            frame = Frame(0x80, Op.SET, 1, len(extras), byte_5, 0, 9, body=extras + b"kv")
            wire.send(frame.encode())
            answer = wire.frame()
            assert (answer.opcode, answer.opaque, answer.status) == (Op.SET, 9, Status.EINVAL)
        wire.ok(control())
        wire.send(Frame(0x80, Op.SET, 0, 32, 1, 0, 9, body=bytes(32)).encode())  # draft A's stream request
        assert wire.frame().status == Status.EINVAL
        assert wire.is_closed()


def test_an_unknown_command_is_answered_in_its_turn(node: RunningNode) -> None:
    with opened(node, b"turn") as wire:
        unknown = Frame(0x80, 0xF0, opaque=2).encode()
        wire.send(control(opaque=1), unknown, control(opaque=3), admin.Noop(opaque=4))
        assert [wire.frame().opaque for _ in range(4)] == [1, 2, 3, 4]
        # what was answered before is not lost by what ends the connection
        wire.send(control(opaque=5), Frame(0x80, 0x40, opaque=6).encode())
        assert [(frame.opaque, frame.status) for frame in (wire.frame(), wire.frame())] == [
            (5, 0),
            (6, Status.EINVAL),
        ]
        assert wire.is_closed()


def test_a_command_that_takes_time_keeps_its_place_before_the_streams_answers(node: RunningNode) -> None:
    with opened(node, b"place") as wire, Wire(node.port) as other:
        other.ok(admin.StopPersistence())
        written = other.ok(kv.Set(key=b"slow", value=b"1"))
        assert written.cas
        seqno = other.ok(admin.GetAllVbSeqnos()).seqnos[0]
        wire.send(admin.SeqnoPersistence(seqno=seqno, opaque=1), control(opaque=2), admin.Noop(opaque=3))
        other.ok(admin.Noop())
        other.ok(admin.StartPersistence())
        assert [wire.frame().opaque for _ in range(3)] == [1, 2, 3]


def test_acks_do_not_wait_behind_a_command_that_takes_time(node: RunningNode) -> None:
    """The stream goes on meanwhile; all answers come in their order."""
    count = 20
    for number in range(count):
        node.set(f"acked-{number}", "v" * 100, vbucket=1)
    with opened(node, b"acks") as wire, Wire(node.port) as other:
        wire.ok(control(b"connection_buffer_size", b"200"))
        other.ok(admin.StopPersistence())
        other.ok(kv.Set(key=b"slow", value=b"1"))
        seqno = other.ok(admin.GetAllVbSeqnos()).seqnos[0]
        wire.ok(dcp.DcpStreamRequest(vbucket=1))
        wire.send(admin.SeqnoPersistence(seqno=seqno, opaque=1), control(opaque=2), admin.Noop(opaque=3))
        # one that is not an ack is answered, in its turn
        wire.send(Frame(0x80, dcp.DcpBufferAck.OPCODE, opaque=4).encode(), admin.Noop(opaque=5))
        seen = 0
        while seen < count:
            frame = wire.frame()
            assert frame.magic == 0x80
            seen += frame.opcode == dcp.DcpMutation.OPCODE
            wire.send(dcp.DcpBufferAck(acked_bytes=frame.size))
        other.ok(admin.StartPersistence())
        assert [(frame.opaque, frame.status) for frame in (wire.frame() for _ in range(5))] == [
            (1, 0),
            (2, 0),
            (3, 0),
            (4, Status.EINVAL),
            (5, 0),
        ]


def test_answers_to_no_ops_do_not_wait_behind_a_command_that_takes_time(node: RunningNode) -> None:
    with opened(node, b"alive") as wire, Wire(node.port) as other:
        wire.ok(control(b"set_noop_interval", b"0.1"))
        other.ok(admin.StopPersistence())
        other.ok(kv.Set(key=b"slow", value=b"1"))
        seqno = other.ok(admin.GetAllVbSeqnos()).seqnos[0]
        wire.send(control(opaque=1), admin.SeqnoPersistence(seqno=seqno, opaque=2), admin.Noop(opaque=3))
        assert wire.frame().opaque == 1
        for _ in range(3):  # the next one comes when the last one was answered
            frame = wire.frame()
            assert frame.opcode == dcp.DcpNoop.OPCODE
            wire.send(Frame(0x81, frame.opcode, opaque=frame.opaque).encode())
        other.ok(admin.StartPersistence())
        answers = (frame.opaque for frame in iter(wire.frame, None) if frame.magic == 0x81)
        assert [next(answers), next(answers)] == [2, 3]


def test_many_requests_behind_a_command_that_takes_time(node: RunningNode) -> None:
    """There are more than the node keeps: it reads the rest when there is room again."""
    count = 60_000
    with opened(node, b"many") as wire, Wire(node.port) as other:
        other.ok(admin.StopPersistence())
        other.ok(kv.Set(key=b"slow", value=b"1"))
        seqno = other.ok(admin.GetAllVbSeqnos()).seqnos[0]
        many = b"".join(admin.Noop(opaque=number).encode() for number in range(2, count))
        wire.send(admin.SeqnoPersistence(seqno=seqno, opaque=1))
        sender = threading.Thread(target=wire.send, args=(many,))
        sender.start()
        other.ok(admin.StartPersistence())
        assert [wire.frame().opaque for _ in range(1, count)] == list(range(1, count))
        sender.join()


def test_a_no_op_is_answered_beside_a_command_that_takes_time(node: RunningNode) -> None:
    """A peer that sends it to a consuming node wants to know whether the node is there."""
    with opened(node, b"no-ops", flags=0) as wire, Wire(node.port) as other:
        other.ok(admin.StopPersistence())
        other.ok(kv.Set(key=b"slow", value=b"1"))
        seqno = other.ok(admin.GetAllVbSeqnos()).seqnos[0]
        wire.send(admin.SeqnoPersistence(seqno=seqno, opaque=1), admin.Noop(opaque=2))
        wire.send(dcp.DcpNoop(opaque=3))
        answers = (frame for frame in iter(wire.frame, None) if frame.opcode != dcp.DcpControl.OPCODE)
        assert next(answers).opaque == 3
        other.ok(admin.StartPersistence())
        assert [next(answers).opaque, next(answers).opaque] == [1, 2]


def test_controls_are_for_streams_that_are_asked_for_later(node: RunningNode) -> None:
    """With sync replication a marker has another layout."""

    def write_and_read(vbucket: int, key: str) -> int:
        node.set(key, 1, vbucket=vbucket)
        while (frame := wire.frame()).opcode != dcp.DcpSnapshotMarker.OPCODE:
            pass
        assert frame.vbucket == vbucket
        while wire.frame().opcode != dcp.DcpMutation.OPCODE:
            pass
        return len(frame.extras)

    with opened(node, b"later") as wire:
        wire.ok(dcp.DcpStreamRequest(vbucket=2))
        assert write_and_read(2, "first") == 20
        wire.ok(control(b"enable_sync_writes"))
        wire.ok(control(b"consumer_name", b"me"))
        assert write_and_read(2, "second") == 20
        wire.ok(dcp.DcpStreamRequest(vbucket=3))
        assert write_and_read(3, "third") == 1
