"""Rounds without Spark and without a table format: the mirror's own loop against a real node."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tailrace.testing
from server.controller import until
from server.serverkit import Wire
from spark.local_jobs import LocalJobs
from spark.naive import Doc, bucket_state
from table.memory_table import MemoryTable
from tailrace.client.kv import KvClient
from tailrace.client.manifest import with_changes
from tailrace.clock import SYSTEM
from tailrace.connstr import parse
from tailrace.spark.rounds import planning
from tailrace.spark.rounds.assignment import Assignment, MirrorSettings
from tailrace.spark.rounds.bucket_watch import BucketState, BucketWatch
from tailrace.spark.rounds.change_log import CHANGES_SCHEMA
from tailrace.spark.rounds.idle_sources import close_idle_sources
from tailrace.spark.rounds.mirror import Mirror
from tailrace.spark.rounds.progress import RoundProgress
from tailrace.spark.rounds.reading import _Waves
from tailrace.spark.rounds.verify import verify_table
from tailrace.table.contract import Commit, TableChanged
from tailrace.table.datafile import BASE
from tailrace.table.rows import key_bytes, table_schema
from tailrace.table.sink import TableWriter
from tailrace.wire.codes import DurabilityLevel, Feature
from tailrace.wire.fields import Durability, encode_frame_infos
from tailrace.wire.kv import Delete, Set

VBUCKETS = 8


@pytest.fixture
def node() -> Iterator[Any]:
    with tailrace.testing.node(vbuckets=VBUCKETS) as running:
        yield running
    close_idle_sources()


@pytest.fixture
def table(tmp_path: Path) -> MemoryTable:
    return MemoryTable(tmp_path / "table")


def given(node: Any) -> dict[str, str]:
    return {"connectionString": node.url, "bucket": "default", "retryFor": "60"}


def once(node: Any, *tables: MemoryTable, **more: Any) -> list[RoundProgress]:
    said: list[RoundProgress] = []
    settings = MirrorSettings(once=True, max_changes=more.pop("max_changes", None))
    mirror = Mirror(
        Assignment(
            LocalJobs(),
            given(node),
            tables,
            "default",
            settings,
            on_progress=said.append,
            in_background=False,
            **more,
        )
    )
    mirror.prepare()
    mirror.run()
    return said


def documents(rows: pa.Table) -> dict[tuple[int, bytes], Doc]:
    documents = {}
    for key, row in zip(key_bytes(rows).to_pylist(), rows.to_pylist(), strict=True):
        assert (row["vbucket"], key) not in documents, f"{key!r} is there twice"
        value = row["value"].encode() if row["value"] is not None else row["value_base64"]
        documents[row["vbucket"], key] = Doc(
            value, row["seqno"], row["rev"], row["cas"], row["flags"], row["expiry"]
        )
    return documents


def assert_equal(node: Any, table: MemoryTable) -> None:
    assert documents(table.rows()) == bucket_state("127.0.0.1", node.port)
    verdict = verify_table(LocalJobs(), given(node), table)
    assert verdict.equal, verdict.differences[:3]
    assert (verdict.documents, verdict.rows, verdict.behind) == (table.rows().num_rows,) * 2 + (0,)


def fill(node: Any, count: int, step: int = 1, what: str = "v") -> None:
    for number in range(0, count, step):
        node.set(f"k{number}", {what: number})


def test_documents_overwrites_and_deletes_arrive(node: Any, table: MemoryTable) -> None:
    fill(node, 200)
    (said,) = once(node, table)
    assert (said.changes, said.rows_written, said.rows_masked, said.lag_changes) == (200, 200, 0, 0)
    assert_equal(node, table)
    fill(node, 200, 3, "w")
    for number in range(0, 200, 7):
        node.delete(f"k{number}")
    (said,) = once(node, table)
    assert said.rows_masked == len({*range(0, 200, 3), *range(0, 200, 7)})
    assert_equal(node, table)


JSON_FIELDS = "batch changes rolled_back versions rows_written rows_masked bytes_written lag_changes lag_s"
JSON_SECONDS = {"plan", "read", "write", "commit", "maintain", "compaction"}


def test_what_scripts_are_told_of_each_commit(node: Any, table: MemoryTable) -> None:
    """The fields of `--json`, which `handle.lastProgress` has too: renaming or losing one is noticed."""
    fill(node, 100)
    marks = {vbucket: node.high_seqno(vbucket) for vbucket in range(VBUCKETS)}
    said = once(node, table)
    fill(node, 100, 2, "lost")
    said += once(node, table)
    for vbucket, seqno in marks.items():
        node.rewind(vbucket, seqno)
    fill(node, 100, 10, "other")
    said += once(node, table)
    lines = [json.loads(json.dumps(progress.to_json())) for progress in said]
    for line in lines:
        assert set(JSON_FIELDS.split()) <= line.keys()
        assert line["seconds"].keys() >= JSON_SECONDS
        assert all(isinstance(spent, float) and spent >= 0 for spent in line["seconds"].values())
        assert min(line["seconds"][name] for name in ("plan", "read", "write", "commit")) > 0
        assert line["lag_changes"] == 0
        assert 0 <= line["lag_s"] < 60
        assert line["bytes_written"] > 0
    assert [(line["changes"], line["rows_written"], line["rows_masked"]) for line in lines] == [
        (100, 100, 0),
        (50, 50, 50),
        (10, 10, 10),
    ]
    assert [len(line["rolled_back"]) for line in lines] == [0, 0, VBUCKETS]
    assert [line["versions"] for line in lines] == [[version] for version in (1, 2, 4)]


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_first_load_needs_no_compaction(
    table: MemoryTable, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    """Its files hold neighbours and don't overlap, however many vbuckets there are and in whatever order a
    server sends them: otherwise the next rounds would rewrite the whole table. The load is divided among
    tasks, and each node has every third vbucket.
    """
    monkeypatch.setattr(planning, "_TASK_CHANGES", 500)
    look = BucketWatch.look

    def look_elsewhere(watch: BucketWatch) -> BucketState:
        state = look(watch)
        return replace(state, homes={vbucket: f"node {vbucket % nodes}" for vbucket in state.homes})

    monkeypatch.setattr(BucketWatch, "look", look_elsewhere)
    monkeypatch.setattr("tailrace.spark.rounds.task_targets.TableWriter", partial(TableWriter, max_rows=500))
    monkeypatch.setattr(_Waves, "FIRST_CHANGES", 60)
    monkeypatch.setattr(_Waves, "MOST_CHANGES", 100)
    with tailrace.testing.node(vbuckets=64) as node:
        fill(node, 3_000)
        once(node, table)
        assert_equal(node, table)
    close_idle_sources()
    files = sorted(table.files(), key=lambda file: file.low)
    assert len(files) >= 6
    assert {file.kind for file in files} == {BASE}
    assert all(below.high < above.low for below, above in pairwise(files))


def test_nothing_new_is_no_commit(node: Any, table: MemoryTable) -> None:
    fill(node, 20)
    once(node, table)
    version = table.version
    assert once(node, table) == []
    assert table.version == version


def test_a_failover_that_loses_changes(
    node: Any, table: MemoryTable, caplog: pytest.LogCaptureFixture
) -> None:
    fill(node, 80)
    once(node, table)
    marks = {vbucket: node.high_seqno(vbucket) for vbucket in range(VBUCKETS)}
    fill(node, 80, 2, "lost")
    for number in range(1, 80, 4):
        node.delete(f"k{number}")
    once(node, table)
    for vbucket, seqno in marks.items():
        node.rewind(vbucket, seqno)
    fill(node, 80, 8, "other")  # a divergent branch with equal seqnos
    highs = [table.current.position(vbucket).seqno for vbucket in range(VBUCKETS)]
    with caplog.at_level(logging.INFO, "tailrace.spark"):
        said = once(node, table)
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("rollback")]
    lost = sum(high - marks[vbucket] for vbucket, high in enumerate(highs))
    assert f"vbuckets={VBUCKETS} changes={lost} rows_gone=" in line
    assert f"0: {highs[0]} to {marks[0]}, " in line
    assert {vbucket for progress in said for vbucket in progress.rolled_back} == set(range(VBUCKETS))
    assert [commit.operation for commit in table.commits][-2:] == ["TAILRACE ROLLBACK", "TAILRACE ROUND"]
    assert_equal(node, table)


def test_durable_writes_and_a_failover(node: Any, table: MemoryTable) -> None:
    """A write is undecided when a round ends; its commit is taken back, and it is committed again."""
    framing = encode_frame_infos([Durability(DurabilityLevel.MAJORITY, 60_000).encode()])

    def place(number: int) -> dict[str, Any]:
        key = f"k{number}"
        return {"key": key.encode(), "vbucket": node.vbucket_of(key), "framing": framing}

    def undecided() -> Any:
        return node.call(lambda n: sum(len(vbucket.undecided) for vbucket in n.buckets["default"].store))

    fill(node, 40)
    with Wire(node.port) as wire:
        wire.hello(Feature.ALT_REQUEST_SUPPORT, Feature.SYNC_REPLICATION, Feature.XERROR)
        for number in range(0, 40, 4):
            wire.ok(Set(value=b'{"durable":1}', **place(number)))
            wire.ok(Delete(**place(number + 1)))
        once(node, table)
        assert_equal(node, table)
        node.stop_persistence()
        wire.send(Set(value=b'{"durable":2}', opaque=5, **place(2)))
        until(undecided, "nothing was prepared")
        fill(node, 40, 8, "plain")
        once(node, table)
        assert_equal(node, table)
        node.start_persistence()
        assert wire.frame().status == 0
    once(node, table)
    assert_equal(node, table)
    vbucket = node.vbucket_of("k2")
    node.rewind(vbucket, node.high_seqno(vbucket) - 1)
    until(lambda: not undecided(), "it was not committed again")
    said = once(node, table)
    assert {number for progress in said for number in progress.rolled_back} == {vbucket}
    assert_equal(node, table)
    assert b'{"durable":2}' in {document.value for document in documents(table.rows()).values()}


def test_a_rollback_is_noticed_where_nothing_else_is_new(node: Any, table: MemoryTable) -> None:
    """The new branch reaches exactly the seqno at which the table stands on the old one."""
    node.set("a", {"n": 1}, vbucket=3)
    once(node, table)
    node.set("b", {"n": 2}, vbucket=3)
    once(node, table)
    node.rewind(3, 1)
    node.set("c", {"n": 3}, vbucket=3)
    once(node, table)
    assert {key for _, key in documents(table.rows())} == {b"a", b"c"}


class StandingClock:
    """No time passes."""

    def monotonic(self) -> float:
        return 1000.0

    def time_ns(self) -> int:
        return SYSTEM.time_ns()


def test_failover_logs_are_not_asked_for_every_round(
    node: Any, table: MemoryTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node checks the branch of each stream; if it refuses one, or any vbucket would go back, the mirror
    asks for the logs before it decides.
    """
    looks = []
    look = BucketWatch.look

    def counted(self: BucketWatch) -> Any:
        looks.append(table.version)
        return look(self)

    monkeypatch.setattr(BucketWatch, "look", counted)
    settings = MirrorSettings(trigger_s=0.0)
    mirror = Mirror(
        Assignment(
            LocalJobs(), given(node), [table], "default", settings, clock=StandingClock(), in_background=False
        )
    )
    mirror.prepare()
    for what in ("a", "b", "c"):
        node.set(what, {"n": 1}, vbucket=3)
        node.set(what, {"n": 1}, vbucket=4)
        mirror.turn()
        assert_equal(node, table)
    assert len(looks) == 1
    node.rewind(3, 1)  # to the same seqno and beyond, on another branch
    for what in ("d", "e", "f"):
        node.set(what, {"n": 2}, vbucket=3)
    mirror.turn()
    assert len(looks) == 1 and not mirror.tables[0].current.resets, "a task was refused"
    mirror.turn()
    assert len(looks) == 2
    assert_equal(node, table)
    node.rewind(4, 1)  # seen in the seqnos
    mirror.turn()
    assert len(looks) == 3
    assert_equal(node, table)
    mirror.turn()
    assert len(looks) == 3, "what was refused is settled"


def test_a_round_that_is_cancelled_is_not_called_a_failure(
    node: Any, table: MemoryTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    settings = MirrorSettings(trigger_s=0.0)
    mirror = Mirror(
        Assignment(
            LocalJobs(),
            given(node),
            [table],
            "default",
            settings,
            on_trouble=said.append,
            in_background=False,
        )
    )
    mirror.prepare()

    def cancelled() -> bool:
        mirror.handle.stopping.set()
        raise RuntimeError("the job was cancelled")

    monkeypatch.setattr(mirror, "turn", cancelled)
    mirror.run()
    assert not said


def test_a_failover_that_the_table_furthest_behind_does_not_notice(
    node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node only checks where a stream begins. A table that is further leaves out what it has, but its
    position may have been taken back since the failover logs were asked for.
    """
    ahead, behind = MemoryTable(tmp_path / "ahead"), MemoryTable(tmp_path / "behind")
    log = MemoryTable(tmp_path / "log", CHANGES_SCHEMA)
    settings = MirrorSettings(trigger_s=0.0)
    mirror = Mirror(
        Assignment(
            LocalJobs(),
            given(node),
            [ahead, behind],
            "default",
            settings,
            log=log,
            clock=StandingClock(),
            in_background=False,
        )
    )
    mirror.prepare()
    for what in ("a", "b"):
        node.set(what, {"n": 1}, vbucket=3)
    mirror.turn()
    for what in ("c", "d"):
        node.set(what, {"n": 1}, vbucket=3)
    commit = MemoryTable.commit

    def refused(self: MemoryTable, made: Commit) -> int:
        if self is behind:
            raise TableChanged("somebody tidied up")
        return commit(self, made)

    with monkeypatch.context() as patched, pytest.raises(TableChanged):
        patched.setattr(MemoryTable, "commit", refused)
        mirror.turn()
    node.rewind(3, 2)
    for what in ("e", "f", "g"):
        node.set(what, {"n": 2}, vbucket=3)
    mirror.turn()
    mirror.turn()
    assert_equal(node, behind)
    assert_equal(node, ahead)
    assert log_rows(log)[-1] == ("rollback", 3, 2, None)
    assert [(seqno, key) for op, _, seqno, key in log_rows(log) if op == "mutation"] == [
        *((1, "a"), (2, "b"), (3, "c"), (3, "e"), (4, "d"), (4, "f"), (5, "g"))
    ]


def test_a_vbucket_is_read_anew_until_that_is_committed(
    node: Any, table: MemoryTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(node, 40)
    once(node, table)
    commit, refusals = MemoryTable.commit, iter([True, False])

    def refused_once(self: MemoryTable, made: Commit) -> int:
        if next(refusals, False):
            raise TableChanged("somebody tidied up")
        return commit(self, made)

    monkeypatch.setattr(MemoryTable, "commit", refused_once)
    once(node, table, start_over=frozenset([2, 5]))
    (anew,) = (made for made in table.commits if made.resets)
    assert set(anew.resets) == {2, 5} and anew.repaired
    assert_equal(node, table)


def test_what_is_read_anew_is_so_in_every_table(
    node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the bucket has nothing, and the commit of the second table is refused."""
    first, second = MemoryTable(tmp_path / "first"), MemoryTable(tmp_path / "second")
    node.set("a", {"n": 1}, vbucket=2)
    once(node, first, second)
    commit, refusals = MemoryTable.commit, iter([True, False])

    def refused_once(self: MemoryTable, made: Commit) -> int:
        if self is second and next(refusals, False):
            raise TableChanged("somebody tidied up")
        return commit(self, made)

    monkeypatch.setattr(MemoryTable, "commit", refused_once)
    once(node, first, second, start_over=frozenset([2, 5]))
    (anew,) = (made for made in second.commits if made.resets)
    assert set(anew.resets) == {2, 5} and anew.repaired


def test_a_rollback_below_everything_starts_over_in_one_commit(node: Any, table: MemoryTable) -> None:
    fill(node, 80)
    once(node, table)
    for vbucket in range(VBUCKETS):
        node.rewind(vbucket, 3)
    fill(node, 20, 1, "new")
    once(node, table)
    assert table.commits[-1].operation == "TAILRACE ROUND"
    assert set(table.commits[-1].resets.values()) == {0}
    assert_equal(node, table)


def test_a_flush_empties_the_table(node: Any, table: MemoryTable) -> None:
    fill(node, 50)
    once(node, table)
    node.flush()
    once(node, table)
    assert table.rows().num_rows == 0
    node.set("only", {"n": 1})
    once(node, table)
    assert_equal(node, table)


def test_a_purge_behind_the_mirror_starts_over(node: Any, table: MemoryTable) -> None:
    fill(node, 64)
    once(node, table)
    for number in range(0, 64, 2):
        node.delete(f"k{number}")
    node.compact(drop_tombstones=True)
    once(node, table)
    assert_equal(node, table)


def test_a_backlog_is_read_in_rounds(node: Any, table: MemoryTable) -> None:
    fill(node, 400)
    said = once(node, table, max_changes=90)
    assert len(said) > 3
    assert sum(progress.changes for progress in said) == 400
    assert [progress.lag_changes for progress in said] == sorted(
        (progress.lag_changes for progress in said), reverse=True
    )
    assert_equal(node, table)


def test_snapshots_larger_than_a_round_are_published_whole(node: Any, table: MemoryTable) -> None:
    for number in range(400):
        node.set(f"k{number}", {"n": number}, vbucket=1)
    once(node, table, max_changes=90)
    for version in range(table.version + 1):
        assert table.rows(version).num_rows in (0, 400), "a part of a snapshot was published"
    assert_equal(node, table)


def test_kept_deletes_are_rows_that_say_so(node: Any, tmp_path: Path) -> None:
    table = MemoryTable(tmp_path / "kept", table_schema(keep_deletes=True))
    fill(node, 10)
    once(node, table)
    node.delete("k3")
    once(node, table)
    rows = table.rows().to_pylist()
    assert [row["key"] for row in rows if row["deleted"]] == ["k3"]
    assert len(rows) == 10
    assert verify_table(LocalJobs(), given(node), table).equal


# several tables


def test_a_table_that_was_left_behind_catches_up_alone(node: Any, tmp_path: Path) -> None:
    """A crash between the commits of two tables, or a table that is new: no table waits for another."""
    first, second = MemoryTable(tmp_path / "first"), MemoryTable(tmp_path / "second")
    fill(node, 60)
    once(node, first)
    fill(node, 60, 2, "w")
    node.delete("k1")
    once(node, first, second)
    assert_equal(node, first)
    assert_equal(node, second)
    assert sum(commit.counts["changes"] for commit in first.commits) == 91, "nothing was written twice"


@pytest.mark.parametrize("newcomer", ["table", "log"])
def test_a_purge_is_not_missed_where_somebody_else_begins_at_0(
    node: Any, table: MemoryTable, tmp_path: Path, newcomer: str
) -> None:
    """A server always allows a stream from the beginning, which lacks purged deletions: so it is of no use to
    a table that is further.
    """
    fill(node, 64)
    once(node, table)
    for number in range(0, 64, 2):
        node.delete(f"k{number}")
    fill(node, 64, 3, "w")
    node.compact(drop_tombstones=True)
    if newcomer == "log":
        log = MemoryTable(tmp_path / "log", CHANGES_SCHEMA)
        once(node, table, log=log)
        assert sorted({row[1] for row in log_rows(log)}) == sorted(range(VBUCKETS))
    else:
        second = MemoryTable(tmp_path / "second")
        once(node, table, second)
        assert_equal(node, second)
    assert_equal(node, table)


def test_a_failover_while_a_table_is_behind(node: Any, tmp_path: Path) -> None:
    first, second = MemoryTable(tmp_path / "first"), MemoryTable(tmp_path / "second")
    fill(node, 60)
    once(node, first, second)
    fill(node, 60, 2, "lost")
    once(node, first)
    for vbucket in range(VBUCKETS):
        node.rewind(vbucket, node.high_seqno(vbucket) - 2)
    fill(node, 30, 3, "other")
    once(node, first, second)
    assert_equal(node, first)
    assert_equal(node, second)


ORDERS = "shop.orders"


@pytest.fixture
def client(node: Any) -> Iterator[KvClient]:
    with KvClient(parse(node.url)) as connected:
        connected.set_manifest(with_changes(connected.manifest(), [ORDERS], []))
        yield connected


def test_a_collection_that_is_dropped_and_made_again(node: Any, client: KvClient, tmp_path: Path) -> None:
    orders = MemoryTable(tmp_path / "orders", scope="shop", collection="orders")
    for number in range(20):
        client.set(f"o{number}", {"n": number}, collection=ORDERS)
        client.set(f"d{number}", {"n": number})
    once(node, orders)
    assert {key for _, key in documents(orders.rows())} == {b"o%d" % number for number in range(20)}
    client.set_manifest(with_changes(client.manifest(), [], [ORDERS]))
    once(node, orders)
    assert orders.rows().num_rows == 0
    client.set_manifest(with_changes(client.manifest(), [ORDERS], []))
    client.set("again", {"n": 1}, collection=ORDERS)
    once(node, orders)
    assert {key for _, key in documents(orders.rows())} == {b"again"}


def test_a_collection_that_is_dropped_and_made_again_in_one_round(
    node: Any, client: KvClient, tmp_path: Path
) -> None:
    orders = MemoryTable(tmp_path / "orders", scope="shop", collection="orders")
    client.set("before", {"n": 0}, collection=ORDERS)
    once(node, orders)
    client.set("between", {"n": 1}, collection=ORDERS)
    client.set_manifest(with_changes(client.manifest(), [], [ORDERS]))
    client.set_manifest(with_changes(client.manifest(), [ORDERS], []))
    client.set("again", {"n": 2}, collection=ORDERS)
    once(node, orders)
    assert {key for _, key in documents(orders.rows())} == {b"again"}


# the change log


def log_rows(log: MemoryTable) -> list[tuple[str, int, int, str | None]]:
    rows = [row for row in log.rows().to_pylist() if row["op"] != "system"]
    return sorted((row["op"], row["vbucket"], row["seqno"], row["key"]) for row in rows)


def test_every_change_is_logged_once(node: Any, table: MemoryTable, tmp_path: Path) -> None:
    log = MemoryTable(tmp_path / "log", CHANGES_SCHEMA)
    fill(node, 30)
    once(node, table, log=log)
    fill(node, 30, 2, "w")
    node.delete("k1")
    once(node, table, log=log)
    rows = log_rows(log)
    assert len(rows) == len(set(rows)) == 46
    assert sum(row[0] == "deletion" for row in rows) == 1


def test_a_log_that_is_added_later_gets_all_that_the_bucket_has(
    node: Any, table: MemoryTable, tmp_path: Path
) -> None:
    fill(node, 30)
    once(node, table)
    log = MemoryTable(tmp_path / "log", CHANGES_SCHEMA)
    said = once(node, table, log=log)
    assert len(log_rows(log)) == 30
    assert not any(progress.rolled_back for progress in said), "the table was left alone"


@pytest.mark.parametrize("after", [lambda node: None, lambda node: node.set("new", {"n": 9}, vbucket=2)])
def test_what_was_taken_back_is_said_in_the_log(
    node: Any, table: MemoryTable, tmp_path: Path, after: Callable[[Any], None]
) -> None:
    log = MemoryTable(tmp_path / "log", CHANGES_SCHEMA)
    node.set("a", {"n": 1}, vbucket=2)
    once(node, table, log=log)
    node.set("b", {"n": 2}, vbucket=2)
    node.set("b", {"n": 3}, vbucket=2)  # covers the one before, in one snapshot
    once(node, table, log=log)
    node.rewind(2, 2)
    after(node)
    once(node, table, log=log)
    rows = log_rows(log)
    assert ("rollback", 2, 2, None) in rows
    assert ("mutation", 2, 2, "b") in rows, "what was covered then is true now"
    assert len([row for row in rows if row[2] == 1]) == 1, "and what was true stays as it is"
    (version,) = {row["log_version"] for row in log.rows().to_pylist() if row["op"] == "rollback"}
    assert version == log.version
    once(node, table, log=log)
    assert log_rows(log) == rows
