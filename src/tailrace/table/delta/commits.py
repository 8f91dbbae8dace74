"""From a `Commit` to the actions of a Delta commit: files, their vectors, positions, and what was done."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyroaring import BitMap

from ... import __version__
from ...errors import UsageError
from ..contract import FOREIGN, Commit, DataFile, TableChanged, Vector
from ..nested import is_part
from .actions import Action, AddFile, CommitInfo, DomainMetadata, Metadata
from .opening import DOCUMENTS, SOURCE
from .positions import BRANCHES, RESETS, SEQNOS, Reset, format_resets, parse_resets
from .schema import schema_from_json, schema_to_json
from .state import RUN, TableState
from .vectors import VectorFile, encode_vector

__all__ = ["REPAIR", "BuiltCommit", "build_commit", "data_file", "parse_repairs"]

REPAIR = "tailrace.repair"
"""The domain that records since which version rows are somebody else's, and in which version they were
repaired: JSON, pairs of both, null for not yet."""

_KIND, _INDEX, _RANGE, _SCHEMA_ID = "tailrace.kind", "tailrace.index", "tailrace.h1", "tailrace.schema"
_MAX_H1 = (1 << 64) - 1

_CLOCK_SLACK_MS = 3_600_000
"""How far the last commit may be ahead of our clock and still be trusted: the next one then has its time. A
clock that was a year ahead for a moment must not date everything that comes after."""


@dataclass(frozen=True)
class BuiltCommit:
    """What a commit writes."""

    actions: list[Action]
    vector_file: VectorFile | None
    masks: dict[Vector, BitMap]
    """The new vectors and their rows."""


def data_file(add: AddFile, rows: Callable[[AddFile], int]) -> DataFile:
    """A file of the log as the contract has it; ``rows`` counts the rows of a file that does not say."""
    kind = add.tags.get(_KIND)
    low, high, index = 0, _MAX_H1, None
    if kind is not None:
        try:
            first, _, last = add.tags[_RANGE].partition("-")
            low, high = int(first, 16), int(last, 16)
            index = int(add.tags[_INDEX]) if _INDEX in add.tags else None
        except (KeyError, ValueError):
            kind, low, high = None, 0, _MAX_H1
    return DataFile(
        add.path,
        add.size,
        rows(add),
        kind or FOREIGN,
        low,
        high,
        index,
        add.stats or "{}",
        add.modified_ms,
        add.vector,
        int(add.tags.get(_SCHEMA_ID, "0")),
    )


def add_file(file: DataFile, vector: Vector | None, *, data_change: bool) -> AddFile:
    """A file of the contract as the log has it."""
    tags = {}
    if file.kind != FOREIGN:
        tags = {_KIND: file.kind, _RANGE: f"{file.low:016x}-{file.high:016x}"}
        if file.index_offset is not None:
            tags[_INDEX] = str(file.index_offset)
        if file.schema_id:
            tags[_SCHEMA_ID] = str(file.schema_id)
    stats = _bounds(file.stats, vector, file.rows)
    return AddFile(file.path, file.size, file.modified_ms, data_change, stats, tags, vector)


def _bounds(stats: str | None, vector: Vector | None, rows: int) -> str:
    """Statistics that tell whether dead rows are included. A file with a vector must have its number of rows,
    which a foreign file may lack.
    """
    fields = json.loads(stats or "{}")
    tight = vector is None
    if fields.get("tightBounds") == tight and fields.get("numRecords") == rows:
        return stats or "{}"
    return json.dumps({**fields, "numRecords": rows, "tightBounds": tight}, separators=(",", ":"))


def build_commit(
    state: TableState,
    commit: Commit,
    mask: Callable[[Vector | None], BitMap],
    rows: Callable[[AddFile], int],
    *,
    run: str,
    now_ms: int,
    vector_name: str,
    commit_id: str,
    oldest_version: int = 0,
    domains: Mapping[str, str | None] | None = None,
) -> BuiltCommit:
    """The actions of the version after ``state``. `TableChanged` if it names a file that is not there.

    ``oldest_version`` is the oldest that a rollback may return to, as far as is known.
    """
    files = _FileActions(state, commit, mask, rows, now_ms=now_ms, vector_file=VectorFile(vector_name))
    files.build()
    changed: dict[str, str | None] = {
        **_moved(state, commit),
        **_set_back(state, commit, oldest_version),
        **(domains or {}),
    }
    if commit.repaired:
        changed[REPAIR] = json.dumps(
            [[since, at or state.version + 1] for since, at in parse_repairs(state)], separators=(",", ":")
        )
    if 0 < state.timestamp_ms - now_ms < _CLOCK_SLACK_MS:
        now_ms = state.timestamp_ms
    metrics = {**files.counts(), **commit.counts}
    info: dict[str, Any] = {
        "timestamp": now_ms,
        "operation": commit.operation,
        "operationParameters": {},
        "operationMetrics": {name: str(count) for name, count in metrics.items()},
        "isBlindAppend": False,
        "engineInfo": f"tailrace/{__version__}",
        "txnId": commit_id,
        RUN: run,
    }
    actions: list[Action] = [CommitInfo(info)]
    if any(new is not None for new in (commit.schema, commit.documents, commit.bucket_uuid)):
        actions.append(_new_metadata(state, commit))
    for domain, text in changed.items():
        if text is not None:
            actions.append(DomainMetadata(domain, text))
        elif domain in state.domains:
            actions.append(DomainMetadata(domain, "", removed=True))
    vector_file = None if files.vector_file.empty else files.vector_file
    return BuiltCommit(actions + files.actions, vector_file, files.masks)


class _FileActions:
    """What a commit does to the files."""

    def __init__(
        self,
        state: TableState,
        commit: Commit,
        mask: Callable[[Vector | None], BitMap],
        rows: Callable[[AddFile], int],
        *,
        now_ms: int,
        vector_file: VectorFile,
    ) -> None:
        self._state = state
        self._commit = commit
        self._mask = mask
        self._rows = rows
        self._now_ms = now_ms
        self.vector_file = vector_file
        self.actions: list[Action] = []
        self.masks: dict[Vector, BitMap] = {}
        self._added = self._removed = self._remasked = self._dead = 0

    def build(self) -> None:
        commit = self._commit
        for path in commit.removed:
            self._remove(self._held(path))
        for new in commit.added:
            if new.file.path in self._state.files:
                raise TableChanged(f"the file {new.file.path} is part of the table already")
            dead = BitMap.deserialize(new.masked) if new.masked else BitMap()
            dead |= commit.masked.get(new.file.path, BitMap())
            self._add(new.file, dead)
        for file in commit.readded:
            if file.path in self._state.files:
                raise TableChanged(f"the file {file.path} is part of the table already")
            self._add(file, commit.vectors.get(file.path, BitMap()))
        fresh = {new.file.path for new in commit.added} | {file.path for file in commit.readded}
        both = set(commit.removed) & (commit.masked.keys() | commit.vectors.keys())
        if both:
            raise UsageError(f"the file {min(both)} is to be both removed and masked")
        for path, rows in commit.masked.items():
            if path not in fresh:
                held = self._held(path)
                before = self._mask(held.vector)
                self._remask(held, before, before | rows)
        for path, rows in commit.vectors.items():
            if path not in fresh:
                held = self._held(path)
                self._remask(held, self._mask(held.vector), rows)

    def _held(self, path: str) -> AddFile:
        held = self._state.files.get(path)
        if held is None:
            raise TableChanged(f"the file {path} is no longer part of the table")
        return held

    def _remove(self, held: AddFile) -> None:
        self.actions.append(held.removed(self._now_ms, data_change=self._commit.data_change))
        self._removed += 1

    def _add(self, file: DataFile, dead: BitMap) -> None:
        if len(dead) == file.rows and file.rows:
            return  # it has no live row
        _check_rows(file.path, dead, file.rows)
        vector = self._vector(dead)
        self.actions.append(add_file(file, vector, data_change=self._commit.data_change))
        self._added += 1

    def _remask(self, held: AddFile, before: BitMap, after: BitMap) -> None:
        if before == after:
            return
        rows = self._rows(held)
        _check_rows(held.path, after, rows)
        self._remove(held)
        self._dead += max(0, len(after) - len(before))
        if len(after) == rows:
            return
        self._removed -= 1
        self._remasked += 1
        vector = self._vector(after)
        self.actions.append(
            replace(
                held,
                vector=vector,
                stats=_bounds(held.stats, vector, rows),
                data_change=self._commit.data_change,
            )
        )

    def _vector(self, dead: BitMap) -> Vector | None:
        if not dead:
            return None
        # never in the log itself, however small: delta-spark's VACUUM fails on those
        vector = self.vector_file.add(encode_vector(dead), len(dead))
        self.masks[vector] = dead
        return vector

    def counts(self) -> dict[str, int]:
        """Figures for the history, under the names that Delta's own operations use if there are any."""
        return {
            "numAddedFiles": self._added,
            "numRemovedFiles": self._removed,
            "numDeletionVectorsUpdated": self._remasked,
            "numDeletedRows": self._dead,
        }


def _check_rows(path: str, dead: BitMap, rows: int) -> None:
    if dead and dead.max() >= rows:
        raise UsageError(f"the file {path} has {rows} rows, and none with the number {dead.max()}")


def _moved(state: TableState, commit: Commit) -> dict[str, str | None]:
    """The domains of the positions, if they change."""
    if not commit.positions:
        return {}
    seqnos, branches = state.positions.moved(commit.positions).to_texts()
    texts: dict[str, str | None] = {SEQNOS: seqnos, BRANCHES: branches}
    return {domain: text for domain, text in texts.items() if text != state.domains.get(domain, "")}


def _set_back(state: TableState, commit: Commit, oldest_version: int) -> dict[str, str | None]:
    """The domain of the resets, if there are new ones."""
    if not commit.resets:
        return {}
    version = state.version + 1
    new = [(version, vbucket, seqno) for vbucket, seqno in sorted(commit.resets.items())]
    known = [reset for reset in parse_resets(state.domains.get(RESETS, "")) if reset[0] > oldest_version]
    return {RESETS: format_resets(_still_needed(known + new))}


def _still_needed(resets: list[Reset]) -> list[Reset]:
    """The resets without the redundant ones: a later reset of the same vbucket went at least as far back."""
    lowest: dict[int, int] = {}
    needed: list[Reset] = []
    for version, vbucket, seqno in reversed(resets):
        if seqno < lowest.get(vbucket, seqno + 1):
            lowest[vbucket] = seqno
            needed.append((version, vbucket, seqno))
    return needed[::-1]


def parse_repairs(state: TableState) -> list[tuple[int, int | None]]:
    """Since which version rows were somebody else's, and in which they were repaired."""
    return [(since, at) for since, at in json.loads(state.domains.get(REPAIR, "[]"))]


def _new_metadata(state: TableState, commit: Commit) -> Metadata:
    assert state.metadata is not None
    metadata = state.metadata
    if commit.schema is not None:
        before = schema_from_json(metadata.schema_string)
        now = {field.name: field.type for field in commit.schema}
        lost = [field.name for field in before if not _is_kept(field.type, now.get(field.name))]
        if lost:
            raise UsageError(f"the column {lost[0]} can't be changed or left out: columns can only be added")
        metadata = replace(metadata, schema_string=schema_to_json(commit.schema))
    if commit.documents is not None:
        configuration = {**metadata.configuration, DOCUMENTS: commit.documents.to_json()}
        metadata = replace(metadata, configuration=configuration)
    if commit.bucket_uuid is not None:
        source = json.loads(metadata.configuration[SOURCE]) | {"uuid": commit.bucket_uuid}
        configuration = {**metadata.configuration, SOURCE: json.dumps(source)}
        metadata = replace(metadata, configuration=configuration)
    return metadata


def _is_kept(before: pa.DataType, now: pa.DataType | None) -> bool:
    """Whether a column is what it was, or an object with more parts."""
    return now is not None and is_part(before, now)
