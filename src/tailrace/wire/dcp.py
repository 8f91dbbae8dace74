"""The messages of DCP between any producer and reader or replica, and their answers.

The messages that only copies of a vbucket exchange are in `dcp_replication`.
"""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import Any, ClassVar

from ..errors import MalformedMessage
from .codes import (
    AddStreamFlag,
    Datatype,
    DcpOpcode,
    Magic,
    OpenFlag,
    OsoFlag,
    RequestFrameId,
    Status,
    StreamEndStatus,
    SystemEventId,
    VBucketState,
)
from .fields import decode_failover_log, encode_failover_log
from .flatbuffer import EventContent, flatbuffer_event
from .header import Frame
from .layout import layout
from .message import DOCUMENT, Direction, Message, Part, Response, message

__all__ = [
    "DELETION_V1",
    "DELETION_V2",
    "EXPIRATION",
    "MUTATION",
    "ON_ERROR",
    "STREAM_ID_FRAME",
    "STREAM_ID_SIZE",
    "DcpAddStream",
    "DcpAddStreamResponse",
    "DcpBufferAck",
    "DcpCloseStream",
    "DcpControl",
    "DcpDeletion",
    "DcpExpiration",
    "DcpFailoverLogResponse",
    "DcpFlush",
    "DcpGetFailoverLog",
    "DcpMutation",
    "DcpNoop",
    "DcpOpen",
    "DcpOsoSnapshot",
    "DcpSeqnoAdvanced",
    "DcpSetVBucketState",
    "DcpSnapshotMarker",
    "DcpStreamEnd",
    "DcpStreamRequest",
    "DcpStreamRequestResponse",
    "DcpSystemEvent",
    "check_seqno",
]

ON_ERROR = "only on error"
MAX_SEQNO = 0xFFFF_FFFF_FFFF_FFFF

_SEQNO = struct.Struct(">Q")


@message
class DcpFailoverLogResponse(Response):
    """The failover log of a vbucket: pairs of vbucket UUID and seqno, newest first, at least one."""

    VALUE = Part.REQUIRED
    DATATYPES = 0

    @property
    def failover_log(self) -> list[tuple[int, int]]:
        """The entries in the order in which they came."""
        return decode_failover_log(self.value)

    def check_fields(self) -> None:
        decode_failover_log(self.value)


@message
class DcpStreamRequestResponse(DcpFailoverLogResponse):
    """The answer to a stream request: the failover log, or (status 0x23) the seqno to roll back to."""

    @classmethod
    def ok(cls, failover_log: list[tuple[int, int]], *, opaque: int) -> DcpStreamRequestResponse:
        """The stream starts."""
        return cls(opcode=DcpOpcode.STREAM_REQUEST, value=encode_failover_log(failover_log), opaque=opaque)

    @classmethod
    def rollback(cls, seqno: int, *, opaque: int) -> DcpStreamRequestResponse:
        """The reader must go back to ``seqno`` first."""
        return cls(
            opcode=DcpOpcode.STREAM_REQUEST,
            status=Status.ROLLBACK,
            value=_SEQNO.pack(seqno),
            opaque=opaque,
        )

    @property
    def rollback_seqno(self) -> int:
        """The seqno to go back to; it may be in the value or in the extras."""
        if self.status != Status.ROLLBACK or len(self.value) != _SEQNO.size:
            raise MalformedMessage(f"a rollback answer has 8 bytes, not {len(self.value)}")
        seqno: int = _SEQNO.unpack(self.value)[0]
        return seqno

    def check(self) -> None:
        super(DcpStreamRequestResponse, self).check()
        if self.status == Status.ROLLBACK:
            _ = self.rollback_seqno


@message
class DcpOpen(Message):
    """Opens a DCP connection and gives it a name; an older connection of the same name is closed."""

    OPCODE = DcpOpcode.OPEN
    LAYOUTS = (
        layout("""
            I reserved  called seqno; send 0, ignore
            I flags     see OpenFlag; 0x01 set: the server is the producer
        """),
    )
    KEY = Part.REQUIRED
    VALUE = Part.OPTIONAL
    DATATYPES = int(Datatype.JSON)
    RESPONSE = Response

    reserved: int = 0
    flags: int = 0

    KNOWN: ClassVar[int] = int(
        OpenFlag.PRODUCER
        | OpenFlag.INCLUDE_XATTRS
        | OpenFlag.NO_VALUE
        | OpenFlag.INCLUDE_DELETE_TIMES
        | OpenFlag.NO_VALUE_WITH_UNDERLYING_DATATYPE
        | OpenFlag.INCLUDE_DELETED_USER_XATTRS
        | OpenFlag.SKIP_DELETES_IN_INITIAL_BACKFILL
    )

    @property
    def consumer_name(self) -> str | None:
        """The name under which a replica introduces itself to its producer."""
        name: str | None = json.loads(self.value).get("consumer_name") if self.value else None
        return name

    def check_fields(self) -> None:
        flags = self.flags
        if flags & ~self.KNOWN:
            raise MalformedMessage(f"dcp open: flags 0x{flags & ~self.KNOWN:x} are not allowed")
        if flags & OpenFlag.NO_VALUE and flags & OpenFlag.NO_VALUE_WITH_UNDERLYING_DATATYPE:
            raise MalformedMessage("dcp open: two flags that strip the value exclude each other")
        if flags & OpenFlag.INCLUDE_DELETED_USER_XATTRS and not flags & OpenFlag.INCLUDE_XATTRS:
            raise MalformedMessage("dcp open: xattrs of deletions need xattrs")
        if flags & OpenFlag.SKIP_DELETES_IN_INITIAL_BACKFILL and not flags & OpenFlag.PRODUCER:
            raise MalformedMessage("dcp open: only a producer can skip deletions")
        if bool(self.value) != bool(self.datatype):
            raise MalformedMessage("dcp open: a value is JSON and says so in the datatype")
        if self.value:
            self._check_value()

    def _check_value(self) -> None:
        try:
            value = json.loads(self.value)
        except (ValueError, RecursionError):
            raise MalformedMessage("dcp open: the value is not JSON") from None
        if not isinstance(value, dict) or set(value) - {"consumer_name"}:
            raise MalformedMessage("dcp open: the value may only say consumer_name")
        if not isinstance(value.get("consumer_name", ""), str) or self.flags & OpenFlag.PRODUCER:
            raise MalformedMessage("dcp open: consumer_name is a text, for a consumer")


@message
class DcpAddStreamResponse(Response):
    """Add Stream is answered when the stream's own handshake is over."""

    LAYOUTS = (layout("I stream_opaque  the opaque that the stream uses"),)
    DATATYPES = 0

    stream_opaque: int = 0


@message
class DcpAddStream(Message):
    """Tells a replica to request a stream from its producer. Sent by a controller."""

    OPCODE = DcpOpcode.ADD_STREAM
    LAYOUTS = (layout("I flags  as in the stream request"),)
    DIRECTION = Direction.TO_RECEIVER
    RESPONSE = DcpAddStreamResponse
    REPLY = "after the stream's handshake"

    flags: int = 0

    def check_fields(self) -> None:
        _check_stream_flags("dcp add stream", self.flags)


@message
class DcpCloseStream(Message):
    """Ends a stream; may carry a stream id frame."""

    OPCODE = DcpOpcode.CLOSE_STREAM
    DIRECTION = None
    RESPONSE = Response


@message
class DcpStreamRequest(Message):
    """Asks for the changes of one vbucket. The request's opaque comes back in all messages of the stream."""

    OPCODE = DcpOpcode.STREAM_REQUEST
    LAYOUTS = (
        layout("""
            I flags           see AddStreamFlag
            I reserved        0
            Q start_seqno     the last seqno that the reader has
            Q end_seqno       where the stream may end; 2^64-1 is never
            Q vb_uuid         the branch of history that the reader is on; 0 is none
            Q snapshot_start  start of the last snapshot that the reader saw
            Q snapshot_end    end of it
        """),
    )
    VALUE = Part.OPTIONAL
    RESPONSE = DcpStreamRequestResponse

    flags: int = 0
    reserved: int = 0
    start_seqno: int = 0
    end_seqno: int = MAX_SEQNO
    vb_uuid: int = 0
    snapshot_start: int = 0
    snapshot_end: int = 0

    def check_fields(self) -> None:
        _check_stream_flags("dcp stream request", self.flags)


@message
class DcpGetFailoverLog(Message):
    """Asks a producer for the failover log of a vbucket."""

    OPCODE = DcpOpcode.GET_FAILOVER_LOG
    RESPONSE = DcpFailoverLogResponse


@message
class DcpStreamEnd(Message):
    """The stream is over."""

    OPCODE = DcpOpcode.STREAM_END
    LAYOUTS = (layout("I status  why; see StreamEndStatus. Unknown: over, reconnect"),)
    DIRECTION = Direction.TO_RECEIVER
    RESPONSE = Response
    REPLY = ON_ERROR

    status: int = int(StreamEndStatus.OK)

    def fields_by_name(self) -> dict[str, Any]:
        return {"status": self.status}


_MARKER_V2_0 = struct.Struct(">QQIQQ")
_MARKER_V2_2 = struct.Struct(">QQIQQQQ")


@message
class DcpSnapshotMarker(Message):
    """A range of seqnos follows; the state is consistent when all of it has arrived.

    V1 has all in the extras. V2.x has the version in the extras and the rest in the value: V2.0 adds
    ``max_visible_seqno`` and ``high_completed_seqno``, V2.2 ``purge_seqno`` and ``high_prepared_seqno``.
    """

    OPCODE = DcpOpcode.SNAPSHOT_MARKER
    LAYOUTS = (
        layout("""
            Q start  first seqno of the range
            Q end    last seqno of the range
            I flags  see MarkerFlag
        """),
        layout("B version  0: V2.0, value of 36 bytes; 2: V2.2, value of 52 bytes"),
    )
    VALUE = Part.OPTIONAL
    DIRECTION = Direction.TO_RECEIVER
    RESPONSE = Response
    REPLY = "with the ack flag, or on error"

    start: int
    end: int
    flags: int
    version: int | None = None
    max_visible_seqno: int | None = None
    high_completed_seqno: int | None = None
    purge_seqno: int | None = None
    high_prepared_seqno: int | None = None

    @classmethod
    def _body_fields(cls, frame: Frame) -> dict[str, Any]:
        body = super(DcpSnapshotMarker, cls)._body_fields(frame)
        version, value = body.get("version"), body["value"]
        if version is None:
            if value:
                raise MalformedMessage("dcp snapshot marker: V1 has no value")
            return body
        shape = {0: _MARKER_V2_0, 2: _MARKER_V2_2}.get(version)
        if shape is None:
            raise MalformedMessage(f"dcp snapshot marker: there is no version {version}")
        if len(value) != shape.size:
            raise MalformedMessage(
                f"dcp snapshot marker: version {version} has a value of {shape.size} bytes, not {len(value)}"
            )
        names = ["start", "end", "flags", "max_visible_seqno", "high_completed_seqno"]
        if shape is _MARKER_V2_2:
            names += ["purge_seqno", "high_prepared_seqno"]
        return {**body, **dict(zip(names, shape.unpack(value), strict=True)), "value": b""}

    def _body(self) -> tuple[int, bytes]:
        if self.version is None:
            return 20, self.LAYOUTS[0].struct.pack(self.start, self.end, self.flags)
        common = (self.start, self.end, self.flags, self.max_visible_seqno, self.high_completed_seqno)
        if self.version == 0:
            return 1, b"\0" + _MARKER_V2_0.pack(*common)
        return 1, b"\2" + _MARKER_V2_2.pack(*common, self.purge_seqno, self.high_prepared_seqno)

    @staticmethod
    def body_v2_2(*fields: int) -> bytes:
        """Extras and value of a V2.2 marker, from its fields in order."""
        return b"\2" + _MARKER_V2_2.pack(*fields)

    @classmethod
    def read_range(cls, body: memoryview, extras_length: int) -> tuple[int, int, int, int | None] | None:
        """Start, end, flags and purge seqno without making a message; None if `decode` would refuse it."""
        size = len(body)
        if extras_length == 1:
            if size == 1 + _MARKER_V2_2.size and body[0] == 2:
                start, end, flags, _, _, purge_seqno, _ = _MARKER_V2_2.unpack_from(body, 1)
                return start, end, flags, purge_seqno
            if size == 1 + _MARKER_V2_0.size and body[0] == 0:
                return (*_MARKER_V2_0.unpack_from(body, 1)[:3], None)
        elif extras_length == size == cls.LAYOUTS[0].size:
            return (*cls.LAYOUTS[0].struct.unpack_from(body), None)
        return None

    def check_fields(self) -> None:
        if self.version is not None:
            if self.version not in {0, 2}:
                raise MalformedMessage(f"dcp snapshot marker: there is no version {self.version}")
            needed = [self.max_visible_seqno, self.high_completed_seqno]
            if self.version == 2:
                needed += [self.purge_seqno, self.high_prepared_seqno]
            if None in needed:
                raise MalformedMessage("dcp snapshot marker: a field of its version is missing")
        if self.start > self.end:
            raise MalformedMessage(f"dcp snapshot marker: start {self.start} is above end {self.end}")


MUTATION = layout("""
    Q by_seqno   position of this change in its vbucket, above 0
    Q rev_seqno  how many times the document has changed
    I flags      chosen by the writer, opaque to us
    I expiry     unix seconds; 0 is never
    I lock_time  seconds that the document stays locked; sent as 0
    H nmeta      bytes of extended metadata after the value; sent as 0
    B nru        cache hint, ignored
""")


@message
class DcpMutation(Message):
    """A document was created or changed."""

    OPCODE = DcpOpcode.MUTATION
    LAYOUTS = (MUTATION,)
    KEY = Part.REQUIRED
    VALUE = Part.OPTIONAL
    DATATYPES = DOCUMENT
    DIRECTION = Direction.TO_RECEIVER
    RESPONSE = Response
    REPLY = ON_ERROR

    by_seqno: int
    rev_seqno: int
    flags: int = 0
    expiry: int = 0
    lock_time: int = 0
    nmeta: int = 0
    nru: int = 0

    @property
    def document(self) -> bytes:
        """The value without the extended metadata that old servers put after it."""
        return self.value[: len(self.value) - self.nmeta] if self.nmeta else self.value

    def check_fields(self) -> None:
        check_seqno("dcp mutation", self.by_seqno)
        if self.nmeta > len(self.value):
            raise MalformedMessage("dcp mutation: extended metadata is longer than the value")


DELETION_V1 = layout("""
    Q by_seqno   position of this change in its vbucket, above 0
    Q rev_seqno  how many times the document has changed
    H nmeta      bytes of extended metadata; sent as 0
""")
DELETION_V2 = layout("""
    Q by_seqno     position of this change in its vbucket, above 0
    Q rev_seqno    how many times the document has changed
    I delete_time  unix seconds; 0 where it is not known
    B unused       0; once a collection length
""")


@message
class DcpDeletion(Message):
    """A document was deleted. V2 is sent exactly if the connection was opened with delete times."""

    OPCODE = DcpOpcode.DELETION
    LAYOUTS = (DELETION_V1, DELETION_V2)
    KEY = Part.REQUIRED
    VALUE = Part.OPTIONAL
    DATATYPES = DOCUMENT
    DIRECTION = Direction.TO_RECEIVER
    RESPONSE = Response
    REPLY = ON_ERROR

    by_seqno: int
    rev_seqno: int
    nmeta: int | None = None
    delete_time: int | None = None
    unused: int | None = None

    def __post_init__(self) -> None:
        # a delete time makes it V2; the filler of either layout need not be given
        if self.delete_time is not None:
            self.unused = self.unused or 0
        elif self.nmeta is None:
            self.nmeta = 0

    @classmethod
    def as_meant(cls, frame: Frame) -> Frame:
        return _with_stream_id(frame)

    def check_fields(self) -> None:
        check_seqno("dcp deletion", self.by_seqno)
        nmeta = self.nmeta or 0
        if nmeta > len(self.value):
            raise MalformedMessage("dcp deletion: extended metadata is longer than the value")
        _check_deleted_value("dcp deletion", self.datatype, self.value[: len(self.value) - nmeta])


EXPIRATION = layout("""
    Q by_seqno     position of this change in its vbucket, above 0
    Q rev_seqno    how many times the document has changed
    I delete_time  unix seconds
""")


@message
class DcpExpiration(Message):
    """A document expired. Only with `enable_expiry_opcode` and delete times; else a deletion is sent."""

    OPCODE = DcpOpcode.EXPIRATION
    LAYOUTS = (EXPIRATION,)
    KEY = Part.REQUIRED
    VALUE = Part.OPTIONAL
    DATATYPES = DOCUMENT
    DIRECTION = Direction.TO_RECEIVER
    RESPONSE = Response
    REPLY = ON_ERROR

    by_seqno: int
    rev_seqno: int
    delete_time: int = 0

    @classmethod
    def as_meant(cls, frame: Frame) -> Frame:
        return _with_stream_id(frame)

    def check_fields(self) -> None:
        check_seqno("dcp expiration", self.by_seqno)
        _check_deleted_value("dcp expiration", self.datatype, self.value)


@message
class DcpFlush(Message):
    """Drop all data of the vbucket. Defined, never used by DCP servers: the answer is 0x83."""

    OPCODE = DcpOpcode.FLUSH
    DIRECTION = Direction.TO_RECEIVER
    RESPONSE = Response


@message
class DcpSetVBucketState(Message):
    """Takeover: the replica's vbucket changes its state. The answer is part of the takeover."""

    OPCODE = DcpOpcode.SET_VBUCKET_STATE
    LAYOUTS = (layout("B state  1 active, 2 replica, 3 pending, 4 dead"),)
    DIRECTION = Direction.TO_RECEIVER
    RESPONSE = Response

    state: int

    def check_fields(self) -> None:
        if self.state not in VBucketState.__members__.values():
            raise MalformedMessage(f"dcp set vbucket state: there is no state {self.state}")


@message
class DcpNoop(Message):
    """Are you there? Must be answered at once with the same opaque."""

    OPCODE = DcpOpcode.NOOP
    DIRECTION = Direction.TO_RECEIVER
    RESPONSE = Response


@message
class DcpBufferAck(Message):
    """The receiver has processed this many bytes. Never answered."""

    OPCODE = DcpOpcode.BUFFER_ACK
    LAYOUTS = (layout("I acked_bytes  bytes that are free again"),)
    REPLY = "never"
    RESPONSE = Response

    acked_bytes: int


@message
class DcpControl(Message):
    """Sets one property of the connection."""

    OPCODE = DcpOpcode.CONTROL
    KEY = Part.REQUIRED
    VALUE = Part.REQUIRED
    RESPONSE = Response


COLLECTION_EVENT = layout("""
    Q manifest_uid   the manifest that the event belongs to
    I scope_id       the scope
    I collection_id  the collection
    I max_ttl        the collection's longest time to live in seconds
""")
"""A system event's value as integers; an event leaves out what it does not have."""

_WITH_TTL, _OF_COLLECTION, _OF_SCOPE = (
    COLLECTION_EVENT.size,
    COLLECTION_EVENT.at("max_ttl"),
    COLLECTION_EVENT.at("collection_id"),
)
_EVENT_SIZES: dict[int, dict[int, int]] = {
    SystemEventId.COLLECTION_BEGIN: {0: _OF_COLLECTION, 1: _WITH_TTL},
    SystemEventId.COLLECTION_END: {0: _OF_COLLECTION},
    SystemEventId.SCOPE_CREATED: {0: _OF_SCOPE},
    SystemEventId.SCOPE_DROPPED: {0: _OF_SCOPE},
    SystemEventId.COLLECTION_MODIFIED: {},
}
"""The size of the value, by event and version."""

_MANIFEST_UID, _SCOPE_ID, _COLLECTION_ID, _MAX_TTL = (field.place for field in COLLECTION_EVENT.fields)


@message
class DcpSystemEvent(Message):
    """A collection or scope was created, dropped or changed. The key is its name, without a prefix."""

    OPCODE = DcpOpcode.SYSTEM_EVENT
    LAYOUTS = (
        layout("""
            Q by_seqno  position of this event in its vbucket, above 0
            I event     see SystemEventId
            B version   0 or 1: the value is made of integers; 2: it is a FlatBuffer
        """),
    )
    KEY = Part.OPTIONAL
    VALUE = Part.OPTIONAL
    DIRECTION = Direction.TO_RECEIVER
    RESPONSE = Response
    REPLY = ON_ERROR

    by_seqno: int
    event: int
    version: int = 0

    @property
    def manifest_uid(self) -> int:
        """The manifest that the event belongs to."""
        return self.content().manifest_uid

    @property
    def scope_id(self) -> int:
        """The scope."""
        return self.content().scope_id

    @property
    def collection_id(self) -> int | None:
        """The collection, if the event is about one."""
        return self.content().collection_id

    @property
    def max_ttl(self) -> int | None:
        """The collection's longest time to live in seconds, if it has one."""
        return self.content().max_ttl

    @property
    def history(self) -> bool | None:
        """Whether every version of the collection's documents is kept, if the event says so."""
        return self.content().history

    def content(self) -> EventContent:
        """All that the value says; ValueError if it is malformed."""
        if self.version == 2:
            return flatbuffer_event(self.event, self.value)
        places = (_MANIFEST_UID, _SCOPE_ID, _COLLECTION_ID, _MAX_TTL)
        uid, scope, collection, max_ttl = (int.from_bytes(self.value[place], "big") for place in places)
        size = len(self.value)
        return EventContent(
            uid,
            scope,
            collection if size >= _OF_COLLECTION else None,
            max_ttl if size == _WITH_TTL else None,
        )

    def check_fields(self) -> None:
        check_seqno("dcp system event", self.by_seqno)
        sizes = _EVENT_SIZES.get(self.event)
        if sizes is None:
            return  # an event of a later server is kept as it came
        if self.version in sizes and len(self.value) != sizes[self.version]:
            raise MalformedMessage(
                f"dcp system event {self.event}: version {self.version} has a value of "
                f"{sizes[self.version]} bytes, not {len(self.value)}"
            )
        if self.version not in sizes and self.version != 2:
            raise MalformedMessage(f"dcp system event {self.event}: there is no version {self.version}")
        try:
            self.content()
        except ValueError as error:
            raise MalformedMessage(f"dcp system event {self.event}: {error}") from None


@message
class DcpSeqnoAdvanced(Message):
    """The stream has passed this seqno; the change there is not for this reader."""

    OPCODE = DcpOpcode.SEQNO_ADVANCED
    LAYOUTS = (layout("Q by_seqno  position that the stream has reached"),)
    DIRECTION = Direction.TO_RECEIVER
    RESPONSE = Response
    REPLY = ON_ERROR

    by_seqno: int


@message
class DcpOsoSnapshot(Message):
    """Brackets a first backfill whose changes come in any order."""

    OPCODE = DcpOpcode.OSO_SNAPSHOT
    LAYOUTS = (layout("I flags  1 start, 2 end"),)
    DIRECTION = Direction.TO_RECEIVER
    RESPONSE = Response
    REPLY = ON_ERROR

    flags: int

    def check_fields(self) -> None:
        if self.flags not in (OsoFlag.START, OsoFlag.END):
            raise MalformedMessage(f"dcp oso snapshot: flags are 1 or 2, not {self.flags}")


# plain numbers: the complement of an IntFlag leaves out the bits that have no name
_STREAM_FLAGS = sum(AddStreamFlag) - int(AddStreamFlag.NO_VALUE)
_CACHE_TRANSFER = int(AddStreamFlag.CACHE_TRANSFER)
_CACHE_TRANSFER_MAY = int(
    AddStreamFlag.CACHE_TRANSFER | AddStreamFlag.TAKE_OVER | AddStreamFlag.ACTIVE_VB_ONLY
)


def _check_stream_flags(what: str, flags: int) -> None:
    if flags & ~_STREAM_FLAGS:
        raise MalformedMessage(f"{what}: flags 0x{flags & ~_STREAM_FLAGS:x} are not allowed")
    if flags & _CACHE_TRANSFER and flags & ~_CACHE_TRANSFER_MAY:
        raise MalformedMessage(f"{what}: a cache transfer goes only with takeover and active only")


def check_seqno(what: str, seqno: int) -> None:
    """Raise `MalformedMessage` for seqno 0, which no change has."""
    if not seqno:
        raise MalformedMessage(f"{what}: seqno 0 names no change")


STREAM_ID_FRAME = RequestFrameId.DCP_STREAM_ID << 4 | 2
"""The first byte of the framing extras that name a stream."""
STREAM_ID_SIZE = 3
"""How many bytes those have."""


def _with_stream_id(frame: Frame) -> Frame:
    """A removal's frame, with its stream id counted as framing extras.

    Servers write the stream id but give the framing extras a length of 0
    (docs/spec/dcp.md#stream-id-without-length). Without the id a seqno would be there, and no seqno is so
    high that it begins with that byte.
    """
    body = frame.body
    if (
        frame.magic != Magic.FLEX_REQUEST
        or frame.framing
        or body[:1] != bytes([STREAM_ID_FRAME])
        or STREAM_ID_SIZE + frame.extras_length + frame.key_length > len(body)
    ):
        return frame
    return replace(frame, framing=body[:STREAM_ID_SIZE], body=body[STREAM_ID_SIZE:])


_DELETED_DATATYPES = frozenset({0, 2, 4, 6, 5, 7})


def _check_deleted_value(what: str, datatype: int, value: bytes) -> None:
    if datatype not in _DELETED_DATATYPES:
        raise MalformedMessage(f"{what}: datatype 0x{datatype:02x} is not allowed here")
    if value and not datatype & Datatype.XATTR and not datatype & Datatype.SNAPPY:
        raise MalformedMessage(f"{what}: the value may only be xattrs")
