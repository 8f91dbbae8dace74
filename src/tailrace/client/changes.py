"""The changes of a delivery as objects, one for each.

Most deliveries hold nothing but mutations whose values are neither compressed nor carry xattrs. Those are
made many at a time, without a call for each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import chain, repeat
from operator import length_hint
from struct import Struct
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..columns.scanner import ScannedFrames, all_true
from ..protocol.dcp.delivery import ChangeDelivery, Place
from ..snappy import inflate
from ..wire.codes import Datatype, DcpOpcode, DurabilityLevel, Magic
from ..wire.dcp import DELETION_V1, DELETION_V2, EXPIRATION
from ..wire.dcp_replication import DcpAbort, DcpCommit, DcpPrepare
from ..wire.fields import decode_leb128, split_xattrs
from ..wire.header import HEADER_LAYOUT, HEADER_SIZE
from ..wire.message import MAX_KEY
from .events import Aborted, Change, Committed, Deletion, DurableWrite, Expiration, Mutation, Prepared

__all__ = ["MadeChanges", "make_durable_write"]

_EXTRAS_LENGTH_AT = HEADER_LAYOUT.at("extras_length")
_FRAMING_LENGTH_AT = HEADER_LAYOUT.at("key_length")  # of a flexible frame: its first byte
assert DELETION_V2.at("delete_time") == EXPIRATION.at("delete_time")
_unpack_delete_time = EXPIRATION.only("delete_time").struct.unpack_from
_MUTATION = int(DcpOpcode.MUTATION)
_JSON = int(Datatype.JSON)
_PACKED = int(Datatype.SNAPPY | Datatype.XATTR)
_STEP_ROWS = 512
"""How many are made at a time: few enough to fit in the processor's caches."""
_STEP_BYTES = 1 << 20
"""Fewer are made at a time if they are large: about this much, but at least one."""
_MOST_PIECES = 4096


ScanRows: TypeAlias = "slice | NDArray[np.intp]"


class MadeChanges:
    """All changes of a delivery, in order, and how many of them were taken. To be iterated over once."""

    def __init__(self, delivery: ChangeDelivery) -> None:
        self._delivery = delivery
        self._stops_at = 0
        self._left: Iterator[Any] = iter(())
        """One item for each change of the current step that was not taken."""

    @property
    def taken(self) -> int:
        """How many were taken, worked out from what is left: counting each one would cost time."""
        return self._stops_at - length_hint(self._left)

    def __iter__(self) -> Iterator[Change]:
        return chain.from_iterable(self._steps())

    def _steps(self) -> Iterator[Iterator[Change]]:
        delivery = self._delivery
        frames, rows = delivery.chunk.frames, delivery.rows
        place_of, places = delivery.places()
        ends = frames.value_end[rows]
        is_plain = not (frames.datatype[rows] & _PACKED).any() and (frames.opcode[rows] == _MUTATION).all()
        first, row_count = 0, delivery.row_count
        while first < row_count:
            stop = min(first + _STEP_ROWS, row_count)
            if (enough := int(ends[first]) + _STEP_BYTES) < ends[stop - 1]:
                stop = int(np.searchsorted(ends, enough))
            step = slice(first, stop)
            step_rows = step if isinstance(rows, slice) else rows[step]  # slicing is the faster way
            changes: Iterator[Change]
            if is_plain:
                changes = self._left = iter(plain_mutations(frames, step_rows, place_of[step], places))
            else:
                # one by one: a change that can't be unpacked must not fail before those ahead of it are taken
                self._left = iter(place_of[step].tolist())
                changes = any_changes(frames, step_rows, map(places.__getitem__, self._left))
            first = self._stops_at = stop
            yield changes
            if length_hint(self._left):
                return  # one could not be made: what follows must not come before it


def plain_mutations(
    frames: ScannedFrames, rows: ScanRows, place_of: NDArray[np.int32], places: list[Place]
) -> list[Mutation]:
    """Changes that are all mutations, none of them compressed or with xattrs."""
    keys, values = _cut_documents(frames, rows)
    count = len(keys)
    place_of_each: Iterable[Place] = (
        repeat(places[place_of[0]], count)
        if all_true(place_of == place_of[0])
        else map(places.__getitem__, place_of.tolist())
    )
    datatypes = frames.datatype[rows] & _JSON
    columns = (frames.seqno, frames.rev, frames.cas, frames.flags, frames.expiry, frames.collection)
    made = list(map(Mutation.__new__, repeat(Mutation, count)))
    # does what `__init__` does: calling it for each takes a third longer
    for (
        change,
        (change.vbucket, change.vb_uuid, change.snapshot),
        change.key,
        change.value,
        change.datatype,
        change.seqno,
        change.rev,
        change.cas,
        change.flags,
        change.expiry,
        change.collection_id,
    ) in zip(
        made,
        place_of_each,
        keys,
        values,
        datatypes.tolist(),
        *(column[rows].tolist() for column in columns),
        strict=True,
    ):
        change.xattrs = None
    return made


def _cut_documents(frames: ScannedFrames, rows: ScanRows) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """The keys and the values of rows, all cut by one `Struct`: slicing takes longer."""
    key_at, value_at, end_at = (
        places[rows] for places in (frames.key_start, frames.value_start, frames.value_end)
    )
    heads = value_at - key_at
    heads[1:] += (key_at[1:] - end_at[:-1]) << _KEY_BITS
    bodies = end_at - value_at
    if all_true(heads[1:] == heads[-1]) and all_true(bodies == bodies[0]):
        cutter = _equal_cutter(int(heads[0]), int(heads[-1]), int(bodies[0]), len(heads))
    else:
        pieces = [""] * (2 * len(heads))
        pieces[::2] = map(_HEADS.__getitem__, heads.tolist())
        pieces[1::2] = map(_BODIES.__getitem__, bodies.tolist())
        cutter = Struct("".join(pieces))
    cut = cutter.unpack_from(frames.data.data, int(key_at[0]))
    return cut[::2], cut[1::2]


@lru_cache(maxsize=16)
def _equal_cutter(first_head: int, head: int, body: int, count: int) -> Struct:
    """The `Struct` for documents of one size."""
    return Struct(_HEADS[first_head] + _BODIES[body] + (_HEADS[head] + _BODIES[body]) * (count - 1))


class _Pieces(dict[int, str]):
    """Pieces of `Struct` formats, made when first needed; cleared when there are too many."""

    def __init__(self, make: Callable[[int], str]) -> None:
        self._make = make

    def __missing__(self, number: int) -> str:
        if len(self) >= _MOST_PIECES:
            self.clear()
        made = self[number] = self._make(number)
        return made


_KEY_BITS = MAX_KEY.bit_length()
_HEADS = _Pieces(lambda head: f"{head >> _KEY_BITS}x{head & (1 << _KEY_BITS) - 1}s")
"""A key and the bytes to skip before it: the number's low bits are the key's length, the rest the skip."""
_BODIES = _Pieces(lambda size: f"{size}s")
"""Values by their length."""


def any_changes(frames: ScannedFrames, rows: ScanRows, places: Iterator[Place]) -> Iterator[Change]:
    """Changes of every kind. The place of each is taken only when the change can be made."""
    data = frames.data.data
    columns = (
        frames.opcode,
        frames.datatype,
        frames.seqno,
        frames.rev,
        frames.cas,
        frames.flags,
        frames.expiry,
        frames.collection,
        frames.start,
        frames.key_start,
        frames.value_start,
        frames.value_end,
    )
    lists = (column[rows].tolist() for column in columns)
    for (
        opcode,
        datatype,
        seqno,
        rev,
        cas,
        flags,
        expiry,
        collection,
        start,
        key_at,
        value_at,
        value_end,
    ) in zip(*lists, strict=True):
        value, xattrs = bytes(data[value_at:value_end]), None
        if datatype & _PACKED and value:
            value, xattrs = _unpack(value, datatype)
        key = bytes(data[key_at:value_at])
        vbucket, vb_uuid, snapshot = next(places)
        if opcode == _MUTATION:
            yield Mutation(
                vbucket,
                vb_uuid,
                seqno,
                rev,
                cas,
                key,
                value,
                flags,
                expiry,
                datatype & _JSON,
                snapshot,
                collection,
                xattrs,
            )
            continue
        time_s = 0
        if data[start + _EXTRAS_LENGTH_AT] != DELETION_V1.size:
            (time_s,) = _unpack_delete_time(data, _extras_at(data, start))
        event_class = Deletion if opcode == DcpOpcode.DELETION else Expiration
        yield event_class(vbucket, vb_uuid, seqno, rev, cas, key, time_s, snapshot, collection, xattrs)


def make_durable_write(
    message: DcpPrepare | DcpCommit | DcpAbort, vb_uuid: int, snapshot: tuple[int, int], *, collections: bool
) -> DurableWrite:
    """The event of a message about a durable write."""
    key, collection = message.key, 0
    if collections:
        collection, size = decode_leb128(key)
        key = key[size:]
    match message:
        case DcpCommit():
            seqno, prepared = message.commit_seqno, message.prepared_seqno
            return Committed(message.vbucket, vb_uuid, seqno, prepared, key, snapshot, collection)
        case DcpAbort():
            seqno, prepared = message.abort_seqno, message.prepared_seqno
            return Aborted(message.vbucket, vb_uuid, seqno, prepared, key, snapshot, collection)
    value, xattrs = message.value, None
    if message.datatype & _PACKED and value:
        value, xattrs = _unpack(value, message.datatype)
    return Prepared(
        message.vbucket,
        vb_uuid,
        message.by_seqno,
        message.rev_seqno,
        message.cas,
        key,
        value,
        message.flags,
        message.expiry,
        message.datatype & _JSON,
        bool(message.deleted),
        DurabilityLevel(message.durability).name.lower(),
        snapshot,
        collection,
        xattrs,
    )


def _extras_at(data: memoryview, start: int) -> int:
    """Where the extras of a frame start: after header and framing extras."""
    framing = data[start + _FRAMING_LENGTH_AT] if data[start] == Magic.FLEX_REQUEST else 0
    return start + HEADER_SIZE + framing


def _unpack(value: bytes, datatype: int) -> tuple[bytes, dict[str, Any] | None]:
    """A value as it was stored, and its xattrs."""
    if datatype & Datatype.SNAPPY:
        value = inflate(value)
    if not datatype & Datatype.XATTR:
        return value, None
    xattrs, body = split_xattrs(value)
    return body, {name: json.loads(text) for name, text in xattrs.items()}
