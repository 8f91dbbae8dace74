"""Document commands and their answers.

A quiet command is an ordinary one with another opcode: it is not answered on success, or on a miss.
Answers are shapes that several commands share; their opcode is that of the request.

Rules: docs/spec/header.md#document-commands, docs/spec/header.md#with-meta-commands.
"""

from __future__ import annotations

import struct

from ..errors import MalformedMessage
from .codes import Datatype, Op, Status
from .layout import NO_EXTRAS, layout
from .message import DOCUMENT, Message, Part, Response, message

QUIET_SUCCESS = "only on error"
QUIET_MISS = "only on a hit or an error"


# answers


@message
class MutationResponse(Response):
    """A write was made; with the MutationSeqno feature the answer says where in the vbucket's history."""

    LAYOUTS = (
        NO_EXTRAS,
        layout("""
            Q vb_uuid   the branch of history
            Q by_seqno  the change's position in it
        """),
    )
    DATATYPES = 0

    vb_uuid: int | None = None
    by_seqno: int | None = None


@message
class CounterResponse(MutationResponse):
    """A counter was changed; the value is the new number, 8 bytes."""

    VALUE = Part.REQUIRED

    @property
    def number(self) -> int:
        """The counter's new number."""
        if len(self.value) != 8:
            raise MalformedMessage(f"counter response: a number has 8 bytes, not {len(self.value)}")
        return int.from_bytes(self.value, "big")

    def check_fields(self) -> None:
        _ = self.number


@message
class GetResponse(Response):
    """A document."""

    LAYOUTS = (layout("I flags  chosen by the writer, opaque to us"),)
    VALUE = Part.OPTIONAL

    flags: int = 0


@message
class GetKResponse(GetResponse):
    """A document and its key."""

    KEY = Part.REQUIRED


@message
class GetMetaResponse(Response):
    """A document's metadata; version 2 adds the datatype. The header's CAS is the document's."""

    LAYOUTS = (
        layout("""
            I deleted    1: it is a tombstone
            I flags      chosen by the writer, opaque to us
            I expiry     unix seconds; 0 is never
            Q rev_seqno  how many times the document has changed
        """),
        layout("""
            I deleted          1: it is a tombstone
            I flags            chosen by the writer, opaque to us
            I expiry           unix seconds; 0 is never
            Q rev_seqno        how many times the document has changed
            B stored_datatype  the document's datatype bits
        """),
    )

    deleted: int = 0
    flags: int = 0
    expiry: int = 0
    rev_seqno: int = 0
    stored_datatype: int | None = None


# documents


@message
class Get(Message):
    """Reads a document."""

    OPCODE = Op.GET
    KEY = Part.REQUIRED
    CAS = Part.FORBIDDEN
    RESPONSE = GetResponse


@message
class GetQ(Get):
    """Get that is silent on a miss."""

    OPCODE = Op.GETQ
    REPLY = QUIET_MISS


@message
class GetK(Get):
    """Get that answers with the key too."""

    OPCODE = Op.GETK
    RESPONSE = GetKResponse


@message
class GetKQ(Get):
    """Get that answers with the key, and is silent on a miss."""

    OPCODE = Op.GETKQ
    RESPONSE = GetKResponse
    REPLY = QUIET_MISS


@message
class GetReplica(Get):
    """Reads a document, only from a replica of its vbucket."""

    OPCODE = Op.GET_REPLICA


@message
class Set(Message):
    """Stores a document; with a CAS only if the document still has it."""

    OPCODE = Op.SET
    LAYOUTS = (
        layout("""
            I flags   chosen by the writer, opaque to us
            I expiry  0 never, up to 30 days relative seconds, above that unix seconds
        """),
    )
    KEY = Part.REQUIRED
    VALUE = Part.OPTIONAL
    DATATYPES = DOCUMENT
    RESPONSE = MutationResponse

    flags: int = 0
    expiry: int = 0


@message
class SetQ(Set):
    """Set that is silent on success."""

    OPCODE = Op.SETQ
    REPLY = QUIET_SUCCESS


@message
class Add(Set):
    """Stores a document that must not exist."""

    OPCODE = Op.ADD
    CAS = Part.FORBIDDEN


@message
class AddQ(Add):
    """Add that is silent on success."""

    OPCODE = Op.ADDQ
    REPLY = QUIET_SUCCESS


@message
class Replace(Set):
    """Stores a document that must exist."""

    OPCODE = Op.REPLACE


@message
class ReplaceQ(Replace):
    """Replace that is silent on success."""

    OPCODE = Op.REPLACEQ
    REPLY = QUIET_SUCCESS


@message
class Delete(Message):
    """Deletes a document; with a CAS only if the document still has it."""

    OPCODE = Op.DELETE
    KEY = Part.REQUIRED
    RESPONSE = MutationResponse


@message
class DeleteQ(Delete):
    """Delete that is silent on success."""

    OPCODE = Op.DELETEQ
    REPLY = QUIET_SUCCESS


@message
class Increment(Message):
    """Adds to a counter, modulo 2^64; an expiry of 0xffffffff means don't create it."""

    OPCODE = Op.INCREMENT
    LAYOUTS = (
        layout("""
            Q delta    how much
            Q initial  the number of a new counter
            I expiry   of a new counter; 0xffffffff: don't create it
        """),
    )
    KEY = Part.REQUIRED
    CAS = Part.FORBIDDEN
    RESPONSE = CounterResponse

    delta: int = 1
    initial: int = 0
    expiry: int = 0


@message
class IncrementQ(Increment):
    """Increment that is silent on success."""

    OPCODE = Op.INCREMENTQ
    REPLY = QUIET_SUCCESS


@message
class Decrement(Increment):
    """Subtracts from a counter, down to 0."""

    OPCODE = Op.DECREMENT


@message
class DecrementQ(Increment):
    """Decrement that is silent on success."""

    OPCODE = Op.DECREMENTQ
    REPLY = QUIET_SUCCESS


@message
class Append(Message):
    """Appends bytes to a document's value."""

    OPCODE = Op.APPEND
    KEY = Part.REQUIRED
    VALUE = Part.REQUIRED
    DATATYPES = DOCUMENT
    RESPONSE = MutationResponse


@message
class AppendQ(Append):
    """Append that is silent on success."""

    OPCODE = Op.APPENDQ
    REPLY = QUIET_SUCCESS


@message
class Prepend(Append):
    """Prepends bytes to a document's value."""

    OPCODE = Op.PREPEND


@message
class PrependQ(Append):
    """Prepend that is silent on success."""

    OPCODE = Op.PREPENDQ
    REPLY = QUIET_SUCCESS


@message
class Touch(Message):
    """Sets a document's expiry."""

    OPCODE = Op.TOUCH
    LAYOUTS = (layout("I expiry  as in set"),)
    KEY = Part.REQUIRED
    CAS = Part.FORBIDDEN
    RESPONSE = Response

    expiry: int = 0


@message
class Gat(Touch):
    """Get and touch."""

    OPCODE = Op.GAT
    RESPONSE = GetResponse


@message
class GatQ(Gat):
    """Get and touch that is silent on a miss."""

    OPCODE = Op.GATQ
    REPLY = QUIET_MISS


@message
class GetLocked(Message):
    """Reads a document and locks it against writers without its CAS."""

    OPCODE = Op.GET_LOCKED
    LAYOUTS = (NO_EXTRAS, layout("I lock_s  seconds; 0 or above 30 means 15"))
    KEY = Part.REQUIRED
    CAS = Part.FORBIDDEN
    RESPONSE = GetResponse

    lock_s: int | None = None


@message
class UnlockKey(Message):
    """Releases a lock; the CAS is that of the lock."""

    OPCODE = Op.UNLOCK_KEY
    KEY = Part.REQUIRED
    CAS = Part.REQUIRED
    RESPONSE = Response


# metadata


@message
class GetMeta(Message):
    """Reads the metadata of a document or a tombstone."""

    OPCODE = Op.GET_META
    LAYOUTS = (NO_EXTRAS, layout("B version  1, or 2 for the datatype too"))
    KEY = Part.REQUIRED
    RESPONSE = GetMetaResponse

    version: int | None = None

    def check_fields(self) -> None:
        if self.version is not None and self.version not in (1, 2):
            raise MalformedMessage(f"get meta: there is no version {self.version}")


@message
class GetMetaQ(GetMeta):
    """Get meta that is silent on a miss."""

    OPCODE = Op.GETQ_META
    REPLY = QUIET_MISS


_META = layout("""
    I flags      chosen by the writer; opaque to us
    I expiry     unix seconds; of a deletion its time
    Q rev_seqno  how many times the document has changed
    Q meta_cas   the CAS to store; the header's is the one that the document must have
""")
_OPTIONS = layout("I options  see WithMetaOption")
_NMETA = layout("H nmeta  bytes of extended metadata after the value; ignored")


@message
class SetWithMeta(Message):
    """Stores a document with the metadata that it has elsewhere, if it wins over the one that is here."""

    OPCODE = Op.SET_WITH_META
    LAYOUTS = (_META, _META + _NMETA, _META + _OPTIONS, _META + _OPTIONS + _NMETA)
    KEY = Part.REQUIRED
    VALUE = Part.OPTIONAL
    DATATYPES = DOCUMENT
    RESPONSE = MutationResponse

    flags: int = 0
    expiry: int = 0
    rev_seqno: int = 0
    meta_cas: int = 0
    options: int | None = None
    nmeta: int | None = None

    @property
    def document(self) -> bytes:
        """The value without the extended metadata."""
        return self.value[: len(self.value) - self.nmeta] if self.nmeta else self.value

    def check_fields(self) -> None:
        if (self.nmeta or 0) > len(self.value):
            raise MalformedMessage(f"{self.name()}: extended metadata is longer than the value")


@message
class SetWithMetaQ(SetWithMeta):
    """Set with meta that is silent on success."""

    OPCODE = Op.SETQ_WITH_META
    REPLY = QUIET_SUCCESS


@message
class AddWithMeta(SetWithMeta):
    """Set with meta of a document that must not exist."""

    OPCODE = Op.ADD_WITH_META


@message
class AddWithMetaQ(SetWithMeta):
    """Add with meta that is silent on success."""

    OPCODE = Op.ADDQ_WITH_META
    REPLY = QUIET_SUCCESS


@message
class DelWithMeta(SetWithMeta):
    """Deletes a document with the metadata of a deletion elsewhere; the value may be xattrs."""

    OPCODE = Op.DEL_WITH_META


@message
class DelWithMetaQ(SetWithMeta):
    """Del with meta that is silent on success."""

    OPCODE = Op.DELQ_WITH_META
    REPLY = QUIET_SUCCESS


# range scans

_SCAN_ID = layout("16s scan_id  as the answer to its creation had it")


@message
class RangeScanIdResponse(Response):
    """A scan was made; the value is its id, 16 bytes."""

    VALUE = Part.REQUIRED
    DATATYPES = 0

    def check_fields(self) -> None:
        if len(self.value) != 16:
            raise MalformedMessage(f"range scan create response: an id has 16 bytes, not {len(self.value)}")


RANGE_SCAN_ITEM = struct.Struct(">IIQQB")  # flags, expiry, seqno, CAS, datatype


@message
class RangeScanItemsResponse(Response):
    """Some of a scan's items. 0xa6 (there are more) and 0xa7 (that was all) are answers of the same shape.

    A key is a LEB128 length and the key, without its collection; a document is u32 flags, u32 expiry,
    u64 seqno, u64 CAS, u8 datatype, then key and value, each after its LEB128 length.
    """

    OK = frozenset({Status.SUCCESS, Status.RANGE_SCAN_MORE, Status.RANGE_SCAN_COMPLETE})
    LAYOUTS = (layout("I has_documents  0: keys only, 1: whole documents"),)
    VALUE = Part.OPTIONAL
    DATATYPES = 0

    has_documents: int = 0


@message
class RangeScanCreate(Message):
    """Begins to read the documents of a vbucket, or some of them, in key order.

    The value is a JSON object: ``collection``, ``key_only``, ``range`` or ``sampling``, and what must be on
    disk first (``snapshot_requirements``).
    """

    OPCODE = Op.RANGE_SCAN_CREATE
    VALUE = Part.REQUIRED
    DATATYPES = int(Datatype.JSON)
    CAS = Part.FORBIDDEN
    RESPONSE = RangeScanIdResponse


@message
class RangeScanContinue(Message):
    """Asks for the next items of a scan; a limit of 0 means none. It gets any number of answers."""

    OPCODE = Op.RANGE_SCAN_CONTINUE
    LAYOUTS = (
        _SCAN_ID
        + layout("""
            I max_items  at most so many
            I max_ms     for at most so long
            I max_bytes  at most so many, and one item at least
        """),
    )
    CAS = Part.FORBIDDEN
    RESPONSE = RangeScanItemsResponse

    scan_id: bytes = bytes(16)
    max_items: int = 0
    max_ms: int = 0
    max_bytes: int = 0


@message
class RangeScanCancel(Message):
    """Ends a scan."""

    OPCODE = Op.RANGE_SCAN_CANCEL
    LAYOUTS = (_SCAN_ID,)
    CAS = Part.FORBIDDEN
    RESPONSE = Response

    scan_id: bytes = bytes(16)
