"""What delta-rs does for us: SQL over a table, and the commits of an export, an ordinary Delta table.

No other module knows it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from ...errors import UsageError
from ..contract import StorageError
from ..store import without_secrets

if TYPE_CHECKING:
    from deltalake import DeltaTable, QueryBuilder

__all__ = ["ExportedFile", "OrdinaryTable", "check_engine_path", "query"]

_ENCODED = re.compile(r"[^A-Za-z0-9_./+=&'@:()!$,;-]")
"""Characters that names in a store should not have: seen with delta-rs 1.6.6 and polars 2.1."""

_ROWS = "__tailrace_rows"
"""The table's internal name in the engine; queries use other names."""
_DRAWN = re.compile("\x1b\\[[0-9;]*m|↳")
"""Colours, and the arrow between an error and its cause."""


def check_engine_path(path: str, instead: str) -> None:
    """UsageError for a path that delta-rs does not open: it decodes ``%41`` and the like twice. In an object
    store it encodes characters that a URI must encode twice, and then finds no file, as polars does.
    """
    _, is_object, name = path.partition("://")
    if is_object and (odd := _ENCODED.search(name)):
        raise UsageError(
            f"the engine finds no file below a name with {odd[0]!r}, such as {path!r}; {instead}, or choose "
            "another name"
        )
    if encoded := re.search(r"%[0-9A-Fa-f]{2}", path):
        raise UsageError(
            f"the engine would take {encoded[0]!r} in {path!r} for another character; {instead}, or give the "
            "folder another name"
        )


def query(
    uri: str, storage_options: Mapping[str, str], sql: str, *, names: Iterable[str], batch_rows: int
) -> pa.RecordBatchReader:
    """The answer to a query in which the table has these names. Errors have the engine's own classes and may
    repeat a store's answer: use `without_secrets`.
    """
    from deltalake import DeltaTable

    table = DeltaTable(uri, storage_options=dict(storage_options) or None)
    engine = _engine(table, names, batch_rows)
    if _reads_no_column(engine, sql):
        engine = _engine(table, names, batch_rows, where=" where vbucket >= 0")
    return pa.RecordBatchReader.from_stream(engine.execute(sql))


@contextlib.contextmanager
def _errors_of(what: str, storage_options: Mapping[str, str] | None) -> Iterator[None]:
    """Raise errors of the engine as ours: one line, without the values of the options."""
    from deltalake.exceptions import DeltaError

    try:
        yield
    except (DeltaError, OSError) as error:
        causes = [_DRAWN.sub("", line).strip() for line in str(error).splitlines()]  # one per line
        reason = without_secrets(": ".join(filter(None, causes)), storage_options or {})
        raise StorageError(f"{what}: {reason}") from None


def _engine(table: DeltaTable, names: Iterable[str], batch_rows: int, where: str = "") -> QueryBuilder:
    """An engine that knows the table by these names."""
    from deltalake import QueryBuilder

    engine = QueryBuilder().register(_ROWS, table)
    engine.execute(f"set datafusion.execution.batch_size = {batch_rows}")
    for name in sorted(names):
        engine.execute(f'create view "{name}" as select * from {_ROWS}{where}')
    return engine


def _reads_no_column(engine: QueryBuilder, sql: str) -> bool:
    """Whether a query needs no column of the rows, only their number.

    The engine then takes the number from the log, and ignores a limit (seen in delta-rs 1.6.6). A condition
    that is true for every row makes it read one column.
    """
    try:
        plans = pa.RecordBatchReader.from_stream(engine.execute(f"explain {sql}")).read_all()
    except Exception:  # noqa: BLE001 - the query itself will say what is wrong with it
        return False
    return any("DeltaScanMetaExec" in plan for plan in plans["plan"].to_pylist())


@dataclass(frozen=True)
class ExportedFile:
    """A Parquet file that is part of an export."""

    path: str
    size: int
    modified_ms: int
    statistics: str
    """As the log has them."""


class OrdinaryTable:
    """A Delta table without deletion vectors, positions and secrets, for other engines."""

    def __init__(self, uri: str, storage_options: Mapping[str, str], name: str) -> None:
        """UsageError if there is a table of another name."""
        from deltalake import DeltaTable

        self._uri = uri
        self._options = dict(storage_options) or None
        self._name = name
        with _errors_of(f"the export at {uri} can't be looked at", storage_options):
            self._is_there = DeltaTable.is_deltatable(uri, self._options)
            known = DeltaTable(uri, storage_options=self._options).metadata().name if self._is_there else name
        if known != name:
            raise UsageError(f"there is a table at {uri} that is not an export; choose another path")

    def replace(
        self, files: Sequence[ExportedFile], schema: pa.Schema, note: Mapping[str, str], description: str
    ) -> None:
        """Replace the table's content by these files; after an error that may or may not have happened."""
        from deltalake import CommitProperties, DeltaTable
        from deltalake import Schema as DeltaSchema
        from deltalake.exceptions import DeltaError
        from deltalake.transaction import AddAction, create_table_with_add_actions

        added = [
            AddAction(file.path, file.size, {}, file.modified_ms, True, file.statistics) for file in files
        ]
        properties = CommitProperties(custom_metadata=dict(note))
        with _errors_of(f"the export could not be written to {self._uri}", self._options):
            if self._is_there:
                DeltaTable(self._uri, storage_options=self._options).create_write_transaction(
                    list(added), "overwrite", schema, commit_properties=properties
                )
            else:
                create_table_with_add_actions(
                    self._uri,
                    DeltaSchema.from_arrow(schema),
                    added,
                    name=self._name,
                    description=description,
                    storage_options=self._options,
                    commit_properties=properties,
                )
        if self._is_there:  # earlier exports would stay for ever; readers have the usual week
            with contextlib.suppress(DeltaError, OSError):
                DeltaTable(self._uri, storage_options=self._options).vacuum(dry_run=False)
