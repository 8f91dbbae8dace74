"""A peer of a node that consumes: it opened the connection, adds streams and pushes changes by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from server.serverkit import Wire
from tailrace.wire.codes import DcpOpcode, Status
from tailrace.wire.dcp import (
    DcpAddStream,
    DcpControl,
    DcpMutation,
    DcpNoop,
    DcpOpen,
    DcpSnapshotMarker,
    DcpStreamRequest,
)
from tailrace.wire.fields import encode_failover_log
from tailrace.wire.header import Frame
from tailrace.wire.message import Message, Response

PATIENCE_S = 60.0


def until(check: Callable[[], Any], what: str) -> Any:
    """Wait for something to become true."""
    deadline = time.monotonic() + PATIENCE_S
    while not (answer := check()):
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
    return answer


class Controller(Wire):
    """A peer that opened the node as consumer, and answers what the node asks."""

    def __init__(self, port: int, *features: int, controls: int = Status.SUCCESS) -> None:
        super().__init__(port)
        self.controls: dict[bytes, bytes] = {}
        self.seqnos: list[int] = []  # what the node says that it has
        self._refuse_with = controls
        if features:
            self.hello(*features)
        self.ok(DcpOpen(key=b"controller-%d" % self.socket.getsockname()[1], flags=0))

    def next(self) -> Frame:
        """The next frame that is not a control; controls are answered."""
        while True:
            frame = self.frame()
            if frame.opcode == DcpOpcode.CONTROL and frame.is_request:
                message = DcpControl.decode(frame)
                self.controls[message.key] = message.value
                status = Status.SUCCESS
                if message.key != b"connection_buffer_size":
                    status = Status(self._refuse_with)
                self.send(Response(opcode=frame.opcode, opaque=frame.opaque, status=status))
            elif frame.opcode == DcpOpcode.SEQNO_ACKNOWLEDGED:
                self.seqnos.append(int.from_bytes(frame.extras, "big"))
            elif frame.opcode != DcpOpcode.BUFFER_ACK:
                return frame

    def begin(self, vbucket: int = 0, log: list[tuple[int, int]] | None = None, flags: int = 0) -> int:
        """Add a stream and answer its request; the stream's opaque."""
        self.send(DcpAddStream(vbucket=vbucket, flags=flags, opaque=99))
        request = DcpStreamRequest.decode(self.next())
        assert request.flags == flags
        self.send(
            Response(opcode=DcpOpcode.STREAM_REQUEST, opaque=request.opaque, extras=b"", status=0).encode()[
                :8
            ]
            + _log_body(request.opaque, log or [(0xAAAA, 0)])
        )
        added = self.next()
        assert (added.opcode, added.opaque, added.status) == (DcpOpcode.ADD_STREAM, 99, 0)
        assert added.extras == request.opaque.to_bytes(4, "big")
        return request.opaque

    def status_of(self, message: Message | bytes) -> int:
        """What the node answers to a message of a stream; after a good one, it answers only the no-op that
        follows.
        """
        self.send(message, DcpNoop(opaque=7))
        frame = self.next()
        if frame.opcode == DcpOpcode.NOOP:
            return 0
        assert self.next().opcode == DcpOpcode.NOOP
        return frame.status


def _log_body(opaque: int, log: list[tuple[int, int]]) -> bytes:
    value = encode_failover_log(log)
    return len(value).to_bytes(4, "big") + opaque.to_bytes(4, "big") + bytes(8) + value


def mutation(opaque: int, seqno: int, key: bytes = b"k", cas: int = 77, **fields: Any) -> DcpMutation:
    return DcpMutation(
        key=key, value=b"v", by_seqno=seqno, rev_seqno=3, cas=cas, vbucket=0, opaque=opaque, **fields
    )


def marker(opaque: int, start: int, end: int, flags: int = 1) -> DcpSnapshotMarker:
    return DcpSnapshotMarker(start=start, end=end, flags=flags, vbucket=0, opaque=opaque)
