"""The executors' half of the mirror: rewrite the groups of vbuckets that a batch touches.

A partition of the source holds whole groups of vbuckets, so each task reads its groups' files, folds its
changes in and writes new files, without a shuffle. Nothing is visible before the driver commits. The task
answers with one row per table and group, which says what to commit.

At the end of a batch the source says where each vbucket stands (``position`` rows). A vbucket that stands
inside a snapshot can't be published: its rows are set aside in a staging file and handed back to the task
that sees the snapshot's end."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..crashpoints import crash_point
from ..model import Position
from ..rng import unique_name
from .archived_modules import forget_packages_in_archives
from .changelog import ChangeLog, Logger
from .fold import DOCUMENT_OPS, fold, table_schema
from .table import GroupFile, MirrorTable, file_system, read_rows, write_file

__all__ = ["CHANGES", "RESULT_DDL", "GroupResult", "Reset", "Rewrite", "Target"]

RESULT_DDL = "target int, group int, result string"
_RESULT_SCHEMA = pa.schema([("target", pa.int32()), ("group", pa.int32()), ("result", pa.string())])

CHANGES = -1
"""Stands for the change log where a result names its table."""

_WIDTH = 1 << 64


class Reset(NamedTuple):
    """A vbucket goes back: to its rows in an earlier version, or (None) to nothing."""

    version: int | None
    seqno: int | None
    """Where it went back to; None where it only lost its rows, with its collection."""


@dataclass(frozen=True)
class Target:
    """A table that is kept equal to one collection."""

    uri: str
    scope: str
    collection: str
    files: Mapping[int, tuple[str, ...]]
    """By group, the files that hold its rows now."""
    keep_deletes: bool = False


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What a task did with a group of a table."""

    target: int
    group: int
    added: tuple[GroupFile, ...]
    removed: tuple[str, ...]
    positions: dict[int, Position]
    """VBuckets that are whole, and where they stand."""
    staged: tuple[str, ...]
    """Files with rows that can't be published yet; they replace those that the group had."""
    changes: int
    """Changes of documents that went into the table."""
    resets: Mapping[int, int] = field(default_factory=dict)
    """VBuckets that were set back first, and to which seqno."""

    def to_json(self) -> str:
        """For the way to the driver."""
        return json.dumps(
            {
                "added": [astuple(file) for file in self.added],
                "removed": self.removed,
                "positions": {vbucket: [p.vb_uuid, p.seqno] for vbucket, p in self.positions.items()},
                "staged": self.staged,
                "changes": self.changes,
                "resets": self.resets,
            }
        )

    @classmethod
    def from_json(cls, target: int, group: int, text: str) -> GroupResult:
        """The opposite of `to_json`."""
        found = json.loads(text)
        return cls(
            target,
            group,
            tuple(GroupFile(*file) for file in found["added"]),
            tuple(found["removed"]),
            {int(vbucket): Position.at(*pair) for vbucket, pair in found["positions"].items()},
            tuple(found["staged"]),
            found["changes"],
            {int(vbucket): seqno for vbucket, seqno in found["resets"].items()},
        )


@dataclass(frozen=True)
class Rewrite:
    """What ``mapInArrow`` runs; it is pickled to the executors."""

    targets: tuple[Target, ...]
    group_of: tuple[int, ...]
    """Group by vbucket."""
    staging_uri: str
    staged: Mapping[int, tuple[str, ...]]
    """By group, the rows that were set aside in earlier batches."""
    storage_options: dict[str, str] | None = None
    changes: ChangeLog | None = None
    """Where every change goes beside, if anywhere."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Rewrite the groups of one partition."""
        forget_packages_in_archives()
        received = list(batches)
        if not received:
            return
        rows = pa.Table.from_batches(received)
        groups = np.asarray(self.group_of, dtype=np.int32)[rows["vbucket"].to_numpy()]
        logger = Logger(self.changes) if self.changes is not None else None
        for group in np.unique(groups).tolist():
            for result in self._rewrite_group(group, rows.filter(pa.array(groups == group)), logger):
                yield _as_batch(result)
            crash_point("mirror.in-rewrite")
        if logger is not None:
            logged = logger.finish()
            yield _as_batch(GroupResult(CHANGES, 0, logged.added, (), logged.positions, (), logged.changes))

    def _rewrite_group(self, group: int, rows: pa.Table, logger: Logger | None) -> Iterator[GroupResult]:
        """Fold a group's rows into each table, and set aside what is not whole."""
        earlier = self.staged.get(group, ())
        if earlier:
            rows = pa.concat_tables([*map(self._read_staged, earlier), rows])
        stands = _last_positions(rows.filter(pc.equal(rows["op"], "position")))
        whole = {vbucket: position for vbucket, position in stands.items() if position.at_snapshot_end}
        is_whole = pc.is_in(rows["vbucket"], value_set=pa.array(list(whole), pa.int32()))
        ready, waiting = rows.filter(is_whole), rows.filter(pc.invert(is_whole))
        staged = (self._write_staged(group, waiting),) if waiting.num_rows else ()
        if logger is not None:
            logger.add(ready, whole)
        for index, target in enumerate(self.targets):
            yield self._rewrite_target(index, target, group, ready, whole, staged)

    def _rewrite_target(
        self,
        index: int,
        target: Target,
        group: int,
        ready: pa.Table,
        whole: dict[int, Position],
        staged: tuple[str, ...],
    ) -> GroupResult:
        files = target.files.get(group, ())
        changes, resets = _after_resets(_rows_for(ready, target), index, len(self.group_of))
        if not changes.num_rows and not resets:
            return GroupResult(index, group, (), (), whole, staged, 0)
        reset = {vbucket: self._rows_at(target, one.version, vbucket) for vbucket, one in resets.items()}
        held = self._rows(target, files)
        after = fold(held, changes, reset=reset, keep_deletes=target.keep_deletes)
        added: tuple[GroupFile, ...] = ()
        if after.num_rows:
            name = f"part-{group:04d}-{unique_name()}.parquet"
            added = (write_file(after, target.uri, name, storage_options=self.storage_options),)
        seqnos = {vbucket: one.seqno for vbucket, one in resets.items() if one.seqno is not None}
        return GroupResult(index, group, added, files, whole, staged, changes.num_rows, seqnos)

    def _rows_at(self, target: Target, version: int | None, vbucket: int) -> pa.Table:
        """A vbucket's rows at an earlier version of the table, or none."""
        if version is None:
            return table_schema(keep_deletes=target.keep_deletes).empty_table()
        table = MirrorTable.open(target.uri, storage_options=self.storage_options)
        files = [file.path for file in table.files(version) if file.overlaps(vbucket, vbucket)]
        return self._rows(target, files, pc.field("vbucket") == vbucket)

    def _rows(self, target: Target, files: Iterable[str], filters: pc.Expression | None = None) -> pa.Table:
        schema = table_schema(keep_deletes=target.keep_deletes)
        return read_rows(target.uri, files, schema, filters, storage_options=self.storage_options)

    def _write_staged(self, group: int, rows: pa.Table) -> str:
        name = f"staged-{group:04d}-{unique_name()}.parquet"
        write_file(rows, self.staging_uri, name, storage_options=self.storage_options)
        return name

    def _read_staged(self, name: str) -> pa.Table:
        filesystem, root = file_system(self.staging_uri, self.storage_options)
        rows = pq.read_table(f"{root}/{name}", filesystem=filesystem)
        return rows.filter(pc.not_equal(rows["op"], "position"))


def _as_batch(result: GroupResult) -> pa.RecordBatch:
    return pa.record_batch([[result.target], [result.group], [result.to_json()]], schema=_RESULT_SCHEMA)


_RESETS = pa.array(["rollback", "flush"])
_EMPTYING = ("collection_created", "collection_dropped")


def _rows_for(rows: pa.Table, target: Target) -> pa.Table:
    """The rows that concern a table: changes of its collection, and what concerns whole vbuckets."""
    own = pc.and_(pc.equal(rows["scope"], target.scope), pc.equal(rows["collection"], target.collection))
    return rows.filter(pc.or_(pc.fill_null(own, False), pc.is_in(rows["op"], value_set=_RESETS)))


def _after_resets(rows: pa.Table, target: int, vbucket_count: int) -> tuple[pa.Table, dict[int, Reset]]:
    """The changes that count, and the vbuckets that were set back, each with the version that it goes back
    to.

    A change counts if no rollback of its vbucket, and no end or new beginning of its collection, follows it.
    """
    resets: dict[int, Reset] = {}
    is_reset = pc.is_in(rows["op"], value_set=_RESETS).to_numpy(zero_copy_only=False)
    for index in np.flatnonzero(pc.equal(rows["op"], "system").to_numpy(zero_copy_only=False)).tolist():
        is_reset[index] = _empties_collection(rows["value"][index].as_py())
    at = np.flatnonzero(is_reset)
    if len(at):
        vbuckets = rows["vbucket"].to_numpy()
        last_reset = np.full(vbucket_count, -1, dtype=np.int64)
        for index in at.tolist():  # the last one stays
            vbucket = int(vbuckets[index])
            last_reset[vbucket] = index
            version = _version_of(rows["value"][index].as_py(), target)
            if rows["op"][index].as_py() == "system":
                resets[vbucket] = Reset(None, resets[vbucket].seqno if vbucket in resets else None)
            else:
                resets[vbucket] = Reset(version, rows["seqno"][index].as_py() if version else 0)
        rows = rows.filter(pa.array(np.arange(len(vbuckets)) > last_reset[vbuckets]))
    return rows.filter(pc.is_in(rows["op"], value_set=DOCUMENT_OPS)), resets


def _last_positions(rows: pa.Table) -> dict[int, Position]:
    names = ("vbucket", "vb_uuid", "seqno", "snapshot_start", "snapshot_end")
    return {
        vbucket: Position(*(number % _WIDTH for number in numbers))
        for vbucket, *numbers in zip(*(rows[name].to_pylist() for name in names), strict=True)
    }


def _empties_collection(value: bytes | None) -> bool:
    """A collection that begins has nothing either, also where its end was not seen."""
    return bool(value) and json.loads(value or b"{}").get("event") in _EMPTYING


def _version_of(value: bytes | None, target: int) -> int | None:
    """The version of a table that a rollback row names; a flush and a start-over name none."""
    versions = json.loads(value).get("versions") if value else None
    return None if versions is None else versions[target]
