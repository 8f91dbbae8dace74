"""The driver's half of a round: the tasks' answers become one commit per table.

Positions and rows are in the same commit, and only answers of attempts that Spark accepted count; so whatever
is killed, the next round is planned from what the tables say.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields

from pyroaring import BitMap

from ...crashpoints import crash_point
from ...logs import log_event
from ...model import Position
from ...table.contract import Commit, NewFile, Table, TaskResult
from ...table.document_columns import DocumentColumns
from ...table.rollback import RowsBack, roll_back
from ...table.rows import DELETED, table_schema
from .change_log import ChangeLogTarget
from .freshness import Stands
from .planning import RoundPlan
from .progress import TableCounts
from .task import TableTarget, TaskAnswer
from .troubled_vbuckets import TroubledVBuckets

__all__ = ["RoundCommitter", "RoundCounts"]

_log = logging.getLogger(__name__)
_SHOWN_VBUCKETS = 8


@dataclass
class RoundCounts:
    """What the commits of a round had in them."""

    tables: list[TableCounts]
    log_bytes: int = 0
    """Written to the change log."""
    committed: bool = False
    started_over: set[int] = field(default_factory=set)

    def total(self) -> TableCounts:
        """The sums over all tables and the change log."""
        names = [member.name for member in fields(TableCounts)]
        sums = TableCounts(*(sum(getattr(table, name) for table in self.tables) for name in names))
        sums.bytes_written += self.log_bytes
        return sums


@dataclass
class RoundCommitter:
    """Commits to the tables of a mirror, and to its change log."""

    tables: Sequence[Table]
    log: Table | None
    troubled: TroubledVBuckets
    stands: Stands
    high_seqno: Callable[[int], int]
    """The high seqno of a vbucket when the bucket was last asked."""

    def go_back(self, plan: RoundPlan) -> tuple[dict[int, tuple[int, int]], list[int]]:
        """Return vbuckets to earlier versions of their tables: states that the bucket had. Gives, by vbucket,
        the seqnos from and to which it went, and for each table how many rows that removed or restored.
        """
        rolled_back: dict[int, tuple[int, int]] = {}
        rows = [0] * len(self.tables)
        for index, table in enumerate(self.tables):
            back = plan.going_back(index)
            if not back:
                continue
            crash_point("mirror.before-rollback")
            table_before = {vbucket: table.current.position(vbucket).seqno for vbucket in back}
            pieces = roll_back(table, {vbucket: decision.version for vbucket, decision in back.items()})
            commit = pieces.commit()
            table.commit(
                Commit(
                    operation=commit.operation,
                    positions={vbucket: decision.request for vbucket, decision in back.items()},
                    added=commit.added,
                    vectors=commit.vectors,
                    readded=commit.readded,
                    resets={vbucket: decision.request.seqno for vbucket, decision in back.items()},
                    counts={**commit.counts, "vbuckets": len(back)},
                )
            )
            crash_point("mirror.after-rollback")
            targets = {vbucket: decision.request.seqno for vbucket, decision in back.items()}
            for vbucket, seqno in targets.items():
                rolled_back.setdefault(vbucket, (table_before[vbucket], seqno))
            _log_rollback(table, table_before, targets, pieces)
            rows[index] = pieces.rows_back + pieces.rows_gone
        return rolled_back, rows

    def add_columns(self, wanted: Iterable[DocumentColumns | None]) -> None:
        """Give typed tables the columns that somebody asks for."""
        for table, columns in zip(self.tables, wanted, strict=False):
            if columns is not None and columns != table.documents:
                table.commit(_with_columns(table, columns))

    def settle_columns(self, answers: Sequence[TaskAnswer]) -> bool:
        """Whether tasks gave new fields different types: then the tables get a type that holds all of them,
        and the round must be done again.

        Where the tasks agree, their files have the new columns already, and one commit brings both.
        """
        has_changed = False
        for index, table in enumerate(self.tables):
            seen = [result.documents for result in _results(answers, index) if result.documents is not None]
            if table.documents is None or not seen:
                continue
            columns = table.documents.joined(seen)
            if not all(columns.holds(other) for other in seen):
                table.commit(_with_columns(table, columns))
                has_changed = True
        return has_changed

    def commit(
        self,
        plan: RoundPlan,
        targets: Sequence[TableTarget],
        log: ChangeLogTarget | None,
        answers: Sequence[TaskAnswer],
    ) -> RoundCounts:
        """Commit everything that the tasks of a round answered to its targets."""
        crash_point("mirror.before-commit")
        positions: dict[int, Position] = {}
        for answer in answers:
            positions.update(answer.positions)
        counted = RoundCounts([TableCounts() for _ in self.tables])
        if log is not None:
            self._commit_log(plan, answers, positions, log, counted)
        for index, table in enumerate(self.tables):
            reached = {v: at for v, at in positions.items() if v not in targets[index].waiting}
            self._commit_table(index, table, plan, answers, reached, counted)
            crash_point("mirror.after-commit")
        self.troubled.anew -= self._gone(self.troubled.anew & plan.starting_over(0), positions)
        return counted

    def _gone(self, anew: AbstractSet[int], positions: Mapping[int, Position]) -> set[int]:
        """VBuckets that start over and are not streamed, because the bucket has nothing of them any more."""
        return {vbucket for vbucket in anew if not self.high_seqno(vbucket) and vbucket not in positions}

    def _commit_log(
        self,
        plan: RoundPlan,
        answers: Sequence[TaskAnswer],
        positions: Mapping[int, Position],
        target: ChangeLogTarget,
        counted: RoundCounts,
    ) -> None:
        assert self.log is not None
        log = self.log
        held = self.stands.of(log)
        results = [answer.logged for answer in answers if answer.logged is not None]
        decisions = plan.decisions[len(self.tables)]
        moved = {
            vbucket: position
            for vbucket, position in positions.items()
            if position.seqno > target.floors.get(vbucket, -1)
            and position != held.get(vbucket, Position.BEGINNING)
        }
        added = [new for result in results for new in result.added]
        resets = {
            vbucket: decision.request.seqno for vbucket, decision in decisions.items() if vbucket in moved
        }
        if not added and not moved:
            return
        log.commit(
            Commit(
                operation="TAILRACE ROUND",
                positions=moved,
                added=added,
                resets=resets,
                counts={"changes": sum(result.changes for result in results)},
            )
        )
        counted.log_bytes = sum(result.bytes_written for result in results)
        counted.committed = True
        crash_point("mirror.after-changes")

    def _commit_table(
        self,
        index: int,
        table: Table,
        plan: RoundPlan,
        answers: Sequence[TaskAnswer],
        positions: Mapping[int, Position],
        counted: RoundCounts,
    ) -> None:
        held = self.stands.of(table)
        results = _results(answers, index)
        emptied: set[int] = set()
        for answer in answers:
            emptied.update(vbucket for number, vbucket in answer.emptied if number == index)
        anew = plan.starting_over(index)
        nothing = self._gone(anew, positions)
        moved = {
            vbucket: position
            for vbucket, position in positions.items()
            if vbucket in anew or position.seqno > held.get(vbucket, Position.BEGINNING).seqno
        }
        moved |= dict.fromkeys(nothing, Position.BEGINNING)
        replaced = (anew & moved.keys()) | (emptied & positions.keys())
        resets = dict.fromkeys(anew & moved.keys(), 0)
        masked: dict[str, BitMap] = {}
        for result in results:
            for path, rows in result.masked.items():
                masked.setdefault(path, BitMap()).update(BitMap.deserialize(rows))
        vectors: dict[str, BitMap] = {}
        pieces: RowsBack | None = None
        if replaced:
            pieces = roll_back(table, dict.fromkeys(replaced))
            vectors = pieces.vectors
            for path in vectors.keys() & masked.keys():
                vectors[path] |= masked.pop(path)
        added: list[NewFile] = [new for result in results for new in result.added]
        if not (added or masked or vectors or moved):
            return
        before = {file.path: file for file in table.files()}
        rows_masked = sum(
            len(rows - table.mask(before[path])) for path, rows in (*masked.items(), *vectors.items())
        )
        counts = {
            "changes": sum(result.changes for result in results),
            "rows_written": sum(result.rows_written for result in results),
            "rows_masked": rows_masked,
            "bytes_written": sum(result.bytes_written for result in results),
        }
        columns = table.documents
        if columns is not None:
            counts["rescued"] = sum(result.rescued for result in results)
            columns = columns.joined(result.documents for result in results if result.documents is not None)
        more = None if columns is None or columns == table.documents else columns
        table.commit(
            Commit(
                operation="TAILRACE ROUND",
                positions=moved,
                added=added,
                masked=masked,
                vectors=vectors,
                resets=resets,
                counts=counts,
                schema=None if more is None else _with_columns(table, more).schema,
                documents=more,
                repaired=self.troubled.is_repair and not self.troubled.anew - positions.keys() - nothing,
            )
        )
        counted.committed = True
        counted.started_over.update(resets)
        counted.tables[index] = TableCounts(**counts)
        if resets and pieces is not None:
            counted.tables[index].rows_rolled_back = pieces.rows_gone
            _log_rollback(
                table,
                {vbucket: held.get(vbucket, Position.BEGINNING).seqno for vbucket in resets},
                resets,
                pieces,
            )

    def empty_dropped(self, missing: Iterable[str]) -> None:
        """Empty the tables of collections that are gone: the stream names those only by numbers, which mean
        nothing to a reader that did not see them begin.
        """
        missing = set(missing)
        for table in self.tables:
            path = f"{table.source['scope']}.{table.source['collection']}"
            if path in missing and table.files():
                gone = [file.path for file in table.files()]
                table.commit(Commit("TAILRACE ROUND", removed=gone))


def _results(answers: Iterable[TaskAnswer], index: int) -> list[TaskResult]:
    """The results of tasks for one table."""
    return [
        result
        for answer in answers
        for number, result in zip(answer.tables, answer.results, strict=True)
        if number == index
    ]


def _with_columns(table: Table, columns: DocumentColumns) -> Commit:
    """A commit that gives a typed table other columns of documents."""
    keep_deletes = DELETED.name in table.schema.names
    schema = table_schema(keep_deletes=keep_deletes, documents=columns)
    for column in table.schema:  # a column added by others stays, and is null in our rows
        if column.name not in schema.names:
            schema = schema.append(column)
    return Commit("TAILRACE COLUMNS", schema=schema, documents=columns)


def _log_rollback(
    table: Table, before: Mapping[int, int], targets: Mapping[int, int], pieces: RowsBack
) -> None:
    """Log one line for all vbuckets that go back, to a state that the table had or to nothing."""
    log_event(
        _log,
        logging.INFO,
        "rollback",
        table=table.uri,
        vbuckets=len(targets),
        changes=sum(max(0, before[vbucket] - seqno) for vbucket, seqno in targets.items()),
        rows_gone=pieces.rows_gone,
        rows_back=pieces.rows_back,
        version=table.version,
        from_to=", ".join(
            f"{vbucket}: {before[vbucket]} to {seqno}"
            for vbucket, seqno in sorted(targets.items())[:_SHOWN_VBUCKETS]
        ),
    )
