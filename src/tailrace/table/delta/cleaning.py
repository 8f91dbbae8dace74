"""Cleaning: removes versions that are no longer kept, log files that no kept version needs, and data files
and vectors that no version names.

The order makes it safe to be killed anywhere: a version gets its file before its part of the log goes,
and a file goes only when no kept version names it. Files are listed before the newest commits are read, so a
file is never taken for waste because its commit came in between.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ...clock import Clock
from ...crashpoints import crash_point
from ..contract import MaintenanceReport
from ..store import StoredFile, TableStore
from .log import DeltaLog, LogListing, parse_listing
from .state import TableState
from .undo import (
    MINUTE_MS,
    SAFE_MS,
    UndoHistory,
    UndoPolicy,
    VersionFiles,
    kept_versions,
)
from .vectors import vector_path

__all__ = ["Cleaner"]

GRACE_MS = 60 * MINUTE_MS
"""How long a file stays that no kept version names: somebody may be reading an older version."""
STRANGERS_GRACE_MS = 24 * 60 * MINUTE_MS
"""The same for a file that no version ever named, if we are not the mirror: it may be about to commit it."""
MARGIN_MS = 5 * MINUTE_MS
"""By how much clocks may differ."""
_EVERY_S = 60.0
_MAX_DELETES = 1000
_MAX_REPLAY = 2000

_VERSION = re.compile(r"_delta_log/([0-9]{20})\.")
_DATA = re.compile(
    r"(?:(?![_.])[^/]+/)*(?![_.])[^/]+\.parquet(?:\.new)?|(?:_dv/)?deletion_vector_[^/]+\.bin(?:\.new)?"
)
_FOLDER = re.compile(r"(?!_dv/)[^/]+/")
"""A folder inside the table's. In there only files that a version named are the table's: the rest may be
somebody else's table, or an export."""
_LEFTOVER = re.compile(r"(?:_delta_log|_tailrace/versions)/\.?[^/]+\.new")


@dataclass(frozen=True)
class _Waste:
    """Files that no kept version needs."""

    due: list[StoredFile]
    waiting: list[StoredFile]


class Cleaner:
    """Cleans one table, a bounded piece at a time."""

    def __init__(self, log: DeltaLog, version_files: VersionFiles, policy: UndoPolicy, clock: Clock) -> None:
        self._log = log
        self._store: TableStore = log.store
        self._version_files = version_files
        self._policy = policy
        self._clock = clock
        self._cleaned_at: float | None = None

    @property
    def due(self) -> bool:
        """Whether the last cleaning is long enough ago."""
        return self._cleaned_at is None or self._clock.monotonic() - self._cleaned_at >= _EVERY_S

    def clean(
        self,
        state: TableState,
        history: UndoHistory,
        listed: Sequence[StoredFile],
        *,
        busy_since_ms: int | None,
        owner: bool,
        dry_run: bool,
        checkpoint: int | None,
    ) -> MaintenanceReport:
        """Do one piece of work. ``listed`` was listed before ``state`` was read."""
        now_ms = self._clock.time_ns() // 1_000_000
        listed = _by_our_clock(listed, history)
        sizes = {file.path: file.size for file in listed}
        kept, undo_bytes = self._kept(state, history, sizes, now_ms)
        log_files, dropped_versions, cut, more = self._log_plan(state, history, listed, kept, now_ms)
        waste = self._waste(
            state,
            history,
            listed,
            kept,
            undo_bytes,
            now_ms=now_ms,
            busy_since_ms=busy_since_ms,
            owner=owner,
        )
        deletes = waste.due[:_MAX_DELETES]
        report = MaintenanceReport(
            checkpoint=checkpoint,
            versions_kept=len(kept),
            versions_dropped=len(dropped_versions),
            log_files_removed=len(log_files),
            files_removed=len(deletes),
            bytes_removed=sum(file.size for file in deletes),
            files_waiting=len(waste.waiting),
            bytes_waiting=sum(file.size for file in waste.waiting),
            more=more or len(deletes) < len(waste.due),
        )
        if dry_run:
            return report
        if cut > history.from_log:
            self._write_version_files(history, parse_listing(listed), kept, cut)
        crash_point("table.in-cleaning")
        self._store.delete(log_files)
        crash_point("table.in-cleaning")
        self._version_files.delete(dropped_versions)
        history.from_log = max(history.from_log, cut)
        history.forget(kept)
        crash_point("table.in-cleaning")
        self._store.delete([file.path for file in deletes])
        there = sizes.keys() - {file.path for file in deletes}
        state.tombstones = {path: when for path, when in state.tombstones.items() if path in there}
        self._cleaned_at = self._clock.monotonic()
        return report

    def _kept(
        self, state: TableState, history: UndoHistory, sizes: dict[str, int], now_ms: int
    ) -> tuple[list[int], int]:
        """The versions that are kept, oldest first, and the bytes that they alone need."""
        kept = kept_versions(history.versions, now_ms, self._policy)
        live = _names(state)
        needed_by: dict[str, int] = {}
        for span in history.spans:
            newest = span.newest_of(kept)
            if newest is not None:
                for name in span.names:
                    if name not in live:
                        needed_by[name] = max(needed_by.get(name, -1), newest)
        bytes_of: dict[int, int] = {}
        for name, version in needed_by.items():
            bytes_of[version] = bytes_of.get(version, 0) + sizes.get(name, 0)
        allowed = self._policy.bytes_allowed(sum(file.size for file in state.files.values()))
        written = {version.version: version.timestamp_ms for version in history.versions}
        total = 0
        for place in range(len(kept) - 1, -1, -1):
            version = kept[place]
            total += bytes_of.get(version, 0)
            if total > allowed and version != state.version and abs(now_ms - written[version]) > SAFE_MS:
                return kept[place + 1 :], total - bytes_of.get(version, 0)
        return kept, total

    def _log_plan(
        self,
        state: TableState,
        history: UndoHistory,
        listed: Sequence[StoredFile],
        kept: Sequence[int],
        now_ms: int,
    ) -> tuple[list[str], list[int], int, bool]:
        """Log files that can go, versions whose files can go, the version that the log then begins with, and
        whether there is more to do.
        """
        written = {version.version: version.timestamp_ms for version in history.versions}
        young_ms = self._policy.every_version_ms
        far = history.from_log + _MAX_REPLAY
        checkpoints = [
            version
            for version in parse_listing(listed).checkpoints
            if abs(now_ms - written.get(version, now_ms)) >= young_ms and version <= state.version
        ]
        near = [version for version in checkpoints if version <= far]
        # a longer piece of the log without a checkpoint is taken in one go
        cut = max(near or sorted(checkpoints)[:1], default=history.from_log)
        log_files = [
            file.path
            for file in listed
            if ((match := _VERSION.match(file.path)) and int(match.group(1)) < cut)
            or (_LEFTOVER.fullmatch(file.path) and file.modified_ms < now_ms - GRACE_MS)
        ]
        there = self._version_files.parse(listed)
        dropped_versions = [version for version in there if version not in set(kept)]
        more = len(log_files) > 5 * _MAX_DELETES or bool(checkpoints and max(checkpoints) > cut)
        return log_files[: 5 * _MAX_DELETES], dropped_versions, cut, more

    def _write_version_files(
        self, history: UndoHistory, listing: LogListing, kept: Sequence[int], cut: int
    ) -> None:
        """Write files of the kept versions below ``cut`` that have none."""
        there = set(self._version_files.versions())
        wanted = [version for version in kept if history.from_log <= version < cut and version not in there]
        if not wanted:
            return
        state = self._log.load(wanted[0])
        assert state is not None
        self._version_files.write(state)
        for commit in self._log.read(listing, state.version + 1, wanted[-1]):
            state.apply(commit.version, commit.actions, written_ms=commit.written_ms)
            if commit.version in wanted:
                self._version_files.write(state)

    def _waste(
        self,
        state: TableState,
        history: UndoHistory,
        listed: Sequence[StoredFile],
        kept: Sequence[int],
        undo_bytes: int,
        *,
        now_ms: int,
        busy_since_ms: int | None,
        owner: bool,
    ) -> _Waste:
        """Files that no kept version needs: those that can go now, and those that are too young."""
        written = {version.version: version.timestamp_ms for version in history.versions}
        needed = _names(state)
        free_since: dict[str, int] = dict(state.tombstones)
        for span in history.spans:
            if span.newest_of(kept) is not None:
                needed.update(span.names)
            for name in span.names:
                free_since[name] = max(free_since.get(name, 0), written.get(span.died, 0))
        due: list[StoredFile] = []
        named: list[tuple[int, StoredFile]] = []
        waiting: list[StoredFile] = []
        for file in listed:
            if not _DATA.fullmatch(file.path) or file.path in needed:
                continue
            since_ms = free_since.get(file.path)
            if since_ms is None and _FOLDER.match(file.path):
                continue
            if since_ms is not None:
                if not since_ms or since_ms > now_ms:
                    since_ms = file.modified_ms
                if since_ms <= now_ms - GRACE_MS:
                    due.append(file)
                else:
                    named.append((since_ms, file))
                continue
            grace_ms = GRACE_MS if owner else STRANGERS_GRACE_MS
            busy = busy_since_ms is not None and file.modified_ms >= busy_since_ms - MARGIN_MS
            if file.modified_ms <= now_ms - grace_ms and not busy:
                due.append(file)
            else:
                waiting.append(file)
        # Oldest first, if they take more than undo is allowed.
        allowed = self._policy.bytes_allowed(sum(file.size for file in state.files.values()))
        over = undo_bytes + sum(file.size for _, file in named) - allowed
        for since_ms, file in sorted(named, key=lambda entry: (entry[0], entry[1].path)):
            if over > 0 and since_ms <= now_ms - SAFE_MS:
                due.append(file)
                over -= file.size
            else:
                waiting.append(file)
        return _Waste(due, waiting)


def _by_our_clock(listed: Sequence[StoredFile], history: UndoHistory) -> Sequence[StoredFile]:
    """The files with the times of our clock, if that is ahead of the store's.

    The last commit tells by how much: its own time is the mirror's, its file has the store's. Otherwise a
    file that a task is writing right now would look that much older.
    """
    modified_ms = {file.path: file.modified_ms for file in listed}
    for version in reversed(history.versions):
        stored_ms = modified_ms.get(f"_delta_log/{version.version:020}.json")
        if stored_ms is not None:
            ahead_ms = version.timestamp_ms - stored_ms
            break
    else:
        return listed
    if ahead_ms <= 0:
        return listed
    return [replace(file, modified_ms=file.modified_ms + ahead_ms) for file in listed]


def _names(state: TableState) -> set[str]:
    """The files that a version needs."""
    files: Iterable[str | None] = (
        path for add in state.files.values() for path in (add.path, vector_path(add.vector))
    )
    return {path for path in files if path is not None}
