"""The change log beside a mirror: an append-only table with every change, each at most once.

Like every table, it has a position of its own in every vbucket, and takes what lies above it. A logged change
is never altered. When the bucket takes changes back, a row with op ``rollback`` is appended: the changes of
its vbucket that were logged before it (``log_version``) and lie above its seqno are no longer true.
`live_changes` leaves them out.

After that the stream begins at an earlier position that the bucket still knows: a change that was left out
because a later one superseded it now comes, if the later one was taken back. Changes that the log has already
are recognized by their name: vbucket, vb_uuid and seqno.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyroaring import BitMap

from ...columns.batch import SCHEMA
from ...columns.row_kinds import CHANGE_OPS, ROLLBACK, SYSTEM, rollback_row, unsigned
from ...history import FailoverLog
from ...table.compaction import CompactionPolicy
from ...table.contract import DataFile, NewFile, Table, TaskResult
from ...table.datafile import MAX_FILE_BYTES, DataFileWriter, size_of
from ...table.file_reading import scan
from ...table.hashing import KeyHash
from ...table.rows import as_text
from ...table.store import TableStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = [
    "CHANGES_SCHEMA",
    "LOG_POLICY",
    "ChangeLogTarget",
    "ChangeSink",
    "LogBranch",
    "branch_point",
    "expired_files",
    "live_changes",
    "mergeable",
]

CHANGES_SCHEMA = pa.schema(
    [
        ("log_version", pa.int64()),
        ("op", pa.string()),
        ("key", pa.string()),
        ("key_base64", pa.string()),
        ("value", pa.string()),
        ("value_base64", pa.string()),
        *map(SCHEMA.field, ("scope", "collection", "vbucket", "vb_uuid", "seqno", "rev", "cas", "flags")),
        *map(SCHEMA.field, ("expiry", "datatype", "event_time", "snapshot_start", "snapshot_end")),
    ]
)
"""A row per change. ``log_version`` is the version of the log that brought it."""

LOG_POLICY = CompactionPolicy(overlay=float("inf"), base_masked=float("inf"))
"""Small files become larger ones, and that is all: nothing in a log is ever replaced."""

_LARGE_BYTES = 32 << 20
"""A file of this size is left as it is."""
_TIER = "tier0"
_LOGGED = pa.array([*CHANGE_OPS, SYSTEM])
_SEQNO_BITS = (1 << 48) - 1
_LAST_VERSION = 1 << 63


def live_changes(frame: DataFrame) -> DataFrame:
    """The changes of a log that are still true, without the ``rollback`` rows."""
    from pyspark.sql import functions as sf

    back = frame.where(sf.col("op") == ROLLBACK).select(
        sf.col("vbucket").alias("_vbucket"),
        sf.col("seqno").alias("_seqno"),
        sf.col("log_version").alias("_version"),
    )
    undone = (
        (sf.col("vbucket") == sf.col("_vbucket"))
        & (sf.col("seqno") > sf.col("_seqno"))
        & (sf.col("log_version") < sf.col("_version"))
    )
    return frame.where(sf.col("op") != ROLLBACK).join(sf.broadcast(back), undone, "left_anti")


@dataclass(frozen=True, slots=True)
class LogBranch:
    """A vbucket whose history has left that of the log."""

    seqno: int
    """Up to here the logged history is still the bucket's."""
    vb_uuid: int
    """The branch that it went on with."""
    is_shorter: bool
    """The log has changes that were taken back."""


def branch_point(log: Table, vbucket: int, producer: FailoverLog) -> int:
    """Up to where the logged history of a vbucket is still the bucket's."""
    position = log.current.position(vbucket)
    branch = producer.range_of(position.vb_uuid, position.seqno)
    if branch is not None:
        return min(position.seqno, branch.upper)
    # The bucket no longer has the log's branch. The logged changes show which older branches they share.
    files = tuple(log.files())
    masks = {file.path: log.mask(file) for file in files if file.vector is not None}
    standing = _standing_changes(log.store, files, masks, log.secret, vbucket)
    branches = producer.branches(position.seqno)
    return max(
        (
            min(seqno, branches[unsigned(vb_uuid)].upper)
            for vb_uuid, seqno in standing
            if unsigned(vb_uuid) in branches
        ),
        default=0,
    )


def _standing_changes(
    store: TableStore,
    files: Sequence[DataFile],
    masks: Mapping[str, BitMap],
    secret: bytes,
    vbucket: int,
) -> set[tuple[int, int]]:
    """The changes of a vbucket in a log that were not taken back: the columns vb_uuid and seqno."""
    columns = ["op", "vbucket", "vb_uuid", "seqno", "log_version"]
    batches = scan(
        store,
        files,
        masks,
        CHANGES_SCHEMA,
        key_hash=KeyHash(secret),
        columns=columns,
        vbuckets=(vbucket, vbucket),
        where=pc.field("vbucket") == vbucket,
    )
    rows = [
        row for batch in batches for row in zip(*(batch[name].to_pylist() for name in columns), strict=True)
    ]
    back = [(version, seqno) for op, _, _, seqno, version in rows if op == ROLLBACK]
    return {
        (vb_uuid, seqno)
        for op, _, vb_uuid, seqno, version in rows
        if op != ROLLBACK and not any(version < at and seqno > bound for at, bound in back)
    }


@dataclass(frozen=True)
class ChangeLogTarget:
    """What a task must know of the log; picklable."""

    store: TableStore
    secret: bytes
    files: tuple[DataFile, ...]
    version: int
    """The version that this round will make."""
    floors: Mapping[int, int]
    """By vbucket, the seqno that the log has already, if the stream begins below it."""
    branches: Mapping[int, LogBranch]
    masks: Mapping[str, bytes] = field(default_factory=dict)
    """Rows that are dead, by file."""
    max_bytes: int = MAX_FILE_BYTES


@dataclass
class _LogFile:
    file: DataFile
    vbuckets: NDArray[np.int32]
    """The vbucket of each row."""


@dataclass
class ChangeSink:
    """Takes the changes of one task, in the order in which each vbucket's stream has them."""

    log: ChangeLogTarget
    _waiting: list[pa.Table] = field(default_factory=list)
    _waiting_bytes: int = 0
    _written: list[_LogFile] = field(default_factory=list)
    _discarded: set[int] = field(default_factory=set)
    _standing: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    _rows: int = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Take changes of documents and of collections."""
        rows = pa.Table.from_batches([batch])
        rows = rows.filter(pc.is_in(rows["op"], value_set=_LOGGED))
        new = rows.filter(pa.array(self._is_new(rows))) if self.log.floors or self.log.branches else rows
        if new.num_rows:
            self._waiting.append(_logged(new, self.log.version))
            self._waiting_bytes += size_of(new)
            if self._waiting_bytes >= self.log.max_bytes:
                self._flush()

    def discard(self, vbuckets: Iterable[int]) -> None:
        """Discard the rows of these vbuckets."""
        self._discarded.update(vbuckets)

    def finish(self, whole: Iterable[int]) -> TaskResult:
        """Write the rest; ``whole`` are the vbuckets that count."""
        for vbucket in whole:
            branch = self.log.branches.get(vbucket)
            if branch is not None and branch.is_shorter:
                self._waiting.append(_rollback_row(vbucket, branch, self.log.version))
        self._flush()
        added = []
        for written in self._written:
            gone = np.flatnonzero(np.isin(written.vbuckets, sorted(self._discarded)))
            if len(gone) < written.file.rows:
                added.append(NewFile(written.file, BitMap(gone.tolist()).serialize() if len(gone) else b""))
        size = sum(written.file.size for written in self._written)
        return TaskResult(tuple(added), {}, self._rows, self._rows, size)

    def _flush(self) -> None:
        if not self._waiting:
            return
        rows = pa.concat_tables(self._waiting)
        self._waiting, self._waiting_bytes = [], 0
        if self._discarded:
            gone = pa.array(sorted(self._discarded), pa.int32())
            rows = rows.filter(pc.invert(pc.is_in(rows["vbucket"], value_set=gone)))
        if not rows.num_rows:
            return
        rows = rows.sort_by([("vbucket", "ascending"), ("seqno", "ascending")])
        vbuckets: NDArray[np.int32] = rows["vbucket"].to_numpy()
        h1 = (vbuckets.astype(np.uint64) << np.uint64(48)) | (
            rows["seqno"].to_numpy().astype(np.uint64) & np.uint64(_SEQNO_BITS)
        )
        h2 = pc.fill_null(rows["vb_uuid"], 0).to_numpy().astype(np.uint64)
        writer = DataFileWriter(self.log.store, CHANGES_SCHEMA, kind=_TIER)
        writer.write(rows, h1, h2)
        self._written.append(_LogFile(writer.close(), vbuckets))
        self._rows += rows.num_rows

    def _is_new(self, rows: pa.Table) -> NDArray[np.bool_]:
        """Which rows are not in the log."""
        vbuckets: NDArray[np.int32] = rows["vbucket"].to_numpy()
        seqnos: NDArray[np.int64] = rows["seqno"].to_numpy()
        floor = np.zeros(int(vbuckets.max(initial=0)) + 1, dtype=np.int64)
        for vbucket, seqno in self.log.floors.items():
            if vbucket < len(floor) and vbucket not in self.log.branches:
                floor[vbucket] = seqno
        new: NDArray[np.bool_] = seqnos > floor[vbuckets]
        for vbucket, branch in self.log.branches.items():
            doubtful = np.flatnonzero((vbuckets == vbucket) & (seqnos <= branch.seqno))
            if not len(doubtful):
                continue
            standing = self._standing_of(vbucket)
            names = rows.select(["vb_uuid", "seqno"]).take(pa.array(doubtful)).to_pydict()
            is_logged = [pair in standing for pair in zip(names["vb_uuid"], names["seqno"], strict=True)]
            new[doubtful[np.array(is_logged, dtype=np.bool_)]] = False
        return new

    def _standing_of(self, vbucket: int) -> set[tuple[int, int]]:
        """The changes of a vbucket that are in the log, some of which come again."""
        if vbucket not in self._standing:
            masks = {path: BitMap.deserialize(rows) for path, rows in self.log.masks.items()}
            self._standing[vbucket] = _standing_changes(
                self.log.store, self.log.files, masks, self.log.secret, vbucket
            )
        return self._standing[vbucket]


def mergeable(files: Iterable[DataFile]) -> list[DataFile]:
    """The files of a log that are small enough to be merged."""
    return [file for file in files if file.size < _LARGE_BYTES and file.index_offset is not None]


def expired_files(files: Iterable[DataFile], before: datetime) -> list[str]:
    """The files of a log whose changes were all made before a moment.

    A file with a ``rollback`` row stays while changes that the row takes back may still be there.
    """
    stats = {file.path: json.loads(file.stats or "{}") for file in files}
    old = {path for path, known in stats.items() if _newest(known) < before}
    while True:
        kept_from = min(
            (_log_version(stats[path], "min") for path in stats.keys() - old), default=_LAST_VERSION
        )
        needed = {
            path
            for path in old
            if stats[path].get("nullCount", {}).get("event_time")  # a row of a rollback has none
            and kept_from < _log_version(stats[path], "max")
        }
        if not needed:
            return sorted(old)
        old -= needed


def _newest(stats: Mapping[str, Any]) -> datetime:
    """When the newest change of a file was made; if that is not known, the file counts as new."""
    newest = stats.get("maxValues", {}).get("event_time")
    return datetime.max.replace(tzinfo=UTC) if newest is None else datetime.fromisoformat(newest)


def _log_version(stats: Mapping[str, Any], which: str) -> int:
    """The first or last ``log_version`` of a file's rows; if that is not known, the widest bound."""
    unknown = 0 if which == "min" else _LAST_VERSION
    return int(stats.get(f"{which}Values", {}).get("log_version", unknown))


def _logged(changes: pa.Table, version: int) -> pa.Table:
    key, key_base64 = as_text(changes["key"])
    value, value_base64 = as_text(changes["value"])
    made = {"key": key, "key_base64": key_base64, "value": value, "value_base64": value_base64}
    made["log_version"] = pa.chunked_array([pa.array(np.full(changes.num_rows, version, np.int64))])
    columns = [
        made[field.name] if field.name in made else changes[field.name].cast(field.type)
        for field in CHANGES_SCHEMA
    ]
    return pa.table(columns, schema=CHANGES_SCHEMA)


def _rollback_row(vbucket: int, branch: LogBranch, version: int) -> pa.Table:
    row = {"log_version": version, **rollback_row(vbucket, branch.vb_uuid, branch.seqno)}
    return pa.Table.from_pylist([row], schema=CHANGES_SCHEMA)
