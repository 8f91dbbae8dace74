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
    """In place of a stream's reader that can't be made.

    Spark hides what goes wrong while a reader is made, and shows what its calls raise.
    """

    def __init__(self, why: TailraceError) -> None:
        self._why = why

    def initialOffset(self) -> dict[str, Any]:
        """Refuse."""
        with plain_errors():
            raise self._why

    def latestOffset(self, *_: Any) -> dict[str, Any]:
        """Refuse: a query that has a checkpoint begins here."""
        return self.initialOffset()

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Nothing gets here."""
        raise self._why


class TailraceDataSource(DataSource):
    """Changes of a bucket, as a batch or as a stream."""

    @classmethod
    def name(cls) -> str:
        """What stands in ``format(...)``."""
        return "tailrace"

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        forget_packages_in_archives()  # the processes that plan are kept for the next query
        # Spark hands over a mapping that forgets the case of names
        self._given = dict(options)

    def schema(self) -> str:
        """The columns, as the options choose them.

        Spark asks for them when the frame is made. What is wrong with the options, or between them and the
        bucket, is said at this moment: an error of a query that runs already is a page of Spark's own.
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

    If the session's workers have a Python without Tailrace, that is the reason, and the error says what to
    set.
    """
    from ..spark_session import check_python_of
    from ..stream_failures import end_with_the_reason

    check_python_of(spark)
    end_with_the_reason()
    try:
        spark.dataSource.register(TailraceDataSource)
    except Exception as error:
        if "DATA_SOURCE_ALREADY_EXISTS" not in str(error):  # Spark 4.0 minds what its own search has found
            raise
