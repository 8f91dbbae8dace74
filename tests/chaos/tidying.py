"""What people do to a mirror's table with other tools."""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, QueryBuilder

from tailrace.table.delta.log import DeltaLog
from tailrace.table.delta.vectors import vector_path
from tailrace.table.rows import table_schema
from tailrace.table.store import TableStore


def tidy(table: str, how: str) -> None:
    """Join small files, take old files away, or write a checkpoint of the log."""
    if how == "optimize":
        optimize(table)
    elif how == "vacuum":
        vacuum(table)
    else:
        assert how == "checkpoint"
        DeltaTable(table).create_checkpoint()


def vacuum(table: str) -> None:
    """Remove every file that the newest version does not name, like delta-spark's VACUUM RETAIN 0 HOURS."""
    state = DeltaLog(TableStore(table)).load()
    assert state is not None
    named = {path for file in state.files.values() for path in (file.path, vector_path(file.vector))}
    for stray in (*Path(table).glob("*.parquet"), *Path(table).glob("_dv/*.bin")):
        if str(stray.relative_to(table)) not in named:
            stray.unlink()


def optimize(table: str) -> None:
    """All live rows in one new file that knows nothing of us, as delta-spark's OPTIMIZE leaves it: delta-rs
    does not write to a table with domain metadata.
    """
    rows = QueryBuilder().register("mirrored", DeltaTable(table)).execute("select * from mirrored")
    whole = pa.table(rows.read_all()).cast(table_schema(keep_deletes=False))
    state = DeltaLog(TableStore(table)).load()
    assert state is not None
    if not state.files:
        return
    now_ms = time.time_ns() // 1_000_000
    actions: list[dict[str, object]] = [
        {"commitInfo": {"timestamp": now_ms, "operation": "OPTIMIZE", "operationParameters": {}}}
    ]
    actions += [
        {"remove": file.removed(now_ms, data_change=False).to_json()} for file in state.files.values()
    ]
    if whole.num_rows:
        name = f"part-00000-{uuid.uuid4()}-c000.snappy.parquet"
        pq.write_table(whole, Path(table) / name)
        add = {
            "path": name,
            "partitionValues": {},
            "size": (Path(table) / name).stat().st_size,
            "modificationTime": now_ms,
            "dataChange": False,
            "stats": json.dumps({"numRecords": whole.num_rows}),
        }
        actions.append({"add": add})
    commit = Path(table) / "_delta_log" / f"{state.version + 1:020d}.json"
    with commit.open("x") as file:
        file.write("\n".join(map(json.dumps, actions)))
