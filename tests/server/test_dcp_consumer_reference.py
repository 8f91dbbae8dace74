"""Rules of the reference for a node that consumes: what of a producer's messages it refuses, and how."""

from __future__ import annotations

from typing import Any

import pytest

from server.controller import Controller, marker, mutation, until
from server.serverkit import Wire
from tailrace.testing.running import RunningNode
from tailrace.wire import admin, kv
from tailrace.wire.codes import Feature, Status, SystemEventId, VBucketState
from tailrace.wire.dcp import (
    DcpAddStream,
    DcpCloseStream,
    DcpDeletion,
    DcpMutation,
    DcpNoop,
    DcpOsoSnapshot,
    DcpSystemEvent,
)
from tailrace.wire.dcp_replication import (
    CacheTransferRecord,
    DcpAbort,
    DcpCacheTransfer,
    DcpCacheTransferEnd,
    DcpCommit,
    DcpPrepare,
)
from tailrace.wire.fields import join_xattrs
from tailrace.wire.message import Message


def test_a_seqno_before_the_marker_is_refused(replica: RunningNode) -> None:
    with Controller(replica.port) as peer:
        opaque = peer.begin()
        peer.send(marker(opaque, 0, 2), mutation(opaque, 2))
        assert peer.status_of(marker(opaque, 5, 7)) == 0
        assert peer.status_of(mutation(opaque, 4)) == Status.ERANGE
        assert peer.status_of(mutation(opaque, 5)) == 0
        assert peer.status_of(mutation(opaque, 7, b"l")) == 0
    assert replica.high_seqno(0) == 7


def _as_version_2(event: DcpSystemEvent) -> bytes:
    """The event, as if its value were a FlatBuffer: we make none ourselves."""
    data = bytearray(event.encode())
    assert data[36] == 0
    data[36] = 2  # behind the header, the seqno and the event
    return bytes(data)


def test_changes_in_a_form_that_was_not_asked_for_are_malformed(replica: RunningNode) -> None:
    with Controller(replica.port) as peer:
        opaque = peer.begin()
        common: dict[str, Any] = {"vbucket": 0, "opaque": opaque, "by_seqno": 1}
        collection = b"\0" * 7 + b"\1" + b"\0\0\0\0" + b"\0\0\0\x08"
        assert peer.status_of(marker(opaque, 0, 9)) == 0
        wrong: list[Message | bytes] = [
            mutation(opaque, 1, nmeta=1),
            DcpDeletion(key=b"k", rev_seqno=1, nmeta=1, value=b"m", **common),
            DcpSystemEvent(event=SystemEventId.RESERVED, value=collection, **common),
            DcpSystemEvent(event=6, value=collection, **common),
            _as_version_2(DcpSystemEvent(event=SystemEventId.COLLECTION_BEGIN, value=collection, **common)),
            mutation(opaque, 1, b"k" * 251),
        ]
        for message in wrong:
            assert peer.status_of(message) == Status.EINVAL, message
        assert peer.status_of(mutation(opaque, 1, b"k" * 250)) == 0
    assert replica.high_seqno(0) == 1


@pytest.mark.parametrize(
    "key", [b"\x80\0k", b"\xff\xff\xff\xff\xff\1k", b"\0", b"\x08", b"\3k", b"\x08" * 248]
)
def test_keys_that_no_document_can_have_are_malformed(replica: RunningNode, key: bytes) -> None:
    with Controller(replica.port, Feature.COLLECTIONS, Feature.XATTR) as peer:
        opaque = peer.begin()
        assert peer.status_of(marker(opaque, 0, 9)) == 0
        assert peer.status_of(mutation(opaque, 1, key)) == Status.EINVAL
    assert replica.high_seqno(0) == 0


def test_system_xattrs_have_a_limit(replica: RunningNode) -> None:
    with Controller(replica.port, Feature.COLLECTIONS, Feature.XATTR) as peer:
        opaque = peer.begin()
        assert peer.status_of(marker(opaque, 0, 9)) == 0
        for name, status in [("_sys", Status.E2BIG), ("mine", 0)]:
            value = join_xattrs({name: b'"%s"' % (b"x" * (1 << 20))}, b"1")
            large = DcpMutation(
                key=b"\0k", value=value, datatype=4, by_seqno=1, rev_seqno=1, vbucket=0, opaque=opaque
            )
            assert peer.status_of(large) == status


@pytest.mark.parametrize(
    ("message", "status"),
    [
        # before any marker
        (DcpPrepare(key=b"k", by_seqno=1, rev_seqno=1, cas=1), Status.ERANGE),
        (DcpCommit(key=b"k", prepared_seqno=1, commit_seqno=2), Status.ERANGE),
        (DcpAbort(key=b"k", prepared_seqno=1, abort_seqno=2), Status.ERANGE),
        (DcpOsoSnapshot(flags=1), Status.NOT_SUPPORTED),
        (
            DcpCacheTransfer(value=CacheTransferRecord(1, 1, 1, 0, 0, 0, 0, b"\0k", b"v").encode()),
            Status.ENOMEM,
        ),
        (DcpCacheTransferEnd(), 0),
    ],
)
def test_what_only_others_ask_for_must_belong_to_a_stream_too(
    replica: RunningNode, message: Message, status: int
) -> None:
    with Controller(replica.port) as peer:
        opaque = peer.begin()
        message.vbucket = 1
        assert peer.status_of(message) == Status.DCP_STREAM_NOT_FOUND
        message.vbucket, message.opaque = 0, opaque + 1
        assert peer.status_of(message) == Status.OPAQUE_NO_MATCH
        message.opaque = opaque
        assert peer.status_of(message) == status
        frame = message.to_frame()
        frame.extras_length, frame.body = 1, b"\xff"  # of no shape that it has
        frame.key_length = 0
        peer.send(frame.encode(), DcpNoop(opaque=7))
        assert peer.next().status == Status.EINVAL


def test_framing_extras_of_a_consumers_requests(replica: RunningNode) -> None:
    with Controller(replica.port) as peer:
        opaque = peer.begin()
        for framing, status in [
            (b"\x22\0\1", Status.EINVAL),  # a stream id
            (b"\x23\0\0\1", Status.EINVAL),
            (b"\x30", Status.UNKNOWN_FRAME_INFO),
            (b"\x35", Status.EINVAL),
        ]:
            for message in (marker(opaque, 0, 5), DcpAddStream(vbucket=0), DcpCloseStream(vbucket=0)):
                message.framing = framing
                assert peer.status_of(message) == status, (message, framing)
        assert peer.status_of(marker(opaque, 0, 5)) == 0
        peer.hello(Feature.UNORDERED_EXECUTION)
        peer.send(mutation(opaque, 1))
        assert peer.next().status == Status.NOT_SUPPORTED


def test_the_snapshot_that_is_on_disk_in_part_is_told(replica: RunningNode) -> None:
    def told(port: int) -> dict[bytes, bytes]:
        with Wire(port) as wire:
            wire.send(admin.Stat(key=b"vbucket-seqno 0"))
            figures = {}
            while (frame := wire.frame()).key:
                figures[frame.key] = frame.value
            return figures

    with Controller(replica.port) as peer, Wire(replica.port) as other:
        opaque = peer.begin()
        peer.send(marker(opaque, 0, 2), mutation(opaque, 2))
        peer.send(marker(opaque, 3, 9), mutation(opaque, 5, b"l"))
        until(lambda: replica.high_seqno(0) == 5, "the changes did not come")
        other.ok(admin.SeqnoPersistence(vbucket=0, seqno=5))
        figures = told(replica.port)
        assert figures[b"vb_0:last_persisted_seqno"] == b"5"
        assert figures[b"vb_0:last_persisted_snap_start"] == b"2"
        assert figures[b"vb_0:last_persisted_snap_end"] == b"9"
        assert peer.status_of(mutation(opaque, 9, b"m")) == 0
        other.ok(admin.SeqnoPersistence(vbucket=0, seqno=9))
        figures = told(replica.port)
        assert figures[b"vb_0:last_persisted_snap_start"] == figures[b"vb_0:last_persisted_snap_end"] == b"9"


def test_a_live_document_without_a_cas_gets_its_seqno_for_one(replica: RunningNode) -> None:
    with Controller(replica.port) as peer:
        opaque = peer.begin()
        assert peer.status_of(marker(opaque, 0, 2)) == 0
        assert peer.status_of(mutation(opaque, 1, b"none", cas=0)) == 0
        assert peer.status_of(mutation(opaque, 2, b"some", cas=77)) == 0
    replica.set_vbucket_state(0, VBucketState.ACTIVE)
    with Wire(replica.port) as wire:
        assert wire.ok(kv.Get(key=b"none")).cas == 1
        assert wire.ok(kv.Get(key=b"some")).cas == 77
