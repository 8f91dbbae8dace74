"""Earlier versions, which are the mirror's undo log: which are kept, where they are, and what they need.

Kept are every version of the last ten minutes, the last of each minute for an hour, and the last of each ten
minutes as far back as undo reaches. The files that only they need may by default take as many bytes as the
table itself. The log is needed only for the last ten minutes: a version that is kept longer has a file of
its own, ``_tailrace/versions/00000000000000000007.json.z``, written before the log is cleaned. These files
are derived data: deleting them loses ways back, and nothing else.
"""

from __future__ import annotations

import json
import re
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..contract import TableDamaged, TableVersion
from ..store import StoredFile, TableStore
from .actions import AddFile, parse_action
from .commits import data_file
from .log import DeltaLog, LogListing
from .state import FileChanges, TableState
from .vectors import vector_path

__all__ = [
    "FileSpan",
    "UndoHistory",
    "UndoPolicy",
    "UndoWish",
    "VersionFiles",
    "kept_versions",
    "load_history",
]

MINUTE_MS = 60_000
EVERY_VERSION_MS = 10 * MINUTE_MS
EVERY_MINUTE_MS = 60 * MINUTE_MS
SAFE_MS = 5 * MINUTE_MS
"""Younger versions are kept whatever the policy: somebody may be reading them."""
SMALL_TABLE_BYTES = 64 << 20
"""What a table smaller than this may use for undo by default."""

UNDO = "tailrace.undo"
"""The domain that holds the policy, so that all maintenance of the table keeps what its mirror wants kept."""

_FOLDER = "_tailrace/versions"
_NAME = re.compile(rf"{_FOLDER}/([0-9]{{20}})\.json\.z")
_FOREVER = 1 << 63


@dataclass(frozen=True)
class UndoPolicy:
    """How far back a rollback may lead."""

    span_ms: int = 24 * 60 * MINUTE_MS
    size: int | None = None
    """Bytes that earlier versions may take beyond what the newest needs; None: as many as the table has."""

    @property
    def every_version_ms(self) -> int:
        """How long every version is kept."""
        return max(SAFE_MS, min(EVERY_VERSION_MS, self.span_ms))

    def to_json(self) -> str:
        return json.dumps({"span_ms": self.span_ms, "size": self.size})

    @classmethod
    def from_json(cls, text: str) -> UndoPolicy:
        """The policy of the mirror that last claimed a table; the default if none did."""
        try:
            fields = json.loads(text or "{}")
            return cls(int(fields.get("span_ms", cls.span_ms)), fields.get("size"))
        except (ValueError, TypeError, AttributeError):
            raise TableDamaged(f"the domain {UNDO} in the table's log can't be read") from None

    def bytes_allowed(self, table_bytes: int) -> int:
        return max(table_bytes, SMALL_TABLE_BYTES) if self.size is None else self.size


@dataclass(frozen=True)
class UndoWish:
    """A request for how far back a rollback may lead; None: as it is."""

    span_ms: int | None = None
    size: int | None = None

    def over(self, known: UndoPolicy) -> UndoPolicy:
        """The policy that results from this wish and the policy in force."""
        span_ms = known.span_ms if self.span_ms is None else self.span_ms
        return UndoPolicy(span_ms, known.size if self.size is None else self.size)


def kept_versions(versions: Sequence[TableVersion], now_ms: int, policy: UndoPolicy) -> list[int]:
    """Which versions, given oldest first, are kept by their age. The newest always is."""
    kept: list[int] = []
    for version, newer in zip(versions, [*versions[1:], None], strict=True):
        # a time in the future comes from a wrong clock; only its distance counts
        age = abs(now_ms - version.timestamp_ms)
        step = MINUTE_MS if age <= EVERY_MINUTE_MS else 10 * MINUTE_MS
        if (
            newer is None
            or age <= policy.every_version_ms
            or (age <= policy.span_ms and version.timestamp_ms // step != newer.timestamp_ms // step)
        ):
            kept.append(version.version)
    return kept


@dataclass(slots=True)
class FileSpan:
    """The versions in which a file was part of the table with the same vector."""

    path: str
    vector_file: str | None
    size: int
    low: int
    high: int
    """The first and last vbucket of its rows."""
    born: int
    died: int = _FOREVER

    @property
    def names(self) -> tuple[str, ...]:
        """The files needed to read it."""
        return (self.path,) if self.vector_file is None else (self.path, self.vector_file)

    def newest_of(self, versions: Sequence[int]) -> int | None:
        """The newest of ``versions``, in ascending order, that needs it."""
        place = bisect_left(versions, self.died) - 1
        return versions[place] if place >= 0 and versions[place] >= self.born else None


@dataclass
class UndoHistory:
    """Every version that can be restored, oldest first, and the files of each as spans."""

    versions: list[TableVersion] = field(default_factory=list)
    from_log: int = 0
    """The first version that is in the log itself."""
    _open: dict[str, FileSpan] = field(default_factory=dict)
    _closed: list[FileSpan] = field(default_factory=list)

    @property
    def spans(self) -> Iterator[FileSpan]:
        yield from self._closed
        yield from self._open.values()

    def is_outdated(self, listing: LogListing) -> bool:
        """Whether somebody else has shortened the log since."""
        if self.from_log == 0:
            return 0 not in listing.commits and 0 not in listing.checkpoints
        return self.from_log not in listing.checkpoints

    def advance(self, version: TableVersion, changes: FileChanges) -> None:
        """Add the next version."""
        self.versions.append(version)
        for file in changes.removed:
            self._end(file.path, version.version)
        for file in changes.added:
            self._end(file.path, version.version)
            self._open[file.path] = _span(file, version.version)

    def jump(self, version: TableVersion, files: Mapping[str, AddFile]) -> None:
        """Add a later version; those in between are not known."""
        spans = {path: _span(file, version.version) for path, file in files.items()}
        for path, held in list(self._open.items()):
            span = spans.get(path)
            if span is None or span.vector_file != held.vector_file:
                self._end(path, version.version)
        self.versions.append(version)
        for path, span in spans.items():
            self._open.setdefault(path, span)

    def forget(self, kept: Sequence[int]) -> None:
        """Drop versions older than the log that are not kept."""
        still = set(kept)
        self.versions = [
            version
            for version in self.versions
            if version.version >= self.from_log or version.version in still
        ]
        oldest = self.versions[0].version if self.versions else 0
        self._closed = [span for span in self._closed if span.died > oldest]

    def _end(self, path: str, version: int) -> None:
        span = self._open.pop(path, None)
        if span is not None:
            span.died = version
            self._closed.append(span)


def _span(add: AddFile, born: int) -> FileSpan:
    file = data_file(add, lambda _: 0)
    return FileSpan(add.path, vector_path(add.vector), add.size, file.low >> 48, file.high >> 48, born)


class VersionFiles:
    """The states of versions that are kept longer than the log, each in a file."""

    def __init__(self, store: TableStore) -> None:
        self._store = store

    @staticmethod
    def path(version: int) -> str:
        return f"{_FOLDER}/{version:020d}.json.z"

    def versions(self) -> list[int]:
        """The versions that have a file, oldest first."""
        return self.parse(self._store.list(_FOLDER))

    @staticmethod
    def parse(files: Iterable[StoredFile]) -> list[int]:
        """The versions whose files are among some files, oldest first."""
        names = (match.group(1) for file in files if (match := _NAME.fullmatch(file.path)))
        return sorted(int(name) for name in names)

    def write(self, state: TableState) -> None:
        head = {
            "version": state.version,
            "timestamp": state.timestamp_ms,
            "operation": state.operation,
            "run": state.run,
        }
        lines = [head, *({action.NAME: action.to_json()} for action in state.actions())]
        text = "\n".join(json.dumps(line, separators=(",", ":")) for line in lines)
        self._store.put(self.path(state.version), zlib.compress(text.encode(), 3))

    def read(self, version: int) -> TableState:
        """The state of a version; FileNotFoundError, TableDamaged."""
        path = self.path(version)
        data = self._store.read(path)
        try:
            head, *lines = (json.loads(line) for line in zlib.decompress(data).splitlines())
            state = TableState()
            actions = [action for line in lines if (action := parse_action(line)) is not None]
            state.apply(int(head["version"]), actions)
            state.timestamp_ms = int(head["timestamp"])
            state.operation, state.run = str(head["operation"]), str(head["run"])
            state.foreign_since = None
        except (ValueError, KeyError, TypeError, zlib.error) as error:
            raise TableDamaged(f"{path} is damaged: {error!r}; it may be deleted") from None
        if state.version != version:
            raise TableDamaged(f"{path} is that of version {state.version}; it may be deleted")
        return state

    def delete(self, versions: Iterable[int]) -> None:
        self._store.delete([self.path(version) for version in versions])


def first_version(listing: LogListing, horizon_ms: int) -> int:
    """Where to start in the log: the newest checkpoint from before ``horizon_ms``, else the beginning (-1) if
    it is still there, else the oldest checkpoint.
    """
    written = {file.path: file.modified_ms for file in listing.others}
    old = [
        version
        for version in listing.checkpoints
        if written.get(f"_delta_log/{version:020d}.checkpoint.parquet", horizon_ms) < horizon_ms
    ]
    if old:
        return max(old)
    return -1 if 0 in listing.commits else min(listing.checkpoints, default=-1)


def load_history(log: DeltaLog, version_files: VersionFiles, last: int, horizon_ms: int) -> UndoHistory:
    """What is known of the versions up to ``last``."""
    listing = log.listing()
    start = first_version(listing, horizon_ms)
    history = UndoHistory(from_log=max(start, 0))
    for version in version_files.versions():
        if version < history.from_log:
            try:
                state = version_files.read(version)
            except (TableDamaged, FileNotFoundError):
                continue  # one way back less
            history.jump(state.as_version(), state.files)
    state = TableState()
    if start >= 0:
        loaded = log.load(start)
        assert loaded is not None
        state = loaded
        history.jump(state.as_version(), state.files)
    for commit in log.read(listing, state.version + 1, last):
        changes = state.apply(commit.version, commit.actions, written_ms=commit.written_ms)
        history.advance(state.as_version(), changes)
    return history
