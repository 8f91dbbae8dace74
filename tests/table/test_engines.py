"""Other engines read a mirrored table: the same rows as `verify`, at every stage of its life.

What needs a download is tried by `make interop`: tests/interop/test_engines_of_others.py.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

import tailrace
from table.aged_table import COLUMNS, Stage, aged_table, rows_by_key


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


def test_a_reader_that_knows_no_deletion_vectors_refuses(aged: tuple[Path, list[Stage]]) -> None:
    path, _ = aged
    with pytest.raises(Exception, match="deletionVectors"):
        DeltaTable(str(path)).to_pandas()
