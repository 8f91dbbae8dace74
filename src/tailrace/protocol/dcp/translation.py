"""Messages of an older dialect, rewritten as DCP."""

from __future__ import annotations

from ...wire.codes import DcpOpcode, MarkerFlag, Status
from ...wire.dcp import DcpFlush, DcpSnapshotMarker, DcpStreamEnd, DcpStreamRequestResponse
from ...wire.message import Message

__all__ = ["DcpTranslation"]


class DcpTranslation:
    """Appends DCP's messages to ``_made``, from which the reader or replica takes them."""

    _made: bytearray

    def _say(self, message: Message) -> None:
        self._made += message.encode()

    def _say_opened(self, opaque: int, log: bytes) -> None:
        self._say_answer(opaque, Status.SUCCESS, log)

    def _say_answer(self, opaque: int, status: int, value: bytes = b"") -> None:
        """Answer a stream request."""
        self._say(
            DcpStreamRequestResponse(
                opcode=DcpOpcode.STREAM_REQUEST, opaque=opaque, status=status, value=value
            )
        )

    def _say_rollback(self, opaque: int, seqno: int) -> None:
        self._say_answer(opaque, Status.ROLLBACK, seqno.to_bytes(8, "big"))

    def _say_marker(self, opaque: int, vbucket: int, start: int, end: int, *, is_disk: bool) -> None:
        flags = int(MarkerFlag.DISK if is_disk else MarkerFlag.MEMORY)
        self._say(DcpSnapshotMarker(start=start, end=end, flags=flags, opaque=opaque, vbucket=vbucket))

    def _say_end(self, opaque: int, vbucket: int, status: int) -> None:
        self._say(DcpStreamEnd(status=status, opaque=opaque, vbucket=vbucket))

    def _say_flush(self, opaque: int, vbucket: int) -> None:
        self._say(DcpFlush(opaque=opaque, vbucket=vbucket))
