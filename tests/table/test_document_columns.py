"""The columns of a typed table: names, limit, their statistics, and files without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tailrace.errors import UsageError
from tailrace.table import document_columns
from tailrace.table.contract import Commit, TaskResult
from tailrace.table.datafile import DataFileWriter
from tailrace.table.ddl import format_ddl
from tailrace.table.delta.table import DeltaMirrorTable
from tailrace.table.document_columns import DocumentColumns
from tailrace.table.file_reading import scan
from tailrace.table.hashing import KeyHash
from tailrace.table.row_digest import digest_rows
from tailrace.table.rows import table_schema
from tailrace.table.store import TableStore
from tailrace.table.typed import RESCUED


def texts(*documents: Any) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array([json.dumps(document) for document in documents], pa.string())])


def test_names_that_a_table_can_have() -> None:
    columns = DocumentColumns.from_text(
        "name STRING, Name INT, NAME INT, key INT, `KEY` INT, `_metadata` INT, `a b` INT, a_b INT, "
        "`a;b` INT, `` INT, `dot.ted` INT, s STRUCT<`x=y`: INT, X_Y: INT, key: INT>, "
        "l ARRAY<STRUCT<`p q`: INT>>, m MAP<STRING, STRUCT<`p q`: INT>>"
    )
    assert columns.columns.names == [
        "name", "Name_2", "NAME_3", "doc_key", "doc_KEY_2", "doc__metadata", "a_b", "a_b_2", "a_b_3",
        "doc_", "dot.ted", "s", "l", "m",
    ]  # fmt: skip
    assert [part.name for part in columns.columns.field("s").type] == ["x_y", "X_Y_2", "key"]
    rows, _ = columns.parse(
        texts(
            {"NAME": 3, "": 4, "s": {"x=y": 1, "X_Y": 2}, "l": [{"p q": 5}, None], "m": {"k": {"p q": 6}}}, {}
        )
    )
    row = {name: value for name, value in rows.to_pylist()[0].items() if value is not None}
    assert row == {
        "NAME_3": 3, "doc_": 4, "s": {"x_y": 1, "X_Y_2": 2, "key": None}, "l": [{"p_q": 5}, None],
        "m": [("k", {"p_q": 6})],
    }  # fmt: skip
    assert not any(rows.to_pylist()[1].values())
    assert DocumentColumns.from_json(columns.to_json()) == columns


def test_columns_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_columns, "MAX_COLUMNS", 4)
    columns = DocumentColumns(pa.schema([]), evolve=True)
    _, columns = columns.parse(texts({"a": 1, "b": {"x": 1, "y": 1}}, {"c": {"x": 1, "y": 1}}, {"d": 1}))
    assert format_ddl(columns.fields) == "a BIGINT, b STRUCT<x: BIGINT, y: BIGINT>, d BIGINT"
    rows, again = columns.parse(texts({"e": 1, "a": 2}))
    assert again == columns
    assert rows["a"].to_pylist() == [2]


def test_tasks_that_see_fields_differently_get_one_type() -> None:
    base = DocumentColumns.from_text("a INT", evolve=True)
    left = base.joined([DocumentColumns.from_text("a INT, b INT, s STRUCT<x: INT>")])
    right = base.joined([DocumentColumns.from_text("a INT, b DOUBLE, s STRUCT<y: INT>")])
    both = base.joined([left, right])
    assert format_ddl(both.fields) == "a INT, b DOUBLE, s STRUCT<x: INT, y: INT>"
    assert both.holds(right)
    assert not both.holds(left)  # its file has another type for b
    assert both.holds(base)


def test_tasks_that_give_one_name_to_two_fields() -> None:
    """Alone each gets the name; together the second field gets another one, which its file does not have."""
    base = DocumentColumns(pa.schema([]), evolve=True)
    for first, second in [
        ("`a b` INT", "a_b INT"),
        ("key INT", "doc_key INT"),
        ("s STRUCT<`a b`: INT>", "s STRUCT<a_b: INT>"),
        ("l ARRAY<STRUCT<`a b`: INT>>", "l ARRAY<STRUCT<a_b: INT>>"),
    ]:
        left, right = (base.joined([DocumentColumns.from_text(text)]) for text in (first, second))
        both = base.joined([left, right])
        assert both.holds(left)
        assert not both.holds(right)
        assert both.holds(both) and both.holds(base)


def test_tasks_whose_fields_have_no_room_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they would find the same fields again and again."""
    monkeypatch.setattr(document_columns, "MAX_COLUMNS", 4)
    base = DocumentColumns.from_text("n INT", evolve=True)
    left, right = (base.parse(texts({"s": dict.fromkeys(names, 1)}))[1] for names in ("abc", "xyz"))
    both = base.joined([left, right])
    assert both == left
    assert both.parse(texts({"s": {"x": 1, "y": 1}}))[1] == both, "now there is no room for these"


def test_the_log_says_how_small_and_how_large(tmp_path: Path) -> None:
    documents = DocumentColumns.from_text(
        "t STRING, f DOUBLE, d DATE, at TIMESTAMP, n TINYINT, p DECIMAL(4,1), ok BOOLEAN, l ARRAY<INT>, "
        + ", ".join(f"c{number} INT" for number in range(40))
    )
    long = "x" * 32 + "\U0010ffff\U0010ffffz"
    made, _ = documents.parse(
        texts(
            {"t": long, "f": -0.0, "d": "0001-01-01", "at": "2026-01-01T00:00:00.0009Z", "n": -1, "p": 1},
            {"t": "a", "f": 0.0, "d": "2026-01-01", "at": "2026-01-01T00:00:00Z", "n": 5, "c0": 7},
        )
    )
    writer = DataFileWriter(TableStore(tmp_path), made.schema, kind="tier0")
    writer.write(made, np.array([1, 2], np.uint64), np.array([1, 2], np.uint64))
    stats = json.loads(writer.close().stats)
    assert stats["minValues"] | {"f": str(stats["minValues"]["f"])} == {
        "t": "a", "f": "-0.0", "d": "0001-01-01", "at": "2026-01-01T00:00:00.000Z", "n": -1, "c0": 7,
    }  # fmt: skip
    assert stats["maxValues"]["t"] > long
    assert str(stats["maxValues"]["f"]) == "0.0"
    assert stats["maxValues"]["at"] == "2026-01-01T00:00:00.001Z"
    assert len(stats["nullCount"]) == 32
    assert RESCUED not in stats["nullCount"]


def test_only_what_repeats_has_a_dictionary(tmp_path: Path) -> None:
    """A dictionary of values that never repeat wastes time and space."""
    fields = "own STRING, same STRING, n INT, empty INT, s STRUCT<own: DOUBLE, same: DATE>, "
    columns = DocumentColumns.from_text(
        fields + "l ARRAY<STRUCT<own: STRING, same: INT>>, m MAP<STRING, INT>"
    )
    documents = [
        {
            "own": f"text {number}",
            "same": "text",
            "n": number % 10,
            "s": {"own": number / 7, "same": "2026-11-18"},
            "l": [{"own": f"{number} {place}", "same": place} for place in range(2)],
            "m": {"a": number},
        }
        for number in range(1000)
    ]
    rows, _ = columns.parse(texts(*documents))
    h1 = np.arange(1000, dtype=np.uint64)
    writer = DataFileWriter(TableStore(tmp_path), rows.schema, kind="tier0")
    writer.write(rows, h1, h1)
    written = pq.read_metadata(tmp_path / writer.close().path).row_group(0)
    chunks = [written.column(number) for number in range(written.num_columns)]
    assert {chunk.path_in_schema for chunk in chunks if chunk.has_dictionary_page} == {
        RESCUED, "same", "n", "empty", "s.same", "l.list.element.same", "m.key_value.key",
    }  # fmt: skip
    assert pq.read_table(tmp_path / writer.path).equals(rows)


def test_a_file_without_rows(tmp_path: Path) -> None:
    schema = table_schema(keep_deletes=False, documents=DocumentColumns.from_text("a INT"))
    file = DataFileWriter(TableStore(tmp_path), schema, kind="tier0").close()
    assert (file.rows, pq.read_table(tmp_path / file.path).num_rows) == (0, 0)


def test_an_answer_brings_its_columns() -> None:
    result = TaskResult(rescued=3, documents=DocumentColumns.from_text("`a b` INT", evolve=True))
    assert TaskResult.from_bytes(result.to_bytes()) == result


def test_columns_are_added_and_never_changed(tmp_path: Path) -> None:
    first = DocumentColumns.from_text("s STRUCT<x: INT>, l ARRAY<STRUCT<x: INT>>", evolve=True)
    schema = table_schema(keep_deletes=False, documents=first)
    table = DeltaMirrorTable.open_or_create(tmp_path, schema=schema, source={"bucket": "b"}, documents=first)
    table.claim()
    made, _ = first.parse(texts({"s": {"x": 1}, "l": [{"x": 2}]}, {}))
    writer = DataFileWriter(table.store, made.schema, kind="tier0")
    writer.write(made, np.array([1, 2], np.uint64), np.array([1, 2], np.uint64))
    file = writer.close()
    more = first.joined([DocumentColumns.from_text("s STRUCT<y: STRING>, l ARRAY<STRUCT<y: INT>>, n INT")])
    schema = table_schema(keep_deletes=False, documents=more)
    table.commit(Commit("TAILRACE COLUMNS", schema=schema, documents=more))
    again = DeltaMirrorTable.open(tmp_path)
    assert again.documents == more
    assert again.schema == schema
    assert "n" not in again.schema_of(0).names
    read = pa.Table.from_batches(
        scan(table.store, [file], {}, schema, key_hash=KeyHash(table.secret), columns=["s", "l", "n"])
    )
    assert read.to_pylist() == [
        {"s": {"x": 1, "y": None}, "l": [{"x": 2, "y": None}], "n": None},
        {"s": None, "l": None, "n": None},
    ]
    other = DocumentColumns.from_text("s STRUCT<x: STRING>, l ARRAY<STRUCT<x: INT>>")
    with pytest.raises(UsageError, match="s can't be changed"):
        table.commit(Commit("C", schema=table_schema(keep_deletes=False, documents=other), documents=other))


def test_a_digest_tells_what_differs_and_not_what_says_nothing() -> None:
    columns = DocumentColumns.from_text(
        "a ARRAY<STRUCT<x: INT, y: STRING>>, m MAP<STRING, DOUBLE>, d DATE, p DECIMAL(3,1)"
    )
    documents = [
        {"a": [{"x": 1}, {"x": 2}]}, {"a": [{"x": 2}, {"x": 1}]}, {"a": [{"x": 1, "y": "2"}]},
        {"a": [{"y": "1"}]},
        {"m": {"k": 1.5}}, {"m": {"l": 1.5}}, {"m": {"k": 2.5}}, {"d": "2026-01-01"}, {"p": 1.5}, {"p": 2},
        {},
    ]  # fmt: skip
    nothing = [{"a": []}, {"a": [{}]}, {"m": {}}, {"a": None}]
    rows, _ = columns.parse(texts(*documents, *nothing))
    digests = digest_rows(rows, KeyHash(b"s" * 16)).tolist()
    assert len(set(digests[: len(documents)])) == len(documents)
    assert set(digests[len(documents) :]) == {digests[len(documents) - 1]}
