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

from ..errors import DocumentRefused, MalformedMessage
from ..frames import CHUNK_BYTES, Bytes, Offsets, Trait
from ..wire.codes import Datatype, DcpOpcode, Magic, Status, SystemEventId
from ..wire.fields import decode_leb128
from ..wire.header import HEADER_SIZE

__all__ = [
    "BATCH",
    "BLOCK",
    "COLLECTION",
    "DATATYPE_TRAITS",
    "DELETED",
    "DELETION",
    "DIRECTORY",
    "EXPIRATION",
    "EXPIRED",
    "EXPIRES",
    "FOOTER",
    "FORMAT_VERSION",
    "LOG",
    "MARK",
    "MARK_MAGIC",
    "MUTATION",
    "MUTATION_EXTRAS",
    "MUTATION_HEADS",
    "REPLACES",
    "SYSTEM",
    "SYSTEM_EVENT",
    "TOMBSTONE",
    "StoredDocument",
    "canonical",
    "cas_of",
    "checksum",
    "collection_of",
    "counted",
    "expiries_at",
    "frame_key",
    "index_key",
    "revs_at",
    "vbuckets_at",
]

FORMAT_VERSION = 3
"""1 had a smaller sector in a block's checksum, which was that of the frames alone: see `checksum`. 1 and 2
had no files BUCKETS and SYNCED, so they can't tell that a bucket or the newest log is gone.
"""

# Frames: the header and the extras in one struct. magic, opcode, key length, extras length, datatype,
# vbucket, total body length, opaque, cas; then the extras of docs/spec/dcp.md#mutation,
# docs/spec/dcp.md#deletion (V2), docs/spec/dcp.md#expiration and docs/spec/dcp.md#system-event.

MUTATION = struct.Struct(">HHBBHI4xQQQII7x")  # magic and opcode in one; opaque, lock time, nmeta, nru are 0
DELETION = struct.Struct(">BBHBBHIIQQQIB")
EXPIRATION = struct.Struct(">BBHBBHIIQQQI")
SYSTEM_EVENT = struct.Struct(">BBHBBHIIQQIB")
assert (MUTATION.size, DELETION.size, EXPIRATION.size, SYSTEM_EVENT.size) == (
    24 + 31,
    24 + 21,
    24 + 20,
    24 + 13,
)
MUTATION_EXTRAS = MUTATION.size - HEADER_SIZE
# `MUTATION` for many frames at once: a row has its bytes.
MUTATION_HEADS = np.dtype(
    {
        "names": [
            "start",
            "key_length",
            "extras_length",
            "datatype",
            "vbucket",
            "body_length",
            "cas",
            "seqno",
            "rev",
            "flags",
            "expiry",
        ],
        "formats": [">u2", ">u2", "u1", "u1", ">u2", ">u4", ">u8", ">u8", ">u8", ">u4", ">u4"],
        "offsets": [0, 2, 4, 5, 6, 8, 16, 24, 32, 40, 44],
        "itemsize": MUTATION.size,
    }
)

_REV_AT = 32
_EXPIRY_AT = 44
_DELETE_TIME_AT = 40

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

_MUTATION = int(DcpOpcode.MUTATION)
_DELETION = int(DcpOpcode.DELETION)
_EXPIRATION = int(DcpOpcode.EXPIRATION)
_SYSTEM_EVENT = int(DcpOpcode.SYSTEM_EVENT)
_OPCODE_TRAITS = {
    _MUTATION: 0,
    _DELETION: DELETED,
    _EXPIRATION: EXPIRED,
    _SYSTEM_EVENT: SYSTEM,
}
MUTATION_START = Magic.REQUEST << 8 | DcpOpcode.MUTATION
_U16 = struct.Struct(">H")
_U64 = struct.Struct(">Q")
_U32 = struct.Struct(">I")
_MAX_U64 = (1 << 64) - 1
_HEAD = struct.Struct(">BBHBBHIIQQQ")
_COLLECTION_EVENT = struct.Struct(">QII")  # manifest uid, scope id, collection id


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
        """Take a mutation, deletion or expiration of this store apart."""
        _, opcode, key_length, extras_length, datatype, _, _, _, cas, seqno, rev = _HEAD.unpack_from(frame)
        start = HEADER_SIZE + extras_length
        flags, expiry = 0, 0
        if opcode == _MUTATION:
            flags, expiry = struct.unpack_from(">II", frame, 40)
        elif opcode != _SYSTEM_EVENT:
            (expiry,) = _U32.unpack_from(frame, 40)
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


def frame_key(frame: bytes) -> bytes:
    """The key as it stands in the frame."""
    start = HEADER_SIZE + frame[4]
    return frame[start : start + _U16.unpack_from(frame, 2)[0]]


def cas_of(frame: bytes) -> int:
    """The document's CAS."""
    return int.from_bytes(frame[16:24], "big")


def index_key(frame: bytes) -> bytes:
    """The key under which a frame is found again.

    A system event is about a collection or a scope; the next about the same one replaces it. Its key begins
    with collection id 1, which no document can have.
    """
    if frame[1] != _SYSTEM_EVENT:
        return frame_key(frame)
    event, subject = system_event(frame)
    is_scope = event in (SystemEventId.SCOPE_CREATED, SystemEventId.SCOPE_DROPPED)
    return (b"\x01s" if is_scope else b"\x01c") + _U32.pack(subject)


def system_event(frame: bytes) -> tuple[int, int]:
    """Which event, and of which collection or scope id."""
    _, event, _ = struct.unpack_from(">QIB", frame, HEADER_SIZE)
    value = frame[HEADER_SIZE + frame[4] + _U16.unpack_from(frame, 2)[0] :]
    if event in (SystemEventId.SCOPE_CREATED, SystemEventId.SCOPE_DROPPED):
        return event, struct.unpack_from(">QI", value)[1]
    return event, _COLLECTION_EVENT.unpack_from(value)[2]


def collection_of(key: bytes) -> int:
    """The collection id in front of a document's key."""
    return key[0] if key[0] < 0x80 else decode_leb128(key)[0]


def vbuckets_at(data: Bytes, offsets: Offsets) -> npt.NDArray[np.int64]:
    """The vbucket id of every frame."""
    return data[offsets + 6].astype(np.int64) << 8 | data[offsets + 7]


def revs_at(data: Bytes, offsets: Offsets) -> npt.NDArray[np.uint64]:
    """The rev seqno of every frame; nonsense for system events."""
    # A view of every eight bytes that follow each other, aligned or not.
    words = np.ndarray((len(data) - 7,), ">u8", data, strides=(1,))
    return words[offsets + _REV_AT].astype(np.uint64)


def expiries_at(data: Bytes, offsets: Offsets) -> npt.NDArray[np.uint32]:
    """The expiry of every mutation; nonsense for other frames."""
    return _u32_at(data, offsets + _EXPIRY_AT)


def delete_times_at(data: Bytes, offsets: Offsets) -> npt.NDArray[np.uint32]:
    """The delete time of every tombstone; nonsense for other frames."""
    return _u32_at(data, offsets + _DELETE_TIME_AT)


def _u32_at(data: Bytes, at: Offsets) -> npt.NDArray[np.uint32]:
    words = np.ndarray((len(data) - 3,), ">u4", data, strides=(1,))
    return words[at].astype(np.uint32)


def traits_of(frame: bytes) -> int:
    """What a frame is; without REPLACES, which only its vbucket knows."""
    traits = _OPCODE_TRAITS[frame[1]]
    if traits & SYSTEM:
        return traits
    traits |= DATATYPE_TRAITS[frame[5] & 7]
    if frame[HEADER_SIZE + frame[4]]:
        traits |= COLLECTION
    if frame[1] == _MUTATION and frame[_EXPIRY_AT : _EXPIRY_AT + 4] != b"\0\0\0\0":
        traits |= EXPIRES
    return traits


def canonical(frame: bytes, *, collections: bool, delete_time: int = 0) -> bytes:
    """A change as a peer sent it, in the form in which it is stored.

    Opaque 0, no framing extras, a key with its collection prefix (`collections` says that it has one
    already), no extended metadata behind the value, no lock and no cache hint, and deletions in the V2
    layout, with `delete_time` where the peer gave none.
    """
    magic, opcode, key_length, extras_length, datatype, vbucket, body = struct.unpack_from(">BBHBBHI", frame)
    framing = 0
    if magic == Magic.FLEX_REQUEST:
        framing, key_length = key_length >> 8, key_length & 0xFF
    if opcode not in _OPCODE_TRAITS or len(frame) != HEADER_SIZE + body:
        raise MalformedMessage(f"opcode 0x{opcode:02x} is no change that a store keeps")
    (cas,) = _U64.unpack_from(frame, 16)
    start = HEADER_SIZE + framing
    extras = frame[start : start + extras_length]
    key = frame[start + extras_length : start + extras_length + key_length]
    value = frame[start + extras_length + key_length :]
    if opcode != _SYSTEM_EVENT and not collections:
        key = b"\0" + key
    if opcode == _MUTATION and extras_length == 31:
        meta_length = _U16.unpack_from(extras, 28)[0]
        value = value[: len(value) - meta_length]
        extras = extras[:24] + b"\0" * 7
    elif opcode == _DELETION and extras_length == 18:
        meta_length = _U16.unpack_from(extras, 16)[0]
        value = value[: len(value) - meta_length]
        extras = extras[:16] + _U32.pack(delete_time) + b"\0"
    elif (opcode == _DELETION and extras_length == 21) or (opcode == _EXPIRATION and extras_length == 20):
        extras = extras[:20] + b"\0" * (extras_length - 20)
    elif not (opcode == _SYSTEM_EVENT and extras_length == 13):
        raise MalformedMessage(f"opcode 0x{opcode:02x} with {extras_length} bytes of extras is no change")
    return (
        struct.pack(
            ">BBHBBHIIQ",
            Magic.REQUEST,
            opcode,
            len(key),
            len(extras),
            datatype,
            vbucket,
            len(extras) + len(key) + len(value),
            0,
            cas,
        )
        + extras
        + key
        + value
    )


def counted(text: bytes, delta: int) -> int:
    """What a counter that is stored as this text becomes: not below 0, and modulo 2^64 above."""
    if not text.isdigit() or len(text) > 20 or int(text) > _MAX_U64:
        raise DocumentRefused(Status.DELTA_BADVAL)
    return max(int(text) + delta, 0) & _MAX_U64


# A note stands beside each frame that is not sealed yet: the seqno that it supersedes, and its traits.
NOTE_SHIFT = 8
NOTE_TRAITS = 0xFF

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
    """What each sector counts in both sums."""
    return np.stack([np.ones(count, np.uint64), np.arange(1, count + 1, dtype=np.uint64)], axis=1)


_WEIGHTS = _weights(len(_STARTS))
_U64_MASK = (1 << 64) - 1


def padded(size: int) -> int:
    """The next multiple of 8."""
    return (size + 7) & ~7


def checksum(data: Bytes, sector: int = SECTOR) -> tuple[int, int]:
    """Two numbers that tell whether a block's columns and frames are what was written.

    Up to 64 KiB it is the CRC-32 and 0. Beyond, a CRC would be the slowest part of a backfill: there it is
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
    # In half the time of a sum over an axis, which begins anew for each row.
    sums = np.add.reduceat(data[: words * 8].view(np.uint64), starts)
    # Both at once: a step of numpy's that is not in the processor's cache costs more than what it does.
    plain, weighted = sums.dot(_WEIGHTS[:count] if known else _weights(count)).tolist()
    rest = int.from_bytes(data.data[words * 8 :], "little")  # less than a word, in the last sector
    return (plain + rest) & _U64_MASK, (weighted + (whole + 1) * rest) & _U64_MASK
