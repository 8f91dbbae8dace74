"""The documents of a bucket as they are now: what `tailrace dump` writes.

A stream gives every change since some point, not the state: a document that changes while it is read comes
twice, and deletions come too. So the changes of a vbucket are kept until its stream has ended, and then only
the newest change of each document counts. The vbuckets are read in groups, so that this is a small part of
the bucket at a time.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..columns.batch import SCHEMA
from .aio import Source
from .events import Mutation
from .jsonlines import Names, json_line

__all__ = ["as_json_lines", "documents"]

_GROUPS = 64
_U64 = 0xFFFF_FFFF_FFFF_FFFF
_IDENTITY = ["vbucket", "scope", "collection", "key"]


async def documents(source: Source, advance: Callable[[int], None]) -> AsyncIterator[pa.Table]:
    """All live documents, a table for each group of vbuckets; ``advance`` gets the seqnos that were read."""
    ends = await source.high_seqnos()
    vbuckets = [vbucket for vbucket, seqno in ends.items() if seqno]
    size = max(1, len(ends) // _GROUPS)
    for first in range(0, len(vbuckets), size):
        group = vbuckets[first : first + size]
        batches: list[pa.RecordBatch] = []
        async for batch in source.batches(end={vbucket: ends[vbucket] for vbucket in group}):
            if batch.num_rows == 1 and batch["op"][0].as_py() == "rollback":
                batches = list(_without(batches, batch["vbucket"][0].as_py(), batch["seqno"][0].as_py()))
            else:
                batches.append(batch)
        advance(sum(ends[vbucket] for vbucket in group))
        table = newest(pa.Table.from_batches(batches, SCHEMA))
        if table.num_rows:
            yield table


def newest(changes: pa.Table) -> pa.Table:
    """The live documents that changes leave behind: the newest change of each, if it is a mutation."""
    changes = changes.filter(pc.is_in(changes["op"], pa.array(["mutation", "deletion", "expiration"])))
    numbered = changes.append_column("row", pa.array(np.arange(changes.num_rows)))
    last = numbered.group_by(_IDENTITY, use_threads=False).aggregate([("row", "max")])["row_max"]
    if len(last) < changes.num_rows:
        changes = changes.take(last.combine_chunks().sort())
    return changes.filter(pc.equal(changes["op"], "mutation"))


def _without(batches: list[pa.RecordBatch], vbucket: int, seqno: int) -> Iterator[pa.RecordBatch]:
    """What is left when the changes of a vbucket above a seqno never were."""
    for batch in batches:
        gone = pc.and_(pc.equal(batch["vbucket"], vbucket), pc.greater(batch["seqno"], seqno))
        yield batch.filter(pc.invert(gone))


def as_json_lines(table: pa.Table, names: Names, *, no_value: bool = False) -> Iterator[bytes]:
    """Documents as the lines that `tail --json` has for mutations."""
    # of two with one name the first is the bucket's, others were dropped
    numbers = {path: number for number, path in reversed(list(names.items()))}
    columns = ["vbucket", "vb_uuid", "seqno", "rev", "cas", "key", "value", "flags", "expiry", "datatype"]
    columns += ["snapshot_start", "snapshot_end", "scope", "collection", "xattrs"]
    for row in zip(*(table[name].to_pylist() for name in columns), strict=True):
        vbucket, vb_uuid, seqno, rev, cas, key, value, flags, expiry, datatype, start, end, *more = row
        scope, collection, xattrs = more
        yield json_line(
            Mutation(
                vbucket,
                vb_uuid & _U64,
                seqno & _U64,
                rev & _U64,
                cas & _U64,
                key,
                value or b"",
                flags & 0xFFFF_FFFF,
                expiry,
                int(datatype == "json"),
                (start & _U64, end & _U64),
                numbers[scope, collection],
                None if xattrs is None else json.loads(xattrs),
            ),
            names,
            no_value=no_value,
        )
