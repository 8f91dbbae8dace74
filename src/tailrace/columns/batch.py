"""From arrays to Arrow: the columns that Spark and Python users see.

`SCHEMA` is their only definition. Its types are those that Spark's `to_arrow_schema` makes from the same
columns, because Spark compares them with ``==``: `binary` with 32-bit offsets (it refuses the large and the
view kinds), signed integers only, everything nullable, time in microseconds UTC.

    op              "mutation", "deletion" or "expiration"
    key, value      bytes; the value is inflated and without xattrs, null where a document was removed
    vbucket         int
    vb_uuid, seqno, rev, cas, snapshot_start, snapshot_end
                    bigint with the 64 bits of the wire: from 2^63 on they show as negative
    flags           int with the 32 bits of the wire; null where a document was removed
    expiry          bigint, unix seconds, 0 is never: unsigned 32 bits go beyond 2038; null where flags are
    datatype        "json" or "raw": what the value is. How it travelled (compressed, with xattrs) is undone
    xattrs          text of a JSON object, null where there are none
    event_time      the clock in the CAS; null for a CAS of 0
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ..errors import MalformedMessage
from ..frames import Bytes, Mask, Offsets
from ..model import MAX_U64
from ..snappy import inflate
from ..wire.codes import DcpOpcode, Status
from ..wire.fields import split_xattrs
from ..wire.header import MAX_FRAME
from .scanner import (
    DELETION,
    EXPIRATION,
    JSON,
    MUTATION,
    SNAPPY,
    XATTR,
    ControlFrame,
    Scannable,
    ScannedFrames,
    all_true,
    gather,
    least,
    scan,
)

__all__ = ["SCHEMA", "Decoded", "Names", "decode", "strings_of", "to_batch"]

SCHEMA = pa.schema(
    [
        ("op", pa.string()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("bucket", pa.string()),
        ("scope", pa.string()),
        ("collection", pa.string()),
        ("vbucket", pa.int32()),
        ("vb_uuid", pa.int64()),
        ("seqno", pa.int64()),
        ("rev", pa.int64()),
        ("cas", pa.int64()),
        ("flags", pa.int32()),
        ("expiry", pa.int64()),
        ("datatype", pa.string()),
        ("xattrs", pa.string()),
        ("event_time", pa.timestamp("us", tz="UTC")),
        ("snapshot_start", pa.int64()),
        ("snapshot_end", pa.int64()),
    ]
)

_TYPES = {field.name: field.type for field in SCHEMA}

OPS = tuple(DcpOpcode(opcode).name.lower() for opcode in (MUTATION, DELETION, EXPIRATION))
"""The words of the column `op`, by opcode counted from that of a mutation."""

DATATYPES = ("raw", "json")
"""The words of the column `datatype`, by the JSON bit."""

# A CAS is nanoseconds since the epoch, the lowest 16 bits of them replaced by a counter.
_CAS_CLOCK = np.uint64(0xFFFF_FFFF_FFFF_0000)
_NS_PER_US = np.uint64(1000)

_MOST_REPEATED = 1 << 17
"""How many rows of a constant column are kept for the next batch."""

# Looked up once: Arrow's public wrappers look up function and options in every call.
_TAKE, _UNCHECKED = pc.get_function("array_take"), pc.TakeOptions(boundscheck=False)
_CAST, _TO_BINARY = pc.get_function("cast"), pc.CastOptions.safe(pa.binary())

# Two adjacent 32-bit numbers are made as one 64-bit number, which takes half the time.
_FIRST_HALF, _SECOND_HALF = (0, 32) if sys.byteorder == "little" else (32, 0)

_INLINE = np.dtype([("words", np.int32, 3)])

Integers = int | NDArray[np.uint64] | NDArray[np.int64] | None
"""One number for all rows, one for each, or None if it is not known: the column is null then."""


@dataclass(frozen=True, slots=True)
class Names:
    """What the numbers in a stream are called."""

    bucket: str
    collections: Mapping[int, tuple[str, str]] = field(default_factory=lambda: {0: ("_default", "_default")})
    """Scope and collection by collection id."""


class _BatchAndUsed(NamedTuple):
    batch: pa.RecordBatch
    used: int


class Decoded(_BatchAndUsed):
    """What `decode` returns: the pair ``batch, used``, and the control frames."""

    controls: Sequence[ControlFrame] = ()


def decode(
    buffer: Scannable,
    *,
    names: Names | None = None,
    vb_uuid: Integers = None,
    snapshot_start: Integers = None,
    snapshot_end: Integers = None,
    collections: bool = False,
    limit: int = MAX_FRAME,
) -> Decoded:
    """``batch, used``: all changes at the start of a buffer, and how many bytes they take.

    The frames between them are its ``controls``. This is both stages in one call, for a buffer whose rows all
    have the same history. A frame that breaks the protocol raises its error; if the rows before it matter, or
    there are several histories, use the stages.
    """
    frames = scan(buffer, collections=collections, limit=limit)
    if frames.error is not None:
        raise frames.error
    batch = to_batch(
        frames,
        names=names or Names("default"),
        vb_uuid=vb_uuid,
        snapshot_start=snapshot_start,
        snapshot_end=snapshot_end,
    )
    decoded = Decoded(batch, frames.used)
    decoded.controls = list(frames.controls)
    return decoded


def to_batch(
    frames: ScannedFrames,
    rows: slice | NDArray[Any] = slice(None),
    *,
    names: Names,
    vb_uuid: Integers,
    snapshot_start: Integers,
    snapshot_end: Integers,
    no_value: bool = False,
) -> pa.RecordBatch:
    """Rows of a scan, all or some of them in stream order, as a batch with `SCHEMA`.

    Keys and values are copied, so the batch does not depend on the received buffer. Arrays have an entry for
    each of ``rows``. ``no_value`` says that the stream was opened without values: they are null then;
    otherwise an empty value is a document with no bytes. A value that can't be inflated or split, or a
    collection without a name, raises `MalformedMessage`.
    """
    cas = frames.cas[rows]
    is_mutation, present = None, None
    if frames.common.opcode != MUTATION:
        is_mutation = frames.opcode[rows] == MUTATION
        present = _bitmap(is_mutation)
    kind = frames.common.datatype
    if kind is None:
        kind = _common(frames.datatype[rows])
    if frames.common.collection is None or not len(cas):
        scope, collection = _collection_names(names, frames.collection[rows])
    else:
        scope, collection = _names_of(names, frames.common.collection)
    clock_us = cas & _CAS_CLOCK
    clock_us //= _NS_PER_US
    clocked = None if all_true(cas) else _bitmap(cas != 0)
    value_start = frames.value_start[rows]
    columns = {
        "op": OPS[0] if present is None else _words(OPS, frames.opcode[rows] - MUTATION),
        "key": _copy_keys(frames.data, frames.key_start[rows], value_start),
        "bucket": names.bucket,
        "scope": scope,
        "collection": collection,
        "vbucket": frames.vbucket[rows].astype(np.int32),
        "vb_uuid": vb_uuid,
        "seqno": frames.seqno[rows],
        "rev": frames.rev[rows],
        "cas": cas,
        "flags": _array(pa.int32(), frames.flags[rows], present),
        "expiry": _array(pa.int64(), frames.expiry[rows].astype(np.int64), present),
        "datatype": _words(DATATYPES, frames.datatype[rows] & JSON)
        if kind is None
        else DATATYPES[kind & JSON],
        "event_time": _array(_TYPES["event_time"], clock_us, clocked),
        "snapshot_start": snapshot_start,
        "snapshot_end": snapshot_end,
    }
    arrays = {name: _column(name, content, len(cas)) for name, content in columns.items()}
    # Last, because they push everything else out of the processor's caches.
    values, xattrs = _copy_values(frames.data, value_start, frames.value_end[rows]), None
    if kind is None or kind & (SNAPPY | XATTR):
        values, xattrs = _unpack(frames, rows, values)
    if is_mutation is not None and present is not None:
        values = _null_where_removed(is_mutation, values)
    arrays["value"] = _column("value", None if no_value else values, len(cas))
    arrays["xattrs"] = _column("xattrs", xattrs, len(cas))
    return pa.RecordBatch.from_arrays([arrays[name] for name in _TYPES], schema=SCHEMA)


def _column(name: str, content: Any, count: int) -> pa.Array:
    """A column from an Arrow array, a numpy array, or the content of every row: a number, a word or None."""
    if isinstance(content, np.ndarray):
        if len(content) != count:
            raise ValueError(f"{len(content)} entries for {count} rows")
        return _array(_TYPES[name], content)
    if isinstance(content, pa.Array):
        return content
    return _repeat(name, content, count)


def _array(type_: pa.DataType, numbers: NDArray[Any], present: pa.Buffer | None = None) -> pa.Array:
    """An Arrow array over a numpy array of the same width, whatever its sign."""
    if numbers.itemsize * 8 != type_.bit_width:
        raise ValueError(f"{numbers.dtype} does not have the width of {type_}")
    buffers = [present, pa.py_buffer(np.ascontiguousarray(numbers))]
    return pa.Array.from_buffers(type_, len(numbers), buffers)


def _bitmap(mask: Mask) -> pa.Buffer | None:
    """An Arrow validity bitmap; None if everything is valid."""
    return None if all_true(mask) else pa.py_buffer(np.packbits(mask, bitorder="little"))


def _repeat(name: str, content: str | int | None, count: int) -> pa.Array:
    """A constant column; most batches have several, and share their memory."""
    if count > _MOST_REPEATED:
        return _repeated.__wrapped__(name, content, count)
    return _repeated(name, content, _capacity(count)).slice(0, count)


def _capacity(count: int) -> int:
    """How many entries to make and keep for later, when ``count`` are needed now."""
    return 1 << (count - 1).bit_length() if count else 0


@lru_cache(maxsize=64)
def _repeated(name: str, content: str | int | None, count: int) -> pa.Array:
    type_ = _TYPES[name]  # not an argument: Arrow takes longer to hash a type than to slice an array
    if content is None:
        return pa.nulls(count, type_)
    if isinstance(content, int):
        return _array(type_, np.full(count, content & MAX_U64, dtype=np.uint64))
    # put together here: `pa.repeat` would import pandas first, a third of a second in every new process
    data = content.encode()
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(len(data))
    return pa.Array.from_buffers(type_, count, [None, pa.py_buffer(offsets), pa.py_buffer(data * count)])


def _words(words: Sequence[str], index: NDArray[Any]) -> pa.Array:
    """A column of a few words."""
    return strings_of(words).take(_array(pa.int32(), index.astype(np.int32)))


def strings_of(words: Sequence[str]) -> pa.Array:
    """Like ``pa.array(words)``, whose first call in a process would import pandas."""
    encoded = [word.encode() for word in words]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(words), buffers)


def _common(column: NDArray[Any]) -> int | None:
    """The number that all rows have; None if they differ."""
    return int(column[0]) if len(column) and all_true(column == column[0]) else None


def _collection_names(names: Names, ids: NDArray[np.uint32]) -> tuple[pa.Array | str, pa.Array | str]:
    """Scope and collection of every row, or the ones that all rows share."""
    common = _common(ids)
    if common is not None:
        return _names_of(names, common)
    encoded = _array(pa.uint32(), ids).dictionary_encode()
    pairs = [_names_of(names, number) for number in encoded.dictionary.to_pylist()]
    index = np.from_dlpack(encoded.indices)
    return _words([scope for scope, _ in pairs], index), _words([name for _, name in pairs], index)


def _names_of(names: Names, number: int) -> tuple[str, str]:
    if number not in names.collections:
        raise MalformedMessage(f"there is no collection 0x{number:x}", Status.UNKNOWN_COLLECTION)
    return names.collections[number]


def _copy_keys(data: Bytes, start: Offsets, end: Offsets) -> pa.Array:
    """Short stretches of the buffer as a column of bytes.

    The buffer is described, without a copy, as one Arrow array of keys and the bytes between them; Arrow
    copies every other entry out of it.
    """
    offsets = (start << _FIRST_HALF) | (end << _SECOND_HALF)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    stretches = pa.Array.from_buffers(pa.binary(), max(2 * len(start) - 1, 0), buffers)
    return _TAKE.call([stretches, _every_other(len(start))], _UNCHECKED)


def _every_other(count: int) -> pa.Array:
    """The first even numbers."""
    return _even_numbers(_capacity(count)).slice(0, count)


@lru_cache(maxsize=4)
def _even_numbers(count: int) -> pa.Array:
    return _array(pa.int32(), np.arange(0, 2 * count, 2, dtype=np.int32))


def _copy_values(data: Bytes, start: Offsets, end: Offsets) -> pa.Array:
    """Long stretches of the buffer as a column of bytes.

    Like `_copy_keys`, but described as an array of views, which Arrow copies when it casts them to the type
    that Spark takes. The cast knows the total size; taking would move everything whenever room runs out.
    """
    views = np.empty((len(start), 2), dtype=np.int64)  # length and prefix, which buffer and offset
    length = end - start
    np.left_shift(length, _FIRST_HALF, out=views[:, 0])
    np.left_shift(start, _SECOND_HALF, out=views[:, 1])
    if len(length) and least(length) <= _INLINE.itemsize:  # short ones are in the view itself
        short = np.flatnonzero(length <= _INLINE.itemsize)
        views.view(np.int32)[short, 1:] = gather(data, start[short], _INLINE)["words"]
    buffers = [None, pa.py_buffer(views), pa.py_buffer(data)]
    return _CAST.call([pa.Array.from_buffers(pa.binary_view(), len(start), buffers)], _TO_BINARY)


def _unpack(frames: ScannedFrames, rows: slice | NDArray[Any], values: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Values as they were written, and the column of xattrs."""
    datatype = frames.datatype[rows]
    xattrs = _repeat("xattrs", None, len(datatype))
    packed = (datatype & (SNAPPY | XATTR)) != 0
    if not packed.any():
        return values, xattrs
    # A producer that sends no values may still send their datatypes.
    packed &= frames.value_end[rows] > frames.value_start[rows]
    bodies: list[bytes] = []
    texts: list[str] = []
    has_xattrs = packed & ((datatype & XATTR) != 0)
    where = np.flatnonzero(packed)
    kinds = datatype[where].tolist()
    starts, ends = (places[rows][where].tolist() for places in (frames.value_start, frames.value_end))
    view = frames.data.data
    for index, kind, start, end in zip(where.tolist(), kinds, starts, ends, strict=True):
        content: bytes | memoryview = view[start:end]
        try:
            content = inflate(content) if kind & SNAPPY else bytes(content)
            if kind & XATTR:
                text, content = _split_xattrs(content)
                texts.append(text)
        except MalformedMessage as error:
            place = f"vbucket {frames.vbucket[rows][index]}, seqno {frames.seqno[rows][index]}"
            raise MalformedMessage(f"{place}: {error.what}", error.status) from None
        bodies.append(content)
    if packed.all():
        values = pa.array(bodies, pa.binary())
    else:
        values = pc.replace_with_mask(values, packed, pa.array(bodies, pa.binary()))
    return values, pc.replace_with_mask(xattrs, has_xattrs, pa.array(texts, pa.string()))


def _split_xattrs(value: bytes) -> tuple[str, bytes]:
    """The xattrs of a value as the text of one JSON object, and the body that is left."""
    xattrs, body = split_xattrs(value)
    members = [f"{json.dumps(name)}:{text.decode()}" for name, text in xattrs.items()]
    return "{" + ",".join(members) + "}", body


def _null_where_removed(is_mutation: Mask, values: pa.Array) -> pa.Array:
    """Deletions and expirations have no value, unless a producer sent one after all."""
    has_value = is_mutation | (np.from_dlpack(pc.binary_length(values)) != 0)
    return pa.Array.from_buffers(values.type, len(values), [_bitmap(has_value), *values.buffers()[1:]])
