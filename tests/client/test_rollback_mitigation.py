"""What is not on the server's disk yet is held back; what never gets there is never shown."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import pytest

from client.fake_server import FakeServer, accepted, marker, mutation
from tailrace import Mutation, Rollback
from tailrace.wire.admin import ObserveSeqnoResponse
from tailrace.wire.codes import DcpOpcode, Op, Status
from tailrace.wire.header import Frame
from tailrace.wire.message import Response

LOST, NEW = 0x1111, 0x2222


def observed(frame: Frame, *, persisted: int) -> bytes:
    """On the new branch it says how far the disk is; the lost one has ended at 0."""
    asked = int.from_bytes(frame.value, "big")
    numbers = struct.pack(">HQQQ", frame.vbucket, NEW, persisted, 2)
    value = b"\0" + numbers if asked == NEW else b"\1" + numbers + struct.pack(">QQ", asked, 0)
    return ObserveSeqnoResponse(opcode=Op.OBSERVE_SEQNO, opaque=frame.opaque, value=value).encode()


def gone(frame: Frame) -> bytes:
    """The server does not know the lost branch at all."""
    if int.from_bytes(frame.value, "big") == NEW:
        return observed(frame, persisted=2)
    made = Response(opcode=Op.OBSERVE_SEQNO, opaque=frame.opaque, status=Status.KEY_ENOENT)
    return made.encode()


@pytest.mark.parametrize("answer", [lambda frame: observed(frame, persisted=2), gone])
def test_a_branch_that_was_left_is_taken_back(connect: Any, answer: Any) -> None:
    """The server failed over while changes were held: they are forgotten, and read again on its branch."""

    def stream(connection: Any, request: Any) -> None:
        connection.server.asked.append(request)
        if len(connection.server.asked) == 1:
            lost = [mutation(request, seqno, key=b"\0lost-%d" % seqno) for seqno in (1, 2, 3)]
            connection.send(accepted(request, [(LOST, 0)]), marker(request, 1, 3), *lost)
        else:
            new = [mutation(request, seqno, key=b"\0new-%d" % seqno) for seqno in (1, 2)]
            connection.send(accepted(request, [(NEW, 0)]), marker(request, 1, 2), *new)

    with FakeServer(stream) as server:
        server.answers[Op.OBSERVE_SEQNO] = lambda _, frame: answer(frame)
        source = connect(server.url, rollback_mitigation=True, retry_for_s=60)
        changes = source.changes()
        seen = list(itertools.takewhile(lambda event: getattr(event, "key", b"") != b"new-2", changes))
        assert [event.key for event in seen if isinstance(event, Mutation)] == [b"new-1"]
        assert not [event for event in seen if isinstance(event, Rollback)], "nothing of it was ever shown"
        assert [request.start_seqno for request in server.asked] == [0, 0]
        assert DcpOpcode.CLOSE_STREAM in [request.opcode for request in server.requests]
        assert source.positions()[0].vb_uuid == NEW
