"""The spool of `readStream` on an S3 API that is served on loopback."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest

import tailrace.testing
from spark.test_stream_reader import rows_of
from table.s3 import BUCKET, Fault, Proxy, moto_server, options_for
from tailrace.clock import SYSTEM, ManualClock
from tailrace.errors import StorageError, TailraceError, UsageError
from tailrace.rng import unique_name
from tailrace.spark.rounds.task import RoundTask
from tailrace.spark.source.options import parse_options
from tailrace.spark.source.spool_place import StorePlace, spooled_rows
from tailrace.spark.source.stream import StreamReader
from tailrace.table.store import TableStore

pytestmark = pytest.mark.xdist_group("moto")

DAY_S = 24 * 3600


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with moto_server() as port:
        yield port


def spool_options(place: str, storage: dict[str, str]) -> dict[str, str]:
    return {"spoolDir": place, **{f"storageOption.{name}": value for name, value in storage.items()}}


def read_to_the_end(node: Any, place: str, storage: dict[str, str]) -> list[tuple[str, int, int]]:
    """Batches of seven rows, each read twice as by a task that is repeated."""
    reader = StreamReader(
        {
            "connectionString": node.url,
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": "7",
            **spool_options(place, storage),
        }
    )
    reader.prepareForTriggerAvailableNow()
    start, rows_read = reader.initialOffset(), []
    try:
        while (end := reader.latestOffset(start, reader.getDefaultReadLimit())) is not start:
            for partition in pickle.loads(pickle.dumps(reader.partitions(start, end))):
                rows = rows_of(reader.read(partition))
                assert rows_of(reader.read(partition)) == rows
                rows_read += rows
            reader.commit(end)
            start = end
    finally:
        reader.stop()
    return rows_read


def test_a_spool_on_a_store_that_fails_now_and_then(port: int) -> None:
    proxy, place, count = Proxy(port), f"s3://{BUCKET}/{unique_name()}", 0

    def plan(method: str, path: str) -> Fault | None:
        nonlocal count
        count += 1
        faults: dict[int, Fault] = {1: "lost", 4: "refused", 7: "dropped", 10: "slow"}
        return faults.get(count % 13)

    proxy.plan = plan
    with tailrace.testing.node(vbuckets=4) as node:
        for number in range(60):
            node.set(f"k{number}", {"n": number})
        rows_read = read_to_the_end(node, place, options_for(proxy.port))
        assert sorted(rows_read) == [
            ("mutation", vbucket, seqno)
            for vbucket in range(4)
            for seqno in range(1, node.high_seqno(vbucket) + 1)
        ]
    proxy.close()
    assert {fault for fault, _, _ in proxy.struck} == {"lost", "refused", "dropped", "slow"}
    assert list(TableStore(place, options_for(port)).list()) == [], "it leaves nothing behind"


def test_the_next_one_removes_what_nobody_renewed_for_a_day(port: int) -> None:
    place, options = f"s3://{BUCKET}/{unique_name()}", options_for(port)
    around = TableStore(place, options)
    around.put("spool-of-mine/notes.txt", b"of the user")
    left = StorePlace(place, options)
    next_one = StorePlace(place, options)
    spools = {file.path.partition("/")[0] for file in around.list()}
    assert len(spools) == 3, "one that may be alive stays"
    a_day_later = ManualClock()
    a_day_later.advance(SYSTEM.time_ns() / 1e9 - a_day_later.time_ns() / 1e9 + DAY_S + 60)
    StorePlace(place, options, a_day_later).remove()
    assert [file.path for file in around.list()] == ["spool-of-mine/notes.txt"]
    for gone in (left, next_one):
        gone.remove()


def test_a_file_that_is_gone_is_said_in_one_line(port: int) -> None:
    store = TableStore(f"s3://{BUCKET}/{unique_name()}", options_for(port))
    with pytest.raises(TailraceError, match=r"^the file s3://.* of the spool is gone") as error:
        list(spooled_rows(store, "x.arrow"))
    assert "hush" not in str(error.value)


def test_a_store_that_refuses_ends_the_query_in_one_line_without_secrets(port: int) -> None:
    proxy = Proxy(port)
    proxy.plan = lambda method, path: "refused"
    with (
        tailrace.testing.node(vbuckets=1) as node,
        pytest.raises(StorageError, match=r"^can't \w+ s3://") as error,
    ):
        node.set("k", {})
        read_to_the_end(node, f"s3://{BUCKET}/x", options_for(proxy.port, max_retries="0"))
    proxy.close()
    assert "hush" not in str(error.value) and "\n" not in str(error.value)


def test_options_show_no_values() -> None:
    given = {
        "connectionString": "couchbase://u@127.0.0.1/b",
        "password": "hush-password",
        **spool_options("s3://b/x", {"aws_secret_access_key": "hush-hush-hush"}),
    }
    parsed = parse_options(given)
    assert parsed.storage_options == {"aws_secret_access_key": "hush-hush-hush"}
    assert "hush" not in repr(parsed) + repr(RoundTask(given, ()))
    with pytest.raises(UsageError, match=r"no option 'storageOption\.'"):
        parse_options({**given, "storageOption.": "hush"})
