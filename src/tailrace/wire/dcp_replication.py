"""The messages of DCP that only copies of one vbucket exchange: durable writes and cache transfers.

Rules: docs/spec/dcp.md#sync-write-messages, docs/spec/dcp.md#cache-transfer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import MalformedMessage
from .codes import DcpOpcode, DurabilityLevel
from .dcp import ON_ERROR, check_seqno
from .layout import layout
from .message import DOCUMENT, Direction, Message, Part, Response, message

__all__ = [
    "CacheTransferRecord",
    "DcpAbort",
    "DcpCacheTransfer",
    "DcpCacheTransferEnd",
    "DcpCommit",
    "DcpPrepare",
    "DcpSeqnoAcknowledged",
]


@message
class DcpPrepare(Message):
    """A durable write has begun; it is not visible before its commit."""

    OPCODE = DcpOpcode.PREPARE
    LAYOUTS = (
        layout("""
            Q by_seqno    position of this change in its vbucket, above 0
            Q rev_seqno   how many times the document has changed
            I flags       chosen by the writer, opaque to us
            I expiry      unix seconds; 0 is never
            I lock_time   0
            B nru         cache hint
            B deleted     1: the write is a deletion
            B durability  1 majority, 2 majority and persist on active, 3 persist to majority
        """),
    )
    KEY = Part.REQUIRED
    VALUE = Part.OPTIONAL
    CAS = Part.REQUIRED
    DATATYPES = DOCUMENT
    DIRECTION = Direction.TO_RECEIVER
    RESPONSE = Response
    REPLY = ON_ERROR

    by_seqno: int
    rev_seqno: int
    flags: int = 0
    expiry: int = 0
    lock_time: int = 0
    nru: int = 0
    deleted: int = 0
    durability: int = int(DurabilityLevel.MAJORITY)

    def check_fields(self) -> None:
        check_seqno("dcp prepare", self.by_seqno)
        if self.durability not in DurabilityLevel.__members__.values():
            raise MalformedMessage(f"dcp prepare: there is no durability level {self.durability}")


@message
class DcpSeqnoAcknowledged(Message):
    """A replica has prepared everything up to this seqno. Never answered on success."""

    OPCODE = DcpOpcode.SEQNO_ACKNOWLEDGED
    LAYOUTS = (layout("Q prepared_seqno  the highest seqno that is prepared"),)
    CAS = Part.FORBIDDEN
    RESPONSE = Response
    REPLY = ON_ERROR

    prepared_seqno: int


@message
class DcpCommit(Message):
    """A prepared write becomes visible."""

    OPCODE = DcpOpcode.COMMIT
    LAYOUTS = (
        layout("""
            Q prepared_seqno  seqno of the prepare
            Q commit_seqno    seqno of the commit
        """),
    )
    KEY = Part.REQUIRED
    CAS = Part.FORBIDDEN
    DIRECTION = Direction.TO_RECEIVER
    RESPONSE = Response
    REPLY = ON_ERROR

    prepared_seqno: int
    commit_seqno: int


@message
class DcpAbort(Message):
    """A prepared write is abandoned."""

    OPCODE = DcpOpcode.ABORT
    LAYOUTS = (
        layout("""
            Q prepared_seqno  seqno of the prepare
            Q abort_seqno     seqno of the abort
        """),
    )
    KEY = Part.REQUIRED
    CAS = Part.FORBIDDEN
    DIRECTION = Direction.TO_RECEIVER
    RESPONSE = Response
    REPLY = ON_ERROR

    prepared_seqno: int
    abort_seqno: int


_RECORD = struct.Struct(">QQQIIIHBB")


@dataclass(frozen=True, slots=True)
class CacheTransferRecord:
    """One document of a cache transfer."""

    cas: int
    by_seqno: int
    rev_seqno: int
    flags: int
    expiry: int
    datatype: int
    cache_hint: int
    key: bytes
    value: bytes

    def encode(self) -> bytes:
        """40 bytes, key, value."""
        head = _RECORD.pack(
            self.cas,
            self.by_seqno,
            self.rev_seqno,
            len(self.value),
            self.flags,
            self.expiry,
            len(self.key),
            self.datatype,
            self.cache_hint,
        )
        return head + self.key + self.value


@message
class DcpCacheTransfer(Message):
    """Documents for a replica's cache, unordered; only with the stream flag 0x100."""

    OPCODE = DcpOpcode.CACHE_TRANSFER
    VALUE = Part.REQUIRED
    CAS = Part.FORBIDDEN
    DIRECTION = Direction.TO_RECEIVER
    RESPONSE = Response
    REPLY = ON_ERROR

    def records(self) -> Iterator[CacheTransferRecord]:
        """The documents."""
        at, data = 0, self.value
        while at < len(data):
            if at + _RECORD.size > len(data):
                raise MalformedMessage("dcp cache transfer: a record is cut off")
            cas, seqno, rev, size, flags, expiry, key_size, datatype, hint = _RECORD.unpack_from(data, at)
            key_at = at + _RECORD.size
            value_at = key_at + key_size
            at = value_at + size
            if at > len(data) or not 2 <= key_size <= 251:
                raise MalformedMessage("dcp cache transfer: a record does not fit")
            yield CacheTransferRecord(
                cas,
                seqno,
                rev,
                flags,
                expiry,
                datatype,
                hint,
                data[key_at:value_at],
                data[value_at:at],
            )

    def check_fields(self) -> None:
        for _ in self.records():
            pass


@message
class DcpCacheTransferEnd(Message):
    """The cache transfer is over; ordinary streaming follows."""

    OPCODE = DcpOpcode.CACHE_TRANSFER_END
    DIRECTION = Direction.TO_RECEIVER
    RESPONSE = Response
    REPLY = ON_ERROR
