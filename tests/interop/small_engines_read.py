"""A program: ``small_engines_read.py TABLE STAGES``. DataFusion and DuckDB read each stage and compare.

Both take the Arrow rows of `tailrace.read_table`. Handed delta-rs' table provider, DataFusion 55 refuses
where deletion vectors have to be applied, with an error and never with a wrong row. DuckDB has an extension
for Delta, which it downloads from its own site: it is used where it can be had.
"""

from __future__ import annotations

import sys
from pathlib import Path

import datafusion
import duckdb
from deltalake import DeltaTable

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


def by_duckdb(table: str, stage: Stage, *, has_extension: bool) -> None:
    if has_extension:
        relation = duckdb.sql(f"select {COLUMNS} from delta_scan('{table}', version => {stage.version})")
    else:
        mirrored = tailrace.read_table(table, stage.version).to_arrow()
        relation = duckdb.sql(f"select {COLUMNS} from mirrored")
        del mirrored
    assert relation is not None
    rows = [dict(zip(relation.columns, row, strict=True)) for row in relation.fetchall()]
    assert rows_by_key(rows) == stage.rows, stage.name


def has_delta_extension() -> bool:
    try:
        duckdb.sql("install delta; load delta")
    except duckdb.Error:
        return False
    return True


def main(table: str, stages: str) -> None:
    extension = has_delta_extension()
    for stage in load_stages(Path(stages)):
        by_datafusion(table, stage)
        by_duckdb(table, stage, has_extension=extension)
    print(f"datafusion {datafusion.__version__}, duckdb {duckdb.__version__}, its extension: {extension}")


if __name__ == "__main__":
    main(*sys.argv[1:])
