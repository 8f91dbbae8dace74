"""The mirror's Delta table: rows, and in the same commit the position of every vbucket.

The position in the table is the truth. A commit of the mirror carries in its metadata

    tailrace.positions   {"7": ["187349", 12], …}   vb_uuid and seqno of each vbucket; absent is the beginning
    tailrace.resets      {"7": 10}   vbuckets that went back in this commit, and to which seqno
    tailrace.run         which run of which mirror made it
    tailrace.source      the bucket and collection that the table mirrors
    tailrace.version     the version that the commit makes

and nothing of the mirror's state is kept anywhere else. Earlier versions of the table are the undo log: they
say which rows a vbucket had at which position. A run begins with a commit that claims the table; a run that
finds another's claim above its own stops. Commits never retry over somebody else's, so two writers can't
interleave.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction
from pyarrow.fs import FileSystem, FileType, LocalFileSystem, PyFileSystem

from ..clock import SYSTEM, Clock
from ..errors import TailraceError, UsageError
from ..files import atomic_write
from ..model import MAX_U64, Position, parse_u64
from ..rng import unique_name
from ..table.contract import Fenced, TableChanged

__all__ = [
    "Fenced",
    "GroupFile",
    "GroupVersion",
    "MirrorTable",
    "TableChanged",
    "file_system",
    "format_compact",
    "parse_compact",
    "read_rows",
    "write_file",
]

POSITIONS = "tailrace.positions"
RUN = "tailrace.run"
RESETS = "tailrace.resets"
SOURCE = "tailrace.source"
VERSION = "tailrace.version"
"""Delta's own history counts down from the version that the reader has opened, and is wrong for all commits
as soon as somebody has made another one; a commit without retries knows its number."""
APP_ID = "tailrace-mirror"

_SEARCH_STEP = 50
"""Versions that are looked at in one go when an earlier one is searched."""

_KEPT_FILE_LISTS = 64

# A group is written again whenever one of its documents changes, so what a file costs to write counts for
# more than its size: snappy takes half of zstd's time for a third more bytes.
_DISTINCT = frozenset({"key", "value", "seqno", "cas", "event_time"})
"""Columns whose values hardly repeat: dictionaries of them would be made in vain."""
_LONG = frozenset({"value", "value_base64"})
"""Columns whose smallest and largest value help nobody."""


@dataclass(frozen=True, slots=True)
class GroupFile:
    """A Parquet file of the table, and which vbuckets it has rows of."""

    path: str
    """Relative to the table."""
    size: int
    rows: int
    first_vbucket: int
    last_vbucket: int

    def overlaps(self, first: int, last: int) -> bool:
        """Whether it may have rows of a vbucket in this range."""
        return self.first_vbucket <= last and first <= self.last_vbucket


@dataclass(frozen=True, slots=True)
class GroupVersion:
    """A version of the table that a mirror made."""

    version: int
    positions: Mapping[int, Position]
    run: str
    resets: Mapping[int, int] = field(default_factory=dict)
    """VBuckets that this version set back, and the seqno that they went back to."""

    def position(self, vbucket: int) -> Position:
        """Where a vbucket stood."""
        return self.positions.get(vbucket, Position.BEGINNING)


class MirrorTable:
    """A mirror's table, opened at its newest version."""

    def __init__(
        self,
        delta: DeltaTable,
        *,
        storage_options: dict[str, str] | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        self._delta = delta
        self._storage_options = storage_options
        self._clock = clock
        self._current = next(self.versions(), None)
        self._source = self._newest(SOURCE)
        self._run: str | None = None
        self._files: dict[int, list[GroupFile]] = {}
        self._known: tuple[int, list[GroupVersion]] | None = None
        """All versions, as they were when the newest was this one."""
        self._existing: dict[str, bool] = {}

    # opening

    @classmethod
    def open(cls, uri: str, *, storage_options: dict[str, str] | None = None) -> MirrorTable:
        """The table at ``uri``; an error if there is none or it is no mirror's."""
        _check_no_file(uri)
        try:
            delta = DeltaTable(uri, storage_options=storage_options)
        except TableNotFoundError:
            raise UsageError(f"there is no Delta table at {uri}; run 'tailrace mirror' first") from None
        table = cls(delta, storage_options=storage_options)
        if table._current is None:
            raise UsageError(
                f"the Delta table at {uri} was not made by 'tailrace mirror'; choose another path"
            )
        return table

    @classmethod
    def open_or_create(
        cls,
        uri: str,
        *,
        schema: pa.Schema,
        source: Mapping[str, Any],
        storage_options: dict[str, str] | None = None,
    ) -> MirrorTable:
        """The table at ``uri``, made if there is none; it must mirror ``source`` and nothing else."""
        _check_no_file(uri)
        if not DeltaTable.is_deltatable(uri, storage_options):
            DeltaTable.create(
                uri,
                schema=schema,
                mode="error",
                name="tailrace mirror",
                description=f"mirror of {_source_text(source)}",
                configuration={"delta.logRetentionDuration": "interval 7 days"},
                storage_options=storage_options,
                commit_properties=CommitProperties(
                    custom_metadata={POSITIONS: "{}", RUN: "", SOURCE: json.dumps(source), VERSION: "0"}
                ),
            )
        table = cls.open(uri, storage_options=storage_options)
        if table.source != dict(source):
            raise UsageError(
                f"the table at {uri} mirrors {_source_text(table.source)}, not {_source_text(source)}; "
                "choose another path"
            )
        if table.schema != schema:
            raise UsageError(
                f"the table at {uri} has other columns; with and without kept deletes are two tables"
            )
        return table

    # what it is

    @property
    def uri(self) -> str:
        """Where it is."""
        return str(self._delta.table_uri)

    @property
    def schema(self) -> pa.Schema:
        """Its columns."""
        return pa.schema(self._delta.schema().to_arrow())

    @property
    def version(self) -> int:
        """The newest version that is known here."""
        return int(self._delta.version())

    @property
    def current(self) -> GroupVersion:
        """The newest version that a mirror made."""
        assert self._current is not None
        return self._current

    @property
    def source(self) -> dict[str, Any]:
        """The bucket and collection that it mirrors."""
        found: dict[str, Any] = json.loads(self._source or "{}")
        return found

    def versions(self) -> Iterator[GroupVersion]:
        """Every version that a mirror made and whose log is still there, newest first."""
        for commit in self._history():
            if POSITIONS in commit:
                resets = json.loads(commit.get(RESETS, "{}"))
                yield GroupVersion(
                    int(commit[VERSION]),
                    parse_compact(commit[POSITIONS]),
                    str(commit.get(RUN, "")),
                    {int(vbucket): seqno for vbucket, seqno in resets.items()},
                )

    def _newest(self, name: str) -> str | None:
        """What the newest commit says that says anything of it."""
        return next((str(commit[name]) for commit in self._history() if name in commit), None)

    def _history(self) -> Iterator[dict[str, Any]]:
        """Commits, newest first; read in steps, because the one that is looked for is near."""
        limit, seen = _SEARCH_STEP, 0
        while True:
            commits = self._delta.history(limit)
            yield from commits[seen:]
            if len(commits) < limit:
                return
            seen, limit = len(commits), limit * 2

    def lineage(self, vbucket: int) -> Iterator[tuple[int, Position]]:
        """The versions to whose rows a vbucket can return, newest first, and where it stood in each.

        Versions that a rollback undid are none of them: they hold changes that never happened. Neither are
        those whose files a vacuum has taken.
        """
        if self._known is None or self._known[0] != self.version:
            self._known = (self.version, list(self.versions()))
        bound = MAX_U64
        for version in self._known[1]:
            position = version.position(vbucket)
            if 0 < position.seqno <= bound and self._has_files(version.version, vbucket):
                yield version.version, position
            # what lies between a rollback and the place that it led to is gone
            bound = min(bound, version.resets.get(vbucket, bound))

    def _has_files(self, version: int, vbucket: int) -> bool:
        """Whether a vbucket's rows in a version are still there."""
        try:
            files = [file for file in self.files(version) if file.overlaps(vbucket, vbucket)]
        except (DeltaError, OSError):
            return False
        return all(self._exists(file.path) for file in files)

    def _exists(self, path: str) -> bool:
        found = self._existing.get(path)
        if found is None:
            filesystem, root = file_system(self.uri, self._storage_options)
            info = (filesystem or LocalFileSystem()).get_file_info(f"{root}/{path}")
            found = self._existing[path] = info.type != FileType.NotFound
        return found

    # files

    def files(self, version: int | None = None) -> list[GroupFile]:
        """The files of the newest version, or of an earlier one."""
        version = self.version if version is None else version
        if version not in self._files:
            if len(self._files) >= _KEPT_FILE_LISTS:
                self._files.clear()
            self._files[version] = self._list_files(version)
        return self._files[version]

    def _list_files(self, version: int) -> list[GroupFile]:
        delta = self._delta
        if version != self.version:
            delta = DeltaTable(self.uri, version=version, storage_options=self._storage_options)
        actions = pa.table(delta.get_add_actions(flatten=True))
        names = set(actions.column_names)
        found = []
        for row in actions.to_pylist():
            first, last = row.get("min.vbucket"), row.get("max.vbucket")
            known = {"min.vbucket", "max.vbucket"} <= names and first is not None and last is not None
            found.append(
                GroupFile(
                    row["path"],
                    row["size_bytes"],
                    row["num_records"] or 0,
                    first if known else 0,
                    last if known else 0xFFFF,
                )
            )
        return found

    def absolute(self, path: str) -> str:
        """Where a file of the table is."""
        return f"{self.uri.rstrip('/')}/{path}"

    def refresh(self) -> None:
        """Take note of what others committed; `Fenced` if it was another mirror."""
        self._delta.update_incremental()
        if self._run is not None and self.version != self.current.version:
            self._check_fence()

    # writing

    def claim(self, run: str | None = None) -> str:
        """Take the table over: whoever wrote it before is fenced. The name of the run."""
        self._run = run or f"{socket.gethostname()}:{os.getpid()}:{self._clock.time_ns()}"
        self._commit([], self.current.positions, {})
        return self._run

    def commit(
        self,
        added: Sequence[GroupFile],
        removed: Iterable[str],
        positions: Mapping[int, Position],
        resets: Mapping[int, int] | None = None,
    ) -> None:
        """New files, files that they replace, and the positions that the rows are now at: one commit.

        ``resets`` names vbuckets that went back, and to which seqno.
        """
        if self._run is None:
            raise UsageError("the table was not claimed")
        removed = list(removed)
        sizes = {file.path: file.size for file in self.files()} if removed else {}
        now_ms = self._clock.time_ns() // 1_000_000
        actions: list[AddAction | RemoveAction] = [
            AddAction(file.path, file.size, {}, now_ms, True, _stats(file)) for file in added
        ]
        actions += [RemoveAction(path, True, now_ms, sizes.get(path), {}) for path in removed]
        self._commit(actions, positions, resets or {})

    def split_files(self, group_of: Sequence[int]) -> None:
        """Give every group of vbuckets files of its own again, where somebody has joined them (OPTIMIZE)."""
        schema = self.schema
        filesystem, root = file_system(self.uri, self._storage_options)
        added: list[GroupFile] = []
        removed: list[str] = []
        for file in self.files():
            last = min(file.last_vbucket, len(group_of) - 1)
            if group_of[file.first_vbucket] == group_of[last]:
                continue
            rows = pq.read_table(f"{root}/{file.path}", schema=schema, filesystem=filesystem)
            groups = np.asarray(group_of, dtype=np.int32)[rows["vbucket"].to_numpy()]
            for group in np.unique(groups).tolist():
                part = rows.filter(pa.array(groups == group))
                name = f"part-{group:04d}-{unique_name()}.parquet"
                added.append(write_file(part, self.uri, name, storage_options=self._storage_options))
            removed.append(file.path)
        if removed:
            self.commit(added, removed, self.current.positions)

    def vacuum(self, *, keep_hours: int, keep_versions: int, dry_run: bool = False) -> list[str]:
        """Delete files that no version needs to which a rollback may return: those of the newest
        ``keep_versions`` stay, and all that are younger than ``keep_hours``. Gives their paths.

        Files that were never committed (a task that was killed) are deleted too, when they are that old.
        """
        kept = sorted(version.version for version in islice(self.versions(), keep_versions))
        gone: list[str] = self._delta.vacuum(
            retention_hours=keep_hours,
            dry_run=dry_run,
            enforce_retention_duration=False,
            full=True,
            keep_versions=kept,
        )
        self._existing.clear()
        return gone

    def _commit(
        self,
        actions: list[AddAction | RemoveAction],
        positions: Mapping[int, Position],
        resets: Mapping[int, int],
    ) -> None:
        assert self._run is not None
        version = self.version + 1
        properties = CommitProperties(
            custom_metadata={
                POSITIONS: format_compact(positions),
                RUN: self._run,
                SOURCE: self._source or "{}",
                VERSION: str(version),
                **({RESETS: json.dumps(dict(resets))} if resets else {}),
            },
            app_transactions=[Transaction(APP_ID, version)],
            max_commit_retries=0,
        )
        try:
            self._delta.create_write_transaction(
                actions, "append", self._delta.schema(), commit_properties=properties
            )
        except CommitFailedError as error:
            self._raise_lost_race(error)
        self._delta.update_incremental()
        self._current = GroupVersion(version, dict(positions), self._run, dict(resets))

    def _raise_lost_race(self, error: CommitFailedError) -> None:
        """Somebody else committed first: another mirror, or somebody who tidies up."""
        self._delta.update_incremental()
        self._check_fence()
        raise TableChanged(f"the files of the table at {self.uri} were changed by somebody else") from error

    def _check_fence(self) -> None:
        newest = next(self.versions())
        if newest.version > self.current.version and newest.run != self._run:
            raise Fenced(
                f"the table at {self.uri} was taken over by another mirror ({newest.run or 'unknown'}); "
                "stop that one first, or let it go on"
            )


def _check_no_file(uri: str) -> None:
    if Path(uri).is_file():
        raise UsageError(f"{uri!r} is a file, and a table is a folder; choose another path")


def file_system(uri: str, storage_options: Mapping[str, str] | None = None) -> tuple[Any, str]:
    """A file system for a table's data files and the path in it; None is the local one."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return None, uri.rstrip("/")
    if scheme == "file":
        return None, rest.rstrip("/")
    if storage_options:
        from deltalake.fs import DeltaStorageHandler

        handler = DeltaStorageHandler(uri, dict(storage_options))
        return PyFileSystem(handler), ""
    found, path = FileSystem.from_uri(uri)
    return found, path.rstrip("/")


def read_rows(
    uri: str,
    files: Iterable[str],
    schema: pa.Schema,
    filters: pc.Expression | None = None,
    *,
    storage_options: Mapping[str, str] | None = None,
) -> pa.Table:
    """The rows of some files of a table."""
    filesystem, root = file_system(uri, storage_options)
    tables = []
    for path in files:
        try:
            found = pq.read_table(f"{root}/{path}", schema=schema, filters=filters, filesystem=filesystem)
        except FileNotFoundError:
            raise TailraceError(
                f"the file {path} of the table is gone; a vacuum took more than the mirror allows"
            ) from None
        tables.append(found)
    return pa.concat_tables(tables) if tables else schema.empty_table()


def write_file(
    rows: pa.Table, uri: str, name: str, *, storage_options: Mapping[str, str] | None = None
) -> GroupFile:
    """Write rows as one Parquet file under ``uri``; in a table it counts once it is committed."""
    sink = pa.BufferOutputStream()
    repeating = [name for name in rows.column_names if name not in _DISTINCT]
    bounded = [name for name in rows.column_names if name not in _LONG]
    pq.write_table(rows, sink, compression="snappy", use_dictionary=repeating, write_statistics=bounded)
    data = sink.getvalue()
    filesystem, root = file_system(uri, storage_options)
    if filesystem is None:
        atomic_write(f"{root}/{name}", data)
    else:
        with filesystem.open_output_stream(f"{root}/{name}") as out:
            out.write(data)
    first, last = pc.min_max(rows["vbucket"]).as_py().values()
    return GroupFile(name, data.size, rows.num_rows, first, last)


def _stats(file: GroupFile) -> str:
    return json.dumps(
        {
            "numRecords": file.rows,
            "minValues": {"vbucket": file.first_vbucket},
            "maxValues": {"vbucket": file.last_vbucket},
            "nullCount": {"vbucket": 0},
        }
    )


def format_compact(positions: Mapping[int, Position]) -> str:
    """Exact positions as short JSON: ``{"7": ["187349", 12]}``."""
    return json.dumps(
        {
            str(vbucket): [str(positions[vbucket].vb_uuid), positions[vbucket].seqno]
            for vbucket in sorted(positions)
            if positions[vbucket] != Position.BEGINNING
        },
        separators=(",", ":"),
    )


def parse_compact(text: str) -> dict[int, Position]:
    """Reads what `format_compact` wrote."""
    return {
        int(vbucket): Position.at(parse_u64(vb_uuid, "vb_uuid"), seqno)
        for vbucket, (vb_uuid, seqno) in json.loads(text).items()
    }


def _source_text(source: Mapping[str, Any]) -> str:
    return ".".join(str(source.get(part)) for part in ("bucket", "scope", "collection"))
