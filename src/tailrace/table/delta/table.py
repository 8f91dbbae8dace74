"""A mirror's table as a Delta table: opening it, claiming it, reading it, and commits.

The position in the table is the truth, and it is committed with the rows. A run begins with a commit that
claims the table. A commit gets the number after the version it was made for, so of two writers one loses,
looks, and finds the other's claim.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap

from ... import rng
from ...clock import SYSTEM, Clock
from ...crashpoints import crash_point
from ...errors import UsageError
from ...model import MAX_U64, Position
from ..contract import (
    Commit,
    DataFile,
    Fenced,
    ForeignRows,
    MaintenanceReport,
    StorageError,
    Table,
    TableChanged,
    TableDamaged,
    TableVersion,
    Vector,
)
from ..document_columns import DocumentColumns
from ..store import StoredFile, TableStore
from .actions import Action, AddFile, CommitInfo, Metadata
from .cleaning import Cleaner
from .commits import REPAIR, build_commit, data_file, parse_repairs
from .log import DeltaLog, parse_listing
from .masks import MaskCache
from .opening import (
    DOCUMENTS,
    SECRET,
    SOURCE,
    check_mirror,
    create_mirror,
    is_same_source,
    load_mirror,
    source_text,
)
from .positions import RESETS, parse_resets
from .schema import schema_from_json
from .state import RUN, FileChanges, TableState, check_writable
from .undo import UNDO, FileSpan, UndoHistory, UndoPolicy, UndoWish, VersionFiles, load_history
from .vectors import vector_path

__all__ = ["DeltaMirrorTable"]

CHECKPOINT_EVERY = 100
_STATES = 32
_MASK_BYTES = 256 << 20
_EXISTENCE_MS = 1_000


class DeltaMirrorTable:
    """A mirror's table, opened at its newest version."""

    def __init__(
        self,
        store: TableStore,
        state: TableState,
        *,
        clock: Clock = SYSTEM,
        undo: UndoPolicy | UndoWish | None = None,
        checkpoint_every: int = CHECKPOINT_EVERY,
    ) -> None:
        self._store = store
        self._log = DeltaLog(store)
        self._version_files = VersionFiles(store)
        self._clock = clock
        if not isinstance(undo, UndoPolicy):
            undo = (undo or UndoWish()).over(UndoPolicy.from_json(state.domains.get(UNDO, "")))
        self._undo = undo
        self._checkpoint_every = checkpoint_every
        self._run: str | None = None
        self._accepts_foreign = False
        self._history: UndoHistory | None = None
        self._missing: tuple[int, list[FileSpan]] | None = None
        self._resets: tuple[str, dict[int, list[tuple[int, int]]]] = ("", {})
        self._states: OrderedDict[int, TableState] = OrderedDict()
        self._masks = MaskCache(store, _MASK_BYTES)
        self._rows: dict[str, int] = {}
        self._listed: dict[str, tuple[AddFile, DataFile]] = {}
        self._checkpoint_at = self._log.last_checkpoint()
        self._state = state
        self._cleaner = Cleaner(self._log, self._version_files, self._undo, clock)

    # opening

    @classmethod
    def open(
        cls,
        uri: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, str] | None = None,
        clock: Clock = SYSTEM,
        undo: UndoPolicy | UndoWish | None = None,
        store: TableStore | None = None,
        checkpoint_every: int = CHECKPOINT_EVERY,
    ) -> DeltaMirrorTable:
        """The table at ``uri``; an error if there is none or no mirror made it."""
        store = store or TableStore(uri, storage_options)
        state = load_mirror(store)
        if state is None:
            raise UsageError(f"there is no table at {store.uri}; run 'tailrace mirror' first")
        table = cls(store, state, clock=clock, undo=undo, checkpoint_every=checkpoint_every)
        table._look_back()
        return table

    @classmethod
    def open_or_create(
        cls,
        uri: str | os.PathLike[str],
        *,
        schema: pa.Schema,
        source: Mapping[str, Any],
        documents: DocumentColumns | None = None,
        storage_options: Mapping[str, str] | None = None,
        clock: Clock = SYSTEM,
        undo: UndoPolicy | UndoWish | None = None,
        store: TableStore | None = None,
        checkpoint_every: int = CHECKPOINT_EVERY,
    ) -> DeltaMirrorTable:
        """The table at ``uri``, made if there is none; it must mirror ``source`` and nothing else."""
        store = store or TableStore(uri, storage_options)
        state = load_mirror(store)
        if state is None:
            create_mirror(store, schema, source, clock, documents)
            state = load_mirror(store)
            assert state is not None
        table = cls(store, state, clock=clock, undo=undo, checkpoint_every=checkpoint_every)
        table._look_back()
        if not is_same_source(table.source, source):
            raise UsageError(
                f"the table at {store.uri} mirrors {source_text(table.source)}, not {source_text(source)}; "
                "choose another path"
            )
        lacking = [field.name for field in schema if field not in list(table.schema)]
        if lacking or len(table.schema) < len(schema):
            raise UsageError(
                f"the table at {store.uri} has other columns; with and without kept deletes are two tables"
            )
        return table

    def _look_back(self) -> None:
        """Find out whether somebody else changed rows between a mirror's last commit and the checkpoint that
        the state was read from, which does not say so.
        """
        state = self._state
        version = self._checkpoint_at
        while not state.run and state.foreign_since is None and 0 < version <= state.version:
            try:
                commit = self._log.read_commit(version)
            except FileNotFoundError:
                return
            info = next((action for action in commit.actions if isinstance(action, CommitInfo)), None)
            if info is not None and info.fields.get(RUN):
                return
            alone = TableState()
            alone.apply(version, commit.actions)
            if alone.foreign_since is not None:
                state.foreign_since = version
            version -= 1

    # what it is

    @property
    def uri(self) -> str:
        """Where it is."""
        return self._store.uri

    @property
    def store(self) -> TableStore:
        """Its files."""
        return self._store

    @property
    def source(self) -> dict[str, Any]:
        """The bucket and collection that it mirrors."""
        source: dict[str, Any] = json.loads(self._configuration[SOURCE])
        return source

    @property
    def schema(self) -> pa.Schema:
        """Its columns."""
        return schema_from_json(self._metadata.schema_string)

    @property
    def documents(self) -> DocumentColumns | None:
        """The columns that are made of documents, in a typed table."""
        text = self._configuration.get(DOCUMENTS)
        return None if text is None else DocumentColumns.from_json(text)

    @property
    def secret(self) -> bytes:
        """The secret that its keys are hashed with."""
        return bytes.fromhex(self._configuration[SECRET])

    @property
    def version(self) -> int:
        """The newest version that is known here."""
        return self._state.version

    @property
    def current(self) -> TableVersion:
        """The newest version and its positions."""
        return self._state.as_version()

    @property
    def _metadata(self) -> Metadata:
        assert self._state.metadata is not None
        return self._state.metadata

    @property
    def _configuration(self) -> Mapping[str, str]:
        return self._metadata.configuration

    # versions

    def versions(self) -> Iterator[TableVersion]:
        """Every version that can be restored, newest first."""
        yield from reversed(self._earlier().versions)

    def lineage(self, vbucket: int) -> Iterator[tuple[int, Position]]:
        """The versions whose rows a vbucket can return to, newest first, and where it stood in each.

        Left out are versions that a rollback undid, since they hold changes that never happened, those whose
        files are gone, and those in which somebody else had changed rows.
        """
        lost = [span for span in self._lost() if span.low <= vbucket <= span.high]
        history = self._earlier()
        resets = self._resets_of(vbucket)
        foreign = [(since, at or self.version + 1) for since, at in parse_repairs(self._state)]
        if self._state.foreign_since is not None:
            foreign.append((self._state.foreign_since, self.version + 1))
        for known in reversed(history.versions):
            version = known.version
            bound = min((seqno for undone_by, seqno in resets if undone_by > version), default=MAX_U64)
            position = known.position(vbucket)
            if (
                0 < position.seqno <= bound
                and not any(since <= version < at for since, at in foreign)
                and not any(span.born <= version < span.died for span in lost)
            ):
                yield version, position

    def _resets_of(self, vbucket: int) -> list[tuple[int, int]]:
        """The versions that set a vbucket back, and to which seqnos."""
        text = self._state.domains.get(RESETS, "")
        if text != self._resets[0]:
            by_vbucket: dict[int, list[tuple[int, int]]] = {}
            for version, which, seqno in parse_resets(text):
                by_vbucket.setdefault(which, []).append((version, seqno))
            self._resets = (text, by_vbucket)
        return self._resets[1].get(vbucket, [])

    def _earlier(self) -> UndoHistory:
        if self._history is None:
            horizon_ms = self._now_ms() - self._undo.span_ms - self._undo.every_version_ms
            self._history = load_history(self._log, self._version_files, self.version, horizon_ms)
        return self._history

    def _look_at_log(self, listed: Sequence[StoredFile]) -> None:
        """Forget what is known of earlier versions if somebody else has cleaned the log."""
        if self._history is not None and self._history.is_outdated(parse_listing(listed)):
            self._history = None
            self._states.clear()

    def _lost(self) -> list[FileSpan]:
        """Files that earlier versions name and that are gone."""
        if self._missing is None or self._now_ms() - self._missing[0] > _EXISTENCE_MS:
            listed = list(self._store.list())
            self._look_at_log(listed)
            there = {file.path for file in listed}
            gone = [span for span in self._earlier().spans if not there.issuperset(span.names)]
            self._missing = (self._now_ms(), gone)
        return self._missing[1]

    # files

    def files(self, version: int | None = None) -> list[DataFile]:
        """The files of the newest version, or of an earlier one."""
        adds = self._state_of(version).files
        files = []
        if len(self._listed) > 2 * len(self._state.files) + _STATES * 100:
            self._listed.clear()  # what earlier versions left
        for path, add in adds.items():
            known = self._listed.get(path)
            if known is None or known[0] is not add:
                known = self._listed[path] = (add, data_file(add, self._rows_of))
            files.append(known[1])
        return files

    def schema_of(self, version: int) -> pa.Schema:
        """The columns of an earlier version."""
        metadata = self._state_of(version).metadata
        assert metadata is not None
        return schema_from_json(metadata.schema_string)

    def _state_of(self, version: int | None) -> TableState:
        if version is None or version == self.version:
            return self._state
        if version > self.version or version < 0:
            raise UsageError(
                f"the table at {self.uri} has no version {version}; its newest is {self.version}"
            )
        state = self._states.get(version)
        if state is None:
            try:
                state = self._version_files.read(version)
            except (FileNotFoundError, TableDamaged):
                nearest = max((known for known in self._states if known < version), default=None)
                state = self._log.load(version, base=None if nearest is None else self._states[nearest])
                assert state is not None
            self._states[version] = state
            while len(self._states) > _STATES:
                self._states.popitem(last=False)
        self._states.move_to_end(version)
        return state

    def mask(self, file: DataFile) -> BitMap:
        """Its dead rows; a copy."""
        return self._mask(file.vector)

    def _mask(self, vector: Vector | None) -> BitMap:
        try:
            return self._masks.rows(vector)
        except FileNotFoundError:
            raise self._gone(vector_path(vector) or "") from None

    def _rows_of(self, add: AddFile) -> int:
        """How many rows a file has; a foreign file may not say."""
        if add.stats:
            count = json.loads(add.stats).get("numRecords")
            if isinstance(count, int):
                return count
        if add.path not in self._rows:
            try:
                with self._store.open(add.path) as file:
                    self._rows[add.path] = pq.ParquetFile(file).metadata.num_rows
            except FileNotFoundError:
                raise self._gone(add.path) from None
            except (pa.ArrowException, OSError) as error:
                text = str(error).partition("\n")[0]
                raise TableDamaged(f"the file {add.path} of the table is damaged: {text}") from None
        return self._rows[add.path]

    def _gone(self, path: str) -> TableDamaged:
        return TableDamaged(
            f"the file {path} of the table at {self.uri} is gone: somebody deleted it; "
            "restore it, or make a new table beside this one"
        )

    # taking over, and what others do

    def claim(
        self, run: str | None = None, *, accept_foreign: bool = False, and_still: Sequence[Table] = ()
    ) -> str:
        """Take the table over, which fences whoever wrote it before. The name of the run.

        After `ForeignRows`, only a claim with ``accept_foreign`` may go on, to repair the table, until one of
        its commits is marked ``repaired``.
        """
        run = run or f"{platform.node()}:{os.getpid()}:{self._clock.time_ns()}"
        self._accepts_foreign = accept_foreign
        self._absorb()
        while True:
            self._check_rows()
            check_writable(self._state, self.uri)
            self._check_files()
            for table in and_still:  # whoever takes these later takes this one after us, or our commit fails
                table.refresh()
            self._run = run
            domains: dict[str, str | None] = {RUN: run, UNDO: self._undo.to_json()}
            if self._state.foreign_since is not None:
                repairs = [*parse_repairs(self._state), (self._state.foreign_since, None)]
                domains[REPAIR] = json.dumps(repairs, separators=(",", ":"))
            with contextlib.suppress(TableChanged):  # somebody made a checkpoint of it already: look again
                if self._try_commit(Commit("TAILRACE CLAIM"), domains):
                    return run
            self._absorb()

    def accept_rows(self, version: int) -> bool:
        """After `ForeignRows`, accept the rows of a version that a comparison found right, so that a mirror
        may go on. Whether there was anything to accept; `TableChanged` if there is a newer version.
        """
        self._absorb()
        if self._foreign_since() is None:
            return False
        if self.version == version:
            self.claim(accept_foreign=True)
        if self.version != version + 1:
            raise TableChanged(f"the table at {self.uri} was changed after it was compared; compare it again")
        self.commit(Commit("TAILRACE REPAIR", repaired=True))
        return True

    def refresh(self) -> None:
        """Take note of what others committed; `Fenced` if another mirror did, `ForeignRows` if rows are no
        longer the mirror's.
        """
        self._absorb()
        self._check()

    def _absorb(self) -> None:
        """Apply the commits that are new."""
        if self._log.last_checkpoint() > self.version:
            # The next commits may have been cleaned away, and a writer that slept for too long may have left
            # files under their numbers.
            self._reload()
        for commit in self._log.after(self.version):
            self._apply(commit.version, commit.actions, commit.written_ms)

    def _reload(self) -> None:
        """Read the table again: the log has moved on, and may no longer have the next commit."""
        state = load_mirror(self._store)
        if state is None:
            raise TableDamaged(f"the log of the table at {self.uri} is gone: somebody deleted it")
        self._state = state
        self._checkpoint_at = self._log.last_checkpoint()
        self._history = self._missing = None
        self._states.clear()
        self._look_back()

    def _apply(self, version: int, actions: Sequence[Action], written_ms: int) -> FileChanges:
        changes = self._state.apply(version, actions, written_ms=written_ms or self._now_ms())
        if changes.settings:
            check_mirror(self._state, self._store)
        if self._history is not None:
            self._history.advance(self._state.as_version(), changes)
        for file in changes.removed:
            self._listed.pop(file.path, None)
        return changes

    def _check(self) -> None:
        owner = self._state.domains.get(RUN, "")
        if self._run is not None and owner != self._run:
            raise Fenced(
                f"the table at {self.uri} was taken over by another mirror ({owner or 'unknown'}); "
                "stop that one first, or let it go on"
            )
        check_writable(self._state, self.uri)  # somebody may have changed the settings since the claim
        self._check_rows()

    def _check_rows(self) -> None:
        since = None if self._accepts_foreign else self._foreign_since()
        if since is not None:
            is_log = bool(self.source.get("changes"))
            raise ForeignRows(
                f"something other than a mirror changed rows of the {'change log' if is_log else 'table'} at "
                f"{self.uri} in version {since}: "
                + (
                    "give another path to begin a new log beside it"
                    if is_log
                    else "run 'tailrace verify --repair', or make a new table beside it"
                )
            )

    def _foreign_since(self) -> int | None:
        """Since which version rows are somebody else's; None if they are not."""
        if self._state.foreign_since is not None:
            return self._state.foreign_since
        return next((since for since, at in parse_repairs(self._state) if at is None), None)

    def _check_files(self) -> None:
        """TableDamaged if a file of the newest version is gone."""
        there = {file.path for file in self._store.list()}
        for add in self._state.files.values():
            for path in (add.path, vector_path(add.vector)):
                if path is not None and path not in there:
                    raise self._gone(path)

    # writing

    def commit(self, commit: Commit) -> int:
        """Make the next version; its number. Whole or not at all.

        `TableChanged` if somebody else's commit came between: compute it again. `Fenced`, `ForeignRows`.
        """
        if self._run is None:
            raise UsageError("the table was not claimed")
        self._check()
        self._check_added(commit)
        while not self._try_commit(commit, {}):
            before, settings = dict(self._state.files), self._state.metadata
            self._absorb()
            self._check()
            if self._state.files != before or self._state.metadata is not settings or self._state.run:
                raise TableChanged(f"the table at {self.uri} was changed by somebody else")
            # only a note in the log, as a VACUUM leaves it: the same commit is valid after it
        self._checkpoint_if_due()
        return self.version

    def _try_commit(self, commit: Commit, domains: Mapping[str, str | None]) -> bool:
        """Try to make the next version; False if somebody else has made it."""
        assert self._run is not None
        history = self._history
        built = build_commit(
            self._state,
            commit,
            self._mask,
            self._rows_of,
            run=self._run,
            now_ms=self._now_ms(),
            vector_name=rng.unique_name(),
            commit_id=rng.unique_name(),
            oldest_version=history.versions[0].version if history and history.versions else 0,
            domains=domains,
        )
        if built.vector_file is not None:
            crash_point("table.in-mask")
            self._store.put(built.vector_file.path, built.vector_file.to_bytes())
        version = self.version + 1
        if not self._log.commit(version, built.actions):
            return False
        for vector, rows in built.masks.items():
            self._masks.put(vector, rows.copy())
        self._apply(version, built.actions, self._now_ms())
        return True

    def _check_added(self, commit: Commit) -> None:
        """Files that were written a while ago must still be there: a cleaning may have removed them."""
        old_ms = self._now_ms() - 4 * 60_000
        for file in [*(new.file for new in commit.added if new.file.modified_ms < old_ms), *commit.readded]:
            if self._store.head(file.path) is None:
                raise TableChanged(f"the file {file.path} is gone before it could be committed")

    # maintenance

    def _checkpoint_if_due(self) -> None:
        if self.version - self._checkpoint_at < self._checkpoint_every:
            return
        try:
            self.checkpoint()
        except (StorageError, OSError):
            # The commit stands. The log is just longer than necessary; try again a little later.
            self._checkpoint_at += max(1, self._checkpoint_every // 10)

    def checkpoint(self) -> None:
        """Write the state of this version as one file, which readers start from."""
        horizon_ms = self._now_ms() - max(self._undo.span_ms, 60 * 60_000)
        self._state.tombstones = {
            path: when_ms for path, when_ms in self._state.tombstones.items() if when_ms >= horizon_ms
        }
        self._log.write_checkpoint(self._state, self._state.tombstones)
        self._checkpoint_at = self.version

    def maintain(
        self,
        *,
        busy_since_ms: int | None = None,
        dry_run: bool = False,
        force: bool = False,
    ) -> MaintenanceReport:
        """Thin out earlier versions, shorten the log, delete files that nobody needs; work is bounded.

        Nothing is deleted that was written since ``busy_since_ms``, when the oldest running task began.
        Without a claim, files that no version ever named are left alone for a day, since some mirror may be
        about to commit them. Does nothing if it was done less than a minute ago, unless ``force``.
        """
        checkpoint = None
        if self._run is not None and force and not dry_run and self.version > self._checkpoint_at:
            self.checkpoint()
            checkpoint = self.version
        if not (force or dry_run or self._cleaner.due):
            return MaintenanceReport(checkpoint=checkpoint)
        listed = list(self._store.list())
        self._look_at_log(listed)
        self._absorb()
        report = self._cleaner.clean(
            self._state,
            self._earlier(),
            listed,
            busy_since_ms=busy_since_ms,
            owner=self._run is not None,
            dry_run=dry_run,
            checkpoint=checkpoint,
        )
        if not dry_run:
            self._states.clear()
            self._missing = None
        return report

    def _now_ms(self) -> int:
        return self._clock.time_ns() // 1_000_000
