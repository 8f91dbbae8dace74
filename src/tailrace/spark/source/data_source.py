"""The Spark data source ``tailrace``: found by its name, and light to import."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition

from ...errors import TailraceError, UsageError
from ..archived_modules import forget_packages_in_archives
from .columns import COLUMN_TYPES, column_types, ddl
from .plain_errors import plain_errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

__all__ = ["DDL", "TailraceDataSource", "register"]

DDL = ddl(COLUMN_TYPES)
"""The columns of a read that chooses none."""


_NO_STREAMS = "readStream needs Spark 4.2 or newer; read, ts.mirror and ts.table work with this one"


class NoStreamReader(DataSourceStreamReader):
    """Stands in for a stream's reader that can't be made.

    Spark hides errors of making a reader, but shows what its methods raise.
    """

    def __init__(self, why: TailraceError) -> None:
        self._why = why

    def initialOffset(self) -> dict[str, Any]:
        """Refuse."""
        with plain_errors():
            raise self._why

    def latestOffset(self, *_: Any) -> dict[str, Any]:
        """Refuse: a query with a checkpoint calls this first."""
        return self.initialOffset()

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Nothing gets here."""
        raise self._why


class TailraceDataSource(DataSource):
    """Changes of a bucket, as a batch or as a stream."""

    @classmethod
    def name(cls) -> str:
        """The name for ``format(...)``."""
        return "tailrace"

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        forget_packages_in_archives()  # Spark reuses the processes that plan for the next query
        # Spark's mapping does not keep the case of names
        self._given = dict(options)

    def schema(self) -> str:
        """The columns, as the options choose them.

        Spark asks for them when the frame is made, so errors in the options, or between them and the bucket,
        are raised here: in a query that is running, Spark would bury them in a page of its own.
        """
        from .options import parse_options

        with plain_errors():
            options = parse_options(self._given)
            from .feed import check_bucket

            check_bucket(options)
            return ddl(column_types(options))

    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch read of the columns of ``schema``."""
        from .batch import BatchReader

        forget_packages_in_archives()
        with plain_errors():
            return BatchReader(self._given, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """A streaming read of the columns of ``schema``."""
        try:
            from .stream import StreamReader
        except ModuleNotFoundError as error:
            if error.name != "pyspark.sql.streaming.datasource":
                raise
            return NoStreamReader(UsageError(_NO_STREAMS))
        forget_packages_in_archives()
        try:
            return StreamReader(self._given, schema)
        except TailraceError as error:
            return NoStreamReader(error.bare())


def register(spark: SparkSession) -> None:
    """Make ``format("tailrace")`` known to a session in which Spark's own search does not find it.

    The reason may be that the session's workers have a Python without Tailrace; then the error says what to
    set.
    """
    from ..spark_session import check_python_of
    from ..stream_failures import end_with_the_reason

    check_python_of(spark)
    end_with_the_reason()
    try:
        spark.dataSource.register(TailraceDataSource)
    except Exception as error:
        if "DATA_SOURCE_ALREADY_EXISTS" not in str(error):  # Spark 4.0 refuses what its search has found
            raise
