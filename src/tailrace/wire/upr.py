"""UPR draft A (15 messages in 5 opcodes, the subtype in byte 5) and draft B (11 opcodes).

Where the drafts contradict themselves, what is sent and what is accepted follows the errata table of
`docs/dialects.md`; the ids in the comments (A1, B5 ...) are from that table.
"""

from __future__ import annotations

import struct
from typing import Any, ClassVar

from ..errors import MalformedMessage
from .codes import (
    Magic,
    Status,
    UprAMessageType,
    UprAOpcode,
    UprARequestType,
    UprAResponseType,
    UprAStreamEnd,
    UprBOpcode,
    UprBStreamEnd,
    UprBVBucketState,
)
from .dcp import DcpFailoverLogResponse
from .fields import decode_failover_log
from .header import Frame
from .layout import Layout, layout
from .message import DOCUMENT, Direction, Message, Part, Response, message

__all__ = [
    "UPR_A_MESSAGES",
    "UPR_B_MESSAGES",
    "UprADeletion",
    "UprAExpiration",
    "UprAFailoverLog",
    "UprAFailoverLogRequest",
    "UprAFlush",
    "UprAMutation",
    "UprANotMyVBucket",
    "UprAOk",
    "UprARollback",
    "UprASnapshotEnd",
    "UprASnapshotStart",
    "UprAStreamBegin",
    "UprAStreamEndOk",
    "UprAStreamEndStateChanged",
    "UprAStreamRequest",
    "UprBDeletion",
    "UprBExpiration",
    "UprBFailoverLogRequest",
    "UprBFlush",
    "UprBMutation",
    "UprBSetVBucketState",
    "UprBSnapshotEnd",
    "UprBSnapshotStart",
    "UprBStreamEndMessage",
    "UprBStreamRequest",
    "UprBStreamRequestResponse",
    "UprBStreamStart",
]

_SEQNO = struct.Struct(">Q")
_SKIPPED = 8
"""Draft A announces 8 bytes more than it draws, probably the CAS; they are skipped (A1, A2, A10 to A13)."""

_RESUME = layout("""
    Q start_seqno  the last seqno that the reader has
    Q end_seqno    where the stream may end; 2^64-1 is never
    Q vb_uuid      the branch of history that the reader is on
    Q high_seqno   the high seqno when that branch was made
""")
_CHANGE = layout("""
    Q by_seqno   position of this change in its vbucket
    Q rev_seqno  how many times the document has changed
""")
_ITEM = _CHANGE + layout("""
    I flags      chosen by the writer, opaque to us
    I expiry     unix seconds; 0 is never
    I lock_time  seconds that the document stays locked
""")


# draft A


@message
class _UprA(Message):
    """Draft A: byte 5 is the subtype, bytes 6-7 the vbucket (in answers too), opaque a request id.

    Everything that the producer sends has the magic of a response; 0x80 is tolerated (A20).
    """

    TYPE: ClassVar[int] = 0
    MAGIC = Magic.RESPONSE
    DIRECTION = Direction.TO_RECEIVER
    REPLY = "never"

    @classmethod
    def _header_fields(cls, frame: Frame) -> dict[str, Any]:
        header = super(_UprA, cls)._header_fields(frame)
        del header["datatype"]
        return header

    def _byte_5(self) -> int:
        return self.TYPE


@message
class UprAStreamRequest(_UprA):
    """Asks for the changes of one vbucket; the key is an optional group id."""

    OPCODE = UprAOpcode.REQUEST
    TYPE = UprARequestType.STREAM_REQUEST
    MAGIC = Magic.REQUEST
    DIRECTION = Direction.TO_PRODUCER
    REPLY = "always"
    LAYOUTS = (_RESUME,)
    KEY = Part.OPTIONAL

    start_seqno: int = 0
    end_seqno: int = 0xFFFF_FFFF_FFFF_FFFF
    vb_uuid: int = 0
    high_seqno: int = 0

    @classmethod
    def _unpack_extras(cls, extras: bytes) -> dict[str, Any]:
        return super(UprAStreamRequest, cls)._unpack_extras(_without_skipped(extras, _RESUME))


@message
class UprAFailoverLogRequest(_UprA):
    """Asks for the failover log of one vbucket."""

    OPCODE = UprAOpcode.REQUEST
    TYPE = UprARequestType.FAILOVER_LOG_REQUEST
    MAGIC = Magic.REQUEST
    DIRECTION = Direction.TO_PRODUCER
    REPLY = "always"


@message
class UprAOk(_UprA):
    """The stream will begin."""

    OPCODE = UprAOpcode.RESPONSE
    TYPE = UprAResponseType.OK


@message
class UprANotMyVBucket(_UprA):
    """The vbucket is not here: type 2 with an empty body (A7)."""

    OPCODE = UprAOpcode.RESPONSE
    TYPE = UprAResponseType.NOT_MY_VBUCKET


@message
class UprAFailoverLog(_UprA):
    """The failover log: type 2 with a body of 16 bytes an entry (A7); type 1 with a body is accepted too."""

    OPCODE = UprAOpcode.RESPONSE
    TYPE = UprAResponseType.NOT_MY_VBUCKET
    VALUE = Part.REQUIRED

    @property
    def failover_log(self) -> list[tuple[int, int]]:
        """The entries in the order in which they came."""
        return decode_failover_log(self.value)

    def check_fields(self) -> None:
        decode_failover_log(self.value)


@message
class UprARollback(_UprA):
    """The reader must first go back to a seqno. It is the value; the extras are accepted too (A4)."""

    OPCODE = UprAOpcode.RESPONSE
    TYPE = UprAResponseType.ROLLBACK
    VALUE = Part.REQUIRED

    @classmethod
    def _body_fields(cls, frame: Frame) -> dict[str, Any]:
        if frame.key_length:
            raise MalformedMessage("upr a rollback: it must not have a key")
        return {"value": frame.extras + frame.value}

    @property
    def rollback_seqno(self) -> int:
        """Where to go back to."""
        return _rollback_seqno("upr a rollback", self.value)

    def check_fields(self) -> None:
        _ = self.rollback_seqno


@message
class UprAStreamBegin(_UprA):
    """The stream begins."""

    OPCODE = UprAOpcode.STREAM_BEGIN


@message
class UprASnapshotStart(_UprA):
    """A snapshot begins."""

    OPCODE = UprAOpcode.STREAM_MESSAGE
    TYPE = UprAMessageType.SNAPSHOT_START


@message
class UprASnapshotEnd(_UprA):
    """The snapshot is complete: only now is the state consistent."""

    OPCODE = UprAOpcode.STREAM_MESSAGE
    TYPE = UprAMessageType.SNAPSHOT_END


@message
class _UprAItem(_UprA):
    OPCODE = UprAOpcode.STREAM_MESSAGE
    LAYOUTS = (_ITEM,)
    KEY = Part.REQUIRED

    by_seqno: int
    rev_seqno: int
    flags: int = 0
    expiry: int = 0
    lock_time: int = 0

    @classmethod
    def _unpack_extras(cls, extras: bytes) -> dict[str, Any]:
        return super(_UprAItem, cls)._unpack_extras(_without_skipped(extras, _ITEM))


@message
class UprAMutation(_UprAItem):
    """A document was created or changed."""

    TYPE = UprAMessageType.MUTATION
    VALUE = Part.OPTIONAL


@message
class UprADeletion(_UprAItem):
    """A document was deleted; flags, expiry and lock time are there as in a mutation."""

    TYPE = UprAMessageType.DELETION


@message
class UprAExpiration(_UprAItem):
    """A document expired."""

    TYPE = UprAMessageType.EXPIRATION


@message
class UprAFlush(_UprA):
    """Drop all data of the vbucket."""

    OPCODE = UprAOpcode.STREAM_MESSAGE
    TYPE = UprAMessageType.FLUSH


@message
class UprAStreamEndOk(_UprA):
    """The stream has sent all that was asked for."""

    OPCODE = UprAOpcode.STREAM_END
    TYPE = UprAStreamEnd.OK


@message
class UprAStreamEndStateChanged(_UprA):
    """The vbucket's state changed, so the stream is over."""

    OPCODE = UprAOpcode.STREAM_END
    TYPE = UprAStreamEnd.STATE_CHANGED


UPR_A_MESSAGES: tuple[type[_UprA], ...] = (
    UprAStreamRequest,
    UprAFailoverLogRequest,
    UprAOk,
    UprANotMyVBucket,
    UprAFailoverLog,
    UprARollback,
    UprAStreamBegin,
    UprASnapshotStart,
    UprASnapshotEnd,
    UprAMutation,
    UprADeletion,
    UprAExpiration,
    UprAFlush,
    UprAStreamEndOk,
    UprAStreamEndStateChanged,
)


# draft B


@message
class UprBStreamRequestResponse(Response):
    """The answer to a stream request: empty, or (status 0x23) the seqno to roll back to.

    The seqno is the value; the extras are accepted too (B1).
    """

    DATATYPES = 0

    @property
    def rollback_seqno(self) -> int:
        """Where to go back to."""
        if self.status != Status.ROLLBACK:
            raise MalformedMessage("upr b stream request response: it is not a rollback")
        return _rollback_seqno("upr b stream request response", self.value)

    def check(self) -> None:
        super(UprBStreamRequestResponse, self).check()
        if self.status == Status.ROLLBACK:
            _ = self.rollback_seqno


@message
class UprBStreamRequest(Message):
    """Asks for the changes of one vbucket; the key is an optional group id."""

    OPCODE = UprBOpcode.STREAM_REQUEST
    LAYOUTS = (
        layout("""
            I stream_flags  none are defined; 0
            I reserved      0
        """)
        + _RESUME,
    )
    KEY = Part.OPTIONAL
    RESPONSE = UprBStreamRequestResponse

    stream_flags: int = 0
    reserved: int = 0
    start_seqno: int = 0
    end_seqno: int = 0xFFFF_FFFF_FFFF_FFFF
    vb_uuid: int = 0
    high_seqno: int = 0


@message
class UprBFailoverLogRequest(Message):
    """Asks for the failover log of one vbucket."""

    OPCODE = UprBOpcode.FAILOVER_LOG_REQUEST
    RESPONSE = DcpFailoverLogResponse


@message
class _UprBPush(Message):
    """What the producer sends by itself; it is never answered."""

    DIRECTION = Direction.TO_RECEIVER
    REPLY = "never"


@message
class UprBStreamStart(_UprBPush):
    """The stream begins."""

    OPCODE = UprBOpcode.STREAM_START


@message
class UprBStreamEndMessage(_UprBPush):
    """The stream is over."""

    OPCODE = UprBOpcode.STREAM_END
    LAYOUTS = (layout("I flag  0 OK, 1 the vbucket's state changed"),)

    flag: int = int(UprBStreamEnd.OK)


@message
class UprBSnapshotStart(_UprBPush):
    """A snapshot begins."""

    OPCODE = UprBOpcode.SNAPSHOT_START


@message
class UprBSnapshotEnd(_UprBPush):
    """The snapshot is complete: only now is the state consistent."""

    OPCODE = UprBOpcode.SNAPSHOT_END


@message
class UprBMutation(_UprBPush):
    """A document was created or changed."""

    OPCODE = UprBOpcode.MUTATION
    LAYOUTS = (_ITEM,)
    KEY = Part.REQUIRED
    VALUE = Part.OPTIONAL
    DATATYPES = DOCUMENT

    by_seqno: int
    rev_seqno: int
    flags: int = 0
    expiry: int = 0
    lock_time: int = 0


@message
class _UprBRemoval(_UprBPush):
    LAYOUTS = (_CHANGE,)
    KEY = Part.REQUIRED

    by_seqno: int
    rev_seqno: int


@message
class UprBDeletion(_UprBRemoval):
    """A document was deleted."""

    OPCODE = UprBOpcode.DELETION


@message
class UprBExpiration(_UprBRemoval):
    """A document expired."""

    OPCODE = UprBOpcode.EXPIRATION


@message
class UprBFlush(_UprBPush):
    """Drop all data of the vbucket."""

    OPCODE = UprBOpcode.FLUSH


@message
class UprBSetVBucketState(_UprBPush):
    """The vbucket changes its state; pending and replica are swapped compared with DCP (B5)."""

    OPCODE = UprBOpcode.SET_VBUCKET_STATE
    LAYOUTS = (layout("B state  1 active, 2 pending, 3 replica, 4 dead"),)

    state: int

    def check_fields(self) -> None:
        if self.state not in UprBVBucketState.__members__.values():
            raise MalformedMessage(f"upr b set vbucket state: there is no state {self.state}")


UPR_B_MESSAGES: tuple[type[Message], ...] = (
    UprBStreamRequest,
    UprBFailoverLogRequest,
    UprBStreamStart,
    UprBStreamEndMessage,
    UprBSnapshotStart,
    UprBSnapshotEnd,
    UprBMutation,
    UprBDeletion,
    UprBExpiration,
    UprBFlush,
    UprBSetVBucketState,
)


def _without_skipped(extras: bytes, documented: Layout) -> bytes:
    return extras[: documented.size] if len(extras) == documented.size + _SKIPPED else extras


def _rollback_seqno(what: str, value: bytes) -> int:
    if len(value) != _SEQNO.size:
        raise MalformedMessage(f"{what}: a rollback answer has 8 bytes, not {len(value)}")
    seqno: int = _SEQNO.unpack(value)[0]
    return seqno
