"""Only what a query needs leaves the reader, and where it can, the node. Without Spark's Java."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    In,
    LessThan,
    StringStartsWith,
)
from pyspark.sql.types import StructType

import tailrace.testing
from tailrace.client.kv import KvClient
from tailrace.client.manifest import with_changes
from tailrace.connstr import parse
from tailrace.errors import UsageError
from tailrace.spark.source.batch import BatchReader
from tailrace.spark.source.data_source import TailraceDataSource
from tailrace.spark.source.offsets import from_offset
from tailrace.spark.source.stream import StreamReader

VALUE = {"text": "v" * 2000}
DOCUMENTS = 64


@dataclass
class Reading:
    """What a read returned, and what it cost."""

    rows: pa.Table
    streams: int
    """VBuckets that were streamed."""
    left_node: int
    """Bytes that the node sent."""

    @property
    def left_reader(self) -> int:
        return int(self.rows.nbytes)


@pytest.fixture(scope="module")
def node() -> Iterator[Any]:
    with tailrace.testing.node(vbuckets=8) as running, KvClient(parse(running.url)) as client:
        client.set_manifest(with_changes(client.manifest(), ["shop.orders", "shop.users"], []))
        for number in range(DOCUMENTS):
            running.set(f"{'user' if number % 2 else 'order'}::{number}", VALUE)
            client.set(f"o{number}", b"{}", collection="shop.orders")
        running.delete("order::0")
        yield running


def read(
    node: Any,
    *filters: Filter,
    schema: StructType | None = None,
    streaming: Path | None = None,
    **options: str,
) -> Reading:
    given = {"connectionString": node.url, **options}
    sent = node.call(lambda running: running.counters.bytes_written)
    if streaming is None:
        reader = BatchReader(given, schema)
        if filters:
            assert list(reader.pushFilters(list(filters))) == list(filters)  # Spark applies them as well
        partitions = [pickle.loads(pickle.dumps(partition)) for partition in reader.partitions()]
        streams = sum(len(partition.ranges) for partition in partitions)
        batches = [
            batch for partition in partitions for batch in pickle.loads(pickle.dumps(reader)).read(partition)
        ]
    else:
        stream = StreamReader({**given, "startingOffsets": "earliest", "spoolDir": str(streaming)}, schema)
        stream.prepareForTriggerAvailableNow()
        start = stream.initialOffset()
        streams, batches = len(from_offset(start)), []
        try:
            while (end := stream.latestOffset(start, stream.getDefaultReadLimit())) is not start:
                for partition in stream.partitions(start, end):
                    batches += [pa.RecordBatch.from_pydict(b.to_pydict(), schema=b.schema)
                                for b in stream.read(partition)]  # fmt: skip
                start = end
        finally:
            stream.stop()
    rows = pa.Table.from_batches(batches) if batches else pa.table({})
    return Reading(rows, streams, node.call(lambda running: running.counters.bytes_written) - sent)


@pytest.mark.parametrize("is_stream", [False, True])
def test_columns_that_nobody_asks_for_do_not_leave(node: Any, tmp_path: Path, is_stream: bool) -> None:
    streaming = tmp_path if is_stream else None
    whole = read(node, streaming=streaming)
    assert whole.left_reader > DOCUMENTS * 2000 and whole.left_node > DOCUMENTS * 2000
    by_option = read(node, streaming=streaming, columns="seqno, key", keyFormat="string")
    assert by_option.rows.schema == pa.schema([("seqno", pa.int64()), ("key", pa.string())])
    assert by_option.rows.num_rows == whole.rows.num_rows
    # without values the node has little to send, and Java little to take
    assert by_option.left_reader < whole.left_reader / 20
    assert by_option.left_node < whole.left_node / 3
    schema = StructType().add("key", "string").add("value", "string")
    by_schema = read(node, streaming=streaming, schema=schema)
    assert by_schema.rows.schema == pa.schema([("key", pa.string()), ("value", pa.string())])
    assert sorted(by_schema.rows["value"].to_pylist(), key=str) == sorted(
        (None if value is None else value.decode() for value in whole.rows["value"].to_pylist()), key=str
    )


@pytest.mark.parametrize("is_stream", [False, True])
def test_rows_that_nobody_asks_for_do_not_leave(node: Any, tmp_path: Path, is_stream: bool) -> None:
    streaming = tmp_path if is_stream else None
    deletions = read(node, streaming=streaming, ops="deletion")
    assert deletions.rows["key"].to_pylist() == [b"order::0"]
    assert deletions.left_node < DOCUMENTS * 2000 / 3  # a deletion has no value: nobody sends any
    users = read(node, streaming=streaming, keyPrefix="user::", ops="mutation")
    assert users.rows.num_rows == DOCUMENTS // 2
    everything = read(node, streaming=streaming, keyPrefix="user::")
    assert set(everything.rows["op"].to_pylist()) == {"mutation", "system"}


def test_filters_of_a_query_become_limits(node: Any) -> None:
    whole = read(node)
    assert whole.streams == 8
    three = read(node, In(("vbucket",), (2, 3, 5)))
    assert three.streams == 3 and three.left_node < whole.left_node
    assert set(three.rows["vbucket"].to_pylist()) == {2, 3, 5}
    between = read(node, GreaterThan(("vbucket",), 1), LessThan(("vbucket",), 4))
    assert between.streams == 2
    assert read(node, EqualTo(("vbucket",), 99)).streams == 0
    users = read(node, StringStartsWith(("key",), "user::"), EqualTo(("op",), "mutation"), keyFormat="string")
    assert users.rows.num_rows == DOCUMENTS // 2
    ada = read(node, EqualTo(("key",), b"user::7"), EqualTo(("op",), "mutation"))
    assert ada.rows["key"].to_pylist() == [b"user::7"]


def test_a_collection_is_filtered_by_the_node_where_that_gives_the_same_rows(node: Any) -> None:
    orders, mutations = EqualTo(("collection",), "orders"), EqualTo(("op",), "mutation")
    streamed = read(node, orders, mutations)
    assert streamed.rows.num_rows == DOCUMENTS and set(streamed.rows["scope"].to_pylist()) == {"shop"}
    assert streamed.left_node < DOCUMENTS * 2000 / 3
    # system rows are also about collections that are gone, which can't be requested from the node
    with_system = read(node, orders)
    assert set(with_system.rows["op"].to_pylist()) == {"mutation", "system"}
    assert set(with_system.rows["collection"].to_pylist()) == {"orders"}
    assert read(node, EqualTo(("collection",), "nothing"), mutations).streams == 0
    assert read(node, orders, mutations, collections="shop.users").streams == 0
    assert read(node, EqualTo(("scope",), "_default"), mutations).rows.num_rows == DOCUMENTS - 1


def test_a_session_without_filter_pushdown_may_use_the_reader() -> None:
    """Spark refuses readers with a `pushFilters` of their own unless a setting is on; this is its check."""
    reader = BatchReader({"connectionString": "couchbase://127.0.0.1"})
    assert getattr(reader.pushFilters, "__func__", None) is DataSourceReader.pushFilters


def test_text_that_is_none_shows_where(node: Any) -> None:
    with tailrace.testing.node(vbuckets=1) as other:
        other.set("bytes", b"a\xffb")
        other.set("text", b"\xc3\xa4")
        rows = read(other, columns="key,value", keyFormat="string", valueFormat="string").rows.to_pylist()
    assert rows == [{"key": "bytes", "value": "a\ufffdb"}, {"key": "text", "value": "ä"}]


@pytest.mark.parametrize(
    ("name", "type_", "what"),
    [
        ("name", "string", "the source has no column 'name'; it has op, key, value, "),
        ("key", "integer", "the column key is INT in the schema, but must be BINARY or STRING"),
        ("seqno", "string", "the column seqno is STRING in the schema, but must be BIGINT"),
    ],
)
def test_a_schema_that_does_not_fit_is_refused(name: str, type_: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        BatchReader({"connectionString": "couchbase://127.0.0.1"}, StructType().add(name, type_))


def test_load_with_a_url(node: Any) -> None:
    source = TailraceDataSource({"path": node.url, "columns": "key"})
    assert source.schema() == "key BINARY"
    with pytest.raises(
        UsageError, match="path and connectionString are two names of one option; give one of them"
    ):
        TailraceDataSource({"path": node.url, "connectionString": node.url}).schema()


def test_pandas_is_not_imported_for_a_selection() -> None:
    """Half a second in each process of Spark's."""
    program = """
import sys
from pyspark.sql.types import StructType
from tailrace.columns.row_kinds import no_rows
from tailrace.spark.source.options import parse_options
from tailrace.spark.source.selection import Selection
given = {"path": "couchbase://127.0.0.1", "keyFormat": "string", "ops": "mutation", "keyPrefix": "a"}
chosen = Selection.of(parse_options(given))
chosen.columns_of(chosen.rows_of(no_rows()))
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
