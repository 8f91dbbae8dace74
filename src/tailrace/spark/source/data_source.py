"""The Spark data source ``tailrace``: found by its name, and light to import."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader

from ..archived_modules import forget_packages_in_archives

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

__all__ = ["DDL", "TailraceDataSource", "register"]

DDL = (
    "op STRING, key BINARY, value BINARY, bucket STRING, scope STRING, collection STRING, vbucket INT, "
    "vb_uuid BIGINT, seqno BIGINT, rev BIGINT, cas BIGINT, flags INT, expiry BIGINT, datatype STRING, "
    "xattrs STRING, event_time TIMESTAMP, snapshot_start BIGINT, snapshot_end BIGINT"
)
"""The columns; a test holds them against those of `tailrace.columns`."""


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
        """The columns are always the same; options say what is in them."""
        from .options import parse_options

        parse_options(self._given)  # what is wrong with an option is said before anything runs
        return DDL

    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch read."""
        from .batch import BatchReader

        forget_packages_in_archives()
        return BatchReader(self._given)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """A streaming read."""
        from .stream import StreamReader

        forget_packages_in_archives()
        return StreamReader(self._given)


def register(spark: SparkSession) -> None:
    """Make ``format("tailrace")`` known to a session in which Spark's own search does not find it."""
    spark.dataSource.register(TailraceDataSource)
