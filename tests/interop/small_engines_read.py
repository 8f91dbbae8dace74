"""A program: ``small_engines_read.py TABLE STAGES``. DataFusion, DuckDB and Daft read each stage and compare.

DuckDB's extension for Delta, here from PyPI, reads the table itself. Given delta-rs' table provider,
DataFusion 55 refuses a table with deletion vectors, and so does Daft: with an error and never with a wrong
row. All three take the Arrow rows of `tailrace.read_table`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import daft
import datafusion
import duckdb
from deltalake import DeltaTable
from duckdb_extensions import import_extension

import tailrace
from table.aged_table import COLUMNS, Stage, load_stages, rows_by_key


def by_datafusion(table: str, stage: Stage) -> None:
    context = datafusion.SessionContext()
    context.register_table("mirrored", DeltaTable(table, version=stage.version))
    counted = context.sql("select count(*) as n from mirrored").to_pylist()[0]["n"]
    assert counted == len(stage.rows), stage.name
    try:
        rows = context.sql(f"select {COLUMNS} from mirrored").to_pylist()
    except Exception as error:  # noqa: BLE001 - it has no class of its own
        assert "deletion vector" in str(error), error
        context.from_arrow(tailrace.read_table(table, stage.version).to_arrow(), "given")
        rows = context.sql(f"select {COLUMNS} from given").to_pylist()
    assert rows_by_key(rows) == stage.rows, stage.name


def by_duckdb(table: str, stage: Stage) -> None:
    mirrored = tailrace.read_table(table, stage.version).to_arrow()
    for place in (f"delta_scan('{table}', version => {stage.version})", "mirrored"):
        relation = duckdb.sql(f"select {COLUMNS} from {place}")
        assert relation is not None
        rows = [dict(zip(relation.columns, row, strict=True)) for row in relation.fetchall()]
        assert rows_by_key(rows) == stage.rows, (stage.name, place)
    del mirrored


def by_daft(table: str, stage: Stage) -> None:
    names = COLUMNS.split(", ")
    try:
        frame = daft.read_deltalake(table, version=stage.version).select(*names)
        rows = frame.to_pylist()
    except NotImplementedError as error:
        assert "deletion vectors" in str(error), error
        rows = (
            daft.from_arrow(tailrace.read_table(table, stage.version).to_arrow()).select(*names).to_pylist()
        )
    assert rows_by_key(rows) == stage.rows, stage.name


def main(table: str, stages: str) -> None:
    import_extension("delta")
    duckdb.sql("load delta")
    for stage in load_stages(Path(stages)):
        by_datafusion(table, stage)
        by_duckdb(table, stage)
        by_daft(table, stage)
    print(f"datafusion {datafusion.__version__}, duckdb {duckdb.__version__}, daft {daft.__version__}")


if __name__ == "__main__":
    main(*sys.argv[1:])
