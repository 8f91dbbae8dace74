"""From received bytes to arrays: the frames of a buffer, separated into rows and control frames.

`scan` is the first of two stages. It finds the frames, checks every length before anything relies on it, and
gathers the fixed fields of the changes (mutations, deletions, expirations) into numpy arrays. Keys and values
stay where they are: rows hold offsets into the buffer, and `batch.to_batch` copies them once, into Arrow.

Every other frame is a control frame and is left to the message decoder in `wire`. Tests check that the two
agree: a change is a row exactly when `wire` would accept it, and the first one that it would not accept ends
the scan with the error that `wire` gives.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import FramingError, MalformedMessage, RemoteProtocolError
from ..frames import OPCODE_AT, Bytes, Mask, Offsets
from ..wire import dcp
from ..wire.codes import Datatype, DcpOpcode, Magic
from ..wire.dialect import DCP
from ..wire.fields import decode_leb128
from ..wire.header import HEADER_SIZE, MAX_FRAME, Frame, frame_size
from ..wire.message import DOCUMENT, MAX_KEY, Direction
from .records import (
    BLOCK_ROWS,
    EXTRAS_FIELDS,
    FIELDS,
    GROUPS,
    KEY_BYTE,
    RECORD,
    WORD_BYTES,
    Words,
    gather,
    gather_words,
)
from .walk import frame_end, frame_starts

__all__ = ["SCAN_LIMIT", "ControlFrame", "Scannable", "ScannedFrames", "gather", "scan"]

Scannable: TypeAlias = "bytes | bytearray | memoryview | Bytes"

SCAN_LIMIT = 64 * 1024 * 1024
"""How far one scan reads into a larger buffer.

Arrow's `binary` and Spark count bytes in 31 bits. Snappy inflates by less than 22 times, so whatever a peer
sends, the values of one scan fit.
"""
assert SCAN_LIMIT * 22 < 2**31
assert SCAN_LIMIT >= 2 * MAX_FRAME

Columns = dict[str, NDArray[Any]]

_ROWS_FOR_A_CONTROL = 8
"""With fewer rows per control frame it does not pay to separate them first."""

_MAGICS = np.isin(np.arange(256), [int(magic) for magic in Magic])
# Plain numbers: numpy takes an enum member for an int64 and widens the array that is combined with it.
MUTATION, DELETION, EXPIRATION = map(int, (DcpOpcode.MUTATION, DcpOpcode.DELETION, DcpOpcode.EXPIRATION))
JSON, SNAPPY, XATTR = map(int, (Datatype.JSON, Datatype.SNAPPY, Datatype.XATTR))
_REQUEST, _FLEX_REQUEST, _FLEX_RESPONSE = map(int, (Magic.REQUEST, Magic.FLEX_REQUEST, Magic.FLEX_RESPONSE))
_LEB128_BYTES = 5


class ControlFrame(NamedTuple):
    """A frame that is not a change."""

    row: int
    """How many rows of the scan come before it."""
    start: int
    end: int


class Common(NamedTuple):
    """What the rows of a scan have in common; None where they differ or were not compared."""

    opcode: int | None = None
    datatype: int | None = None
    collection: int | None = None


@dataclass(slots=True)
class ScannedFrames:
    """What `scan` found: arrays with one entry per row, and the control frames between them.

    Integers are unsigned and as wide as on the wire, in native byte order. Offsets point into ``data``,
    which is the caller's buffer and not a copy: take what is needed before the buffer is reused.
    """

    data: Bytes
    used: int
    """Bytes that rows and control frames cover; what follows is the start of the next frame."""
    error: RemoteProtocolError | None
    """What is wrong with the frame at ``used``; None if that frame is only incomplete."""

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
    """The collection id; 0, the default collection, if collections are off."""
    key_start: Offsets
    """Where the document's own key starts, after the collection id."""
    value_start: Offsets
    """Also the end of the key."""
    value_end: Offsets

    control_row: Offsets
    control_start: Offsets
    control_end: Offsets

    common: Common

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.start)

    @property
    def controls(self) -> Iterator[ControlFrame]:
        """The control frames in stream order."""
        columns = (self.control_row, self.control_start, self.control_end)
        return map(ControlFrame, *(column.tolist() for column in columns))

    def frame(self, control: ControlFrame) -> Frame:
        """A control frame, for the message decoder."""
        return Frame.parse(self.data.data, control.start)


def scan(buffer: Scannable, *, collections: bool = False, limit: int = MAX_FRAME) -> ScannedFrames:
    """Find the frames at the start of a buffer.

    Reads up to the first frame that is incomplete, that breaks the protocol (see `ScannedFrames.error`;
    everything before it is still delivered), or that ends after `SCAN_LIMIT`: scan again from ``used`` on
    while that is not 0. ``collections`` says that the connection has negotiated them: keys begin with a
    collection id. ``limit`` is the size of the largest frame that is accepted.
    """
    if limit > SCAN_LIMIT:
        raise ValueError(f"a limit of {limit} bytes is above the {SCAN_LIMIT} bytes of a scan")
    data = np.frombuffer(buffer, dtype=np.uint8)[:SCAN_LIMIT]
    start = frame_starts(data)
    # A frame ends where the next one starts; only the last one can be incomplete.
    end = np.empty_like(start)
    end[:-1] = start[1:]
    end[-1:] = [frame_end(data, int(at)) for at in start[-1:]]
    error: RemoteProtocolError | None = None
    if len(start) and end[-1] > len(data):
        error = _framing_error(data, int(start[-1]), limit)
        start, end = start[:-1], end[:-1]

    framed = len(start)
    rows, common, words, control = _mostly_plain(data, start, end, limit)
    malformed: Mask | None = None
    only_id: int | None = 0
    if rows is None:
        words = gather_words(data, start)
        columns = {name: field.of(words) for name, field in FIELDS.items()}
        lengths = _split_keys(data, start, end, columns)
        framed = _first(_unframeable(columns, end - start, lengths, limit))
        if framed < len(start):
            error = _framing_error(data, int(start[framed]), limit)
            assert error is not None, "scan and wire.header disagree about a header"
        is_row = _is_change(columns)[:framed]
        control = np.flatnonzero(~is_row)
        rows = _NO_ROWS
        if len(control) < framed:
            row = np.flatnonzero(is_row) if len(control) else slice(0, framed)
            lengths = _Lengths(lengths.framing[row], lengths.key[row])
            columns = {name: column[row] for name, column in columns.items()}
            rows, malformed = _rows(data, columns, start[row], end[row], lengths)
    if collections and len(rows["start"]):
        is_plain = malformed is None
        first_byte = KEY_BYTE.of(words) if is_plain else data[np.minimum(rows["key_start"], len(data) - 1)]
        bad_id, only_id = _take_collection_ids(data, rows, first_byte)
        malformed = bad_id if malformed is None else malformed | bad_id
    if malformed is not None and (intact := _first(malformed)) < len(malformed):
        at = int(rows["start"][intact])
        error = _message_error(data, at, collections=collections)
        framed = int(np.searchsorted(start, at))
        control = control[: np.searchsorted(control, framed)]
        rows = {name: column[:intact] for name, column in rows.items()}

    return ScannedFrames(
        data=data,
        used=int(end[framed - 1]) if framed else 0,
        error=error,
        **rows,
        control_row=control - np.arange(len(control)),
        control_start=start[control],
        control_end=end[control],
        common=common._replace(collection=only_id),
    )


_ROW_FIELDS = ("opcode", "datatype", "vbucket", "opaque", "cas", "seqno", "rev", "flags", "expiry")
"""The columns of `ScannedFrames` that are gathered as they are."""

_PLAIN = {"magic": _REQUEST, "opcode": MUTATION, "extras_length": dcp.MUTATION.size}
_KEY_LENGTH, _DATATYPE = FIELDS["key_length"], FIELDS["datatype"]
assert {FIELDS[name].word for name in (*_PLAIN, "datatype", "key_length")} == {0}
_PLAIN_BITS = sum(FIELDS[name].lowest * _PLAIN[name] for name in _PLAIN)
# and no bit of the datatype above those of a document
assert (DOCUMENT + 1).bit_count() == 1
_PLAIN_MASK = sum(FIELDS[name].bits for name in _PLAIN) + _DATATYPE.bits - _DATATYPE.lowest * DOCUMENT


_RECORD_MASK, _RECORD_BITS = (
    np.uint64(int.from_bytes(bits.to_bytes(WORD_BYTES, "big"), sys.byteorder))
    for bits in (_PLAIN_MASK, _PLAIN_BITS)
)
"""The same for the first word of a record in the byte order of the buffer."""


def _mostly_plain(
    data: Bytes, start: Offsets, end: Offsets, limit: int
) -> tuple[Columns | None, Common, Words, Offsets]:
    """The rows of plain mutations with a few control frames among them, their words, and the control frames.

    Every buffer of many small vbuckets is like that. None instead of rows if any frame is something else or
    has a fault.
    """
    words, control = _gather_plain(data, start)
    if len(words[0]) + len(control) < len(start):
        return None, Common(), words, control
    if len(control):
        if not _are_controls(data, start[control], end[control], limit):
            return None, Common(), words, control
        is_row = np.ones(len(start), dtype=bool)
        is_row[control] = False
        start, end = start.compress(is_row), end.compress(is_row)
    rows, common = _plain_rows(words, start, end, limit)
    return rows, common, words, control


def _gather_plain(data: Bytes, at: Offsets) -> tuple[Words, Offsets]:
    """The words of plain mutations, and which frames are something else.

    It gives up, and so returns fewer frames than there are, if the others are many or include changes.
    """
    groups = [(part, np.empty((part.stop - part.start, len(at)), dtype=np.uint64)) for part in GROUPS]
    others: list[Offsets] = [at[:0]]
    done = 0
    for first in range(0, len(at), BLOCK_ROWS):
        records = gather(data, at[first : first + BLOCK_ROWS], RECORD).view(np.uint64)
        records = records.reshape(-1, RECORD.itemsize // WORD_BYTES)
        is_plain = (records[:, 0] & _RECORD_MASK) == _RECORD_BITS
        if not all_true(is_plain):
            other = np.flatnonzero(~is_plain)
            opcode = data[at[first + other] + OPCODE_AT]
            is_change = (opcode >= MUTATION) & (opcode <= EXPIRATION)
            if len(other) * _ROWS_FOR_A_CONTROL > len(records) or is_change.any():
                break
            others.append(other + first)
            records = records.compress(is_plain, axis=0)  # five times as fast as indexing with the mask
        block = slice(done, done + len(records))
        done = block.stop
        for part, group in groups:
            group[:, block] = records.view(">u8").T[part]
    return [word[:done] for _, group in groups for word in group], np.concatenate(others)


def _are_controls(data: Bytes, start: Offsets, end: Offsets, limit: int) -> bool:
    """Whether all these frames are control frames without a fault."""
    words = gather_words(data, start)
    columns = {name: field.of(words) for name, field in FIELDS.items()}
    lengths = _split_keys(data, start, end, columns)
    return not (_unframeable(columns, end - start, lengths, limit) | _is_change(columns)).any()


def _plain_rows(words: Words, start: Offsets, end: Offsets, limit: int) -> tuple[Columns | None, Common]:
    """The rows of frames that are all mutations in the usual form and without a fault; else None.

    A backfill consists of these, so they take only a few passes over whole words; anything else goes the long
    way, which gives the same rows for these.
    """
    first, nmeta = words[0], FIELDS["nmeta"]
    all_bits, any_bits = int(in_all(first)), int(in_any(first))
    if (
        not len(start)
        or all_bits & _PLAIN_MASK != _PLAIN_BITS
        or any_bits & _PLAIN_MASK != _PLAIN_BITS
        or int(in_any(words[nmeta.word])) & nmeta.bits
    ):
        return None, Common()
    rows = {name: FIELDS[name].of(words) for name in _ROW_FIELDS}
    key_length = _KEY_LENGTH.of(words).astype(np.int64)
    key_start = start + (HEADER_SIZE + dcp.MUTATION.size)
    value_start = key_start + key_length
    size = end - start
    if (
        least(key_length) == 0
        or most(key_length) > MAX_KEY
        or most(size) > limit
        or least(end - value_start) < 0
        or least(rows["seqno"]) == 0
    ):
        return None, Common()
    datatype = None if (all_bits ^ any_bits) & _DATATYPE.bits else int(rows["datatype"][0])
    return {
        **rows,
        "collection": np.zeros(len(start), dtype=np.uint32),
        "start": start,
        "size": size,
        "key_start": key_start,
        "value_start": value_start,
        "value_end": end,
    }, Common(MUTATION, datatype)


class _Lengths(NamedTuple):
    framing: Offsets
    key: Offsets


def _split_keys(data: Bytes, start: Offsets, end: Offsets, columns: Columns) -> _Lengths:
    """The lengths of framing extras and key: a flexible frame has one byte for each."""
    magic = columns["magic"]
    key_length = columns["key_length"].astype(np.int64)
    framing_length = np.zeros(len(start), dtype=np.int64)
    flexible = np.flatnonzero((magic == _FLEX_REQUEST) | (magic == _FLEX_RESPONSE))
    if len(flexible):
        framing_length[flexible] = key_length[flexible] >> 8
        key_length[flexible] &= 0xFF
        # On streams with an id, servers send deletions and expirations with a framing length of 0 although
        # the id is in the body (docs/spec/dcp.md#stream-id-without-length). No seqno is so high that it could
        # start with that byte.
        opcode, extras_length = columns["opcode"][flexible], columns["extras_length"][flexible]
        body_start = start[flexible] + HEADER_SIZE
        forgotten = (opcode == DELETION) | (opcode == EXPIRATION)
        forgotten &= magic[flexible] == _FLEX_REQUEST
        forgotten &= framing_length[flexible] == 0
        forgotten &= body_start + dcp.STREAM_ID_SIZE + extras_length + key_length[flexible] <= end[flexible]
        forgotten[forgotten] = data[body_start[forgotten]] == dcp.STREAM_ID_FRAME
        framing_length[flexible[forgotten]] = dcp.STREAM_ID_SIZE
    return _Lengths(framing_length, key_length)


def _unframeable(columns: Columns, size: Offsets, lengths: _Lengths, limit: int) -> Mask:
    """Which headers `wire.header.frame_size` refuses."""
    bad: Mask = ~_MAGICS[columns["magic"]]
    bad |= size > limit
    bad |= lengths.framing + lengths.key + columns["extras_length"] > size - HEADER_SIZE
    return bad


def _is_change(columns: Columns) -> Mask:
    magic, opcode = columns["magic"], columns["opcode"]
    change = (opcode >= MUTATION) & (opcode <= EXPIRATION)
    change &= (magic == _REQUEST) | (magic == _FLEX_REQUEST)
    return np.asarray(change, dtype=bool)


def _rows(
    data: Bytes, columns: Columns, start: Offsets, end: Offsets, lengths: _Lengths
) -> tuple[Columns, Mask]:
    """The columns of `ScannedFrames` for changes of all kinds, and which of them `wire.dcp` refuses."""
    behind = np.flatnonzero(lengths.framing)
    if len(behind):
        moved = gather_words(data, start[behind] + lengths.framing[behind])
        for name, field in EXTRAS_FIELDS.items():
            columns[name][behind] = field.of(moved)
    opcode, extras_length, nmeta = columns["opcode"], columns["extras_length"], columns["nmeta"]
    removed = np.flatnonzero(opcode != MUTATION)
    if len(removed):
        has_nmeta = extras_length[removed] == dcp.DELETION_V1.size
        nmeta[removed] = np.where(has_nmeta, columns["deletion_nmeta"][removed], 0)
        # only now: flags and deletion_nmeta may share memory
        columns["flags"][removed] = columns["expiry"][removed] = 0
    key_start = start + HEADER_SIZE + lengths.framing + extras_length
    rows = {
        **{name: columns[name] for name in _ROW_FIELDS},
        "collection": np.zeros(len(start), dtype=np.uint32),
        "start": start,
        "size": end - start,
        "key_start": key_start,
        "value_start": key_start + lengths.key,
        "value_end": end - nmeta,
    }
    return rows, _malformed(rows, extras_length, lengths.key)


_EXTRAS_SIZES = np.zeros((3, 256), dtype=bool)
"""The lengths that the extras may have, by opcode counted from that of a mutation."""
for _message in (dcp.DcpMutation, dcp.DcpDeletion, dcp.DcpExpiration):
    for _layout in _message.LAYOUTS:
        _EXTRAS_SIZES[_message.OPCODE - MUTATION, _layout.size] = True


def _malformed(rows: Columns, extras_length: NDArray[np.uint8], key_length: Offsets) -> Mask:
    """Which changes `wire.dcp` refuses."""
    opcode, datatype = rows["opcode"], rows["datatype"]
    bad = ~_EXTRAS_SIZES[opcode - MUTATION, extras_length]
    bad |= rows["seqno"] == 0
    bad |= (key_length == 0) | (key_length > MAX_KEY)
    bad |= datatype > DOCUMENT
    bad |= rows["value_end"] < rows["value_start"]
    removed = np.flatnonzero(opcode != MUTATION)
    if len(removed):
        # A removed document may keep only its xattrs.
        kind = datatype[removed]
        bad[removed] |= (kind & (JSON | XATTR)) == JSON
        plain = (kind & (XATTR | SNAPPY)) == 0
        bad[removed] |= plain & (rows["value_end"][removed] > rows["value_start"][removed])
    return np.asarray(bad, dtype=bool)


def _no_rows() -> Columns:
    nothing = np.empty(0, dtype=np.int64)
    data = np.empty(0, dtype=np.uint8)
    words = gather_words(data, nothing)
    columns = {name: field.of(words) for name, field in FIELDS.items()}
    return _rows(data, columns, nothing, nothing, _Lengths(nothing, nothing))[0]


_NO_ROWS = _no_rows()
"""The rows of a buffer with nothing but control frames, as all are before a connection has streams."""


def _take_collection_ids(data: Bytes, rows: Columns, byte: NDArray[np.uint8]) -> tuple[Mask, int | None]:
    """Move the collection id from the start of each key into its column.

    Returns which keys have no valid id, and the id if it has one byte and is the same in all keys. ``byte``
    is the first one of each key. The rules are those of `wire.fields.decode_leb128`; in addition, something
    must be left of the key.
    """
    key_start, key_end = rows["key_start"], rows["value_start"]
    if len(byte) and (largest := int(most(byte))) < 0x80:
        rows["collection"] = byte.astype(np.uint32)
        rows["key_start"] = key_start + 1
        only_id = largest if least(byte) == largest else None
        return np.asarray(rows["key_start"] >= key_end, dtype=bool), only_id
    number = (byte & 0x7F).astype(np.uint64)
    size = np.ones(len(key_start), dtype=np.int64)
    bad = np.zeros(len(key_start), dtype=bool)
    todo = np.flatnonzero(byte >= 0x80)
    for place in range(1, _LEB128_BYTES):
        if not len(todo):
            break
        at = key_start[todo] + place
        bad[todo] |= at >= key_end[todo]
        byte = data[np.minimum(at, len(data) - 1)]
        number[todo] |= (byte & 0x7F).astype(np.uint64) << np.uint64(7 * place)
        size[todo] = place + 1
        bad[todo] |= byte == 0  # not the shortest form
        todo = todo[byte >= 0x80]
    bad[todo] = True
    bad |= (number > 0xFFFF_FFFF) | (key_start + size >= key_end)
    rows["collection"] = number.astype(np.uint32)
    rows["key_start"] = key_start + size
    return bad, None


# Reductions of a whole array. The array methods do the same but take three times as long to call, which
# counts if a buffer holds a few thousand large frames.
least, most = np.minimum.reduce, np.maximum.reduce
in_all, in_any = np.bitwise_and.reduce, np.bitwise_or.reduce


def all_true(mask: NDArray[Any]) -> bool:
    return int(np.count_nonzero(mask)) == len(mask)


def _first(mask: Mask) -> int:
    """The index of the first True, or the length."""
    at = int(mask.argmax()) if len(mask) else 0
    return at if len(mask) and mask[at] else len(mask)


def _framing_error(data: Bytes, at: int, limit: int) -> RemoteProtocolError | None:
    """What `wire.header` says about a header."""
    try:
        frame_size(data.data, at, limit)
    except FramingError as error:
        return error.with_traceback(None)  # a traceback would keep the buffer alive
    return None


def _message_error(data: Bytes, at: int, *, collections: bool) -> RemoteProtocolError:
    try:
        frame = Frame.parse(data.data, at)
        DCP.decode(frame, Direction.TO_RECEIVER)
        if collections:
            decode_leb128(frame.key)
    except MalformedMessage as error:
        return error.with_traceback(None)
    # `wire` reads one message at a time and does not know that a key is more than its collection id
    return MalformedMessage(f"dcp {DcpOpcode(frame.opcode).name.lower()}: lengths or key are wrong")
