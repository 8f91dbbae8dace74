"""From a bucket to an answer: a typed mirror, a join, reading your writes, and a failover that loses one.

python examples/typed_session.py [FOLDER]

Starts a node of its own, and writes to it with Couchbase's SDK (`pip install couchbase`).
"""

import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.options import ClusterOptions

import tailrace.spark as ts
import tailrace.testing

QUESTION = """
    select r.name as region, count(*) as customers, sum(c.total) as total
    from customers c join regions r on c.address.region = r.id
    group by r.name order by r.name
"""


def main(spark, folder):
    """Run the session and print what a person would see."""
    table, regions = folder / "customers", folder / "regions.parquet"
    pq.write_table(pa.table({"id": ["N", "S"], "name": ["north", "south"]}), regions)
    with tailrace.testing.node(vbuckets=64) as node:
        login = ClusterOptions(PasswordAuthenticator("Administrator", "password"))
        cluster = Cluster.connect(f"couchbase://{node.host}:{node.port}", login)
        bucket = cluster.bucket("default").default_collection()
        for number in range(100):
            address = {"city": f"city {number}", "region": "NS"[number % 2]}
            bucket.upsert(f"c{number:02}", {"name": f"n{number}", "total": number / 4, "address": address})

        run = ts.mirror(spark, node.url, table, schema="infer", on_schema=print)
        last = bucket.upsert("c00", {"name": "Ada", "total": 0.5, "address": {"region": "N"}})
        ts.wait_for(table, [last.mutation_token()], timeout_s=120)
        ask(spark, table, regions)

        print("a write, waited for:")
        kept = last.mutation_token()
        large = bucket.upsert("c00", {"name": "Ada", "total": 1000.5, "address": {"region": "N"}})
        ts.wait_for(table, [large.mutation_token()], timeout_s=120)
        ask(spark, table, regions)

        print("a failover loses it:")
        vbucket = node.vbucket_of("c00")
        node.rewind(vbucket, kept.sequence_number)
        key = next(f"later{n}" for n in range(10_000) if node.vbucket_of(f"later{n}") == vbucket)
        later = bucket.upsert(key, {"name": "Bob", "total": "much"})
        ts.wait_for(table, [later.mutation_token()], timeout_s=120)
        ask(spark, table, regions)
        ts.table(spark, table).where("_rescued is not null").select("key", "name", "total", "_rescued").show(
            truncate=False
        )
        run.stop()
        verdict = ts.verify(spark, node.url, table)
        print("equal" if verdict.equal else verdict.differences, "with", verdict.rescued, "rescued")
        cluster.close()


def ask(spark, table, regions):
    """Ask the same question each time."""
    ts.table(spark, table).createOrReplaceTempView("customers")
    spark.read.parquet(str(regions)).createOrReplaceTempView("regions")
    spark.sql(QUESTION).show()


if __name__ == "__main__":
    main(ts.session("typed session"), Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
