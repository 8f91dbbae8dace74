"""The changes of a delivery as objects, one for each.

Most deliveries hold nothing but mutations whose values are as they were written. Those are made many at a
time, without a call for each, or by iterators of the interpreter if they are long.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from operator import length_hint
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..columns.scanner import ScannedFrames
from ..protocol.dcp.delivery import ChangeDelivery
from ..snappy import inflate
from ..wire.codes import Datatype, DcpOpcode, DurabilityLevel, Magic
from ..wire.dcp import DELETION_V1, DELETION_V2, EXPIRATION
from ..wire.dcp_replication import DcpAbort, DcpCommit, DcpPrepare
from ..wire.fields import decode_leb128, split_xattrs
from ..wire.header import HEADER_LAYOUT, HEADER_SIZE
from .events import Aborted, Change, Committed, Deletion, DurableWrite, Expiration, Mutation, Prepared

__all__ = ["MadeChanges", "make_durable_write"]

_EXTRAS_LENGTH_AT = HEADER_LAYOUT.at("extras_length")
_FRAMING_LENGTH_AT = HEADER_LAYOUT.at("key_length")  # of a flexible frame: its first byte
assert DELETION_V2.at("delete_time") == EXPIRATION.at("delete_time")
_unpack_delete_time = EXPIRATION.only("delete_time").struct.unpack_from
_MUTATION = int(DcpOpcode.MUTATION)
_JSON = int(Datatype.JSON)
_PACKED = int(Datatype.SNAPPY | Datatype.XATTR)
_SHORT_BYTES = 2 << 10
"""Documents up to this size are cut out of a copy of all their bytes: one step less for each."""
_STEP_ROWS = 512
"""So many are made ready at once: few enough that the processor's caches hold them."""


Rows: TypeAlias = "slice | NDArray[np.intp]"


class MadeChanges:
    """All changes of a delivery, in order, and how many of them were taken. To be gone through once."""

    def __init__(self, delivery: ChangeDelivery) -> None:
        self._delivery = delivery
        self._row_count = delivery.row_count
        self._stops_at = 0
        self._left: tuple[Iterator[Change], Iterator[int]] = iter(()), iter(())
        """Of the step that changes are taken from now, those that are made and left, and one item for each
        that is still to be made.
        """

    @property
    def taken(self) -> int:
        """How many were taken. Nobody counts them one by one: it follows from what is left."""
        made, to_make = self._left
        return self._stops_at - length_hint(made) - length_hint(to_make)

    def __iter__(self) -> Iterator[Change]:
        return chain.from_iterable(self._steps())

    def _steps(self) -> Iterator[Iterator[Change]]:
        if not self._row_count:
            return
        delivery = self._delivery
        frames = delivery.chunk.frames
        rows = delivery.rows
        vb_uuids = delivery.histories()[0]
        snapshots = [(run.snapshot.start, run.snapshot.end) for run in delivery.runs]
        is_plain = not (frames.datatype[rows] & _PACKED).any() and (frames.opcode[rows] == _MUTATION).all()
        make = plain_mutations if is_plain else any_changes
        for first in range(0, self._row_count, _STEP_ROWS):
            step = slice(first, first + _STEP_ROWS)
            run_of = iter(delivery.run_of[step].tolist())
            of_step = map(snapshots.__getitem__, run_of)
            some = step if isinstance(rows, slice) else rows[step]  # a part is cut faster than it is chosen
            made = make(frames, some, vb_uuids[step].tolist(), of_step)
            self._left, self._stops_at = (made, run_of), min(step.stop, self._row_count)
            yield made


def plain_mutations(
    frames: ScannedFrames, rows: Rows, vb_uuids: list[int], snapshots: Iterator[tuple[int, int]]
) -> Iterator[Mutation]:
    """Changes that are all mutations, none of them compressed or with xattrs."""
    key_start, value_start, value_end = (
        places[rows] for places in (frames.key_start, frames.value_start, frames.value_end)
    )
    first, last = int(key_start[0]), int(value_end[-1])
    data = frames.data.data[first:last]
    key_at, value_at, end_at = ((places - first).tolist() for places in (key_start, value_start, value_end))
    are_short = len(data) <= _SHORT_BYTES * len(key_at)
    if are_short:
        copy = bytes(data)
        keys = [copy[start:stop] for start, stop in zip(key_at, value_at, strict=True)]
        values: Iterable[bytes] = [copy[start:stop] for start, stop in zip(value_at, end_at, strict=True)]
    else:
        keys = [bytes(data[start:stop]) for start, stop in zip(key_at, value_at, strict=True)]
        values = (bytes(data[start:stop]) for start, stop in zip(value_at, end_at, strict=True))
    seqnos, revs, cas, flags, expiries, vbuckets, collections = (
        column[rows].tolist()
        for column in (
            frames.seqno,
            frames.rev,
            frames.cas,
            frames.flags,
            frames.expiry,
            frames.vbucket,
            frames.collection,
        )
    )
    datatypes = (frames.datatype[rows] & _JSON).tolist()
    columns = (
        vbuckets,
        vb_uuids,
        seqnos,
        revs,
        cas,
        keys,
        values,
        flags,
        expiries,
        datatypes,
        snapshots,
        collections,
    )
    if not are_short:
        return map(Mutation, *columns)
    made = list(map(Mutation.__new__, repeat(Mutation, len(keys))))
    # what `__init__` does; a call of it for each takes a third longer
    for (
        change,
        change.vbucket,
        change.vb_uuid,
        change.seqno,
        change.rev,
        change.cas,
        change.key,
        change.value,
        change.flags,
        change.expiry,
        change.datatype,
        change.snapshot,
        change.collection_id,
    ) in zip(made, *columns, strict=True):
        change.xattrs = None
    return iter(made)


def any_changes(
    frames: ScannedFrames, rows: Rows, vb_uuids: list[int], snapshots: Iterator[tuple[int, int]]
) -> Iterator[Change]:
    """Changes of every kind."""
    data = frames.data.data
    columns = (
        frames.opcode,
        frames.datatype,
        frames.vbucket,
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
        vbucket,
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
        vb_uuid,
        snapshot,
    ) in zip(*lists, vb_uuids, snapshots, strict=True):
        value, xattrs = bytes(data[value_at:value_end]), None
        if datatype & _PACKED and value:
            value, xattrs = _unpack(value, datatype)
        key = bytes(data[key_at:value_at])
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
        made = Deletion if opcode == DcpOpcode.DELETION else Expiration
        yield made(vbucket, vb_uuid, seqno, rev, cas, key, time_s, snapshot, collection, xattrs)


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
    """Where the extras of a frame start: behind header and framing extras."""
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
