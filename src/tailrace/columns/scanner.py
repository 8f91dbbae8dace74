"""From received bytes to arrays: the frames of a buffer, rows and control frames told apart.

`scan` is the first of two stages. It finds the frames, checks every length before anything relies on it, and
gathers the fixed fields of the changes (mutations, deletions, expirations) into numpy arrays. Keys and values
stay where they are: rows hold offsets into the buffer, and `batch.to_batch` copies them once, into Arrow.

Every other frame is a control frame and is left to the message decoder in `wire`. What the two agree on is
tested: a change is a row exactly when `wire` would accept it, and the first one that it would not accept ends
the scan with the error that `wire` gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import FramingError, MalformedMessage, RemoteProtocolError
from ..frames import Bytes, Mask, Offsets
from ..wire import dcp
from ..wire.codes import Datatype, DcpOpcode, Magic, RequestFrameId
from ..wire.dialect import DCP
from ..wire.fields import decode_leb128
from ..wire.header import HEADER_SIZE, MAX_FRAME, Frame, frame_size
from ..wire.message import DOCUMENT, MAX_KEY, Direction, Layout
from .walk import frame_starts

__all__ = ["SCAN_LIMIT", "Buffer", "ControlFrame", "Frames", "gather", "scan"]

Buffer: TypeAlias = "bytes | bytearray | memoryview | Bytes"

SCAN_LIMIT = 64 * 1024 * 1024
"""How far one scan reads into a larger buffer.

Arrow's `binary` and Spark count bytes in 31 bits. Snappy inflates by less than 22 times, so whatever a peer
sends, the values of one scan fit.
"""
assert SCAN_LIMIT * 22 < 2**31
assert SCAN_LIMIT >= 2 * MAX_FRAME

Columns = dict[str, NDArray[Any]]

_HEADER = {
    "magic": ("u1", 0),
    "opcode": ("u1", 1),
    "keys": (">u2", 2),
    "extras_length": ("u1", 4),
    "datatype": ("u1", 5),
    "vbucket": (">u2", 6),
    "body": (">u4", 8),
    "opaque": (">u4", 12),
    "cas": (">u8", 16),
}
_NUMPY_OF = {"B": "u1", "H": ">u2", "I": ">u4", "Q": ">u8"}


def _extras(layout: Layout, *names: str, prefix: str = "") -> dict[str, tuple[str, int]]:
    """Fields of the extras, as they stand behind a header without framing extras."""
    return {
        prefix + one.name: (_NUMPY_OF[one.code], HEADER_SIZE + one.offset)
        for one in layout.fields
        if one.name in names
    }


# One gather takes header and extras; deletions have shorter extras with another use of the same bytes.
_EXTRAS = np.dtype((np.void, dcp.MUTATION.size))
_FIELDS: dict[str, tuple[Any, int]] = {
    **_HEADER,
    **_extras(dcp.MUTATION, "by_seqno", "rev_seqno", "flags", "expiry", "nmeta"),
    **_extras(dcp.DELETION_V1, "nmeta", prefix="deletion_"),
    "extras": (_EXTRAS, HEADER_SIZE),
}
_CHANGE: np.dtype[np.void] = np.dtype(
    {
        "names": list(_FIELDS),
        "formats": [code for code, _ in _FIELDS.values()],
        "offsets": [offset for _, offset in _FIELDS.values()],
    }
)
assert _CHANGE.itemsize == HEADER_SIZE + _EXTRAS.itemsize

_MAGICS = np.isin(np.arange(256), [int(magic) for magic in Magic])
# Plain numbers, because numpy takes a member of an enum for an int64 and widens the array that meets it.
MUTATION, DELETION, EXPIRATION = map(int, (DcpOpcode.MUTATION, DcpOpcode.DELETION, DcpOpcode.EXPIRATION))
JSON, SNAPPY, XATTR = map(int, (Datatype.JSON, Datatype.SNAPPY, Datatype.XATTR))
_REQUEST, _FLEX_REQUEST, _FLEX_RESPONSE = map(int, (Magic.REQUEST, Magic.FLEX_REQUEST, Magic.FLEX_RESPONSE))
_STREAM_ID_FRAME = RequestFrameId.DCP_STREAM_ID << 4 | 2
_STREAM_ID_SIZE = 3
_LEB128_BYTES = 5


class ControlFrame(NamedTuple):
    """A frame that is no change."""

    row: int
    """How many rows of the scan come before it."""
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Frames:
    """What `scan` found: arrays with one entry a row, and the control frames between them.

    Integers are as wide and as unsigned as on the wire, in native byte order. Offsets point into ``data``,
    which is the caller's buffer and not a copy: take what is needed before it is used again.
    """

    data: Bytes
    used: int
    """Bytes that rows and control frames cover; what is behind them is the start of the next frame."""
    error: RemoteProtocolError | None
    """What is wrong with the frame at ``used``; None where that frame is only incomplete."""

    start: Offsets
    size: Offsets
    """Bytes of the whole frame: what flow control counts."""
    opcode: NDArray[np.uint8]
    datatype: NDArray[np.uint8]
    vbucket: NDArray[np.uint16]
    opaque: NDArray[np.uint32]
    cas: NDArray[np.uint64]
    seqno: NDArray[np.uint64]
    rev: NDArray[np.uint64]
    flags: NDArray[np.uint32]
    """0 in deletions and expirations, as `expiry` is."""
    expiry: NDArray[np.uint32]
    collection: NDArray[np.uint32]
    """The collection id; 0, the default collection, where collections are off."""
    key_start: Offsets
    """Where the document's own key starts, behind the collection id."""
    value_start: Offsets
    """Also the end of the key."""
    value_end: Offsets

    control_row: Offsets
    control_start: Offsets
    control_end: Offsets

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.start)

    @property
    def controls(self) -> Iterator[ControlFrame]:
        """The control frames in stream order."""
        columns = (self.control_row, self.control_start, self.control_end)
        return map(ControlFrame, *(one.tolist() for one in columns))

    def frame(self, control: ControlFrame) -> Frame:
        """A control frame, for the message decoder."""
        return Frame.parse(self.data.data, control.start)


def scan(buffer: Buffer, *, collections: bool = False, limit: int = MAX_FRAME) -> Frames:
    """Find the frames at the start of a buffer.

    Reads up to the first frame that is incomplete, that breaks the protocol (see `Frames.error`; everything
    before it is still delivered), or that ends behind `SCAN_LIMIT`: scan again from ``used`` on while that is
    not 0. ``collections`` says that the connection has negotiated them: keys begin with a collection id.
    ``limit`` is the size of the largest frame that is accepted.
    """
    if limit > SCAN_LIMIT:
        raise ValueError(f"a limit of {limit} bytes is above the {SCAN_LIMIT} bytes of a scan")
    data = np.frombuffer(buffer, dtype=np.uint8)[:SCAN_LIMIT]
    start = frame_starts(data)
    records = gather(data, start, _CHANGE)
    header = {name: _native(records[name]) for name in _HEADER}
    end = start + HEADER_SIZE + header["body"]
    header["framing_length"], header["key_length"] = _split_keys(data, start, header)

    error: RemoteProtocolError | None = None
    framed = _first(_unframeable(header, limit))
    if framed < len(start):
        error = _framing_error(data, int(start[framed]), limit)
    elif framed and end[-1] > len(data):
        framed -= 1  # only the last frame can be incomplete

    is_row = _is_change(header)[:framed]
    row = slice(0, framed) if is_row.all() else np.flatnonzero(is_row)
    about = {name: column[row] for name, column in header.items()}
    rows = _rows(data, start[row], end[row], about, records[row])
    malformed = _malformed(rows, about)
    if collections:
        malformed |= _take_collection_ids(data, rows)
    intact = _first(malformed)
    if intact < len(rows["start"]):
        at = int(rows["start"][intact])
        error = _message_error(data, at, collections=collections)
        framed = int(np.searchsorted(start, at))
        rows = {name: column[:intact] for name, column in rows.items()}

    control = np.flatnonzero(~is_row[:framed])
    return Frames(
        data=data,
        used=int(end[framed - 1]) if framed else 0,
        error=error,
        **rows,
        control_row=control - np.arange(len(control)),
        control_start=start[control],
        control_end=end[control],
    )


def gather(data: Bytes, at: Offsets, dtype: np.dtype[np.void]) -> NDArray[np.void]:
    """The records at ascending offsets; what lies behind the end of the buffer reads as zeros."""
    size = dtype.itemsize
    inside = int(np.searchsorted(at, len(data) - size, side="right"))
    # A record at every offset, without a copy: fancy indexing reads what is asked for.
    everywhere = np.ndarray((max(len(data) - size + 1, 0),), dtype=f"V{size}", buffer=data, strides=(1,))
    records = everywhere[at[:inside]]
    if inside == len(at):
        return records.view(dtype)
    tail = b"".join(data[one:].tobytes().ljust(size, b"\0")[:size] for one in at[inside:])
    return np.concatenate((records, np.frombuffer(tail, dtype=records.dtype))).view(dtype)


def _native(field: NDArray[Any]) -> NDArray[Any]:
    """A field of records as an array of its own, in native byte order."""
    return np.ascontiguousarray(field, dtype=field.dtype.newbyteorder("="))


def _split_keys(
    data: Bytes, start: Offsets, header: Columns
) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """The lengths of framing extras and key: a flexible frame has one byte for each."""
    keys, magic = header["keys"], header["magic"]
    framing = np.zeros_like(keys)
    flexible = np.flatnonzero((magic == _FLEX_REQUEST) | (magic == _FLEX_RESPONSE))
    if len(flexible):
        framing[flexible] = keys[flexible] >> 8
        keys[flexible] &= 0xFF
        # Servers send deletions and expirations of streams with an id with a framing length of 0: the id is
        # in the body all the same (dcp.md, 2.21). No seqno is so high that it could start with that byte.
        opcode = header["opcode"][flexible]
        inner = _STREAM_ID_SIZE + header["extras_length"][flexible] + keys[flexible].astype(np.int64)
        body_start = start[flexible] + HEADER_SIZE
        forgotten = (opcode == DELETION) | (opcode == EXPIRATION)
        forgotten &= magic[flexible] == _FLEX_REQUEST
        forgotten &= (framing[flexible] == 0) & (inner <= header["body"][flexible])
        forgotten &= body_start < len(data)
        forgotten[forgotten] = data[body_start[forgotten]] == _STREAM_ID_FRAME
        framing[flexible[forgotten]] = _STREAM_ID_SIZE
    return framing, keys


def _unframeable(header: Columns, limit: int) -> Mask:
    """Which headers `wire.header.frame_size` refuses."""
    body = header["body"]
    inner = header["framing_length"].astype(np.uint32) + header["key_length"] + header["extras_length"]
    return ~_MAGICS[header["magic"]] | (body > limit - HEADER_SIZE) | (inner > body)


def _is_change(header: Columns) -> Mask:
    magic, opcode = header["magic"], header["opcode"]
    change = (opcode >= MUTATION) & (opcode <= EXPIRATION)
    change &= (magic == _REQUEST) | (magic == _FLEX_REQUEST)
    return change


def _rows(data: Bytes, start: Offsets, end: Offsets, header: Columns, records: NDArray[np.void]) -> Columns:
    """The columns of `Frames` for the changes."""
    extras_start = start + HEADER_SIZE + header["framing_length"]
    behind = np.flatnonzero(header["framing_length"])
    if len(behind):
        records["extras"][behind] = gather(data, extras_start[behind], _EXTRAS)
    opcode = header["opcode"]
    flags, expiry = _native(records["flags"]), _native(records["expiry"])
    nmeta = records["nmeta"].astype(np.int64)
    removed = np.flatnonzero(opcode != MUTATION)
    if len(removed):
        flags[removed] = expiry[removed] = 0
        has_nmeta = header["extras_length"][removed] == dcp.DELETION_V1.size
        nmeta[removed] = np.where(has_nmeta, records["deletion_nmeta"][removed], 0)
    key_start = extras_start + header["extras_length"]
    return {
        "start": start,
        "size": end - start,
        "opcode": opcode,
        "datatype": header["datatype"],
        "vbucket": header["vbucket"],
        "opaque": header["opaque"],
        "cas": header["cas"],
        "seqno": _native(records["by_seqno"]),
        "rev": _native(records["rev_seqno"]),
        "flags": flags,
        "expiry": expiry,
        "collection": np.zeros(len(start), dtype=np.uint32),
        "key_start": key_start,
        "value_start": key_start + header["key_length"],
        "value_end": end - nmeta,
    }


_EXTRAS_SIZES = np.zeros((3, 256), dtype=bool)
"""By opcode, counted from that of a mutation: the lengths that the extras may have."""
for _message in (dcp.DcpMutation, dcp.DcpDeletion, dcp.DcpExpiration):
    for _layout in _message.LAYOUTS:
        _EXTRAS_SIZES[_message.OPCODE - MUTATION, _layout.size] = True


def _malformed(rows: Columns, header: Columns) -> Mask:
    """Which changes `wire.dcp` refuses."""
    opcode, datatype, key_length = rows["opcode"], rows["datatype"], header["key_length"]
    bad = ~_EXTRAS_SIZES[opcode - MUTATION, header["extras_length"]]
    bad |= rows["seqno"] == 0
    bad |= (key_length == 0) | (key_length > MAX_KEY)
    bad |= datatype > DOCUMENT
    bad |= rows["value_end"] < rows["value_start"]
    removed = np.flatnonzero(opcode != MUTATION)
    if len(removed):
        # Of a document that was removed only xattrs may be left.
        kind = datatype[removed]
        bad[removed] |= (kind & (JSON | XATTR)) == JSON
        plain = (kind & (XATTR | SNAPPY)) == 0
        bad[removed] |= plain & (rows["value_end"][removed] > rows["value_start"][removed])
    return np.asarray(bad, dtype=bool)


def _take_collection_ids(data: Bytes, rows: Columns) -> Mask:
    """Move the collection id from the start of each key into its column; tells which keys have no proper one.

    The rules are those of `wire.fields.decode_leb128`; besides, something must be left of the key.
    """
    key_start, key_end = rows["key_start"], rows["value_start"]
    number = np.zeros(len(key_start), dtype=np.uint64)
    size = np.zeros(len(key_start), dtype=np.int64)
    bad = np.zeros(len(key_start), dtype=bool)
    todo = np.arange(len(key_start))
    for place in range(_LEB128_BYTES):
        at = key_start[todo] + place
        bad[todo] |= at >= key_end[todo]
        byte = data[np.minimum(at, len(data) - 1)]
        number[todo] |= (byte & 0x7F).astype(np.uint64) << np.uint64(7 * place)
        size[todo] = place + 1
        if place:
            bad[todo] |= byte == 0  # not the shortest form
        todo = todo[byte >= 0x80]
        if not len(todo):
            break
    bad[todo] = True
    bad |= (number > 0xFFFF_FFFF) | (key_start + size >= key_end)
    rows["collection"] = number.astype(np.uint32)
    rows["key_start"] = key_start + size
    return bad


def _first(mask: Mask) -> int:
    """The index of the first True, or the length."""
    at = int(mask.argmax()) if len(mask) else 0
    return at if len(mask) and mask[at] else len(mask)


def _framing_error(data: Bytes, at: int, limit: int) -> RemoteProtocolError:
    try:
        frame_size(data.data, at, limit)
    except FramingError as error:
        return error.with_traceback(None)  # a traceback would keep the buffer
    raise AssertionError("scan and wire.header disagree about a header")


def _message_error(data: Bytes, at: int, *, collections: bool) -> RemoteProtocolError:
    try:
        frame = Frame.parse(data.data, at)
        DCP.decode(frame, Direction.TO_CONSUMER)
        if collections:
            decode_leb128(frame.key)
    except MalformedMessage as error:
        return error.with_traceback(None)
    # nothing in `wire` knows that a framing length may be forgotten, or that a key is more than its prefix
    return MalformedMessage(f"dcp {DcpOpcode(frame.opcode).name.lower()}: lengths or key are wrong")
