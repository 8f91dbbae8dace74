"""The streaming reader, called as Spark calls it, without Spark."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tailrace.testing
from client.fake_server import FakeServer, accepted, marker, mutation
from tailrace.client.kv import KvClient
from tailrace.client.manifest import with_changes
from tailrace.errors import ChangesTakenBack, ConnectError, DataLoss, UsageError
from tailrace.model import Position
from tailrace.spark.source.batch import BatchReader
from tailrace.spark.source.feed import Feed
from tailrace.spark.source.offsets import from_offset, to_offset
from tailrace.spark.source.options import parse_mirror_options, parse_options
from tailrace.spark.source.spool import segment_rows
from tailrace.spark.source.stream import StreamReader
from tailrace.wire.codes import Status
from tailrace.wire.dcp import DcpStreamRequestResponse


@pytest.mark.parametrize("ends", [True, False])
def test_a_batch_that_took_the_whole_spool_leaves_room_for_the_next(tmp_path: Path, ends: bool) -> None:
    """Spark commits a batch only when there is a next one; a full spool must not wait for that."""
    with tailrace.testing.node(vbuckets=2) as node:
        for number in range(60):
            node.set(f"k{number}", {"n": number})
        reader = StreamReader(
            {
                "connectionString": node.url,
                "startingOffsets": "earliest",
                "spoolDir": str(tmp_path),
                "spoolSize": "1",
                "maxOffsetsPerTrigger": "7",
            }
        )
        if ends:
            reader.prepareForTriggerAvailableNow()
        start: dict[str, Any] = reader.initialOffset()
        limit = reader.getDefaultReadLimit()
        rows = 0
        while rows < 60:
            end = reader.latestOffset(start, limit)
            for partition in reader.partitions(start, end):
                rows += sum(batch.num_rows for batch in reader.read(partition))
            start = end
        assert {vbucket: p.seqno for vbucket, p in from_offset(start).items()} == {
            vbucket: node.high_seqno(vbucket) for vbucket in range(2)
        }
        reader.stop()


def test_deliveries_are_cut_where_a_segment_is_full() -> None:
    """However the changes come, batches are as large as they may be; every cut has a position."""
    options = {"connectionString": "", "startingOffsets": "earliest", "maxOffsetsPerTrigger": "7"}
    with tailrace.testing.node(vbuckets=2) as node:
        for number in range(5):
            node.set(f"early{number}", {}, vbucket=number % 2)
        feed = Feed(parse_options({**options, "connectionString": node.url}))
        deliveries = feed.deliveries(feed.starting_positions("earliest"), end="forever")
        rows: list[tuple[str, int, int]] = []
        ends: list[int] = []
        while len(rows) < 65:
            if len(rows) == 5:
                for number in range(60):
                    node.set(f"late{number}", {}, vbucket=number % 2)
            delivery = next(deliveries)
            rows += rows_of([delivery.rows])
            ends.append(len(rows))
            reached = {vbucket: seqno for _, vbucket, seqno in rows}
            assert {vbucket for _, vbucket, _ in rows_of([delivery.rows])} <= set(delivery.positions)
            assert all(reached[vbucket] == position.seqno for vbucket, position in delivery.positions.items())
        feed.close()
    assert set(range(7, 65, 7)) < set(ends)
    assert len(set(rows)) == 65


@pytest.mark.parametrize(
    ("batch", "segment"),
    [(None, 50_000), (1, 1), (49_999, 49_999), (50_001, 25_000), (250_000, 50_000), (1_000_001, 47_619)],
)
def test_whole_segments_fill_a_batch(batch: int | None, segment: int) -> None:
    assert segment_rows(batch) == segment


def position_of(node: Any) -> str:
    """The position of the bucket as an offset."""
    return json.dumps(
        to_offset(
            {v: Position.at(node.failover_log(v)[0][0], node.high_seqno(v)) for v in range(node.vbuckets)}
        )
    )


def read_stream(node: Any, directory: Path, **options: str) -> list[tuple[str, int, int]]:
    """What a query that ends gives: op, vbucket and seqno."""
    reader = StreamReader({"connectionString": node.url, "spoolDir": str(directory), **options})
    reader.prepareForTriggerAvailableNow()
    start, rows = reader.initialOffset(), []
    try:
        while (end := reader.latestOffset(start, reader.getDefaultReadLimit())) is not start:
            for partition in reader.partitions(start, end):
                rows += rows_of(reader.read(partition))
            start = end
    finally:
        reader.stop()
    return rows


def read_batch(node: Any, _directory: Path, **options: str) -> list[tuple[str, int, int]]:
    reader = BatchReader({"connectionString": node.url, **options})
    return [row for partition in reader.partitions() for row in rows_of(reader.read(partition))]


def rows_of(batches: Iterable[pa.RecordBatch]) -> list[tuple[str, int, int]]:
    return [
        (row["op"], row["vbucket"], row["seqno"])
        for batch in batches
        for row in batch.select(["op", "vbucket", "seqno"]).to_pylist()
    ]


@pytest.mark.parametrize("read", [read_stream, read_batch])
def test_a_purge_behind_the_reader_stops_it_unless_it_may_start_over(read: Any, tmp_path: Path) -> None:
    with tailrace.testing.node(vbuckets=1) as node:
        for number in range(20):
            node.set(f"k{number}", {"n": number})
        here = position_of(node)
        for number in range(10):
            node.delete(f"k{number}")
        node.set("last", {})  # the newest change is never purged
        node.compact(drop_tombstones=True)
        with pytest.raises(DataLoss, match=r"vbucket 0 .* seqno 20 .*failOnDataLoss"):
            read(node, tmp_path, startingOffsets=here)
        rows = read(node, tmp_path, startingOffsets=here, failOnDataLoss="false")
        assert rows[0] == ("rollback", 0, 0)
        assert [op for op, *_ in rows[1:]] == ["mutation"] * 11


def test_a_purge_is_noticed_although_the_connection_is_lost_at_that_moment() -> None:
    """The feed asks the node nothing for it: the answer would wait behind what the feed has not taken yet."""

    def stream(connection: Any, request: Any) -> None:
        if request.start_seqno:
            refused = DcpStreamRequestResponse(
                opcode=request.OPCODE, opaque=request.opaque, status=Status.ROLLBACK, value=bytes(8)
            )
            connection.send(refused.encode())
        else:
            connection.send(accepted(request, [(7, 0)]), marker(request, 1, 9), mutation(request, 9))
            connection.close()

    with FakeServer(stream) as server:
        feed = Feed(parse_options({"connectionString": server.url, "retryFor": "2"}))
        with contextlib.closing(feed), pytest.raises(DataLoss, match="seqno 5"):
            list(feed.deliveries({0: Position.at(7, 5)}, end="forever"))


@pytest.mark.parametrize("read", [read_stream, read_batch])
def test_what_a_failover_takes_back_is_no_data_loss(read: Any, tmp_path: Path) -> None:
    with tailrace.testing.node(vbuckets=1) as node:
        for number in range(20):
            node.set(f"k{number}", {"n": number})
        here = position_of(node)
        node.rewind(0, 0)
        node.set("other", {})
        assert read(node, tmp_path, startingOffsets=here) == [("rollback", 0, 0), ("mutation", 0, 1)]
        with pytest.raises(ChangesTakenBack, match="took changes back"):
            read(node, tmp_path, startingOffsets=here, onRollback="fail")


def test_what_comes_is_what_the_options_say() -> None:
    with tailrace.testing.node(vbuckets=4) as node, KvClient(node.url) as client:
        client.set_manifest(with_changes(client.manifest(), ["shop.orders", "shop.users"], []))
        document = {"text": "repeats " * 200}
        for number in range(10):
            client.set(f"o{number}", document, collection="shop.orders")
            client.set(f"u{number}", document, collection="shop.users")
            client.set(f"d{number}", document)

        def read(**options: str) -> tuple[set[str], set[bytes | None]]:
            reader = BatchReader({"connectionString": node.url, **options})
            batches = [batch for partition in reader.partitions() for batch in reader.read(partition)]
            rows = [row for row in pa.Table.from_batches(batches).to_pylist() if row["op"] == "mutation"]
            return {row["key"].decode()[0] for row in rows}, {row["value"] for row in rows}

        value = json.dumps(document, separators=(",", ":")).encode()
        assert read() == ({"o", "u", "d"}, {value})
        assert read(collections="shop.orders,_default._default") == ({"o", "d"}, {value})
        assert read(scope="shop", compression="snappy") == ({"o", "u"}, {value})
        assert read(noValue="true") == ({"o", "u", "d"}, {None})
        with pytest.raises(UsageError, match="no collection"):
            read(collections="shop.odrers")


@pytest.mark.parametrize(
    "option",
    [
        {"vbuckets": "2,9"},
        {"startingOffsets": '{"9":{"vb_uuid":"1","seqno":1,"snapshot":[1,1]}}'},
        {"endingOffsets": '{"9":{"vb_uuid":"1","seqno":1,"snapshot":[1,1]}}'},
    ],
)
def test_a_vbucket_that_is_not_there_is_named(option: dict[str, str]) -> None:
    # a typing error is no empty result
    with tailrace.testing.node(vbuckets=4) as node:
        given = {"connectionString": node.url, **option}
        with pytest.raises(UsageError, match="there is no vbucket 9, the last is 3"):
            BatchReader(given).partitions()
        if "vbuckets" in option:
            with pytest.raises(UsageError, match="there is no vbucket 9, the last is 3"):
                StreamReader(given).initialOffset()


def test_a_checkpoint_of_another_bucket_is_refused(tmp_path: Path) -> None:
    with tailrace.testing.node(vbuckets=2, buckets=("one", "two")) as node:
        where = node.url.rpartition("/")[0]
        reader = StreamReader({"connectionString": f"{where}/one", "startingOffsets": "earliest"})
        other = StreamReader({"connectionString": f"{where}/two"})
        try:
            offset = reader.initialOffset()
            assert from_offset(offset).keys() == {0, 1}
            for call in (
                lambda: other.latestOffset(offset, other.getDefaultReadLimit()),
                lambda: other.partitions({}, offset),
            ):
                with pytest.raises(UsageError, match="the checkpoint is of bucket 'one', but"):
                    call()
            with pytest.raises(UsageError, match="the offsets are of bucket 'one', but 'two' is to be read"):
                BatchReader({"connectionString": f"{where}/two", "startingOffsets": json.dumps(offset)})
        finally:
            reader.stop()
            other.stop()


def test_offsets_of_a_batch_that_rolled_back_may_be_given() -> None:
    offset = to_offset({3: Position.at(7, 12)}, {3: Position.at(5, 10)}, bucket="b")
    given = {"path": "couchbase://127.0.0.1/b", "startingOffsets": json.dumps(offset)}
    assert parse_options(given).starting_offsets == {3: Position.at(7, 12)}


@pytest.mark.parametrize("option", ["noValue", "vbuckets", "columns", "startingOffsets", "collections"])
def test_a_mirror_does_not_take_options_that_choose(option: str) -> None:
    with pytest.raises(UsageError, match=f"the option {option} is for reads; a mirror takes a bucket whole"):
        parse_mirror_options({"connectionString": "couchbase://127.0.0.1", option.lower(): "0"})


DAMAGED: list[dict[str, Any]] = [
    {"x": 3},
    {"0": 3},
    {"0": {"seqno": 1}},
    {"0": {"vb_uuid": "1", "seqno": 5, "snapshot": [9, 9]}},
    {"0": {"vb_uuid": "1", "seqno": 1, "snapshot": [1, 1], "bucket": 7}},
    {"0": {"vb_uuid": "1", "seqno": 1, "snapshot": [1, 1], "rollback": 7}},
    {"0": {"vb_uuid": "1", "seqno": 1, "snapshot": [1, 1], "rollback": {"seqno": 7}}},
]


def test_a_damaged_checkpoint_is_one_line() -> None:
    with tailrace.testing.node(vbuckets=2) as node:
        reader = StreamReader({"connectionString": node.url})
        good = reader.initialOffset()
        for offset in DAMAGED:
            with pytest.raises(UsageError, match=r"^the checkpoint is damaged: .*; give the query a "):
                reader.partitions(good, offset)
            with pytest.raises(UsageError, match=r"^the checkpoint is damaged: "):
                reader.latestOffset(offset, reader.getDefaultReadLimit())
        reader.stop()


@pytest.fixture
def as_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look like the process that Spark starts for a stream's reader."""
    spec = importlib.util.find_spec("pyspark.sql.streaming.python_streaming_source_runner")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)


@pytest.mark.usefixtures("as_runner")
def test_it_connects_while_spark_prepares_its_first_batch() -> None:
    with tailrace.testing.node(vbuckets=2) as node:
        node.set("k", {"n": 1})
        reader = StreamReader({"connectionString": node.url, "startingOffsets": "earliest"})
        assert reader.connecting is not None
        assert reader.connecting.result().vbucket_count == 2
        assert len(reader.initialOffset()) == 2
        reader.stop()


@pytest.mark.usefixtures("as_runner")
def test_a_node_that_is_away_is_told_when_spark_asks() -> None:
    """Spark hides what goes wrong while a reader is made."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    reader = StreamReader({"connectionString": f"couchbase://127.0.0.1:{port}", "connectTimeout": "1s"})
    with pytest.raises(ConnectError):
        reader.initialOffset()


def test_whoever_plans_does_not_connect() -> None:
    assert StreamReader({"connectionString": "couchbase://127.0.0.1"}).connecting is None
