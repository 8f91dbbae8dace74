"""The actions of a Delta log that define a table, each declared once, and their JSON.

Paths in the log are URL-encoded; here they are decoded. Fields of an action that are not declared are kept in
``extra`` and written again; an action that is not declared at all is skipped, as the protocol asks: a writer
that needs it to be understood sets a table feature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import quote, unquote

from ..contract import TableDamaged, Vector

__all__ = [
    "ACTIONS",
    "Action",
    "AddFile",
    "AppTransaction",
    "CommitInfo",
    "DomainMetadata",
    "Metadata",
    "ProtocolVersion",
    "RemoveFile",
    "parse_action",
]


def encode_path(path: str) -> str:
    """A path as it is in the log."""
    return quote(path, safe="/=:@,+-._~!$&'()*;")


def decode_path(text: str) -> str:
    """A path as it is in the table's folder."""
    path = unquote(text)
    if "://" in path or path.startswith("/"):
        raise TableDamaged(
            f"the file {path[:200]!r} lies outside the table: the table is a clone of another one, "
            "which a mirror can't continue"
        )
    return path


def vector_to_json(vector: Vector) -> dict[str, Any]:
    fields: dict[str, Any] = {"storageType": vector.storage, "pathOrInlineDv": vector.path_or_inline}
    if vector.offset is not None:
        fields["offset"] = vector.offset
    return {**fields, "sizeInBytes": vector.size, "cardinality": vector.cardinality}


def vector_from_json(fields: Mapping[str, Any] | None) -> Vector | None:
    if not fields:
        return None
    return Vector(
        fields["storageType"],
        fields["pathOrInlineDv"],
        fields.get("offset"),
        fields["sizeInBytes"],
        fields["cardinality"],
    )


def _without(fields: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in known and value is not None}


def _pairs(value: Any) -> dict[str, Any]:
    """A map, from JSON or from a checkpoint's Parquet."""
    return dict(value) if value else {}


@dataclass(frozen=True, slots=True)
class AddFile:
    """Adds a data file to the table, with this vector."""

    path: str
    size: int
    modified_ms: int
    data_change: bool = True
    stats: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    vector: Vector | None = None
    partition_values: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    NAME = "add"
    _FIELDS = frozenset(
        {
            *("path", "size", "modificationTime", "dataChange", "stats", "tags", "deletionVector"),
            *("partitionValues", "stats_parsed", "partitionValues_parsed"),
        }
    )

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> AddFile:
        return cls(
            decode_path(fields["path"]),
            fields["size"],
            fields["modificationTime"],
            bool(fields.get("dataChange", True)),
            fields.get("stats"),
            _pairs(fields.get("tags")),
            vector_from_json(fields.get("deletionVector")),
            _pairs(fields.get("partitionValues")),
            _without(fields, cls._FIELDS),
        )

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "path": encode_path(self.path),
            "partitionValues": dict(self.partition_values),
            "size": self.size,
            "modificationTime": self.modified_ms,
            "dataChange": self.data_change,
        }
        if self.stats is not None:
            fields["stats"] = self.stats
        if self.tags:
            fields["tags"] = dict(self.tags)
        if self.vector is not None:
            fields["deletionVector"] = vector_to_json(self.vector)
        return {**fields, **self.extra}

    def removed(self, when_ms: int, *, data_change: bool) -> RemoveFile:
        """The action that takes it out of the table."""
        return RemoveFile(
            self.path,
            when_ms,
            data_change,
            self.size,
            self.vector,
            self.tags,
            self.partition_values,
            {name: value for name, value in self.extra.items() if name in _SHARED_EXTRA},
        )


_SHARED_EXTRA = frozenset({"baseRowId", "defaultRowCommitVersion"})


@dataclass(frozen=True, slots=True)
class RemoveFile:
    """Removes a data file with this vector from the table."""

    path: str
    when_ms: int
    data_change: bool = True
    size: int | None = None
    vector: Vector | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    partition_values: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    NAME = "remove"
    _FIELDS = frozenset(
        {
            *("path", "deletionTimestamp", "dataChange", "size", "deletionVector", "tags"),
            *("partitionValues", "extendedFileMetadata"),
        }
    )

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> RemoveFile:
        return cls(
            decode_path(fields["path"]),
            fields.get("deletionTimestamp") or 0,
            bool(fields.get("dataChange", True)),
            fields.get("size"),
            vector_from_json(fields.get("deletionVector")),
            _pairs(fields.get("tags")),
            _pairs(fields.get("partitionValues")),
            _without(fields, cls._FIELDS),
        )

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "path": encode_path(self.path),
            "deletionTimestamp": self.when_ms,
            "dataChange": self.data_change,
            "extendedFileMetadata": self.size is not None,
            "partitionValues": dict(self.partition_values),
        }
        if self.size is not None:
            fields["size"] = self.size
        if self.tags:
            fields["tags"] = dict(self.tags)
        if self.vector is not None:
            fields["deletionVector"] = vector_to_json(self.vector)
        return {**fields, **self.extra}


@dataclass(frozen=True, slots=True)
class Metadata:
    """The table's columns and configuration."""

    id: str
    schema_string: str
    configuration: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None
    description: str | None = None
    partition_columns: tuple[str, ...] = ()
    created_ms: int | None = None
    format: Mapping[str, Any] = field(default_factory=lambda: {"provider": "parquet", "options": {}})

    NAME = "metaData"

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Metadata:
        file_format = fields.get("format") or {}
        return cls(
            fields["id"],
            fields["schemaString"],
            _pairs(fields.get("configuration")),
            fields.get("name"),
            fields.get("description"),
            tuple(fields.get("partitionColumns") or ()),
            fields.get("createdTime"),
            {
                "provider": file_format.get("provider", "parquet"),
                "options": _pairs(file_format.get("options")),
            },
        )

    def to_json(self) -> dict[str, Any]:
        optional = {"name": self.name, "description": self.description, "createdTime": self.created_ms}
        return {
            "id": self.id,
            **{name: value for name, value in optional.items() if value is not None},
            "format": dict(self.format),
            "schemaString": self.schema_string,
            "partitionColumns": list(self.partition_columns),
            "configuration": dict(self.configuration),
        }


@dataclass(frozen=True, slots=True)
class ProtocolVersion:
    """What a reader and a writer of the table must know."""

    reader: int
    writer: int
    reader_features: tuple[str, ...] | None = None
    writer_features: tuple[str, ...] | None = None

    NAME = "protocol"

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> ProtocolVersion:
        reader, writer = fields.get("readerFeatures"), fields.get("writerFeatures")
        return cls(
            fields["minReaderVersion"],
            fields["minWriterVersion"],
            None if reader is None else tuple(reader),
            None if writer is None else tuple(writer),
        )

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"minReaderVersion": self.reader, "minWriterVersion": self.writer}
        if self.reader_features is not None:
            fields["readerFeatures"] = list(self.reader_features)
        if self.writer_features is not None:
            fields["writerFeatures"] = list(self.writer_features)
        return fields


@dataclass(frozen=True, slots=True)
class DomainMetadata:
    """A named text that belongs to somebody who writes the table."""

    domain: str
    configuration: str
    removed: bool = False

    NAME = "domainMetadata"

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> DomainMetadata:
        return cls(fields["domain"], fields.get("configuration") or "", bool(fields.get("removed", False)))

    def to_json(self) -> dict[str, Any]:
        return {"domain": self.domain, "configuration": self.configuration, "removed": self.removed}


@dataclass(frozen=True, slots=True)
class AppTransaction:
    """The progress of an application's writes."""

    app_id: str
    version: int
    updated_ms: int | None = None

    NAME = "txn"

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> AppTransaction:
        return cls(fields["appId"], fields["version"], fields.get("lastUpdated"))

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"appId": self.app_id, "version": self.version}
        return fields if self.updated_ms is None else {**fields, "lastUpdated": self.updated_ms}


@dataclass(frozen=True, slots=True)
class CommitInfo:
    """Who made a commit, when and why."""

    fields: Mapping[str, Any]

    NAME = "commitInfo"

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> CommitInfo:
        return cls(dict(fields))

    def to_json(self) -> dict[str, Any]:
        return dict(self.fields)

    @property
    def timestamp_ms(self) -> int | None:
        stamp = self.fields.get("inCommitTimestamp", self.fields.get("timestamp"))
        return stamp if isinstance(stamp, int) else None


Action: TypeAlias = (
    AddFile | RemoveFile | Metadata | ProtocolVersion | DomainMetadata | AppTransaction | CommitInfo
)

ACTIONS: dict[str, Callable[[Mapping[str, Any]], Action]] = {
    kind.NAME: kind.from_json
    for kind in (AddFile, RemoveFile, Metadata, ProtocolVersion, DomainMetadata, AppTransaction, CommitInfo)
}


def parse_action(line: Mapping[str, Any]) -> Action | None:
    """The action of a line of the log; None if it does not concern us. KeyError, TypeError, ValueError if it
    is not what its name says.
    """
    for name, fields in line.items():
        make = ACTIONS.get(name)
        if make is not None and fields is not None:
            return make(fields)
    return None
