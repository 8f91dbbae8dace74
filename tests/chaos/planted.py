"""Bugs that mirrors have, planted into this one by one: the chaos suite must catch each.

Each is a change of the product's code for the time of a ``with``; nothing of this is in the product.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.client.resume import Reading
from tailrace.model import Position
from tailrace.spark import mirroring, rewrite, table
from tailrace.spark.source.feed import Feed
from tailrace.spark.table import MirrorTable


@dataclass(frozen=True)
class Bug:
    """What is wrong, and who would write it that way."""

    name: str
    about: str
    plant: Callable[[], AbstractContextManager[Any]]
    seed: int = 0
    """The script that is tried first; it catches the bug, however busy the machine is."""
    rare: bool = False
    """It takes many scripts to catch it: for make chaos."""


def _identity_without_vb_uuid() -> AbstractContextManager[Any]:
    original = Feed.deliveries

    def deliveries(self: Feed, start: Mapping[int, Position], *, end: str) -> Iterator[Any]:
        logs = self._source.failover_logs(list(start))
        high = self.high_seqnos()
        renamed = {
            vbucket: Position.at(logs[vbucket].newest.vb_uuid, min(position.seqno, high[vbucket]))
            for vbucket, position in start.items()
        }
        return original(self, renamed, end=end)

    return mock.patch.object(Feed, "deliveries", deliveries)


def _old_versions_not_restored() -> AbstractContextManager[Any]:
    original = rewrite.fold  # type: ignore[attr-defined]

    def fold(
        held: pa.Table, changes: pa.Table, *, reset: Mapping[int, pa.Table], keep_deletes: bool
    ) -> pa.Table:
        kept = {}
        for vbucket, rows in reset.items():
            limit = pc.max(rows["seqno"]).as_py() or 0
            wanted = pc.and_(pc.equal(held["vbucket"], vbucket), pc.less_equal(held["seqno"], limit))
            kept[vbucket] = held.filter(wanted)
        return original(held, changes, reset=kept, keep_deletes=keep_deletes)

    return mock.patch.object(rewrite, "fold", fold)


def _range_collapsed_on_resume() -> AbstractContextManager[Any]:
    original = Reading._request

    def request(self: Reading, one: Any, node: Any) -> None:
        position = one.stream.position
        one.stream.position = Position.at(position.vb_uuid, position.seqno)
        original(self, one, node)

    return mock.patch.object(Reading, "_request", request)


def _position_before_the_commit() -> AbstractContextManager[Any]:
    original = MirrorTable.commit

    def commit(self: MirrorTable, added: Any, removed: Any, positions: Any, resets: Any = None) -> None:
        if positions != self.current.positions:
            original(self, [], [], positions)
            mirroring.crash_point("mirror.before-commit")  # type: ignore[attr-defined]
        original(self, added, removed, positions, resets)

    return mock.patch.object(MirrorTable, "commit", commit)


def _partial_snapshot_published() -> AbstractContextManager[Any]:
    original = rewrite._last_positions

    def last_positions(rows: pa.Table) -> dict[int, Position]:
        return {v: Position.at(p.vb_uuid, p.seqno) for v, p in original(rows).items()}

    return mock.patch.object(rewrite, "_last_positions", last_positions)


@contextlib.contextmanager
def _retry_applied_twice() -> Iterator[None]:
    original = mirroring.Mirror._commit

    def commit(self: mirroring.Mirror, results: Any, batch_id: int) -> None:
        original(self, results, batch_id)
        if batch_id % 3 == 2:  # the answer got lost: the same rows once more, under other names
            again = []
            for result in results:
                held = self.tables[result.target]
                copies = tuple(_copied(held, file) for file in result.added)
                again.append(replace(result, added=copies, removed=()))
            original(self, again, batch_id)

    with mock.patch.object(mirroring.Mirror, "_commit", commit):
        yield


def _copied(held: MirrorTable, file: table.GroupFile) -> table.GroupFile:
    rows = table.read_rows(held.uri, [file.path], held.schema)
    return table.write_file(rows, held.uri, f"again-{file.path}")


def _lineage_ignores_resets() -> AbstractContextManager[Any]:
    def lineage(self: MirrorTable, vbucket: int) -> Iterator[tuple[int, Position]]:
        for version in self.versions():
            position = version.position(vbucket)
            if position.seqno and self._has_files(version.version, vbucket):
                yield version.version, position

    return mock.patch.object(MirrorTable, "lineage", lineage)


BUGS = (
    Bug(
        "identity without vb_uuid",
        "The position is a seqno alone, as in a log of messages: a failover to a branch with the "
        "same seqnos goes unnoticed.",
        _identity_without_vb_uuid,
    ),
    Bug(
        "old versions not restored",
        "A rollback to X deletes the rows above X; what these had overwritten or deleted does not come back.",
        _old_versions_not_restored,
        seed=2,
    ),
    Bug(
        "snapshot range collapsed on resume",
        "A reader that was cut off inside a snapshot resumes with its seqno as both ends of the range: the "
        "producer can't know that changes were folded away which a failover has taken back.",
        _range_collapsed_on_resume,
        seed=2,
    ),
    Bug(
        "position saved before the table commit",
        "The position is saved first, the rows after it: a kill between the two loses rows.",
        _position_before_the_commit,
        seed=1,
    ),
    Bug(
        "partial snapshot published",
        "A batch that ends inside a snapshot is committed as if it were whole: a state that the bucket never "
        "had, and a place to go back to that never was.",
        _partial_snapshot_published,
        seed=2,
    ),
    Bug(
        "retry applied twice",
        "A commit whose answer got lost is made once more: documents stand twice.",
        _retry_applied_twice,
        seed=2,
    ),
    Bug(
        "a dead branch restored",
        "A second rollback goes back to a version that the first one undid, because it has the right seqno.",
        _lineage_ignores_resets,
        seed=4,
    ),
)
