"""Other engines read a mirrored table: the same rows as `verify`, at every stage of its life.

What needs a download is tried by `make interop`: tests/interop/test_engines_of_others.py.
"""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

import tailrace
import tailrace.testing
from spark.local_jobs import LocalJobs
from table.aged_table import COLUMNS, DOCS, Stage, aged_table, rows_by_key
from tailrace.spark.rounds.idle_sources import close_idle_sources
from tailrace.spark.rounds.setup import build_mirror
from tailrace.table.opening import open_table


@pytest.fixture(scope="module")
def aged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Stage]]:
    path = tmp_path_factory.mktemp("engines") / "table"
    return path, aged_table(path)


def test_delta_rs_polars_and_pandas(aged: tuple[Path, list[Stage]]) -> None:
    path, stages = aged
    names = COLUMNS.split(", ")
    for stage in stages:
        query = QueryBuilder().register("t", DeltaTable(str(path), version=stage.version))
        selected = pa.table(query.execute(f"select {COLUMNS} from t").read_all())
        assert rows_by_key(selected.to_pylist()) == stage.rows, stage.name
        assert rows_by_key(selected.to_pandas().to_dict("records")) == stage.rows, stage.name
        frame = pl.scan_delta(str(path), version=stage.version).select(names).collect()
        assert rows_by_key(frame.to_dicts()) == stage.rows, stage.name
        own = tailrace.read_table(path, stage.version, columns=names)
        assert rows_by_key(own.to_pandas().to_dict("records")) == stage.rows, stage.name


def test_filters_skip_no_live_row(aged: tuple[Path, list[Stage]]) -> None:
    path, stages = aged
    wanted = {key: row for key, row in stages[-1].rows.items() if row[0] == 5 and key > "key::2"}
    query = QueryBuilder().register("t", DeltaTable(str(path)))
    sql = f"select {COLUMNS} from t where vbucket = 5 and key > 'key::2'"
    assert rows_by_key(pa.table(query.execute(sql).read_all()).to_pylist()) == wanted
    lazy = pl.scan_delta(str(path)).filter((pl.col("vbucket") == 5) & (pl.col("key") > "key::2"))
    assert rows_by_key(lazy.select(COLUMNS.split(", ")).collect().to_dicts()) == wanted


def test_files_are_skipped_by_key_vbucket_and_time(tmp_path: Path) -> None:
    """A query for some documents does not open the other files, which are gone here."""
    path = tmp_path / "table"
    with tailrace.testing.node(vbuckets=2) as node:
        for vbucket, name in enumerate(("early", "late")):
            for number in range(20):
                node.set(f"{name}::{number}", {name: number}, vbucket=vbucket)
            made = build_mirror(
                LocalJobs(), node.url, path, once=True, in_background=False, maintenance=False
            )
            made.prepare()
            made.run()
            time.sleep(0.01)
    close_idle_sources()
    first, second = sorted(
        open_table(path).files(), key=lambda file: json.loads(file.stats)["minValues"]["key"]
    )
    between = pl.read_parquet(path / second.path)["event_time"].min()
    assert isinstance(between, datetime)
    (path / first.path).unlink()
    wanted = {f"late::{number}" for number in range(20)}
    moment = between.isoformat()
    for condition in ("vbucket = 1", "key >= 'late'", f"event_time >= timestamp '{moment}'"):
        query = QueryBuilder().register("t", DeltaTable(str(path)))
        chosen_keys = pa.table(query.execute(f"select key from t where {condition}").read_all())
        assert set(chosen_keys["key"].to_pylist()) == wanted, condition
    for chosen in (pl.col("vbucket") == 1, pl.col("key") >= "late", pl.col("event_time") >= between):
        frame = pl.scan_delta(str(path)).filter(chosen).select("key").collect()
        assert set(frame["key"]) == wanted, chosen


def test_the_history_says_what_each_commit_was(aged: tuple[Path, list[Stage]]) -> None:
    path, _ = aged
    newest: dict[str, dict[str, int]] = {}
    for entry in DeltaTable(str(path)).history():
        metrics = {name: int(count) for name, count in entry.get("operationMetrics", {}).items()}
        newest.setdefault(entry["operation"], metrics)
    of_files = {"numAddedFiles", "numRemovedFiles", "numDeletionVectorsUpdated", "numDeletedRows"}
    last, back, compacted = (newest[f"TAILRACE {what}"] for what in ("ROUND", "ROLLBACK", "COMPACT"))
    assert all(of_files <= metrics.keys() for metrics in (last, back, compacted))
    written = range(3, DOCS, 50)
    there_before = sum(number % 12 != 1 for number in written)
    assert (last["changes"], last["rows_written"], last["rows_masked"]) == (60, 60, there_before)
    assert last["bytes_written"] > 0
    lost = len(range(2, DOCS, 9))
    assert back["vbuckets"] == 8
    assert back["rows_back"] == back["rows_gone"] >= lost, "each of them had replaced another row"
    assert compacted["files"] >= 2
    assert compacted["rows"] >= lost
    assert compacted["bytes"] > 0


def test_a_reader_that_knows_no_deletion_vectors_refuses(aged: tuple[Path, list[Stage]]) -> None:
    path, _ = aged
    with pytest.raises(Exception, match="deletionVectors"):
        DeltaTable(str(path)).to_pandas()
