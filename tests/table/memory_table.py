"""A table whose log is a list in memory: the contract's second implementation, for tests of what is above it.

Its files are real, its masks are bitmaps, and every commit is a version that can be read again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
from pyroaring import BitMap

from tailrace.model import Position
from tailrace.table.contract import Commit, DataFile, MaintenanceReport, TableVersion, Vector
from tailrace.table.rows import TABLE_SCHEMA
from tailrace.table.store import TableStore


@dataclass
class _State:
    files: dict[str, DataFile] = field(default_factory=dict)
    masks: dict[str, BitMap] = field(default_factory=dict)
    positions: dict[int, Position] = field(default_factory=dict)
    resets: Mapping[int, int] = field(default_factory=dict)
    operation: str = "CREATE"


class MemoryTable:
    def __init__(
        self, store: TableStore, schema: pa.Schema = TABLE_SCHEMA, secret: bytes = b"s" * 16
    ) -> None:
        self.store = store
        self.uri = store.uri
        self.schema = schema
        self.secret = secret
        self.source: dict[str, Any] = {}
        self._states = [_State()]

    @property
    def version(self) -> int:
        return len(self._states) - 1

    @property
    def current(self) -> TableVersion:
        return self._version(self.version)

    def _version(self, number: int) -> TableVersion:
        state = self._states[number]
        return TableVersion(number, 0, state.operation, state.positions, "", state.resets)

    def claim(self, run: str | None = None, *, accept_foreign: bool = False) -> str:
        return run or "run"

    def refresh(self) -> None:
        """Nobody else commits."""

    def versions(self) -> Iterator[TableVersion]:
        for number in range(self.version, -1, -1):
            yield self._version(number)

    def lineage(self, vbucket: int) -> Iterator[tuple[int, Position]]:
        for version in self.versions():
            yield version.version, version.position(vbucket)

    def files(self, version: int | None = None) -> list[DataFile]:
        state = self._states[self.version if version is None else version]
        return [
            replace(
                file, vector=Vector(str(self._states.index(state)), path, None, 0, len(state.masks[path]))
            )
            for path, file in state.files.items()
        ]

    def schema_of(self, version: int) -> pa.Schema:
        return self.schema

    def mask(self, file: DataFile) -> BitMap:
        assert file.vector is not None
        return self._states[int(file.vector.storage)].masks[file.path].copy()

    def commit(self, commit: Commit) -> int:
        old = self._states[-1]
        new = _State(
            dict(old.files),
            {path: mask.copy() for path, mask in old.masks.items()},
            {**old.positions, **(commit.positions or {})},
            commit.resets,
            commit.operation,
        )
        for path in commit.removed:
            del new.files[path], new.masks[path]
        for file in commit.readded:
            assert file.path not in new.files
            new.files[file.path] = file
        for added in commit.added:
            new.files[added.file.path] = added.file
            new.masks[added.file.path] = BitMap.deserialize(added.masked) if added.masked else BitMap()
        for path, rows in commit.masked.items():
            new.masks[path] |= rows
        for path, rows in commit.vectors.items():
            new.masks[path] = rows.copy()
        for path in [path for path, file in new.files.items() if len(new.masks[path]) == file.rows]:
            del new.files[path], new.masks[path]
        self._states.append(new)
        return self.version

    def maintain(
        self, *, busy_since_ms: int | None = None, dry_run: bool = False, force: bool = False
    ) -> MaintenanceReport:
        return MaintenanceReport()
