"""Comparing a table with its bucket, on the executors: every task compares some vbuckets.

A task streams a few vbuckets at a time, from the beginning to the high seqnos at the start of the comparison,
and compares the last state of each document with the table's live rows. The verdict also has the position of
the table, and the seqnos up to which the bucket was read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap

from ...columns.row_kinds import SYSTEM, empties_collection, kind_of
from ...errors import ConnectError, UsageError
from ...model import Position
from ...table.contract import DataFile, Table
from ...table.document_columns import DocumentColumns
from ...table.file_reading import scan
from ...table.hashing import KeyHash
from ...table.rows import DELETED
from ...table.store import TableStore
from ...table.typed import RESCUED
from ..source.feed import open_source
from ..source.options import parse_mirror_options
from .compare import DIGEST_SCHEMA, Difference, Digester, compare, newest
from .idle_sources import borrowed_source
from .jobs import Jobs
from .planning import ReadRange, changes_of, divided
from .reading import read_ranges
from .same_bucket import check_same_bucket
from .table_contents import options_of_table

__all__ = ["Verdict", "verify_table"]

_MOST_DIFFERENCES = 10_000
"""The most differences that a task names; the others are only counted."""
_GROUP_CHANGES = 250_000
"""About how many changes are compared together."""
_ATTEMPTS = 5
_FOLD_ROWS = 400_000


@dataclass(frozen=True)
class Verdict:
    """What a comparison found."""

    differences: tuple[Difference, ...]
    documents: int
    """Live documents of the bucket."""
    rows: int
    """Rows of the table."""
    table_version: int
    table_positions: Mapping[int, Position]
    bucket_seqnos: Mapping[int, int]
    """Up to where the bucket was read."""
    omitted: int = 0
    """How many more differences there are than are named."""
    rescued: int = 0
    """Rows of a typed table with something that does not fit its column."""

    @property
    def equal(self) -> bool:
        """Whether nothing is different."""
        return not self.differences

    @property
    def behind(self) -> int:
        """How many changes the table is behind."""
        return sum(
            max(0, seqno - self.table_positions.get(vbucket, Position.BEGINNING).seqno)
            for vbucket, seqno in self.bucket_seqnos.items()
        )


@dataclass
class _Found:
    """What a task found."""

    differences: list[Difference] = field(default_factory=list)
    omitted: int = 0
    documents: int = 0
    rows: int = 0
    rescued: int = 0
    ends: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _VerifyTask:
    """What a job runs for each piece; picklable."""

    given: Mapping[str, str] = field(repr=False)
    store: TableStore
    schema: pa.Schema
    secret: bytes
    files: tuple[DataFile, ...]
    masks: Mapping[str, bytes]
    scope: str
    collection: str
    seqnos: Mapping[int, int]
    """The table's seqno in each vbucket."""
    documents: DocumentColumns | None = None

    def __call__(self, ranges: Mapping[int, ReadRange]) -> _Found:
        findings = _Found()
        group: dict[int, ReadRange] = {}
        size = 0
        for vbucket, span in sorted(ranges.items()):
            if group and size + span.changes > _GROUP_CHANGES:
                self._compare(group, findings)
                group, size = {}, 0
            group[vbucket] = span
            size += span.changes
        if group:
            self._compare(group, findings)
        return findings

    def _compare(self, ranges: Mapping[int, ReadRange], findings: _Found) -> None:
        bucket = self._bucket_rows(ranges, findings)
        table = self._table_rows(min(ranges), max(ranges), ranges, findings)
        positions = np.zeros(max(ranges) + 1, dtype=np.int64)
        for vbucket in ranges:
            positions[vbucket] = self.seqnos.get(vbucket, 0)
        differences = compare(bucket, table, positions)
        room = max(0, _MOST_DIFFERENCES - len(findings.differences))
        findings.differences += islice(differences, room)
        findings.omitted += sum(1 for _ in differences)
        findings.documents += bucket.num_rows - (pc.sum(bucket["deleted"]).as_py() or 0)
        findings.rows += table.num_rows

    def _bucket_rows(self, ranges: Mapping[int, ReadRange], findings: _Found) -> pa.Table:
        """The last state of each document, deletions too. VBuckets that go back meanwhile are read again."""
        parts: list[pa.Table] = []
        left = dict(ranges)
        for _ in range(_ATTEMPTS):
            taker = _StateTaker(self)
            with borrowed_source(self.given) as source:
                read_ranges(source, left, taker)
            parts.append(taker.finish())
            findings.ends.update(taker.ends)
            if taker.failed:
                raise ConnectError(next(iter(taker.failed.values())))
            left = {vbucket: left[vbucket] for vbucket in taker.left_out}
            if not left:
                return pa.concat_tables(parts)
        raise ConnectError(f"the bucket takes changes of vbucket {min(left)} back time and again")

    def _table_rows(
        self, first: int, last: int, wanted: Mapping[int, ReadRange], findings: _Found
    ) -> pa.Table:
        keeps_deletes = DELETED.name in self.schema.names
        digester = Digester(self.secret, self.documents)
        batches = scan(
            self.store,
            self.files,
            {path: BitMap.deserialize(rows) for path, rows in self.masks.items()},
            self.schema,
            key_hash=KeyHash(self.secret),
            columns=[*digester.columns(), *([DELETED.name] if keeps_deletes else [])],
            vbuckets=(first, last),
        )
        chosen = pa.array(sorted(wanted), pa.int32())
        parts = [DIGEST_SCHEMA.empty_table()]
        for batch in batches:
            rows = pa.Table.from_batches([batch])
            rows = rows.filter(pc.is_in(rows["vbucket"], value_set=chosen))
            if keeps_deletes:
                rows = rows.filter(pc.invert(rows[DELETED.name]))
            if self.documents is not None:
                findings.rescued += rows.num_rows - rows[RESCUED].null_count
            parts.append(digester.of_rows(rows))
        return pa.concat_tables(parts)


class _StateTaker:
    """Keeps the last state of each document of one collection."""

    def __init__(self, task: _VerifyTask) -> None:
        self.ends: dict[int, int] = {}
        self.left_out: set[int] = set()
        self.failed: dict[int, str] = {}
        self._scope, self._collection = task.scope, task.collection
        self._digester = Digester(task.secret, task.documents)
        self._parts: list[pa.Table] = []
        self._rows = 0

    def add(self, batch: pa.RecordBatch) -> None:
        kind = kind_of(batch)
        rows = pa.Table.from_batches([batch])
        own = pc.and_(pc.equal(rows["scope"], self._scope), pc.equal(rows["collection"], self._collection))
        rows = rows.filter(pc.fill_null(own, False))
        if kind == SYSTEM and rows.num_rows and empties_collection(batch):
            self._drop([batch["vbucket"][0].as_py()])
        elif kind is None and rows.num_rows:
            self._parts.append(self._digester.of_changes(rows))
            self._rows += rows.num_rows
            if self._rows >= _FOLD_ROWS:
                self._parts = [newest(self._parts)]
                self._rows = 0

    def stand(self, vbucket: int, position: Position) -> None:
        self.ends[vbucket] = position.seqno

    def refuse(self, vbucket: int, requested: Position) -> None:
        self.left_out.add(vbucket)

    def hold(self, vbucket: int, why: str) -> None:
        self.failed[vbucket] = why

    def fail(self, vbucket: int, why: str) -> None:
        self.failed[vbucket] = why

    def finish(self) -> pa.Table:
        self._drop(sorted(self.left_out))
        return newest(self._parts) if self._parts else DIGEST_SCHEMA.empty_table()

    def _drop(self, vbuckets: list[int]) -> None:
        if vbuckets and self._parts:
            rows = pa.concat_tables(self._parts)
            gone = pc.is_in(rows["vbucket"], value_set=pa.array(vbuckets, pa.int32()))
            self._parts = [rows.filter(pc.invert(gone))]


def verify_table(
    jobs: Jobs,
    given: Mapping[str, str],
    table: Table,
    on_progress: Callable[[int, int], None] = lambda _done, _planned: None,
) -> Verdict:
    """Compare a bucket with its mirror; ``given`` are options of the source. ``on_progress`` is called, from
    any thread, with the number of changes compared so far, and the total.
    """
    options = parse_mirror_options(given)
    mirrored = table.source.get("bucket")
    if mirrored not in (None, options.bucket):
        raise UsageError(
            f"the table mirrors bucket {mirrored!r}, not {options.bucket!r}; compare it with that"
        )
    if table.source.get("changes"):
        raise UsageError(
            f"{table.uri} is a change log, which holds more than the bucket; "
            "verify the table that it was written with"
        )
    given = options_of_table(given, table)
    with open_source(options, "spark-verify") as client:
        check_same_bucket(table, client.bucket_uuid)
        ends, homes = client.high_seqnos(), client.homes()
    files = tuple(table.files())
    task = _VerifyTask(
        given,
        table.store,
        table.schema,
        table.secret,
        files,
        {file.path: table.mask(file).serialize() for file in files if file.vector is not None},
        str(table.source["scope"]),
        str(table.source["collection"]),
        {vbucket: position.seqno for vbucket, position in table.current.positions.items()},
        table.documents,
    )
    # vbuckets without changes too: the table may have rows of them
    ranges = {vbucket: ReadRange(Position.BEGINNING, ends.get(vbucket, 0)) for vbucket in homes}
    where = {vbucket: str(home) for vbucket, home in homes.items()}
    pieces = divided(ranges, where, jobs.parallelism)
    compared: set[int] = set()

    def note_done(piece: int) -> None:
        compared.add(piece)
        on_progress(changes_of([pieces[number] for number in compared]), changes_of(pieces))

    answers: list[_Found] = jobs.run(task, pieces, f"tailrace verify: {table.uri}", note_done)
    differences = [difference for answer in answers for difference in answer.differences]
    return Verdict(
        tuple(sorted(differences, key=lambda difference: (difference.vbucket, difference.key))),
        sum(answer.documents for answer in answers),
        sum(answer.rows for answer in answers),
        table.version,
        dict(table.current.positions),
        {vbucket: seqno for answer in answers for vbucket, seqno in answer.ends.items() if seqno},
        sum(answer.omitted for answer in answers),
        sum(answer.rescued for answer in answers),
    )
