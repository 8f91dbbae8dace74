"""``tailrace query``: SQL over the live rows of a mirrored table."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import click
import pyarrow as pa

from ..errors import UsageError
from .common import TABLE, counted, json_option, note
from .common import command as make_command
from .spark_options import parse_storage_options, storage_option

if TYPE_CHECKING:
    from deltalake import DeltaTable, QueryBuilder

_ENGINE_ROWS = 8192
"""In a batch of the engine, unless rows are long: each of its threads holds several batches."""
_WIDEST = 1 << 20
_ROWS = "__tailrace_rows"
"""The table's own name for the engine; queries know it by others."""


@make_command(
    "query",
    example="""
tailrace query ./people "select count(*) from t"
tailrace query ./people "select vbucket, max(seqno) from people group by vbucket" --json
""",
)
@click.argument("table", type=TABLE)
@click.argument("sql")
@json_option("Write one JSON object per row.")
@storage_option
def command(table: str, sql: str, as_json: bool, storage_options: tuple[str, ...]) -> None:
    """Query the live rows of a table.

    In the query the table is called t, and by the name of its folder. The SQL is DataFusion's. No Spark is
    started.
    """
    from deltalake import DeltaTable

    from ..table.contract import TableDamaged
    from ..table.exporting import check_engine_path
    from ..table.opening import TableOptions, open_table
    from ..table.scan import rows_per_batch

    storage = parse_storage_options(storage_options)
    opened = open_table(table, TableOptions(storage))
    check_engine_path(opened.uri, "read it with Spark")
    at_once = rows_per_batch(opened.store, opened.files(), _ENGINE_ROWS)
    delta = DeltaTable(opened.uri, storage_options=storage or None)
    folder = PurePosixPath(opened.uri).name
    names = {"t", folder, folder.lower()} if re.fullmatch(r"[A-Za-z_]\w*", folder) else {"t"}
    try:
        engine = _engine(delta, names, at_once)
        if _reads_no_column(engine, sql):
            engine = _engine(delta, names, at_once, where=" where vbucket >= 0")
        reader = pa.RecordBatchReader.from_stream(engine.execute(sql))
        rows = _as_json(reader) if as_json else _as_table(reader)
    except BrokenPipeError:  # whoever read it has seen enough
        raise
    except Exception as error:  # the engine has its own classes for errors in a query
        reason = str(error).splitlines()[0]
        if ".parquet" in reason:
            raise TableDamaged(
                f"a file of the table can't be read: {reason}; restore it, or make a new table beside it"
            ) from error
        raise UsageError(f"the query can't be answered: {reason}") from error
    note(counted(rows, "row"))


def _engine(delta: DeltaTable, names: Iterable[str], at_once: int, where: str = "") -> QueryBuilder:
    """What answers queries, with the table under these names."""
    from deltalake import QueryBuilder

    engine = QueryBuilder().register(_ROWS, delta)
    engine.execute(f"set datafusion.execution.batch_size = {at_once}")
    for name in sorted(names):
        engine.execute(f'create view "{name}" as select * from {_ROWS}{where}')
    return engine


def _reads_no_column(engine: QueryBuilder, sql: str) -> bool:
    """Whether a query needs no column of the rows, only their number.

    The engine takes that from the log then, and forgets a limit (seen in delta-rs 1.6.6). A condition that is
    true of every row makes it read one column.
    """
    try:
        plans = pa.RecordBatchReader.from_stream(engine.execute(f"explain {sql}")).read_all()
    except Exception:  # noqa: BLE001 - the query itself will say what is wrong with it
        return False
    return any("DeltaScanMetaExec" in plan for plan in plans["plan"].to_pylist())


def _as_json(batches: Iterable[pa.RecordBatch]) -> int:
    count = 0
    for batch in batches:
        for row in batch.to_pylist(maps_as_pydicts="lossy"):
            click.echo(json.dumps(row, default=_shown, ensure_ascii=False))
            count += 1
    return count


def _as_table(reader: pa.RecordBatchReader) -> int:
    from rich.console import Console
    from rich.table import Table

    shown = Table(*[field.name for field in reader.schema])
    count = 0
    for batch in reader:
        for row in batch.to_pylist(maps_as_pydicts="lossy"):
            shown.add_row(*["" if value is None else _text(value) for value in row.values()])
            count += 1
    # only a terminal has an edge; in a file or a pipe columns are as wide as they must be
    width = None if sys.stdout.isatty() else _WIDEST
    Console(width=width).print(shown)
    return count


def _text(value: Any) -> str:
    plain = isinstance(value, dict | list)
    text = json.dumps(value, default=_shown, ensure_ascii=False) if plain else _shown(value)
    return "".join(sign if sign.isprintable() else " " for sign in text)


def _shown(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
