"""``tailrace query``: SQL over the live rows of a mirrored table."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

import click
import pyarrow as pa

from ..errors import UsageError
from .common import TABLE, counted, json_option, note, printable
from .common import command as make_command
from .spark_options import parse_storage_options, storage_option

_ENGINE_ROWS = 8192
"""Per batch of the engine, unless rows are long: each of its threads holds several batches."""
_WIDEST = 1 << 20
_FILE_OF_TABLE = re.compile(r"\.parquet|/_dv/|/_delta_log/|_last_checkpoint")
"""In an error of the engine, these say that the table is at fault, not the query."""


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

    In the query the table is called t, or by the name of its folder. The SQL dialect is DataFusion's. Does
    not start Spark.
    """
    from ..table.contract import TableDamaged
    from ..table.file_reading import rows_per_batch
    from ..table.opening import TableOptions, open_table, query_table
    from ..table.store import without_secrets

    storage = parse_storage_options(storage_options)
    opened = open_table(table, TableOptions(storage))
    at_once = rows_per_batch(opened.store, opened.files(), _ENGINE_ROWS)
    folder = PurePosixPath(opened.uri).name
    names = {"t", folder, folder.lower()} if re.fullmatch(r"[A-Za-z_]\w*", folder) else {"t"}
    try:
        reader = query_table(opened, storage, sql, names=names, batch_rows=at_once)
        rows = _as_json(reader) if as_json else _as_table(reader)
    except (BrokenPipeError, UsageError):  # the reader of our output has gone; or it is our own error
        raise
    except Exception as error:  # noqa: BLE001 - the engine has its own classes for errors in a query
        text = without_secrets(str(error), storage)
        reason = text.splitlines()[0]
        cause = error if text == str(error) else None  # --debug shows all of it
        if _FILE_OF_TABLE.search(reason):
            raise TableDamaged(
                f"a file of the table can't be read: {reason}; restore it, or make a new table beside it "
                "(a _last_checkpoint of what is gone may be deleted)"
            ) from cause
        raise UsageError(f"the query can't be answered: {reason}") from cause
    note(counted(rows, "row"))


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
    # only a terminal limits the width; in a file or a pipe columns are as wide as they need to be
    width = None if sys.stdout.isatty() else _WIDEST
    Console(width=width).print(shown)
    return count


def _text(value: Any) -> str:
    plain = isinstance(value, dict | list)
    text = json.dumps(value, default=_shown, ensure_ascii=False) if plain else _shown(value)
    return printable(text, " ")


def _shown(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
