"""Opening mirrored tables: the one place that knows which format they have."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from ..clock import SYSTEM, Clock
from .contract import Table
from .delta import delta_rs
from .delta.opening import check_place
from .delta.table import DeltaMirrorTable
from .delta.undo import UndoWish
from .document_columns import DocumentColumns
from .store import TableStore

__all__ = ["TableOptions", "check_not_inside", "open_or_create", "open_table", "query_table", "table_exists"]


@dataclass(frozen=True)
class TableOptions:
    """How a table is opened."""

    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    undo_s: float | None = None
    """How long earlier versions are kept."""
    undo_bytes: int | None = None
    clock: Clock = SYSTEM

    def undo(self) -> UndoWish:
        """Which earlier versions to keep; what is None here is as the table itself has it."""
        span_ms = None if self.undo_s is None else int(self.undo_s * 1000)
        return UndoWish(span_ms, self.undo_bytes)


def open_table(uri: str | os.PathLike[str], options: TableOptions | None = None) -> Table:
    """The table at ``uri``; an error if there is none or no mirror made it."""
    how = options or TableOptions()
    return DeltaMirrorTable.open(uri, storage_options=how.storage_options, undo=how.undo(), clock=how.clock)


def open_or_create(
    uri: str | os.PathLike[str],
    *,
    schema: pa.Schema,
    source: Mapping[str, Any],
    documents: DocumentColumns | None = None,
    options: TableOptions | None = None,
) -> Table:
    """The table at ``uri``, made if there is none; it must mirror ``source`` and nothing else."""
    how = options or TableOptions()
    return DeltaMirrorTable.open_or_create(
        uri,
        schema=schema,
        source=source,
        documents=documents,
        storage_options=how.storage_options,
        undo=how.undo(),
        clock=how.clock,
    )


def query_table(
    table: Table, storage_options: Mapping[str, str], sql: str, *, names: Iterable[str], batch_rows: int
) -> pa.RecordBatchReader:
    """The answer of an SQL engine to a query in which the table has these names.

    Errors in the query have the engine's own classes.
    """
    delta_rs.check_engine_path(table.uri, "read it with Spark")
    return delta_rs.query(table.uri, storage_options, sql, names=names, batch_rows=batch_rows)


def check_not_inside(uri: str, storage_options: Mapping[str, str]) -> None:
    """UsageError for a place inside a table, which belongs to that table alone."""
    check_place(TableStore(uri, storage_options))


def table_exists(uri: str | os.PathLike[str], options: TableOptions | None = None) -> bool:
    """Whether there is a table at ``uri``, of whatever kind."""
    store = TableStore(uri, (options or TableOptions()).storage_options)
    return any(True for _ in store.list("_delta_log/"))
