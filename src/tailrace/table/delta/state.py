"""What a version of a Delta table is: the sum of the actions up to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..contract import TableDamaged, TableVersion, UnknownFeature, Vector
from .actions import (
    Action,
    AddFile,
    AppTransaction,
    CommitInfo,
    DomainMetadata,
    Metadata,
    ProtocolVersion,
    RemoveFile,
)
from .positions import BRANCHES, RESETS, SEQNOS, PositionArray, parse_resets

__all__ = ["PROTOCOL", "RUN", "FileChanges", "TableState", "check_readable", "check_writable"]

RUN = "tailrace.run"
"""In the commitInfo of a mirror's commit: which run made it. As a domain: which run has claimed the table."""

PROTOCOL = ProtocolVersion(3, 7, ("deletionVectors",), ("deletionVectors", "domainMetadata"))
"""What our own tables ask of others. delta-rs does not write tables with domainMetadata: a fence."""

_READABLE = frozenset({"deletionVectors", "vacuumProtocolCheck"})
_WRITABLE = _READABLE | {
    *("domainMetadata", "appendOnly", "invariants", "checkConstraints", "changeDataFeed", "generatedColumns"),
    *("inCommitTimestamp", "columnMapping"),
}
"""Features that the protocol may list; those that matter only once switched on are in `_SWITCHED_ON`."""
_SWITCHED_ON = {
    "delta.appendOnly": "true",
    "delta.enableChangeDataFeed": "true",
    "delta.enableInCommitTimestamps": "true",
    "delta.enableRowTracking": "true",
}


@dataclass(slots=True)
class FileChanges:
    """What a commit did to the files."""

    added: list[AddFile] = field(default_factory=list)
    removed: list[AddFile] = field(default_factory=list)
    """As they were before."""
    data_change: bool = False
    settings: bool = False
    """Whether it changed the metadata or the protocol."""


@dataclass(slots=True)
class TableState:
    """A version and all that belongs to it."""

    version: int = -1
    timestamp_ms: int = 0
    protocol: ProtocolVersion | None = None
    metadata: Metadata | None = None
    files: dict[str, AddFile] = field(default_factory=dict)
    tombstones: dict[str, int] = field(default_factory=dict)
    """Data files that were removed, and when, if somebody may still be reading them."""
    domains: dict[str, str] = field(default_factory=dict)
    transactions: dict[str, AppTransaction] = field(default_factory=dict)
    operation: str = ""
    run: str = ""
    """The run of a mirror that made this version; empty if no mirror did."""
    positions: PositionArray = field(default_factory=PositionArray)
    foreign_since: int | None = None
    """The version in which somebody else changed rows, if no mirror has written since."""

    def copy(self) -> TableState:
        """An independent copy."""
        return TableState(
            self.version,
            self.timestamp_ms,
            self.protocol,
            self.metadata,
            dict(self.files),
            dict(self.tombstones),
            dict(self.domains),
            dict(self.transactions),
            self.operation,
            self.run,
            self.positions,
            self.foreign_since,
        )

    def apply(self, version: int, actions: Iterable[Action], *, written_ms: int = 0) -> FileChanges:
        """Advance to a later version by its actions."""
        changes = FileChanges()
        added: list[AddFile] = []
        removed: list[RemoveFile] = []
        info: dict[str, Any] = {}
        stamp: int | None = None
        moved, before = False, self.domains.get(BRANCHES, "")
        for action in actions:
            match action:
                case AddFile():
                    added.append(action)
                case RemoveFile():
                    removed.append(action)
                case DomainMetadata():
                    moved |= action.domain in (SEQNOS, BRANCHES)
                    if action.removed:
                        self.domains.pop(action.domain, None)
                    else:
                        self.domains[action.domain] = action.configuration
                case Metadata():
                    self.metadata, changes.settings = action, True
                case ProtocolVersion():
                    self.protocol, changes.settings = action, True
                case AppTransaction():
                    self.transactions[action.app_id] = action
                case CommitInfo():
                    info, stamp = dict(action.fields), action.timestamp_ms
        # Removes go first: a file that gets another vector is removed and added in one commit, in any order.
        for removal in removed:
            held = self.files.get(removal.path)
            changes.data_change |= removal.data_change
            self.tombstones[removal.path] = removal.when_ms
            if held is not None and _same_vector(held.vector, removal.vector):
                changes.removed.append(self.files.pop(removal.path))
        for file in added:
            changes.data_change |= file.data_change
            self.files[file.path] = file
            self.tombstones.pop(file.path, None)
            changes.added.append(file)
        self.version = version
        self.timestamp_ms = stamp if stamp is not None else written_ms
        self.operation = str(info.get("operation", ""))
        self.run = str(info.get(RUN, ""))
        if moved:
            self._read_positions(branches=before)
        if self.run:
            self.foreign_since = None
        elif changes.data_change and (changes.added or changes.removed) and self.foreign_since is None:
            self.foreign_since = version
        return changes

    def _read_positions(self, branches: str) -> None:
        """Parse the domains; the array of ``branches``, which hardly ever change, is shared."""
        array = PositionArray.of_texts(self.domains.get(SEQNOS, ""), self.domains.get(BRANCHES, ""))
        if branches == self.domains.get(BRANCHES, ""):
            array.branches = self.positions.branches
        self.positions = array

    def as_version(self) -> TableVersion:
        """The version as others see it."""
        resets = {
            vbucket: seqno
            for version, vbucket, seqno in parse_resets(self.domains.get(RESETS, ""))
            if version == self.version
        }
        return TableVersion(self.version, self.timestamp_ms, self.operation, self.positions, self.run, resets)

    def actions(self, tombstones: Iterable[str] = ()) -> Iterator[Action]:
        """The actions that make this state from scratch, with some of the removed files."""
        if self.protocol is None or self.metadata is None:
            raise TableDamaged(f"version {self.version} of the table has no protocol or no metadata")
        yield self.protocol
        yield self.metadata
        yield from self.transactions.values()
        for domain, configuration in sorted(self.domains.items()):
            yield DomainMetadata(domain, configuration)
        yield from self.files.values()
        for path in tombstones:
            if path in self.tombstones and path not in self.files:
                yield RemoveFile(path, self.tombstones[path], False)


def _same_vector(first: Vector | None, other: Vector | None) -> bool:
    """Whether two descriptors mean the same vector, which is known by its place."""
    if first is None or other is None:
        return first is other
    return (first.storage, first.path_or_inline, first.offset) == (
        other.storage,
        other.path_or_inline,
        other.offset,
    )


def check_readable(state: TableState, uri: str) -> None:
    """UnknownFeature if this version can't be read correctly."""
    protocol, metadata = state.protocol, state.metadata
    if protocol is None or metadata is None:
        raise TableDamaged(f"the log of the table at {uri} has no protocol or no metadata")
    needed = set(protocol.reader_features or ()) - _READABLE
    if protocol.reader > 3 or protocol.reader == 2 or needed:
        unknown = ", ".join(sorted(needed)) or f"reader version {protocol.reader}"
        raise UnknownFeature(
            f"the table at {uri} needs {unknown}, which is not known here: "
            "somebody changed its settings; make a new table beside it"
        )


def check_writable(state: TableState, uri: str) -> None:
    """UnknownFeature if we could not write this table correctly."""
    check_readable(state, uri)
    protocol, metadata = state.protocol, state.metadata
    assert protocol is not None and metadata is not None
    needed = set(protocol.writer_features or ()) - _WRITABLE
    configuration = metadata.configuration
    needed |= {name for name, on in _SWITCHED_ON.items() if configuration.get(name, "").lower() == on}
    needed |= {name for name in configuration if name.startswith("delta.constraints.")}
    if configuration.get("delta.columnMapping.mode", "none") != "none":
        needed.add("delta.columnMapping.mode")
    if metadata.partition_columns:
        needed.add("partition columns")
    if protocol.writer != 7 or needed:
        unknown = ", ".join(sorted(needed)) or f"writer version {protocol.writer}"
        raise UnknownFeature(
            f"the table at {uri} asks its writers for {unknown}, which a mirror can't do: "
            "somebody changed its settings; set them back, or make a new table beside it"
        )
