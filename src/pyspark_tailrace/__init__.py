"""What makes ``spark.read.format("tailrace")`` work without a registration call.

Spark looks for top-level modules whose name starts with ``pyspark_`` and takes their ``DefaultSource``. An
exception in any of them hides them all, so only the class is imported here, which itself imports nothing
heavy.
"""

from tailrace.spark.source.data_source import TailraceDataSource as DefaultSource

__all__ = ["DefaultSource"]
