"""A job for spark-submit: bring a mirror up to date and verify it.

spark-submit examples/job.py couchbase://127.0.0.1/default /data/people
"""

import sys

import tailrace.spark as ts


def main(url: str, table: str) -> int:
    """Mirror once, then verify."""
    spark = ts.session("mirror job")
    ts.mirror(spark, url, table, once=True).awaitTermination()
    verdict = ts.verify(spark, url, table)
    print(f"{verdict.documents} documents, {verdict.rows} rows, {len(verdict.differences)} differences")
    return 0 if verdict.equal else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
