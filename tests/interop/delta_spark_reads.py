"""A program for a Spark with delta-spark: ``delta_spark_reads.py JARS TABLE STAGES``.

delta-spark reads each stage of the table and compares. Then it changes the table by OPTIMIZE.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from table.aged_table import COLUMNS, load_stages, rows_by_key
from tailrace.spark.spark_session import session


def delta_session(jars: str) -> Any:
    """A session with delta-spark; also for `bench/peers`."""
    files = ",".join(str(jar) for jar in sorted(Path(jars).glob("*.jar")))
    return session(
        "delta-spark",
        master="local[2]",
        **{
            "spark.jars": files,
            "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
            "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
            "spark.ui.enabled": "false",
            "spark.log.level": "ERROR",
            "spark.sql.shuffle.partitions": "2",
            "spark.databricks.delta.snapshotPartitions": "1",
        },
    )


def main(jars: str, table: str, stages: str) -> None:
    spark = delta_session(jars)
    for stage in load_stages(Path(stages)):
        frame = spark.read.format("delta").option("versionAsOf", stage.version).load(table)
        rows = frame.selectExpr(*COLUMNS.split(", ")).collect()
        assert rows_by_key(row.asDict() for row in rows) == stage.rows, stage.name
    newest = load_stages(Path(stages))[-1]
    history = spark.sql(f"DESCRIBE HISTORY delta.`{table}`").select("operation").collect()
    assert {"TAILRACE ROUND", "TAILRACE ROLLBACK", "TAILRACE COMPACT"} <= {row.operation for row in history}
    few = spark.read.format("delta").load(table).where("vbucket = 5").count()
    assert few == sum(1 for row in newest.rows.values() if row[0] == 5)
    spark.sql(f"OPTIMIZE delta.`{table}`")
    rows = spark.read.format("delta").load(table).selectExpr(*COLUMNS.split(", ")).collect()
    assert rows_by_key(row.asDict() for row in rows) == newest.rows
    print(spark.version)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
