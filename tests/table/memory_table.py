"""A mirrored table whose log is a list: the contract of a table without a format, for tests of
what stands on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyroaring import BitMap

from tailrace.model import MAX_U64, Position
from tailrace.table.contract import Commit, DataFile, MaintenanceReport, Table, TableVersion, Vector
from tailrace.table.document_columns import DocumentColumns
from tailrace.table.file_reading import scan
from tailrace.table.hashing import KeyHash
from tailrace.table.rows import table_schema
from tailrace.table.store import TableStore

_MARK = Vector("m", "", None, 0, 0)
"""Stands for a vector; the mask itself is in memory."""


class MemoryTable:
    """A table with its data files in a folder and everything else in memory."""

    def __init__(
        self,
        folder: Path,
        schema: pa.Schema | None = None,
        *,
        scope: str = "_default",
        collection: str = "_default",
        documents: DocumentColumns | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.uri = str(folder)
        self.store = TableStore(self.uri)
        self.source: dict[str, Any] = {"bucket": "default", "scope": scope, "collection": collection}
        self.documents = documents
        self.schema = schema or table_schema(keep_deletes=False, documents=documents)
        self.secret = b"0123456789abcdef"
        self.commits: list[Commit] = []
        self._versions = [TableVersion(0, 0, "CREATE", {})]
        self._files: list[dict[str, tuple[DataFile, BitMap]]] = [{}]

    @property
    def version(self) -> int:
        return len(self._versions) - 1

    @property
    def current(self) -> TableVersion:
        return self._versions[-1]

    def claim(
        self, run: str | None = None, *, accept_foreign: bool = False, and_still: Sequence[Table] = ()
    ) -> str:
        for table in and_still:
            table.refresh()
        return run or "run"

    def accept_rows(self, version: int) -> bool:
        return False

    def refresh(self) -> None:
        pass

    def versions(self) -> Iterator[TableVersion]:
        yield from reversed(self._versions)

    def lineage(self, vbucket: int) -> Iterator[tuple[int, Position]]:
        bound = MAX_U64
        for version in self.versions():
            position = version.position(vbucket)
            if 0 < position.seqno <= bound:
                yield version.version, position
            bound = min(bound, version.resets.get(vbucket, bound))

    def files(self, version: int | None = None) -> list[DataFile]:
        number = self.version if version is None else version
        return [
            replace(file, vector=replace(_MARK, cardinality=len(mask), offset=number) if mask else None)
            for file, mask in self._files[number].values()
        ]

    def schema_of(self, version: int) -> pa.Schema:
        return self.schema

    def mask(self, file: DataFile) -> BitMap:
        if file.vector is None:
            return BitMap()
        assert file.vector.offset is not None
        return self._files[file.vector.offset][file.path][1].copy()

    def commit(self, commit: Commit) -> int:
        self.schema = commit.schema or self.schema
        self.documents = commit.documents or self.documents
        if commit.bucket_uuid is not None:
            self.source = {**self.source, "uuid": commit.bucket_uuid}
        held = dict(self._files[-1])
        for path in commit.removed:
            del held[path]
        for path, rows in commit.masked.items():
            file, mask = held[path]
            held[path] = (file, mask | rows)
        for file in commit.readded:
            held[file.path] = (replace(file, vector=None), BitMap())
        for path, rows in commit.vectors.items():
            held[path] = (held[path][0], rows.copy())
        for new in commit.added:
            held[new.file.path] = (new.file, BitMap.deserialize(new.masked) if new.masked else BitMap())
        positions = {**self.current.positions, **(commit.positions or {})}
        self._files.append({path: file for path, file in held.items() if len(file[1]) < file[0].rows})
        self._versions.append(
            TableVersion(self.version + 1, 0, commit.operation, positions, "run", dict(commit.resets))
        )
        self.commits.append(commit)
        return self.version

    def maintain(
        self, *, busy_since_ms: int | None = None, dry_run: bool = False, force: bool = False
    ) -> MaintenanceReport:
        return MaintenanceReport()

    def rows(self, version: int | None = None) -> pa.Table:
        """The live rows."""
        files = self.files(version)
        masks: Mapping[str, BitMap] = {file.path: self.mask(file) for file in files}
        batches = scan(self.store, files, masks, self.schema, key_hash=KeyHash(self.secret))
        return pa.Table.from_batches(batches, schema=self.schema)
