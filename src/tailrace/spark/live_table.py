"""A mirrored table as a DataFrame, in any Spark session, without a jar.

Spark's own Parquet reader reads the data files, so columns are pruned and filters reach the files. Rows that
the table's deletion vectors mask are left out by their number in the file, which Spark knows: a mask is an
array of numbers with a bit for each of 64 rows, joined by the file's name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ..table.file_reading import scan
from ..table.hashing import KeyHash
from ..table.index import row_numbers
from ..table.reading import LiveFile, LiveRows, PositionVector, read_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pyarrow.compute as pc
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["table"]

_FILE, _ROW, _DEAD = "__tailrace_file", "__tailrace_row", "__tailrace_dead"
_GLOB = str.maketrans({sign: f"\\{sign}" for sign in "\\*?[]{},"})
"""Spark takes these for patterns in a path."""


def table(
    spark: SparkSession,
    path: str | os.PathLike[str],
    version: int | None = None,
    at: PositionVector | None = None,
    *,
    columns: Sequence[str] | None = None,
    filter: pc.Expression | Sequence[Any] | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """The live rows of a mirrored table.

    ``version`` is a version of the table, ``at`` a position by vbucket, which gives the newest state of each
    vbucket at or before it; with neither, the rows are the newest. The frame shows that state whatever the
    mirror does later, while the table keeps the version (``--undo``).

    Local files are read by Spark itself, which reads only the columns that a query needs and skips what its
    filters exclude. Files on an object store are read by Python on the executors, with ``storage_options``,
    so they need no jar either. Spark does not tell Python what a query needs: choose it with ``columns`` and
    ``filter``, which are those of `tailrace.read_table`.
    """
    rows = read_table(path, version, at, columns, filter, storage_options=storage_options)
    opened, schema, files = rows.table, rows.table_schema, list(rows.files)
    if not files:
        return spark.createDataFrame([], _ddl(rows.schema))
    if not opened.store.is_local or rows.where is not None:
        return _by_python(spark, rows)
    places = [opened.store.local_path(live.file.path) for live in files]
    frame = spark.read.schema(_ddl(schema)).parquet(*[f"file:{_escaped(str(place))}" for place in places])
    return _without_dead(spark, frame, files, list(rows.columns))


def _escaped(path: str) -> str:
    return path.translate(_GLOB)


def _without_dead(spark: SparkSession, rows: DataFrame, files: list[LiveFile], names: list[str]) -> DataFrame:
    from pyspark.sql import functions as sf

    masked = [live for live in files if live.dead]
    if not masked:
        return rows.select(*[sf.col(_quoted(name)) for name in names])
    masks = pa.table(
        {
            _FILE: pa.array([live.file.path.rpartition("/")[2] for live in masked], pa.string()),
            _DEAD: pa.array([_words(live) for live in masked], pa.list_(pa.int64())),
        }
    )
    numbered = rows.select(
        *[sf.col(_quoted(name)) for name in names],
        sf.col("_metadata.file_name").alias("__tailrace_name"),
        sf.col("_metadata.row_index").alias(_ROW),
    )
    joined = numbered.join(
        sf.broadcast(spark.createDataFrame(masks)), sf.col("__tailrace_name") == sf.col(_FILE), "left"
    )
    alive = joined.where(
        f"{_DEAD} is null or getbit({_DEAD}[cast({_ROW} div 64 as int)], cast({_ROW} % 64 as int)) = 0"
    )
    return alive.select(*[sf.col(_quoted(name)) for name in names])


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _words(live: LiveFile) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A mask as 64-bit numbers, a bit for each row."""
    bits = np.zeros(-(-live.file.rows // 64) * 64, dtype=np.uint8)
    bits[row_numbers(live.dead)] = 1
    return np.packbits(bits, bitorder="little").view("<i8")


def _by_python(spark: SparkSession, rows: LiveRows) -> DataFrame:
    """The rows as read by Python on the executors, one file per task."""
    store, secret, schema = rows.table.store, rows.table.secret, rows.table_schema
    columns, where = rows.columns, rows.where
    parts = [(live.file, live.dead.serialize()) for live in rows.files]

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyroaring import BitMap

        for batch in batches:
            for number in batch["id"].to_pylist():
                file, dead = parts[number]
                masks = {file.path: BitMap.deserialize(dead)}
                yield from scan(
                    store, [file], masks, schema, key_hash=KeyHash(secret), columns=columns, where=where
                )

    numbers = spark.range(0, len(parts), 1, len(parts))
    return numbers.mapInArrow(read, _ddl(rows.schema))


def _ddl(schema: pa.Schema) -> Any:
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema)
