"""An object store, from a node to every reader: typed tables of several collections, and all on Spark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tailrace
import tailrace.spark as ts
import tailrace.testing
from spark.local_jobs import LocalJobs
from table.s3 import BUCKET, moto_server, options_for
from tailrace.client.kv import KvClient
from tailrace.client.manifest import with_changes
from tailrace.connstr import parse
from tailrace.errors import TailraceError
from tailrace.rng import unique_name
from tailrace.spark.rounds.setup import build_mirror, source_options
from tailrace.spark.rounds.verify import verify_table
from tailrace.table.opening import TableOptions, open_table

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]
ORDERS, USERS = "shop.orders", "shop.users"
PASSWORD = "hush-password-7"


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, str]]:
    with moto_server() as port:
        yield options_for(port)


def test_two_collections_with_kept_deletes(spark: Any, options: dict[str, str]) -> None:
    place = f"s3://{BUCKET}/{unique_name()}"
    tables = {ORDERS: f"{place}/orders", USERS: f"{place}/users"}
    with tailrace.testing.node(vbuckets=4) as node, KvClient(parse(node.url)) as client:
        client.set_manifest(with_changes(client.manifest(), [ORDERS, USERS], []))

        def once(**settings: Any) -> None:
            mirror = build_mirror(
                LocalJobs(),
                node.url,
                tables,
                once=True,
                in_background=False,
                keep_deletes=True,
                storage_options=options,
                on_schema=said.append,
                **settings,
            )
            mirror.prepare()
            mirror.run()

        said: list[str] = []
        for number in range(40):
            client.set(
                f"o{number}", {"total": number / 2, "lines": [{"sku": f"s{number}"}]}, collection=ORDERS
            )
            client.set(f"u{number}", {"name": f"n{number}", "total": f"t{number}"}, collection=USERS)
        once(schema="infer")
        # a column for one of the two, a value that fits nowhere, and a deletion
        client.set("o1", {"total": "much", "paid": True}, collection=ORDERS)
        client.delete("u3", collection=USERS)
        once()

        assert sorted(text.partition(": ")[2] for text in said) == [
            "name STRING, total STRING",
            "total DOUBLE, lines ARRAY<STRUCT<sku: STRING>>",
        ]
        for path in tables.values():
            opened = open_table(path, TableOptions(options))
            assert verify_table(LocalJobs(), source_options(node.url), opened).equal
    orders = ts.table(spark, tables[ORDERS], storage_options=options)
    assert "paid" not in ts.table(spark, tables[USERS], storage_options=options).columns
    (changed,) = orders.where("key = 'o1'").select("total", "paid", "_rescued").collect()
    assert (changed.total, changed.paid) == (None, True)
    assert changed["_rescued"] == '{"total":{"value":"much","reason":"a string, not DOUBLE"}}'
    assert (orders.count(), orders.where("lines[0].sku = 's7'").count()) == (40, 1)
    users = tailrace.read_table(tables[USERS], storage_options=options).to_arrow()
    deleted = users.filter(users["deleted"]).to_pylist()
    assert [(row["key"], row["name"], row["value"]) for row in deleted] == [("u3", None, None)]
    # the call says what a query needs, and Python reads no more
    some = ts.table(
        spark, tables[ORDERS], columns=["total"], filter=[("key", "=", "o5")], storage_options=options
    )
    assert [row.asDict() for row in some.collect()] == [{"total": 2.5}]
    with pytest.raises(TailraceError, match="has no column 'totl'"):
        ts.table(spark, tables[ORDERS], columns=["totl"], storage_options=options)


def test_executors_write_to_the_store_and_spark_shows_no_secret(
    spark: Any, options: dict[str, str], tmp_path: Path
) -> None:
    """Mirror, change log, verify and the spool of a stream, with nothing shared but the store."""
    place, secret = f"s3://{BUCKET}/{unique_name()}", options["aws_secret_access_key"]
    users, storage = (
        {"Administrator": PASSWORD},
        {f"storageOption.{name}": text for name, text in options.items()},
    )
    shown: list[str] = []
    with tailrace.testing.node(vbuckets=4, users=users) as node:
        login = {"username": "Administrator", "password": PASSWORD}
        for number in range(40):
            node.set(f"k{number}", {"n": number})

        def once() -> None:
            handle = ts.mirror(
                spark,
                node.url,
                f"{place}/t",
                once=True,
                changes=f"{place}/log",
                options=login,
                storage_options=options,
            )
            handle.awaitTermination()
            shown.extend([repr(handle), handle._repr_html_(), json.dumps(handle.recentProgress)])

        once()
        marks = {vbucket: node.high_seqno(vbucket) for vbucket in range(4)}
        for number in range(0, 40, 2):
            node.set(f"k{number}", {"lost": number})
        once()
        for vbucket, seqno in marks.items():
            node.rewind(vbucket, seqno)
        once()
        assert ts.verify(spark, node.url, f"{place}/t", options=login, storage_options=options).equal
        live = ts.table(spark, f"{place}/t", storage_options=options)
        assert live.count() == 40
        changes = ts.table(spark, f"{place}/log", storage_options=options)
        assert changes.where("op = 'mutation'").count() == 60
        assert ts.live_changes(changes).where("op = 'mutation'").count() == 40
        rows: list[Any] = []
        read = spark.readStream.format("tailrace").options(**login, **storage)
        query = (
            read.option("startingOffsets", "earliest")
            .option("spoolDir", f"{place}/spool")
            .load(node.url)
            .writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
            .foreachBatch(lambda batch, _: rows.extend(batch.collect()))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        assert len(rows) == 40
        shown.append(json.dumps([progress.json for progress in query.recentProgress]))
        shown.append(query._jsq.explainInternal(True))
        batch = spark.read.format("tailrace").options(**login, **storage).load(node.url)
        for frame in (live, changes, batch):
            shown.append(frame._jdf.queryExecution().toString())
        assert batch.count() == 40
    text = "\n".join(shown)
    assert "tailrace" in text
    assert secret not in text
    assert PASSWORD not in text
    written = [path for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()]
    assert written
    assert not [
        path
        for path in written
        if secret.encode() in path.read_bytes() or PASSWORD.encode() in path.read_bytes()
    ]
