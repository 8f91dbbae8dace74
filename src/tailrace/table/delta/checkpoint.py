"""Checkpoints: the state of a version as one Parquet file, so that the log before it need not be read.

We write classic checkpoints in one file, which `delta-rs` and `polars` read, and also read those in several.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..contract import TableDamaged
from .actions import ACTIONS, Action, CommitInfo

__all__ = ["CheckpointName", "encode_checkpoint", "parse_checkpoint", "parse_name"]

_TEXTS = pa.map_(pa.string(), pa.string())
_VECTOR = pa.struct(
    [
        pa.field("storageType", pa.string()),
        pa.field("pathOrInlineDv", pa.string()),
        pa.field("offset", pa.int32()),
        pa.field("sizeInBytes", pa.int32()),
        pa.field("cardinality", pa.int64()),
    ]
)
_SCHEMA = pa.schema(
    {
        "txn": pa.struct({"appId": pa.string(), "version": pa.int64(), "lastUpdated": pa.int64()}),
        "add": pa.struct(
            {
                "path": pa.string(),
                "partitionValues": _TEXTS,
                "size": pa.int64(),
                "modificationTime": pa.int64(),
                "dataChange": pa.bool_(),
                "stats": pa.string(),
                "tags": _TEXTS,
                "deletionVector": _VECTOR,
            }
        ),
        "remove": pa.struct(
            {
                "path": pa.string(),
                "deletionTimestamp": pa.int64(),
                "dataChange": pa.bool_(),
                "extendedFileMetadata": pa.bool_(),
                "partitionValues": _TEXTS,
                "size": pa.int64(),
                "deletionVector": _VECTOR,
                "tags": _TEXTS,
            }
        ),
        "metaData": pa.struct(
            {
                "id": pa.string(),
                "name": pa.string(),
                "description": pa.string(),
                "format": pa.struct({"provider": pa.string(), "options": _TEXTS}),
                "schemaString": pa.string(),
                "partitionColumns": pa.list_(pa.string()),
                "configuration": _TEXTS,
                "createdTime": pa.int64(),
            }
        ),
        "protocol": pa.struct(
            {
                "minReaderVersion": pa.int32(),
                "minWriterVersion": pa.int32(),
                "readerFeatures": pa.list_(pa.string()),
                "writerFeatures": pa.list_(pa.string()),
            }
        ),
        "domainMetadata": pa.struct(
            {"domain": pa.string(), "configuration": pa.string(), "removed": pa.bool_()}
        ),
    }
)

_NAME = re.compile(r"_delta_log/([0-9]{20})\.checkpoint(?:\.([0-9]{10})\.([0-9]{10}))?\.parquet")

CheckpointName = tuple[int, int, int]
"""Version, number of the part (from 1) and number of parts."""


def parse_name(path: str) -> CheckpointName | None:
    """What the name of a file in the log says, if it is a checkpoint or a part of one."""
    match = _NAME.fullmatch(path)
    if match is None:
        return None
    version, part, parts = match.groups()
    return int(version), int(part or 1), int(parts or 1)


def encode_checkpoint(actions: Iterable[Action]) -> tuple[bytes, int, int]:
    """The bytes of a checkpoint, how many actions it has, and how many files of the table."""
    columns: dict[str, list[Mapping[str, Any] | None]] = {name: [] for name in _SCHEMA.names}
    count = files = 0
    for action in actions:
        if isinstance(action, CommitInfo):
            continue
        fields = action.to_json()
        if action.NAME == "add":
            files += 1
            # a checkpoint repeats earlier actions: nothing in it is a change
            fields["dataChange"] = False
        for name, column in columns.items():
            column.append(_maps(fields) if name == action.NAME else None)
        count += 1
    table = pa.table([pa.array(columns[field.name], field.type) for field in _SCHEMA], schema=_SCHEMA)
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="snappy")
    return sink.getvalue(), count, files


_MAPS = frozenset({"partitionValues", "tags", "options", "configuration"})


def _maps(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields as Arrow wants them: maps are lists of pairs."""
    arrow: dict[str, Any] = {}
    for name, value in fields.items():
        if name in _MAPS and isinstance(value, Mapping):
            arrow[name] = list(value.items())
        elif isinstance(value, Mapping):
            arrow[name] = _maps(value)
        else:
            arrow[name] = value
    return arrow


def parse_checkpoint(path: str, data: bytes) -> list[Action]:
    """The actions of a checkpoint, or of a part of one."""
    actions: list[Action] = []
    try:
        file = pq.ParquetFile(io.BytesIO(data))
        for name, make in ACTIONS.items():
            if name not in file.schema_arrow.names:
                continue
            column = file.read(columns=[name]).column(name).combine_chunks()
            there = column.filter(pc.is_valid(column))
            actions += [make(_with_stats(fields)) for fields in there.to_pylist()]
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        text = str(error).partition("\n")[0]
        raise TableDamaged(f"the table's checkpoint {path} is damaged: {text}") from None
    return actions


def _with_stats(fields: dict[str, Any]) -> dict[str, Any]:
    """Some writers keep statistics only as columns; all that is needed of them is the number of rows."""
    parsed = fields.get("stats_parsed")
    if fields.get("stats") is None and parsed and parsed.get("numRecords") is not None:
        fields["stats"] = json.dumps({"numRecords": parsed["numRecords"]})
    return fields


def whole_checkpoints(names: Iterable[CheckpointName]) -> dict[int, Sequence[CheckpointName]]:
    """By version, the parts of each checkpoint that has all of them."""
    parts: dict[tuple[int, int], set[CheckpointName]] = {}
    for name in names:
        parts.setdefault((name[0], name[2]), set()).add(name)
    return {
        version: sorted(named) for (version, count), named in sorted(parts.items()) if len(named) == count
    }


def checkpoint_path(name: CheckpointName) -> str:
    version, part, parts = name
    middle = "" if parts == 1 else f".{part:010d}.{parts:010d}"
    return f"_delta_log/{version:020d}.checkpoint{middle}.parquet"
