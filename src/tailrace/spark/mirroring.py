"""The mirror: a Delta table for each collection, kept equal to the bucket, also when the bucket takes changes
back.

A streaming query reads the bucket; each micro-batch is applied with one Spark action (`rewrite.Rewrite` on
the executors) and one Delta commit a table, which carries the position of every vbucket. The positions in
the tables are the truth: every start of a mirror plans anew from them, with a fresh Spark checkpoint, so
that a lost, an old or somebody else's checkpoint can neither lose nor double anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..crashpoints import crash_point
from ..errors import UsageError
from ..model import Position, format_positions
from .changelog import CHANGES_SCHEMA, ChangeLog
from .fold import table_schema
from .rewrite import CHANGES, RESULT_DDL, GroupResult, Rewrite, Target
from .source.options import MIRROR, MirrorOption, group_of
from .source.scratch import Scratch
from .table import MirrorTable, TableChanged

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["Applied", "Mirror", "TableSpec"]

MAX_GROUPS = 64
"""Groups of vbuckets in a new table: each is one file, rewritten when one of its documents changes."""

_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class TableSpec:
    """Which collection goes into which table."""

    uri: str
    scope: str = "_default"
    collection: str = "_default"

    @property
    def path(self) -> str:
        """As people write it."""
        return f"{self.scope}.{self.collection}"

    @property
    def is_default(self) -> bool:
        """It is there in every bucket."""
        return self.path == "_default._default"


@dataclass(frozen=True, slots=True)
class Applied:
    """What a batch did, for those who watch."""

    batch: int
    changes: int
    rolled_back: tuple[int, ...]
    versions: tuple[int, ...]
    positions: Mapping[int, Position]


@dataclass
class Mirror:
    """A mirror that is being set up, or runs."""

    spark: SparkSession
    options: Mapping[str, str]
    """Options of the source."""
    specs: Sequence[TableSpec]
    bucket: str
    vbucket_count: int
    work_dir: Path | None
    """Where this run keeps Spark's checkpoint, staged rows and the spool: on a file system that all executors
    see. None is a folder for such on this machine."""
    keep_deletes: bool = False
    storage_options: dict[str, str] | None = None
    on_applied: Callable[[Applied], None] | None = None
    start_over: frozenset[int] = frozenset()
    """VBuckets that are to be read again from the beginning, whatever the tables hold of them."""
    changes_uri: str | None = None
    """Where the change log is, if there is to be one."""
    missing: tuple[str, ...] = ()
    """Collections that have been dropped: their tables are emptied at the start."""
    changes: MirrorTable | None = None
    tables: list[MirrorTable] = field(default_factory=list)
    _staged: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def start(self, *, once: bool = False, trigger_s: float | None = None) -> StreamingQuery:
        """Claim the tables and start the query."""
        self._open_tables()
        self._empty_dropped()
        positions, resets = self._agree()
        crash_point("mirror.in-recovery")
        self._scratch = Scratch(self.work_dir, "run")
        run = self._scratch.path
        self._staging = run / "staging"
        self._staging.mkdir()
        groups = int(self.tables[0].source["groups"])
        self._group_of = tuple(
            group_of(vbucket, groups, self.vbucket_count) for vbucket in range(self.vbucket_count)
        )
        mirror = MirrorOption(groups, tuple(table.uri for table in self.tables), self.storage_options, resets)
        options = {
            "minPartitions": str(self.spark.sparkContext.defaultParallelism),
            "spoolDir": str(run),
            **self.options,
            "startingOffsets": format_positions(
                {vbucket: positions.get(vbucket, Position.BEGINNING) for vbucket in range(self.vbucket_count)}
            ),
            "failOnDataLoss": "false",
            MIRROR: mirror.to_text(),
        }
        frame = _observed(self.spark.readStream.format("tailrace").options(**options).load())
        writer = frame.writeStream.foreachBatch(self._apply).option(
            "checkpointLocation", str(run / "checkpoint")
        )
        if once:
            writer = writer.trigger(availableNow=True)
        elif trigger_s:
            writer = writer.trigger(processingTime=f"{int(trigger_s * 1000)} milliseconds")
        return writer.queryName(f"tailrace mirror of {self.bucket} {run.name[4:]}").start()

    def tidy_up(self) -> None:
        """Once the query has ended: nothing of its run is needed any more. The end of the process does it
        too.
        """
        self._scratch.remove()

    def _open_tables(self) -> None:
        if not self.specs:
            raise UsageError("a mirror needs at least one table")
        schema = table_schema(keep_deletes=self.keep_deletes)
        groups = min(MAX_GROUPS, self.vbucket_count)
        self.tables = []
        for spec in self.specs:
            source = {
                "bucket": self.bucket,
                "scope": spec.scope,
                "collection": spec.collection,
                "vbuckets": self.vbucket_count,
                "groups": groups,
            }
            table = MirrorTable.open_or_create(
                spec.uri, schema=schema, source=source, storage_options=self.storage_options
            )
            table.claim()
            self.tables.append(table)
        if self.changes_uri is not None:
            source = {
                "bucket": self.bucket,
                "scope": "*",
                "collection": "*",
                "changes": True,
                "vbuckets": self.vbucket_count,
            }
            self.changes = MirrorTable.open_or_create(
                self.changes_uri, schema=CHANGES_SCHEMA, source=source, storage_options=self.storage_options
            )
            self.changes.claim()

    def _empty_dropped(self) -> None:
        """Empty the tables of collections that are gone: the stream names those by numbers that only they
        who saw them begin can tell.
        """
        for spec, table in zip(self.specs, self.tables, strict=True):
            if spec.path in self.missing and table.files():
                table.commit([], [file.path for file in table.files()], table.current.positions)

    def _agree(self) -> tuple[dict[int, Position], dict[int, tuple[int, int, list[int] | None]]]:
        """The position that all tables go on from, and the vbuckets that must be set back to it first.

        The tables are committed one after the other, so a crash can leave some one batch ahead. Those go back
        to the version at which they stood with the others; a vbucket without such a version starts over.
        """
        current = [table.current for table in self.tables]
        agreed: dict[int, Position] = {}
        resets: dict[int, tuple[int, int, list[int] | None]] = {}
        for vbucket in range(self.vbucket_count):
            stands = {version.position(vbucket) for version in current}
            versions: list[int] | None = None
            if vbucket in self.start_over or self._log_lacks(vbucket, stands):
                agreed[vbucket] = Position.BEGINNING
            elif len(stands) == 1:
                agreed[vbucket] = stands.pop()
                continue
            else:
                agreed[vbucket], versions = self._last_common(vbucket)
            resets[vbucket] = (agreed[vbucket].vb_uuid, agreed[vbucket].seqno, versions)
        return agreed, resets

    def _log_lacks(self, vbucket: int, stands: set[Position]) -> bool:
        """Whether the change log has not been where a table is: then everything must come once more."""
        if self.changes is None:
            return False
        return self.changes.current.position(vbucket).seqno < max(position.seqno for position in stands)

    def _last_common(self, vbucket: int) -> tuple[Position, list[int] | None]:
        """The newest position that every table has had, and the version of each that had it."""
        by_table = [
            {position: version for version, position in reversed(list(table.lineage(vbucket)))}
            for table in self.tables
        ]
        for position in reversed(by_table[0]):
            if all(position in known for known in by_table):
                return position, [known[position] for known in by_table]
        return Position.BEGINNING, None

    # a batch

    def _apply(self, batch: DataFrame, batch_id: int) -> None:
        """Rewrite on the executors, commit here. A batch that can't be applied stops the query."""
        for attempt in range(_ATTEMPTS):
            results = self._run(batch)
            try:
                self._commit(results, batch_id)
                break
            except TableChanged:
                # somebody tidied the files up: compute the batch again from those that are there now
                if attempt + 1 == _ATTEMPTS:
                    raise
        crash_point("mirror.after-batch")

    def _run(self, batch: DataFrame) -> list[GroupResult]:
        targets = []
        for spec, table in zip(self.specs, self.tables, strict=True):
            table.refresh()
            table.split_files(self._group_of)
            files = self._files_by_group(table)
            targets.append(Target(table.uri, spec.scope, spec.collection, files, self.keep_deletes))
        rewrite = Rewrite(
            tuple(targets),
            self._group_of,
            str(self._staging),
            dict(self._staged),
            self.storage_options,
            self._change_log(),
        )
        rows = batch.mapInArrow(rewrite, RESULT_DDL).collect()
        return [GroupResult.from_json(row.target, row.group, row.result) for row in rows]

    def _change_log(self) -> ChangeLog | None:
        if self.changes is None:
            return None
        self.changes.refresh()
        return ChangeLog(
            self.changes.uri,
            dict(self.options),
            self.changes.current.positions,
            self.changes.version + 1,
            self.storage_options,
        )

    def _files_by_group(self, table: MirrorTable) -> dict[int, tuple[str, ...]]:
        found: dict[int, tuple[str, ...]] = {}
        for file in table.files():
            group = self._group_of[file.first_vbucket]
            found[group] = (*found.get(group, ()), file.path)
        return found

    def _commit(self, results: Sequence[GroupResult], batch_id: int) -> None:
        crash_point("mirror.before-commit")
        self._commit_changes([result for result in results if result.target == CHANGES])
        results = [result for result in results if result.target != CHANGES]
        for index, table in enumerate(self.tables):
            own = [result for result in results if result.target == index]
            positions = dict(table.current.positions)
            for result in own:
                positions.update(result.positions)
            added = [file for result in own for file in result.added]
            removed = [path for result in own for path in result.removed]
            resets = {vbucket: seqno for result in own for vbucket, seqno in result.resets.items()}
            if added or removed or resets or positions != table.current.positions:
                table.commit(added, removed, positions, resets)
            crash_point("mirror.after-commit")
        for result in results:
            self._staged[result.group] = result.staged
        if self.on_applied is not None:
            self._tell(results, batch_id)

    def _commit_changes(self, results: Sequence[GroupResult]) -> None:
        """The log goes first: what a crash keeps from the tables comes again, and the log knows it then."""
        if self.changes is None:
            return
        positions = dict(self.changes.current.positions)
        for result in results:
            positions.update(result.positions)
        added = [file for result in results for file in result.added]
        if added or positions != self.changes.current.positions:
            self.changes.commit(added, [], positions)
            crash_point("mirror.after-changes")

    def _tell(self, results: Sequence[GroupResult], batch_id: int) -> None:
        assert self.on_applied is not None
        self.on_applied(
            Applied(
                batch_id,
                sum(result.changes for result in results),
                tuple(sorted({vbucket for result in results for vbucket in result.resets})),
                tuple(table.version for table in self.tables),
                self.tables[0].current.positions,
            )
        )


def _observed(frame: DataFrame) -> DataFrame:
    """Figures of each batch that stand in ``query.lastProgress`` under ``tailrace``."""
    from pyspark.sql import functions as sf

    return frame.observe(
        "tailrace",
        sf.count_if(sf.col("op").isin("mutation", "deletion", "expiration")).alias("changes"),
        sf.count_if(sf.col("op") == "rollback").alias("rollbacks"),
        sf.sum(sf.length("value")).alias("value_bytes"),
    )
