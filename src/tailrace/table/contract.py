"""What a mirrored table is, whatever its format: the types that connect its parts.

Tasks write files and answer with a `TaskResult`; the driver puts the answers of a round into one `Commit`;
a `Table` makes a `TableVersion` of it, or raises an error of `tailrace.errors`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
from pyroaring import BitMap

from ..errors import Fenced, ForeignRows, StorageError, TableChanged, TableDamaged, UnknownFeature
from ..model import Position
from .document_columns import DocumentColumns

if TYPE_CHECKING:
    from .store import TableStore

__all__ = [
    "FOREIGN",
    "Commit",
    "DataFile",
    "Fenced",
    "ForeignRows",
    "MaintenanceReport",
    "NewFile",
    "StorageError",
    "Table",
    "TableChanged",
    "TableDamaged",
    "TableVersion",
    "TaskResult",
    "UnknownFeature",
    "Vector",
]

FOREIGN = "foreign"
"""The kind of a file that we did not write."""


@dataclass(frozen=True, slots=True)
class Vector:
    """Where the deletion vector of a file is, as the log has it."""

    storage: str
    path_or_inline: str
    offset: int | None
    size: int
    cardinality: int


@dataclass(frozen=True, slots=True)
class DataFile:
    """A Parquet file that is part of the table, or is going to be."""

    path: str
    """Relative to the table, decoded."""
    size: int
    rows: int
    """Physical rows, masked ones included."""
    kind: str
    """``base``, ``tier0``, ``tier1``, …; `FOREIGN` if we did not write it."""
    low: int
    high: int
    """The smallest and largest h1 of its rows, unsigned 64 bits."""
    index_offset: int | None
    """Where the arrays h1 and h2 are (rows x u64 little-endian each); None if there are none."""
    stats: str
    """The statistics of its columns, as Delta's JSON."""
    modified_ms: int
    vector: Vector | None = None
    schema_id: int = 0
    """Which set of typed columns it was written with."""

    @property
    def live_rows(self) -> int:
        """Rows that are not masked."""
        return self.rows - (self.vector.cardinality if self.vector else 0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> DataFile:
        vector = fields.get("vector")
        return cls(**{**fields, "vector": Vector(**vector) if vector else None})


@dataclass(frozen=True)
class NewFile:
    """What a task wrote; not yet visible."""

    file: DataFile
    masked: bytes = b""
    """Its rows that are dead from the start: a portable 32-bit roaring bitmap; b"" if none."""


@dataclass(frozen=True)
class TaskResult:
    """What a task of a round answers."""

    added: tuple[NewFile, ...] = ()
    masked: Mapping[str, bytes] = field(default_factory=dict)
    """By path of a file of the table: rows to mask (portable roaring); some may be masked already."""
    changes: int = 0
    rows_written: int = 0
    bytes_written: int = 0
    rescued: int = 0
    """Rows of a typed table with a value that does not fit."""
    documents: DocumentColumns | None = None
    """The columns that the files were written with, if they are more than the table's."""

    _PREFIX = struct.Struct("<I")

    def to_bytes(self) -> bytes:
        """To send to the driver: the size of the head, the head as JSON, then the bitmaps."""
        bitmaps = [new.masked for new in self.added] + list(self.masked.values())
        head = json.dumps(
            {
                "added": [[new.file.to_json(), len(new.masked)] for new in self.added],
                "masked": [[path, len(bitmap)] for path, bitmap in self.masked.items()],
                "counts": [self.changes, self.rows_written, self.bytes_written, self.rescued],
                "documents": None if self.documents is None else self.documents.to_json(),
            }
        ).encode()
        return b"".join([self._PREFIX.pack(len(head)), head, *bitmaps])

    @classmethod
    def from_bytes(cls, data: bytes) -> TaskResult:
        """Reads what `to_bytes` wrote."""
        (size,) = cls._PREFIX.unpack_from(data)
        start = cls._PREFIX.size + size
        head = json.loads(data[cls._PREFIX.size : start])
        added = []
        for fields, length in head["added"]:
            added.append(NewFile(DataFile.from_json(fields), data[start : start + length]))
            start += length
        masked = {}
        for path, length in head["masked"]:
            masked[path] = data[start : start + length]
            start += length
        documents = head["documents"]
        changes, rows, size, rescued = head["counts"]
        columns = None if documents is None else DocumentColumns.from_json(documents)
        return cls(tuple(added), masked, changes, rows, size, rescued, columns)


@dataclass(frozen=True)
class Commit:
    """What is to become the next version."""

    operation: str
    """``TAILRACE ROUND``, ``TAILRACE ROLLBACK``, ``TAILRACE COMPACT``, …: what the history shows."""
    positions: Mapping[int, Position] | None = None
    """The positions of vbuckets that move; None: all stay where they are."""
    added: Sequence[NewFile] = ()
    removed: Sequence[str] = ()
    """Paths."""
    masked: Mapping[str, BitMap] = field(default_factory=dict)
    """By path: rows that die now, in addition to those already dead."""
    vectors: Mapping[str, BitMap] = field(default_factory=dict)
    """By path: exactly the dead rows (for a rollback); also for `readded` files."""
    readded: Sequence[DataFile] = ()
    """Files of an earlier version that come back."""
    resets: Mapping[int, int] = field(default_factory=dict)
    """VBuckets that go back, and to which seqno."""
    data_change: bool = True
    """Whether it changes what readers see; compaction does not."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """For the history."""
    schema: pa.Schema | None = None
    """The table's columns from now on, if they change; columns can only be added."""
    documents: DocumentColumns | None = None
    """Which of them are made of documents, if that changes."""
    bucket_uuid: str | None = None
    """The bucket that the table mirrors from now on, if that changes."""
    repaired: bool = False
    """The rows are right again after `ForeignRows`."""


@dataclass(frozen=True, slots=True)
class TableVersion:
    """A version of the table and where every vbucket stands in it."""

    version: int
    timestamp_ms: int
    operation: str
    positions: Mapping[int, Position]
    """A vbucket that is not in it stands at the beginning."""
    run: str = ""
    """The run of a mirror that made it; empty if no mirror did."""
    resets: Mapping[int, int] = field(default_factory=dict)
    """VBuckets that this version set back, and to which seqno."""

    def position(self, vbucket: int) -> Position:
        """Where a vbucket stood."""
        return self.positions.get(vbucket, Position.BEGINNING)


@dataclass(frozen=True)
class MaintenanceReport:
    """What a table's maintenance did, or would do."""

    checkpoint: int | None = None
    """The version that a checkpoint was made of."""
    versions_kept: int = 0
    """Versions that a rollback can return to."""
    versions_dropped: int = 0
    log_files_removed: int = 0
    files_removed: int = 0
    bytes_removed: int = 0
    files_waiting: int = 0
    """Files that no version needs, but that are too young to go."""
    bytes_waiting: int = 0
    more: bool = False
    """There was more to do than one call does."""


class Table(Protocol):
    """A mirrored table, opened at its newest version."""

    @property
    def uri(self) -> str: ...

    @property
    def store(self) -> TableStore: ...

    @property
    def source(self) -> Mapping[str, Any]:
        """The bucket and collection that it mirrors: ``bucket``, its ``uuid`` if known, and more."""
        ...

    @property
    def schema(self) -> pa.Schema: ...

    @property
    def documents(self) -> DocumentColumns | None:
        """The columns that are made of documents, in a typed table."""
        ...

    @property
    def secret(self) -> bytes:
        """The 16-byte secret that its keys are hashed with."""
        ...

    @property
    def version(self) -> int: ...

    @property
    def current(self) -> TableVersion: ...

    def claim(
        self, run: str | None = None, *, accept_foreign: bool = False, and_still: Sequence[Table] = ()
    ) -> str:
        """Take the table over, which fences whoever wrote it before. The name of the run.

        ``and_still`` are tables that the same mirror claimed before; `Fenced` if another mirror has taken one
        of them, and then this one is not taken.
        """
        ...

    def accept_rows(self, version: int) -> bool:
        """After `ForeignRows`, accept the rows of a version that a comparison found right, so that a mirror
        may go on. Whether there was anything to accept; `TableChanged` if there is a newer version.
        """
        ...

    def refresh(self) -> None:
        """Take note of what others committed; `Fenced`, `ForeignRows`."""
        ...

    def versions(self) -> Iterator[TableVersion]:
        """The versions that are kept, newest first."""
        ...

    def lineage(self, vbucket: int) -> Iterator[tuple[int, Position]]:
        """The versions whose rows a vbucket can return to, newest first, and where it stood in each."""
        ...

    def files(self, version: int | None = None) -> list[DataFile]: ...

    def schema_of(self, version: int) -> pa.Schema:
        """The columns of an earlier version."""
        ...

    def mask(self, file: DataFile) -> BitMap:
        """Its dead rows; a copy."""
        ...

    def commit(self, commit: Commit) -> int:
        """Make the next version; its number. `TableChanged`, `Fenced`, `ForeignRows`."""
        ...

    def maintain(
        self, *, busy_since_ms: int | None = None, dry_run: bool = False, force: bool = False
    ) -> MaintenanceReport:
        """Thin out earlier versions, shorten the log, delete what nobody needs; a bounded amount of work.

        Does nothing if it was done a moment ago, unless ``force``.
        """
        ...
