"""Actions, columns and positions: what is written can be read again, also from a checkpoint."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
from deltalake import Schema as DeltaSchema
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import UsageError
from tailrace.model import MAX_SEQNO, Position
from tailrace.table.contract import TableDamaged, Vector
from tailrace.table.delta.actions import (
    Action,
    AddFile,
    AppTransaction,
    CommitInfo,
    DomainMetadata,
    Metadata,
    ProtocolVersion,
    RemoveFile,
    parse_action,
)
from tailrace.table.delta.checkpoint import encode_checkpoint, parse_checkpoint
from tailrace.table.delta.positions import PositionArray
from tailrace.table.delta.schema import schema_from_json, schema_to_json

VECTOR = Vector("u", "_dv^-aqEH.-t@S}K{vb[*k^", 1, 40, 6)
ACTIONS: list[Action] = [
    ProtocolVersion(3, 7, ("deletionVectors",), ("deletionVectors", "domainMetadata")),
    ProtocolVersion(1, 2),
    Metadata("id", '{"type":"struct","fields":[]}', {"a": "b"}, "name", None, (), 7),
    AppTransaction("app", 12, 13),
    AppTransaction("app", 12),
    DomainMetadata("tailrace.seqnos", "AAEC"),
    DomainMetadata("tailrace.seqnos", "", removed=True),
    AddFile("größe #1 100%41?.parquet", 10, 11, False, '{"numRecords":1}', {"tailrace.kind": "base"}, VECTOR),
    AddFile("plain.parquet", 10, 11, False),
    AddFile("x.parquet", 1, 2, False, vector=Vector("i", "00000", None, 4, 1)),
    RemoveFile("größe #1 100%41?.parquet", 12, False, 10, VECTOR, {"tailrace.kind": "base"}),
    RemoveFile("plain.parquet", 12, True),
]


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.NAME)
def test_actions_survive_json(action: Action) -> None:
    line = json.loads(json.dumps({action.NAME: action.to_json()}))
    assert parse_action(line) == action
    assert action.NAME == "commitInfo" or " " not in line[action.NAME].get("path", "")


def test_actions_survive_a_checkpoint() -> None:
    data, count, files = encode_checkpoint([*ACTIONS, CommitInfo({"operation": "x"})])
    assert (count, files) == (len(ACTIONS), 3)
    again = parse_checkpoint("c", data)
    key = repr
    assert sorted(again, key=key) == sorted(ACTIONS, key=key)


def test_unknown_fields_are_written_again() -> None:
    line = {"add": {**AddFile("a", 1, 2).to_json(), "clusteringProvider": "liquid", "baseRowId": 7}}
    action = parse_action(line)
    assert isinstance(action, AddFile)
    assert action.to_json() == line["add"]
    removed = action.removed(9, data_change=True).to_json()
    assert removed["baseRowId"] == 7 and "clusteringProvider" not in removed
    assert parse_action({"cdc": {"path": "x"}}) is None


def test_files_outside_of_the_table() -> None:
    for path in ("s3://elsewhere/x.parquet", "/elsewhere/x.parquet", "file:///x.parquet"):
        with pytest.raises(TableDamaged, match="clone"):
            parse_action({"add": {"path": path, "size": 1, "modificationTime": 1}})


COLUMNS = pa.schema(
    [
        pa.field("key", pa.string()),
        pa.field("data", pa.binary()),
        pa.field("flag", pa.bool_()),
        pa.field("small", pa.int8()),
        pa.field("short", pa.int16()),
        pa.field("vbucket", pa.int32(), nullable=False),
        pa.field("seqno", pa.int64()),
        pa.field("ratio", pa.float32()),
        pa.field("amount", pa.float64()),
        pa.field("price", pa.decimal128(12, 2)),
        pa.field("day", pa.date32()),
        pa.field("event_time", pa.timestamp("us", tz="UTC")),
        pa.field("tags", pa.list_(pa.field("element", pa.string()))),
        pa.field("address", pa.struct([pa.field("city", pa.string()), pa.field("zip.code", pa.int32())])),
        pa.field("counts", pa.map_(pa.string(), pa.field("value", pa.int64()))),
    ]
)


def test_columns() -> None:
    text = schema_to_json(COLUMNS)
    assert schema_from_json(text) == COLUMNS
    theirs = json.loads(DeltaSchema.from_json(text).to_json())
    assert theirs == json.loads(text)
    with pytest.raises(UsageError, match="no type for uint64"):
        schema_to_json(pa.schema([("x", pa.uint64())]))
    for damaged in ("", "{", "{}", '{"fields":[{"name":"x","type":"odd","nullable":true}]}'):
        with pytest.raises(TableDamaged, match="columns"):
            schema_from_json(damaged)


u64 = st.integers(0, (1 << 64) - 1)


@given(st.dictionaries(st.integers(0, 1023), st.tuples(u64, st.integers(0, MAX_SEQNO))))
def test_positions(given_positions: dict[int, tuple[int, int]]) -> None:
    positions = {vb: Position.at(*pair) for vb, pair in given_positions.items() if pair != (0, 0)}
    array = PositionArray().moved(positions)
    assert dict(array) == positions
    again = PositionArray.of_texts(*array.to_texts())
    assert dict(again) == positions
    assert len(again) == len(positions)
    assert again.get(5000) is None and 5000 not in again and -1 not in again
    for vbucket in positions:
        back = again.moved({vbucket: Position.BEGINNING})
        assert vbucket not in back
        assert vbucket in again
        break


def test_positions_of_a_large_bucket_are_short() -> None:
    array = PositionArray(np.full(1024, 123_456_789, np.uint64), np.full(1024, (1 << 48) - 1, np.uint64))
    seqnos, branches = array.to_texts()
    assert len(seqnos) == 5464
    assert len(branches) < 10_000


@pytest.mark.parametrize("text", ["*", "gA==", "gICAgICAgICAgIAB", "abc", "gICAgICAgIAB"])
def test_damaged_positions(text: str) -> None:
    with pytest.raises(TableDamaged, match=r"tailrace\.seqnos"):
        PositionArray.of_texts(text, "")
