"""From the store's frames to those of one connection.

The layouts are docs/spec/dcp.md#mutation and those below it; what a value holds is docs/spec/dcp.md#values.

A frame was made once, in the store, in the richest form: with collection prefix, delete time and xattrs,
compressed as it came. Most readers can take most frames as they are, so a chunk goes through these steps,
each for the whole chunk, and each skipped if there is nothing to do:

1. drop the frames that the stream's filter does not want;
2. remake the frames that this reader can't take as they are (the only step frame by frame);
3. make commits and aborts of prepares, for a reader that asked for them (`sync_writes`);
4. cut the collection prefix off, for a reader without collections;
5. put the stream's opaque in, and its stream id.

A deletion from memory has its delete time too; servers send 0 there.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...frames import (
    OPCODE_AT,
    Bytes,
    Chunk,
    Offsets,
    Trait,
    cut_out,
    field_everywhere,
    frames_of,
    keys_at,
    set_opaques,
)
from ...snappy import deflate, inflate
from ...wire.codes import Datatype, DcpOpcode, Magic, RequestFrameId, SystemEventId
from ...wire.dcp import DELETION_V1, DELETION_V2, EXPIRATION, MUTATION, DcpSystemEvent
from ...wire.event_forms import as_flatbuffer, as_integers
from ...wire.fields import FrameInfo, encode_frame_infos, join_xattrs, split_xattrs
from ...wire.header import HEADER, HEADER_LAYOUT, HEADER_SIZE, MAX_FRAME, Frame
from ..stream_filter import StreamFilter
from .controls import ConnectionOptions
from .sync_writes import PREPARED_DELETION_AT, SyncWriteShaping

__all__ = ["ShapedFrames", "Shaper", "stream_id_framing"]

_KEY_LENGTH, _BODY_LENGTH = HEADER_LAYOUT.field("key_length"), HEADER_LAYOUT.field("body_length")
_DATATYPE_AT = HEADER_LAYOUT.at("datatype")
_DATATYPES = 8
_unpack_seqno = MUTATION.until("rev_seqno").struct.unpack_from
"""All changes begin with it."""
_SYSTEM_XATTR = "_"
_EVENT = DcpSystemEvent.LAYOUTS[0].field("event")
_SYSTEM_EVENT = int(Trait.SYSTEM_EVENT)
_TOMBSTONES = int(Trait.DELETION | Trait.EXPIRATION)


class ShapedFrames(NamedTuple):
    """Whole frames, ready to be sent, back to back."""

    data: Bytes
    offsets: Offsets
    first_seqno: int
    last_seqno: int
    surcharge: int = 0
    """What flow control counts beyond the bytes: docs/spec/dcp.md#counted-bytes."""


def _seqno_of(data: Bytes, offset: int) -> int:
    seqno: int = _unpack_seqno(data.data, offset + HEADER_SIZE)[0]
    return seqno


def stream_id_framing(stream_id: int) -> bytes:
    """The framing extras that name a stream, or nothing for the stream id 0 (there is none)."""
    if not stream_id:
        return b""
    return encode_frame_infos([FrameInfo(RequestFrameId.DCP_STREAM_ID, struct.pack(">H", stream_id))])


class Shaper:
    """Shapes the chunks of a vbucket for one stream."""

    __slots__ = (
        "_decisions",
        "_filter",
        "_framing",
        "_opaque",
        "_options",
        "_rewritten",
        "_rewritten_traits",
    )

    def __init__(
        self, options: ConnectionOptions, filter_: StreamFilter, opaque: int, stream_id: int = 0
    ) -> None:
        self._options = options
        self._filter = filter_
        self._opaque = opaque
        self._framing = stream_id_framing(stream_id)
        self._decisions = SyncWriteShaping() if options.sync_writes else None
        self._rewritten, self._rewritten_traits = _rewritten(
            options.features,
            options.flags,
            options.expiry_opcode,
            options.force_compression,
            options.sync_writes,
        )

    def shape(
        self, chunk: Chunk, *, skip_deletes: bool = False, by_key: bool = False, may_commit: bool = False
    ) -> ShapedFrames | None:
        """The frames of a chunk that are for the stream, as its reader wants them; None if none are.

        ``by_key`` puts them in the order of their keys, with system events first. Commits are sent as such
        only with ``may_commit``, in snapshots from memory.
        """
        data, offsets = self.choose(chunk, skip_deletes=skip_deletes)
        if not len(offsets):
            return None
        first_seqno = _seqno_of(data, offsets.item(0))
        last_seqno = chunk.last_seqno if data is chunk.data else _seqno_of(data, offsets.item(-1))
        if by_key:
            data, offsets = _in_key_order(data, offsets)
        surcharge = 0
        if self._decisions is not None:
            data, offsets, surcharge = self._decisions.shape(data, offsets, may_commit=may_commit)
        set_opaques(data, offsets, self._opaque)
        if self._filter.is_legacy:
            data, offsets = _without_prefix(data, offsets)
        elif self._framing:
            data, offsets = _with_framing(data, offsets, self._framing)
        return ShapedFrames(data, offsets, first_seqno, last_seqno, surcharge)

    def choose(self, chunk: Chunk, *, skip_deletes: bool = False) -> tuple[Bytes, Offsets]:
        """The first two steps: the frames that are for the stream, with values that its reader can take."""
        data, offsets = chunk.data, chunk.offsets
        wanted = self._filter.wanted(chunk)
        if skip_deletes and chunk.traits & _TOMBSTONES:
            opcodes = data[offsets + OPCODE_AT]
            living = (opcodes != DcpOpcode.DELETION) & (opcodes != DcpOpcode.EXPIRATION)
            wanted = living if wanted is None else wanted & living
        if chunk.traits & _SYSTEM_EVENT and not self._options.flatbuffers:
            unmodified = ~_modified(data, offsets)
            wanted = unmodified if wanted is None else wanted & unmodified
        if wanted is not None and not wanted.all():
            data, offsets = frames_of(data, offsets, wanted)
        if len(offsets) and (chunk.traits & self._rewritten_traits or self._rewritten_traits < 0):
            data, offsets = self._rewrite(data, offsets)
        return data, offsets

    def _rewrite(self, data: Bytes, offsets: Offsets) -> tuple[Bytes, Offsets]:
        """Remake the frames that need it; runs of other frames stay as they are."""
        opcodes = data[offsets + OPCODE_AT]
        places = np.flatnonzero(self._rewritten[opcodes, data[offsets + _DATATYPE_AT] % _DATATYPES])
        if not len(places):
            return data, offsets
        ends = np.append(offsets[1:], len(data))
        sizes = ends - offsets
        view = data.data
        pieces: list[bytes | memoryview] = []
        done = 0
        for place in places.tolist():
            start, end = int(offsets[place]), int(ends[place])
            pieces.append(view[done:start])
            frame = self._rewrite_frame(view[start:end].tobytes())
            pieces.append(frame)
            sizes[place] = len(frame)
            done = end
        pieces.append(view[done:])
        return np.frombuffer(bytearray().join(pieces), np.uint8), np.cumsum(sizes) - sizes

    def _rewrite_frame(self, frame: bytes) -> bytes:
        """One frame as this reader wants it, still with its prefix."""
        _, opcode, key_length, extras_length, datatype, vbucket, _, _, cas = HEADER.unpack_from(frame)
        if opcode == DcpOpcode.SYSTEM_EVENT:
            event = DcpSystemEvent.decode(Frame.parse(frame))
            return (as_flatbuffer(event) if self._options.flatbuffers else as_integers(event)).encode()
        key_at = HEADER_SIZE + extras_length
        value_at = key_at + key_length
        extras = frame[HEADER_SIZE:key_at]
        value = frame[value_at:]
        is_deleted = opcode == DcpOpcode.PREPARE and extras[PREPARED_DELETION_AT]
        if opcode == DcpOpcode.MUTATION or (opcode == DcpOpcode.PREPARE and not is_deleted):
            value, datatype = self._document(value, datatype)
        elif is_deleted:
            value, datatype = self._tombstone_value(value, datatype)
        else:
            opcode, extras = self._tombstone(opcode, extras)
            value, datatype = self._tombstone_value(value, datatype)
        if self._options.force_compression:
            value, datatype = _compressed(value, datatype)
        body = len(extras) + key_length + len(value)
        header = HEADER.pack(
            Magic.REQUEST, opcode, key_length, len(extras), datatype, vbucket, body, self._opaque, cas
        )
        return b"".join((header, extras, frame[key_at:value_at], value))

    # docs/spec/dcp.md#values

    def _document(self, value: bytes, datatype: int) -> tuple[bytes, int]:
        options = self._options
        if options.no_value:
            stored = datatype
            kept = self._xattrs_only(value, datatype) if options.xattrs else (b"", 0)
            return (kept[0], stored) if options.keep_datatype else kept
        strip = datatype & Datatype.XATTR and not options.xattrs
        if datatype & Datatype.SNAPPY and (strip or not options.snappy):
            value, datatype = inflate(value, MAX_FRAME), datatype & ~Datatype.SNAPPY
        if strip:
            value, datatype = split_xattrs(value)[1], datatype & ~Datatype.XATTR
        return value, datatype

    def _tombstone_value(self, value: bytes, datatype: int) -> tuple[bytes, int]:
        """What is left of a deletion's value: system xattrs, and the user's if they were asked for."""
        if not datatype & Datatype.XATTR or not self._options.xattrs:
            return b"", 0
        if self._options.deleted_user_xattrs:
            return self._xattrs_only(value, datatype)
        xattrs, _ = split_xattrs(inflate(value, MAX_FRAME) if datatype & Datatype.SNAPPY else value)
        kept = {name: text for name, text in xattrs.items() if name.startswith(_SYSTEM_XATTR)}
        return (join_xattrs(kept, b""), int(Datatype.XATTR)) if kept else (b"", 0)

    @staticmethod
    def _xattrs_only(value: bytes, datatype: int) -> tuple[bytes, int]:
        if not datatype & Datatype.XATTR:
            return b"", 0
        if datatype & Datatype.SNAPPY:
            value = inflate(value, MAX_FRAME)
        return value[: len(value) - len(split_xattrs(value)[1])], int(Datatype.XATTR)

    def _tombstone(self, opcode: int, extras: bytes) -> tuple[int, bytes]:
        """Opcode and extras of a deletion or expiration."""
        stored = DELETION_V2 if opcode == DcpOpcode.DELETION else EXPIRATION
        seqno, rev, delete_time = stored.struct.unpack(extras)[:3]
        if opcode == DcpOpcode.EXPIRATION and self._options.expirations:
            return opcode, extras
        if self._options.delete_times:
            return DcpOpcode.DELETION, DELETION_V2.struct.pack(seqno, rev, delete_time, 0)
        return DcpOpcode.DELETION, DELETION_V1.struct.pack(seqno, rev, 0)


def _compressed(value: bytes, datatype: int) -> tuple[bytes, int]:
    """The value compressed, if that makes it smaller."""
    if value and not datatype & Datatype.SNAPPY and len(smaller := deflate(value)) < len(value):
        return smaller, datatype | Datatype.SNAPPY
    return value, datatype


@lru_cache(maxsize=64)
def _rewritten(
    features: frozenset[int], flags: int, expiry_opcode: bool, force_compression: bool, sync_writes: bool
) -> tuple[npt.NDArray[np.bool_], int]:
    """By opcode and datatype, whether such a frame has to be remade for a connection with these options.

    Also the traits without which no frame of a chunk has to be remade; -1 if any frame may have to be.
    """
    taken = ConnectionOptions(
        features,
        flags=flags,
        expiry_opcode=expiry_opcode,
        force_compression=force_compression,
        sync_writes=sync_writes,
    )
    table = np.zeros((256, _DATATYPES), np.bool_)
    for bits in range(_DATATYPES):
        datatype = Datatype(bits)
        inside = bool(datatype & Datatype.SNAPPY and not taken.snappy) or bool(
            datatype & Datatype.XATTR and not taken.xattrs
        )
        compress = taken.force_compression and not datatype & Datatype.SNAPPY
        pruned = bool(datatype) and not (
            datatype & Datatype.XATTR and taken.xattrs and taken.deleted_user_xattrs
        )
        table[DcpOpcode.MUTATION, bits] = taken.no_value or inside or compress
        table[DcpOpcode.PREPARE, bits] = taken.sync_writes  # rare, and it may be a deletion
        table[DcpOpcode.DELETION, bits] = not taken.delete_times or inside or pruned
        table[DcpOpcode.EXPIRATION, bits] = not taken.expirations or inside or pruned
        table[DcpOpcode.SYSTEM_EVENT, bits] = True  # which may leave it as it is
    if taken.no_value or taken.force_compression:
        return table, -1
    traits = Trait.SYSTEM_EVENT
    if not taken.delete_times:
        traits |= Trait.DELETION
    if not taken.expirations:
        traits |= Trait.EXPIRATION
    if not taken.snappy:
        traits |= Trait.SNAPPY
    if not taken.xattrs or not taken.deleted_user_xattrs:
        traits |= Trait.XATTR  # for deletions; mutations with xattrs are then found to need nothing
    return table, int(traits)


def _modified(data: Bytes, offsets: Offsets) -> npt.NDArray[np.bool_]:
    """Which frames say that a collection was modified: the form with integers has no such event."""
    is_event: npt.NDArray[np.bool_] = data[offsets + OPCODE_AT] == DcpOpcode.SYSTEM_EVENT
    for place in np.flatnonzero(is_event).tolist():
        start = int(offsets[place]) + HEADER_SIZE + _EVENT.offset
        event = int.from_bytes(data[start : start + _EVENT.size].tobytes(), "big")
        is_event[place] = event == SystemEventId.COLLECTION_MODIFIED
    return is_event


def _in_key_order(data: Bytes, offsets: Offsets) -> tuple[Bytes, Offsets]:
    starts = keys_at(data, offsets)
    stops = starts + field_everywhere(data, _KEY_LENGTH)[offsets]
    is_document = (data[offsets + OPCODE_AT] != DcpOpcode.SYSTEM_EVENT).tolist()
    view = data.data
    keys = [view[start:stop].tobytes() for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
    order = sorted(range(len(keys)), key=lambda place: (is_document[place], keys[place]))
    ends = np.append(offsets[1:], len(data))
    sizes = (ends - offsets)[order]
    pieces = [view[offsets.item(place) : ends.item(place)] for place in order]
    return np.frombuffer(bytearray().join(pieces), np.uint8), np.cumsum(sizes) - sizes


def _without_prefix(data: Bytes, offsets: Offsets) -> tuple[Bytes, Offsets]:
    """Frames of the default collection without the byte 00 in front of their keys."""
    # Lengths are reduced as numbers, not as bytes: a body length may end in 00.
    field_everywhere(data, _KEY_LENGTH)[offsets] -= 1
    field_everywhere(data, _BODY_LENGTH)[offsets] -= 1
    prefixes = keys_at(data, offsets)
    if len(offsets) == 1:
        # Usually a large frame: what comes before the byte moves up by one, and no value is copied.
        at = int(prefixes[0])
        data[1 : at + 1] = data[:at].copy()
        return data[1:], offsets
    return cut_out(data, prefixes), offsets - np.arange(len(offsets))


def _with_framing(data: Bytes, offsets: Offsets, framing: bytes) -> tuple[Bytes, Offsets]:
    """Frames with framing extras after their headers."""
    size = len(framing)
    # Keys have up to 251 bytes, so the byte in front of the key length is free for the framing's.
    data[offsets] = Magic.FLEX_REQUEST
    data[offsets + _KEY_LENGTH.offset] = size
    field_everywhere(data, _BODY_LENGTH)[offsets] += size
    shifted = offsets + size * np.arange(len(offsets))
    view = data.data
    pieces: list[bytes | memoryview] = []
    done = 0
    for place in (offsets + HEADER_SIZE).tolist():
        pieces += (view[done:place], framing)
        done = place
    pieces.append(view[done:])
    return np.frombuffer(bytearray().join(pieces), np.uint8), shifted
