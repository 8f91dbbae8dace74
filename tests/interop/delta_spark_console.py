"""A program for a Spark with delta-spark: ``delta_spark_console.py JARS``.

Runs the statements that come on standard input, a line each, and answers each with a line of JSON: its rows,
or the first line of what went wrong.
"""

from __future__ import annotations

import json
import sys

from interop.delta_spark_reads import delta_session


def main(jars: str) -> None:
    spark = delta_session(jars)
    spark.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
    spark.conf.set("spark.sql.sources.parallelPartitionDiscovery.parallelism", "2")
    for statement in sys.stdin:
        try:
            answer: dict[str, object] = {"rows": [list(row) for row in spark.sql(statement).collect()]}
        except Exception as error:  # noqa: BLE001 - whatever it is, the test gets it
            answer = {"error": str(error).splitlines()[0]}
        print("answer:", json.dumps(answer, default=str), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
