"""`query`, `export` and `wait`: a mirrored table from the command line, without Spark."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyroaring import BitMap

from table.s3 import options_for, refusing_store
from table.test_table_model import Change, changes_table
from tailrace.cli.main import main
from tailrace.model import Position
from tailrace.table.contract import Commit
from tailrace.table.delta import delta_rs
from tailrace.table.delta.table import DeltaMirrorTable
from tailrace.table.rows import TABLE_SCHEMA
from tailrace.table.sink import TableWriter


@pytest.fixture
def people(tmp_path: Path) -> Path:
    """Ten documents, of which two were written twice and one was deleted."""
    path = tmp_path / "people"
    table = DeltaMirrorTable.open_or_create(path, schema=TABLE_SCHEMA, source={"bucket": "b"})
    table.claim()
    rounds: list[list[Change]] = [
        [(3, f"k{number}", number + 1, f'{{"n":{number}}}') for number in range(10)],
        [(3, "k0", 11, '{"n":100}'), (3, "k1", 12, '{"n":101}'), (3, "k2", 13, None)],
    ]
    for changes in rounds:
        sink = TableWriter(table.store, table.schema, table.secret, tuple(table.files())).sink()
        sink.add(changes_table(changes))
        result = sink.finish()
        table.commit(
            Commit(
                "TAILRACE ROUND",
                {3: Position.at(11, changes[-1][2])},
                result.added,
                masked={name: BitMap.deserialize(rows) for name, rows in result.masked.items()},
            )
        )
    return path


def test_a_query_sees_live_rows_only(people: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["query", str(people), "select key, seqno from people where seqno > 9 order by key", "--json"])
        == 0
    )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"key": "k0", "seqno": 11}, {"key": "k1", "seqno": 12}, {"key": "k9", "seqno": 10}]
    assert main(["query", str(people), "select count(*) as live from t"]) == 0
    shown = capsys.readouterr()
    assert "live" in shown.out
    assert "9" in shown.out
    assert "1 row" in shown.err


def test_a_reader_that_has_seen_enough(people: Path) -> None:
    """`tailrace query … --json | head -1` is not an error."""
    query = "select a.key from t a, t b, t c, t d, t e, t f"
    command = [sys.executable, "-m", "tailrace", "query", str(people), query, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert json.loads(process.stdout.readline()).keys() == {"key"}
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_a_map_and_a_wide_table(people: Path, capsys: pytest.CaptureFixture[str]) -> None:
    query = "select map(['a', 'b'], [1, 2]) as m from t where key = 'k0'"
    assert main(["query", str(people), query, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"m": {"a": 1, "b": 2}}
    assert main(["query", str(people), "select * from t where key = 'k0'"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*TABLE_SCHEMA.names, '{"n":100}'))  # nothing is cut off or wrapped


@pytest.mark.parametrize(
    ("query", "rows"),
    [
        ("select 5 from t limit 1", 1),
        ("SELECT 5 AS five FROM people LIMIT 3 OFFSET 7", 2),
        ("select 5 from (select * from t limit 4)", 4),
        ("select 5 from t order by 1 limit 2", 2),
        ("select 5 from t", 9),
        ("select key from t limit 3", 3),
        ("select 5 from t limit 1 -- no more", 1),
        ("explain select 5 from t limit 1", 2),
        ("select 5 from t a, t b where a.key = (select max(key) from people) limit 4;", 4),
    ],
)
def test_a_limit_where_no_column_is_named(
    people: Path, query: str, rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine answers such a query from the log, and then ignores the limit."""
    assert main(["query", str(people), query, "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == rows


def test_a_table_whose_name_has_capitals(people: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capitals = people.rename(people.with_name("People"))
    for name in ("People", '"People"', "people", "t"):
        for column in ("key", "5"):
            assert main(["query", str(capitals), f"select {column} from {name} limit 2", "--json"]) == 0, name
            assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_query_that_is_none(people: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["query", str(people), "selec 1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("tailrace: error: the query can't be answered: ")
    assert said.count("\n") == 1


def test_an_export_that_every_engine_reads(people: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = people.parent / "plain"
    for _ in range(2):
        assert main(["export", str(people), str(plain), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["rows"] == 9
        delta = DeltaTable(plain)
        assert delta.protocol().min_reader_version == 1
        rows = delta.to_pyarrow_table().to_pylist()
        assert {row["key"]: row["seqno"] for row in rows} == {
            "k0": 11,
            "k1": 12,
            **{f"k{number}": number + 1 for number in range(3, 10)},
        }
    assert DeltaTable(plain).version() == 1, "the second export is one commit"


def test_what_was_exported_long_ago_goes(people: Path) -> None:
    """An export that is replaced every night does not grow for ever."""
    plain = people.parent / "plain"
    for _ in range(2):
        assert main(["export", str(people), str(plain)]) == 0
    assert len(list(plain.glob("*.parquet"))) == 2  # somebody may be reading it
    DeltaTable(plain).alter.set_table_properties({"delta.deletedFileRetentionDuration": "interval 0 days"})
    assert main(["export", str(people), str(plain)]) == 0
    assert len(list(plain.glob("*.parquet"))) == 1
    assert polars.read_delta(str(plain)).height == 9


def test_an_export_as_parquet_replaces_the_one_before(people: Path) -> None:
    folder = people.parent / "folder"
    for _ in range(2):
        assert main(["export", str(people), str(folder), "--format", "parquet"]) == 0
        assert pq.read_table(folder).num_rows == 9
        assert polars.scan_parquet(folder / "*.parquet").collect().height == 9
    assert [path.name for path in people.parent.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("form", ["delta", "parquet"])
def test_an_export_replaces_nobody_elses(people: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(people), str(people), "--format", form]) == 2
    assert "is not an export; choose another path" in capsys.readouterr().err


def test_wait(people: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wait", str(people), "--token", "3:11:13", "--token", "3:11:2"]) == 0
    assert main(["wait", str(people), "--token", "3:11:14", "--timeout", "1ms"]) == 1
    assert "the table does not hold 3:11:14 yet" in capsys.readouterr().err
    assert main(["wait", str(people), "--token", "3:11"]) == 2


def test_a_secret_is_not_shown(people: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["query", str(people), "select 1", "--storage-option", "hunter2"]) == 2
    assert "hunter2" not in capsys.readouterr().err


def test_a_query_does_not_repeat_what_was_signed(
    people: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine has its own connection to the store, so its errors do not come from `TableStore`."""

    def query_elsewhere(_table: object, options: Any, sql: str, **how: Any) -> pa.RecordBatchReader:
        return delta_rs.query("s3://bucket/table", options, sql, **how)

    monkeypatch.setattr("tailrace.table.opening.query_table", query_elsewhere)
    with refusing_store() as port:
        options = options_for(port, aws_session_token="hush-token")
        given = [text for name, value in options.items() for text in ("--storage-option", f"{name}={value}")]
        assert main(["query", str(people), "select 1", "--debug", *given]) == 1
    said = capsys.readouterr().err
    assert "lacked the necessary privileges" in said
    assert "hush" not in said


def test_a_query_takes_long_rows_few_at_a_time(
    people: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine gathers what a filter leaves into batches of a number of rows, however long they are."""
    sizes: list[int] = []

    def taken(batches: Iterable[pa.RecordBatch]) -> int:
        sizes.extend(batch.num_rows for batch in batches)
        return sum(sizes)

    monkeypatch.setattr("tailrace.cli.query._as_json", taken)
    command = ["query", str(people), "select key, value from t where seqno <> 10", "--json"]
    assert main(command) == 0
    assert max(sizes) > 1
    monkeypatch.setattr("tailrace.table.file_reading._BATCH_BYTES", 1)
    sizes.clear()
    assert main(command) == 0
    assert sizes == [1] * 8
