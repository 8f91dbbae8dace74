"""Bugs that mirrors have, planted into this one by one: the chaos suite must catch each.

Each is a change of the product's code for the time of a ``with``; nothing of this is in the product.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
from pyroaring import BitMap

from campaigns.bug import Bug
from chaos.chaos_jobs import ChaosJobs
from tailrace.client.resume import Reading
from tailrace.history import RestartAction
from tailrace.model import Position
from tailrace.spark.rounds import committing, housekeeping, planning, reading, task, task_targets
from tailrace.spark.rounds.change_log import CHANGES_SCHEMA, ChangeSink
from tailrace.spark.rounds.planning import VBucketDecision
from tailrace.spark.rounds.task import TaskAnswer
from tailrace.table import compaction, rollback
from tailrace.table.contract import Commit, NewFile, Table
from tailrace.table.delta import table as delta_table
from tailrace.table.delta.table import DeltaMirrorTable
from tailrace.table.file_reading import scan
from tailrace.table.hashing import KeyHash
from tailrace.table.index import FileIndex
from tailrace.table.rollback import RowsBack


def _identity_without_vb_uuid() -> AbstractContextManager[Any]:
    def decide(table: Any, vbucket: int, log: Any, high_seqno: int, **_: Any) -> VBucketDecision:
        held = table.current.position(vbucket)
        named = Position.at(log.newest.vb_uuid, min(held.seqno, high_seqno)) if held.seqno else held
        return VBucketDecision(RestartAction.RESUME, held, named)

    return mock.patch.object(planning, "decide", decide)


def _old_versions_not_restored() -> AbstractContextManager[Any]:
    original = rollback.roll_back

    def roll_back(table: Table, back: Mapping[int, int | None]) -> RowsBack:
        known = {version.version: version for version in table.versions()}
        done = original(table, dict.fromkeys(back))
        for file in table.files():
            rows = pq.read_table(f"{table.uri}/{file.path}", columns=["vbucket", "seqno"]).to_pydict()
            kept = BitMap()
            for number, (vbucket, seqno) in enumerate(zip(rows["vbucket"], rows["seqno"], strict=True)):
                version = back.get(vbucket)
                if version is not None and seqno <= known[version].position(vbucket).seqno:
                    kept.add(number)
            if file.path in done.vectors:
                done.vectors[file.path] -= kept - table.mask(file)
        return done

    return mock.patch.object(committing, "roll_back", roll_back)


def _range_collapsed_on_resume() -> AbstractContextManager[Any]:
    original = Reading._request

    def request(self: Reading, progress: Any, node: Any) -> None:
        position = progress.stream.position
        progress.stream.position = Position.at(position.vb_uuid, position.seqno)
        original(self, progress, node)

    return mock.patch.object(Reading, "_request", request)


def _position_before_the_commit() -> AbstractContextManager[Any]:
    original = DeltaMirrorTable.commit

    def commit(self: DeltaMirrorTable, commit: Commit) -> int:
        if commit.operation == "TAILRACE ROUND" and commit.positions:
            original(self, Commit("TAILRACE ROUND", positions=commit.positions))
            committing.__dict__["crash_point"]("mirror.before-commit")
        return original(self, commit)

    return mock.patch.object(DeltaMirrorTable, "commit", commit)


def _partial_snapshot_published() -> AbstractContextManager[Any]:
    class Stopped:
        """Pieces of a stream, the second of which never comes."""

        def __init__(self, source: Any) -> None:
            self._source = source

        def __getattr__(self, name: str) -> Any:
            return getattr(self._source, name)

        def portions(self, *where: Any, **how: Any) -> Iterator[Any]:
            with contextlib.closing(self._source.portions(*where, **how)) as portions:
                for portion in portions:
                    whole = {
                        vbucket: Position.at(at.vb_uuid, at.seqno) for vbucket, at in portion.ends.items()
                    }
                    portion.ends = whole
                    yield portion
                    if whole:
                        return

    original = reading.read_ranges

    def read_ranges(source: Any, ranges: Any, taker: Any) -> None:
        original(Stopped(source), ranges, taker)  # type: ignore[arg-type]

    return mock.patch.object(task, "read_ranges", read_ranges)


def _retry_applied_twice() -> AbstractContextManager[Any]:
    original = ChaosJobs.run

    def run(self: ChaosJobs, work: Any, pieces: Any, description: str, on_done: Any) -> list[Any]:
        answers = original(self, work, pieces, description, on_done)
        if isinstance(work, task.RoundTask):  # one was slow, so it was run twice
            answers.append(original(self, work, pieces[:1], description, None)[0])
        return answers

    return mock.patch.object(ChaosJobs, "run", run)


def _named_by_the_seqno_alone() -> AbstractContextManager[Any]:
    original = ChangeSink._is_new

    def is_new(self: ChangeSink, rows: Any) -> Any:
        """A change counts as logged as soon as one with its seqno is, whatever the branch."""
        new = original(self, rows)
        logged = scan(
            self.log.store,
            self.log.files,
            {},
            CHANGES_SCHEMA,
            key_hash=KeyHash(self.log.secret),
            columns=["op", "vbucket", "seqno"],
        )
        known = {
            (row["vbucket"], row["seqno"])
            for batch in logged
            for row in batch.to_pylist()
            if row["op"] != "rollback" and row["vbucket"] in self.log.branches
        }
        names = zip(rows["vbucket"].to_pylist(), rows["seqno"].to_pylist(), strict=True)
        return new & np.array([name not in known for name in names], dtype=np.bool_)

    return mock.patch.object(ChangeSink, "_is_new", is_new)


def _skips_what_was_passed_before() -> AbstractContextManager[Any]:
    original = task_targets._floors

    def floors(
        table: Any, decisions: Mapping[int, VBucketDecision], ranges: Mapping[int, Any]
    ) -> dict[int, int]:
        passed = {
            vbucket: decision.held.seqno
            for vbucket, decision in decisions.items()
            if vbucket in ranges and decision.action is RestartAction.ROLL_BACK
        }
        return {**original(table, decisions, ranges), **passed}

    return mock.patch.object(task_targets, "_floors", floors)


def _keyed_by_another_runs_number() -> AbstractContextManager[Any]:
    """Rounds are numbered from 0 in every run; a number that was committed is not committed again."""
    original = DeltaMirrorTable.commit
    numbers: dict[int, int] = {}
    committed: set[tuple[str, int]] = set()

    def commit(self: DeltaMirrorTable, commit: Commit) -> int:
        if commit.operation == "TAILRACE ROUND" and commit.positions:
            number = numbers[id(self)] = numbers.get(id(self), -1) + 1
            if (self.uri, number) in committed:
                commit = Commit(commit.operation, positions=commit.positions, resets=commit.resets)
            committed.add((self.uri, number))
        return original(self, commit)

    return mock.patch.object(DeltaMirrorTable, "commit", commit)


def _lineage_ignores_resets() -> AbstractContextManager[Any]:
    return mock.patch.object(delta_table, "parse_resets", lambda _text: [])


def _masked_by_h1_alone() -> AbstractContextManager[Any]:
    """With hashes that collide, which is harmless while both of them are looked at."""
    original = KeyHash.hash

    def hash_of(self: KeyHash, keys: Any, vbuckets: Any) -> Any:
        h1, h2 = original(self, keys, vbuckets)
        return h1 & ~np.uint64((1 << 48) - 4), h2

    def find(self: FileIndex, h1: Any, h2: Any) -> Any:
        at = np.searchsorted(self.h1, h1)
        inside = at < len(self.h1)
        return at[inside][self.h1[at[inside]] == h1[inside]].astype(np.uint32)

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(KeyHash, "hash", hash_of))
    stack.enter_context(mock.patch.object(FileIndex, "find", find))
    return stack


def _mask_lost_by_compaction() -> AbstractContextManager[Any]:
    original = compaction.finish_step

    def finish_step(table: Table, step: Any, written: Any) -> Commit | None:
        commit = original(table, step, written)
        return commit and replace(commit, added=[NewFile(new.file, b"") for new in commit.added])

    return mock.patch.object(housekeeping, "finish_step", finish_step)


def _undo_without_moved_rows() -> AbstractContextManager[Any]:
    original = rollback.roll_back

    def roll_back(table: Table, back: Mapping[int, int | None]) -> RowsBack:
        done = original(table, back)
        for file in done.readded:
            del done.vectors[file.path]
        done.readded, done.added = [], []
        return done

    return mock.patch.object(committing, "roll_back", roll_back)


def _position_ahead_of_its_rows() -> AbstractContextManager[Any]:
    original = committing.RoundCommitter._commit_table

    def commit_table(self: Any, *given: Any) -> None:
        *before, positions, counted = given
        planned = {
            vbucket: Position.at(at.vb_uuid, max(at.seqno, self.high_seqno(vbucket)))
            for vbucket, at in positions.items()
        }
        original(self, *before, planned, counted)  # type: ignore[call-arg]

    return mock.patch.object(committing.RoundCommitter, "_commit_table", commit_table)


def _orphan_taken_for_a_file() -> AbstractContextManager[Any]:
    original = committing.RoundCommitter._commit_table

    def commit_table(self: Any, index: int, table: Any, plan: Any, answers: Any, *more: Any) -> None:
        lost = [
            answer for attempt in ChaosJobs.lost for answer in [attempt] if isinstance(answer, TaskAnswer)
        ]
        ChaosJobs.lost.clear()
        files = [new for answer in lost for result in answer.results for new in result.added]
        if files and answers and answers[0].results:
            first = answers[0].results[0]
            answers[0].results[0] = replace(first, added=(*first.added, *files))
        original(self, index, table, plan, answers, *more)

    return mock.patch.object(committing.RoundCommitter, "_commit_table", commit_table)


def _cleaning_takes_what_is_named() -> AbstractContextManager[Any]:
    original = DeltaMirrorTable.maintain

    def maintain(self: DeltaMirrorTable, **how: Any) -> Any:
        report = original(self, **how)
        # a file that gets a vector is removed and added by the same commit, and only the first is seen
        self.store.delete([file.path for file in self.files() if file.vector is not None])
        return report

    return mock.patch.object(DeltaMirrorTable, "maintain", maintain)


BUGS = (
    Bug(
        "identity without vb_uuid",
        "The position is a seqno alone, as in a log of messages: a failover to a branch with the "
        "same seqnos goes unnoticed.",
        _identity_without_vb_uuid,
        seed=1000,
    ),
    Bug(
        "pre-images not restored",
        "A rollback to X deletes the rows above X; what these had overwritten or deleted does not come back.",
        _old_versions_not_restored,
        seed=1001,
    ),
    Bug(
        "snapshot range collapsed on resume",
        "A reader that was cut off inside a snapshot resumes with its seqno as both ends of the range: the "
        "producer can't know that changes were folded away which a failover has taken back.",
        _range_collapsed_on_resume,
        seed=1001,
    ),
    Bug(
        "position saved before the rows",
        "The position is saved first, the rows after it: a kill between the two loses rows.",
        _position_before_the_commit,
        seed=1000,
    ),
    Bug(
        "partial snapshot published",
        "A batch that ends inside a snapshot is committed as if it were whole: a state that the bucket never "
        "had, and a place to go back to that never was.",
        _partial_snapshot_published,
        seed=1000,
    ),
    Bug(
        "retry applied twice",
        "A commit whose answer was lost is made again: documents are in the table twice.",
        _retry_applied_twice,
        seed=1000,
    ),
    Bug(
        "deduplication without vb_uuid",
        "A change counts as logged if one with its seqno is, of whatever branch.",
        _named_by_the_seqno_alone,
        seed=9,
    ),
    Bug(
        "events at or below the old seqno skipped after a rollback",
        "What comes again below the seqno where the mirror stood before is taken for old.",
        _skips_what_was_passed_before,
        seed=10,
    ),
    Bug(
        "commit keyed by another run's number",
        "The number of a round says whether it was committed, and every run begins with 0.",
        _keyed_by_another_runs_number,
        seed=1000,
    ),
    Bug(
        "a dead branch restored",
        "A second rollback goes back to a version that the first one undid, because it has the right seqno.",
        _lineage_ignores_resets,
        seed=1001,
    ),
    Bug(
        "masked the wrong row",
        "Two documents whose first hash is the same are taken for one: the row of the other one is masked.",
        _masked_by_h1_alone,
        seed=1000,
    ),
    Bug(
        "mask lost by a compaction",
        "A row that was masked while its file was being merged is alive again in the new file.",
        _mask_lost_by_compaction,
        seed=1000,
    ),
    Bug(
        "undo without what a compaction moved",
        "A rollback sets the masks of the files that are there, and forgets those that a compaction took.",
        _undo_without_moved_rows,
        seed=1001,
    ),
    Bug(
        "position ahead of its rows",
        "The position that is committed is the one that was planned, not the one that the task came to.",
        _position_ahead_of_its_rows,
        seed=1001,
    ),
    Bug(
        "orphan taken for a file of the table",
        "A file of an attempt whose answer was lost becomes part of the table, beside that of the other one.",
        _orphan_taken_for_a_file,
        seed=1001,
    ),
    Bug(
        "cleaning takes a file that is still named",
        "A file that gets a deletion vector is removed and added by one commit; cleaning sees half of it.",
        _cleaning_takes_what_is_named,
        seed=1000,
    ),
)
