"""The bytes of a store: frames as they are logged and streamed, and the files that hold them.

`docs/format.md` describes the files for people; the structs, dtypes and asserted sizes here are what it is
about. Frames are big-endian, as on the wire; everything around them is little-endian, so that numpy reads it
in place.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import DocumentRefused, MalformedMessage, StoreTooNew
from ..files import Buffer
from ..frames import CHUNK_BYTES, OPCODE_AT, Bytes, Offsets, Trait, field_everywhere
from ..model import MAX_U64
from ..wire import dcp
from ..wire.codes import SCOPE_EVENTS, Datatype, DcpOpcode, Magic, Status, SystemEventId
from ..wire.dcp_replication import DcpAbort, DcpPrepare
from ..wire.fields import decode_leb128
from ..wire.flatbuffer import EventContent
from ..wire.header import HEADER, HEADER_LAYOUT, HEADER_SIZE, Frame

__all__ = [
    "BATCH",
    "BLOCK",
    "COLLECTION",
    "DATATYPE_TRAITS",
    "DELETED",
    "DELETION",
    "DELETION_EXTRAS",
    "DIRECTORY",
    "EVENT_EXTRAS",
    "EXPIRATION",
    "EXPIRATION_EXTRAS",
    "EXPIRED",
    "EXPIRES",
    "EXPIRY_BYTES",
    "FOOTER",
    "FORMAT_VERSION",
    "LOG",
    "MARK",
    "MARK_MAGIC",
    "MUTATION",
    "MUTATION_EXTRAS",
    "PREPARE",
    "PREPARE_EXTRAS",
    "REPLACES",
    "REQUEST",
    "SYSTEM",
    "SYSTEM_EVENT",
    "TOMBSTONE",
    "UNSEEN",
    "StoredDocument",
    "StoredPrepare",
    "aborted",
    "canonical",
    "cas_of",
    "check_version",
    "checksum",
    "collection_of",
    "committed",
    "counted",
    "datatype_of",
    "expiries_at",
    "expiry_of",
    "frame_key",
    "index_key",
    "is_sound_inside",
    "is_sound_to_end",
    "number_in",
    "numbered_name",
    "rev_of",
    "revs_at",
    "seqno_of",
    "vbucket_of",
    "vbuckets_at",
    "with_crc_at_end",
    "with_crc_inside",
]

FORMAT_VERSION = 4
"""1 had a smaller sector in a block's checksum, which covered only the frames: see `checksum`. 1 and 2 had no
files BUCKETS and SYNCED, so they can't tell that a bucket or the newest log is gone. 3 is the same as 4, but
versions that know neither prepares nor modified collections wrote it too.
"""


def check_version(what: str, version: int) -> None:
    """`StoreTooNew` if a newer Tailrace wrote it."""
    if version > FORMAT_VERSION:
        raise StoreTooNew(
            f"{what} has format {version}, this Tailrace reads up to {FORMAT_VERSION}: use a newer Tailrace"
        )


def numbered_name(prefix: str, number: int) -> str:
    """The name of a log or segment."""
    return f"{prefix}{number:010d}"


def number_in(name: str, prefix: str) -> int | None:
    """The number in such a name; None for other files."""
    digits = name.removeprefix(prefix)
    return int(digits) if name.startswith(prefix) and len(digits) == 10 and digits.isdecimal() else None


# Frames: the header and the extras in one struct. A mutation's has only what the store fills in: opaque, lock
# time, nmeta and nru are 0.

_MUTATION_LAYOUT = HEADER_LAYOUT + dcp.MUTATION
_STORED_MUTATION = _MUTATION_LAYOUT.only(
    "magic+opcode",
    "key_length",
    "extras_length",
    "datatype",
    "vbucket",
    "body_length",
    "cas",
    "by_seqno",
    "rev_seqno",
    "flags",
    "expiry",
)
_DELETION_LAYOUT = HEADER_LAYOUT + dcp.DELETION_V2
_EXPIRATION_LAYOUT = HEADER_LAYOUT + dcp.EXPIRATION
_EVENT_LAYOUT = HEADER_LAYOUT + dcp.DcpSystemEvent.LAYOUTS[0]
_PREPARE_LAYOUT = HEADER_LAYOUT + DcpPrepare.LAYOUTS[0]
MUTATION = _STORED_MUTATION.struct
DELETION = _DELETION_LAYOUT.struct
EXPIRATION = _EXPIRATION_LAYOUT.struct
SYSTEM_EVENT = _EVENT_LAYOUT.struct
PREPARE = _PREPARE_LAYOUT.struct
MUTATION_EXTRAS = dcp.MUTATION.size
DELETION_EXTRAS = dcp.DELETION_V2.size
EXPIRATION_EXTRAS = dcp.EXPIRATION.size
EVENT_EXTRAS = dcp.DcpSystemEvent.LAYOUTS[0].size
PREPARE_EXTRAS = DcpPrepare.LAYOUTS[0].size

_REV = _MUTATION_LAYOUT.field("rev_seqno")
_EXPIRY = _MUTATION_LAYOUT.field("expiry")
_DELETE_TIME = _DELETION_LAYOUT.field("delete_time")
# Mutations and tombstones have seqno and rev at the same place, and tombstones of both kinds their time.
assert _REV.offset == _DELETION_LAYOUT.at("rev_seqno") == _EXPIRATION_LAYOUT.at("rev_seqno")
assert _DELETE_TIME.offset == _EXPIRATION_LAYOUT.at("delete_time")
# A prepare also has its flags and expiry where the mutation that it may become has them.
assert all(_PREPARE_LAYOUT.at(name) == _MUTATION_LAYOUT.at(name) for name in ("rev_seqno", "flags", "expiry"))

# Where fields are in a frame, for code that reads only one.
CAS_BYTES = _MUTATION_LAYOUT.field("cas").place
SEQNO_BYTES = _MUTATION_LAYOUT.field("by_seqno").place
REV_BYTES = _REV.place
EXPIRY_BYTES = _EXPIRY.place
_KEY_LENGTH_BYTES = HEADER_LAYOUT.field("key_length").place
_VBUCKET_BYTES = HEADER_LAYOUT.field("vbucket").place
_EXTRAS_LENGTH_AT = HEADER_LAYOUT.at("extras_length")
_DATATYPE_AT = HEADER_LAYOUT.at("datatype")

# The traits as plain integers: an operator of an IntFlag takes a microsecond, a tenth of a whole write.
DELETED = int(Trait.DELETION)
EXPIRED = int(Trait.EXPIRATION)
TOMBSTONE = DELETED | EXPIRED
SYSTEM = int(Trait.SYSTEM_EVENT)
COLLECTION = int(Trait.COLLECTION)
EXPIRES = int(Trait.EXPIRES)
REPLACES = int(Trait.REPLACES)

DATATYPE_TRAITS = tuple(
    int(Trait.XATTR if datatype & Datatype.XATTR else 0)
    | int(Trait.SNAPPY if datatype & Datatype.SNAPPY else 0)
    for datatype in range(8)
)

REQUEST = int(Magic.REQUEST)
"""Every frame of a store has this magic."""
_MUTATION = int(DcpOpcode.MUTATION)
_DELETION = int(DcpOpcode.DELETION)
_EXPIRATION = int(DcpOpcode.EXPIRATION)
_SYSTEM_EVENT = int(DcpOpcode.SYSTEM_EVENT)
_PREPARE = int(DcpOpcode.PREPARE)
_ABORT = int(DcpOpcode.ABORT)
UNSEEN = frozenset({_PREPARE, _ABORT})
"""Opcodes of the changes that make no document: durable writes that are not decided, and those that were
given up. By their traits alone they are system events.
"""
_OPCODE_TRAITS = {
    _MUTATION: 0,
    _DELETION: DELETED,
    _EXPIRATION: EXPIRED,
    _SYSTEM_EVENT: SYSTEM,
    _PREPARE: SYSTEM,
    _ABORT: SYSTEM,
}
MUTATION_START = Magic.REQUEST << 8 | DcpOpcode.MUTATION
_U32 = struct.Struct(">I")
_FLAGS_AND_EXPIRY = _MUTATION_LAYOUT.only("flags", "expiry").struct
_HEAD = (
    (HEADER_LAYOUT + dcp.DELETION_V1)
    .only("opcode", "key_length", "extras_length", "datatype", "cas", "by_seqno", "rev_seqno")
    .struct
)
_EVENT = _EVENT_LAYOUT.only("event").struct
_MODIFIED = SystemEventId.COLLECTION_MODIFIED


class StoredDocument(NamedTuple):
    """A document's frame, taken apart. A tombstone has no flags, and its expiry is the time of the
    deletion.
    """

    key: bytes
    value: bytes
    cas: int
    seqno: int
    rev: int
    flags: int
    expiry: int
    datatype: int
    opcode: int

    @property
    def deleted(self) -> bool:
        return self.opcode != _MUTATION

    @classmethod
    def of(cls, frame: bytes) -> StoredDocument:
        """Take apart a mutation, deletion, expiration or prepare of this store."""
        opcode, key_length, extras_length, datatype, cas, seqno, rev = _HEAD.unpack_from(frame)
        start = HEADER_SIZE + extras_length
        flags, expiry = 0, 0
        if opcode in (_MUTATION, _PREPARE):
            flags, expiry = _FLAGS_AND_EXPIRY.unpack_from(frame)
        elif opcode != _SYSTEM_EVENT:
            (expiry,) = _U32.unpack_from(frame, _DELETE_TIME.offset)
        return cls(
            frame[start : start + key_length],
            frame[start + key_length :],
            cas,
            seqno,
            rev,
            flags,
            expiry,
            datatype,
            opcode,
        )


class StoredPrepare(NamedTuple):
    """A durable write that is not decided."""

    key: bytes
    seqno: int
    level: int

    @classmethod
    def of(cls, frame: bytes) -> StoredPrepare:
        """Take apart a prepare of this store."""
        return cls(frame_key(frame), seqno_of(frame), frame[_PREPARE_LAYOUT.at("durability")])


def committed(prepare: bytes, seqno: int) -> bytes:
    """The change that a prepare's commit makes: a mutation, or a deletion at the time in its expiry."""
    document = StoredDocument.of(prepare)
    vbucket, key_length, datatype = vbucket_of(prepare), len(document.key), document.datatype
    size = key_length + len(document.value)
    if prepare[_PREPARE_LAYOUT.at("deleted")]:
        body = DELETION_EXTRAS + size
        header = (REQUEST, _DELETION, key_length, DELETION_EXTRAS, datatype, vbucket, body, 0, document.cas)
        made = DELETION.pack(*header, seqno, document.rev, document.expiry, 0)
    else:
        body = MUTATION_EXTRAS + size
        start = (MUTATION_START, key_length, MUTATION_EXTRAS, datatype, vbucket, body, document.cas)
        made = MUTATION.pack(*start, seqno, document.rev, document.flags, document.expiry)
    return made + document.key + document.value


def aborted(  # noqa: PLR0917
    vbucket: int, key: bytes, seqno: int, prepared_seqno: int, time_s: int, cas: int = 0
) -> bytes:
    """An abort as it is stored: like a deletion, with the prepare's seqno in place of the rev. So its own
    seqno is where every change has it, and it is forgotten when deletions of its age are.
    """
    body = DELETION_EXTRAS + len(key)
    start = REQUEST, _ABORT, len(key), DELETION_EXTRAS, 0, vbucket, body, 0, cas
    return DELETION.pack(*start, seqno, prepared_seqno, time_s, 0) + key


def frame_key(frame: bytes) -> bytes:
    """The key as it is in the frame."""
    start = HEADER_SIZE + frame[_EXTRAS_LENGTH_AT]
    return frame[start : start + int.from_bytes(frame[_KEY_LENGTH_BYTES], "big")]


def cas_of(frame: bytes) -> int:
    """The document's CAS."""
    return int.from_bytes(frame[CAS_BYTES], "big")


def seqno_of(frame: bytes) -> int:
    """The change's place in its vbucket."""
    return int.from_bytes(frame[SEQNO_BYTES], "big")


def rev_of(frame: bytes) -> int:
    """The document's rev; nonsense for a system event."""
    return int.from_bytes(frame[REV_BYTES], "big")


def expiry_of(frame: bytes) -> int:
    """When a mutation expires; nonsense for other frames."""
    return int.from_bytes(frame[EXPIRY_BYTES], "big")


def datatype_of(frame: bytes) -> int:
    """The bits of `Datatype`."""
    return frame[_DATATYPE_AT]


def vbucket_of(frame: bytes) -> int:
    """The vbucket that a frame belongs to."""
    return int.from_bytes(frame[_VBUCKET_BYTES], "big")


def index_key(frame: bytes) -> bytes:
    """The key under which a frame is found again.

    A system event replaces the previous one about the same collection or scope, except that a collection's
    modification replaces only its previous modification. Its key begins with collection id 1, which no
    document can have.
    """
    if frame[OPCODE_AT] != _SYSTEM_EVENT:
        return frame_key(frame)
    return system_key(*system_event(frame))


def system_key(event: int, subject: int) -> bytes:
    """The key of an event about a collection or scope."""
    kind = b"\x01s" if event in SCOPE_EVENTS else b"\x01m" if event == _MODIFIED else b"\x01c"
    return kind + _U32.pack(subject)


def system_event(frame: bytes) -> tuple[int, int]:
    """Which event it is, and the id of its collection or scope."""
    (event,) = _EVENT.unpack_from(frame)
    content = event_content(frame)
    return event, content.scope_id if content.collection_id is None else content.collection_id


def event_content(frame: bytes) -> EventContent:
    """What a system event says, in whichever form it is stored."""
    return dcp.DcpSystemEvent.decode(Frame.parse(frame)).content()


def collection_of(key: bytes) -> int:
    """The collection id in front of a document's key."""
    return key[0] if key[0] < 0x80 else decode_leb128(key)[0]


def vbuckets_at(data: Bytes, offsets: Offsets) -> npt.NDArray[np.int64]:
    """The vbucket id of every frame."""
    return field_everywhere(data, HEADER_LAYOUT.field("vbucket"))[offsets].astype(np.int64)


def revs_at(data: Bytes, offsets: Offsets) -> npt.NDArray[np.uint64]:
    """The rev seqno of every frame; nonsense for system events."""
    return field_everywhere(data, _REV)[offsets].astype(np.uint64)


def expiries_at(data: Bytes, offsets: Offsets) -> npt.NDArray[np.uint32]:
    """The expiry of every mutation; nonsense for other frames."""
    return field_everywhere(data, _EXPIRY)[offsets].astype(np.uint32)


def delete_times_at(data: Bytes, offsets: Offsets) -> npt.NDArray[np.uint32]:
    """The delete time of every tombstone; nonsense for other frames."""
    return field_everywhere(data, _DELETE_TIME)[offsets].astype(np.uint32)


def traits_of(frame: bytes) -> int:
    """A frame's traits, without REPLACES, which only its vbucket knows."""
    traits = _OPCODE_TRAITS[frame[OPCODE_AT]]
    if traits & SYSTEM:
        return traits
    traits |= DATATYPE_TRAITS[frame[_DATATYPE_AT] & 7]
    if frame[HEADER_SIZE + frame[_EXTRAS_LENGTH_AT]]:
        traits |= COLLECTION
    if frame[OPCODE_AT] == _MUTATION and frame[EXPIRY_BYTES] != b"\0\0\0\0":
        traits |= EXPIRES
    return traits


def canonical(frame: bytes, *, collections: bool, delete_time: int = 0) -> bytes:
    """A change as a peer sent it, in the form in which it is stored.

    Opaque 0, no framing extras, a key with its collection prefix (`collections` says that it has one
    already), no extended metadata behind the value, no lock and no cache hint, and deletions in the V2
    layout, with `delete_time` where the peer gave none.
    """
    magic, opcode, key_length, extras_length, datatype, vbucket, body, _, cas = (
        HEADER_LAYOUT.struct.unpack_from(frame)
    )
    framing = 0
    if magic == Magic.FLEX_REQUEST:
        framing, key_length = key_length >> 8, key_length & 0xFF
    if opcode not in _OPCODE_TRAITS or len(frame) != HEADER_SIZE + body:
        raise MalformedMessage(f"opcode 0x{opcode:02x} is not a change that a store keeps")
    start = HEADER_SIZE + framing
    extras = frame[start : start + extras_length]
    key = frame[start + extras_length : start + extras_length + key_length]
    value = frame[start + extras_length + key_length :]
    if opcode != _SYSTEM_EVENT and not collections:
        key = b"\0" + key
    if opcode == _MUTATION and extras_length == MUTATION_EXTRAS:
        seqno, rev, flags, expiry, _, meta_length, _ = dcp.MUTATION.struct.unpack(extras)
        value = value[: len(value) - meta_length]
        extras = dcp.MUTATION.struct.pack(seqno, rev, flags, expiry, 0, 0, 0)
    elif opcode == _DELETION and extras_length == dcp.DELETION_V1.size:
        seqno, rev, meta_length = dcp.DELETION_V1.struct.unpack(extras)
        value = value[: len(value) - meta_length]
        extras = dcp.DELETION_V2.struct.pack(seqno, rev, delete_time, 0)
    elif opcode == _PREPARE and extras_length == PREPARE_EXTRAS:
        seqno, rev, flags, expiry, _, _, deleted, level = DcpPrepare.LAYOUTS[0].struct.unpack(extras)
        extras = DcpPrepare.LAYOUTS[0].struct.pack(seqno, rev, flags, expiry, 0, 0, deleted, level)
    elif opcode == _ABORT and extras_length == DcpAbort.LAYOUTS[0].size:
        prepared_seqno, seqno = DcpAbort.LAYOUTS[0].struct.unpack(extras)
        return aborted(vbucket, key, seqno, prepared_seqno, delete_time)
    elif opcode == _DELETION and extras_length == DELETION_EXTRAS:
        extras = dcp.DELETION_V2.struct.pack(*dcp.DELETION_V2.struct.unpack(extras)[:-1], 0)
    elif (opcode, extras_length) not in ((_EXPIRATION, EXPIRATION_EXTRAS), (_SYSTEM_EVENT, EVENT_EXTRAS)):
        raise MalformedMessage(f"opcode 0x{opcode:02x} with {extras_length} bytes of extras is not a change")
    size = len(extras) + len(key) + len(value)
    header = (Magic.REQUEST, opcode, len(key), len(extras), datatype, vbucket, size, 0, cas)
    return HEADER.pack(*header) + extras + key + value


def counted(text: bytes, delta: int) -> int:
    """The new value of a counter that is stored as this text: at least 0, and modulo 2^64."""
    if not text.isdigit() or len(text) > 20 or int(text) > MAX_U64:
        raise DocumentRefused(Status.DELTA_BADVAL)
    return max(int(text) + delta, 0) & MAX_U64


# Each frame that is not sealed yet has a note: the seqno that it supersedes, and its traits.
NOTE_SHIFT = 8
NOTE_TRAITS = 0xFF

# The headers of logs, batches and blocks, the footers of segments and the marks have a CRC-32 of their own:
# after the magic where a body with a checksum follows, and at the end elsewhere.


def with_crc_inside(head: bytes, salt: int = 0) -> bytes:
    """The header of a batch or block, with the checksum of what comes behind it."""
    return head[:4] + zlib.crc32(head[8:], salt).to_bytes(4, "little") + head[8:]


def is_sound_inside(head: Buffer, salt: int = 0) -> bool:
    """Whether the checksum behind the magic is right."""
    return zlib.crc32(head[8:], salt) == int.from_bytes(head[4:8], "little")


def with_crc_at_end(head: bytes) -> bytes:
    """A log's header, a footer or a mark, with the checksum of what comes before it."""
    return head[:-4] + zlib.crc32(head[:-4]).to_bytes(4, "little")


def is_sound_to_end(head: bytes) -> bool:
    """Whether the checksum at the end is right."""
    return zlib.crc32(head[:-4]) == int.from_bytes(head[-4:], "little")


# The log. Its header: magic, version, number, number and valid bytes of the log before, number of the first
# batch, salt, checksum. A batch: magic, checksum of this header, number, highest CAS that may have been given
# out, frames, bytes of metadata, bytes of frames, checksum of the body. The body: length u32 x frames, note
# u64 x frames, the frames, the metadata (JSON). Checksums are CRC-32 begun with the salt.

LOG = struct.Struct("<4sB3xQQQQI16xI")
BATCH = struct.Struct("<4sIQQIIQI4x")
LOG_MAGIC = b"TRLG"
BATCH_MAGIC = b"TRBT"
assert (LOG.size, BATCH.size) == (64, 48)

# A mark in the SYNCED file: magic, number and valid bytes of the newest log, number of the next batch,
# checksum.

MARK = struct.Struct("<4sQQQI")
MARK_MAGIC = b"TRMK"
assert MARK.size == 32

# A segment: header, blocks, pairs, directory, footer. A block: magic, checksum of the rest of this header,
# checksum of the columns, vbucket, traits of all frames, frames, bytes of frames, earliest expiry, first and
# last seqno, checksum of the frames. Then the columns seqno u64, length u32, CRC-32 u32, traits u8, padded to
# 8; then the frames, padded to 8.

SEGMENT = struct.Struct("<4sB3xQQ8x")
BLOCK = struct.Struct("<4sIIHHIIIQQQQ4x")
FOOTER = struct.Struct("<QQQQI4sB3xI")
DIRECTORY = np.dtype(
    [
        ("vbucket", "<u2"),
        ("traits", "<u2"),
        ("min_expiry", "<u4"),
        ("count", "<u4"),
        ("pairs", "<u4"),
        ("pairs_crc", "<u4"),
        ("spare", "<u4"),
        ("offset", "<u8"),
        ("bytes", "<u8"),
        ("frame_bytes", "<u8"),
        ("pairs_offset", "<u8"),
        ("first", "<u8"),
        ("last", "<u8"),
    ]
)
SEGMENT_MAGIC = b"TRSG"
BLOCK_MAGIC = b"TRBK"
assert (SEGMENT.size, BLOCK.size, FOOTER.size, DIRECTORY.itemsize) == (32, 64, 48, 72)

COLUMN_BYTES = 8 + 4 + 4 + 1
NO_EXPIRY = 0xFFFFFFFF
CRC_BYTES = 64 << 10
SECTOR = 4096
OLD_SECTOR = 512
_STARTS = np.arange(0, CHUNK_BYTES // 4, SECTOR // 8)  # where the sectors of a block begin, in words


def _weights(count: int) -> npt.NDArray[np.uint64]:
    """The weight of each sector in both sums."""
    return np.stack([np.ones(count, np.uint64), np.arange(1, count + 1, dtype=np.uint64)], axis=1)


_WEIGHTS = _weights(len(_STARTS))


def padded(size: int) -> int:
    """The next multiple of 8."""
    return (size + 7) & ~7


def checksum(data: Bytes, sector: int = SECTOR) -> tuple[int, int]:
    """Two numbers that tell whether a block's columns and frames are what was written.

    Up to 64 KiB they are the CRC-32 and 0. Beyond, a CRC would be the slowest part of a backfill, so they are
    two sums over sectors, the second weighted by the sector's place, at a multiple of the speed. They find
    flipped bits and zeroed or swapped sectors just as well. A sector is what kernels write and disks keep as
    a whole; with eighths of it, as in format 1, the sums take twice as long.
    """
    if len(data) <= CRC_BYTES:
        return zlib.crc32(data.data), 0
    words, whole = len(data) // 8, len(data) // sector
    count = -(-words * 8 // sector)
    known = sector == SECTOR and count <= len(_STARTS)
    starts = _STARTS[:count] if known else np.arange(0, words, sector // 8)
    # This takes half the time of a sum over an axis, which starts over for each row.
    sums = np.add.reduceat(data[: words * 8].view(np.uint64), starts)
    # Both sums together: reading the words again would cost more than adding them up.
    plain, weighted = sums.dot(_WEIGHTS[:count] if known else _weights(count)).tolist()
    rest = int.from_bytes(data.data[words * 8 :], "little")  # less than a word, in the last sector
    return (plain + rest) & MAX_U64, (weighted + (whole + 1) * rest) & MAX_U64
