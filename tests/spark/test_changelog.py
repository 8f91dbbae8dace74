"""The change log beside a mirror: every change once, and the live changes lead to the bucket."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder

import tailrace.spark as ts
import tailrace.testing
from spark.local_jobs import LocalJobs
from spark.naive import bucket_state, table_state
from tailrace.spark.rounds import committing
from tailrace.spark.rounds.change_log import CHANGES_SCHEMA, expired_files
from tailrace.spark.rounds.idle_sources import close_idle_sources
from tailrace.spark.rounds.maintenance_once import maintain_once
from tailrace.spark.rounds.progress import RoundProgress
from tailrace.spark.rounds.setup import build_mirror
from tailrace.spark.rounds.task import RoundTask
from tailrace.table.compaction import CompactionPolicy
from tailrace.table.opening import open_table


class Run:
    """A node, its mirror and its change log."""

    def __init__(self, node: Any, folder: Path) -> None:
        self.node = node
        self.table, self.log = str(folder / "table"), str(folder / "changes")

    def once(self, *, log: bool = True, **settings: Any) -> None:
        made = build_mirror(
            LocalJobs(),
            self.node.url,
            self.table,
            once=True,
            changes=self.log if log else None,
            in_background=False,
            **settings,
        )
        made.prepare()
        made.run()

    def fill(self, numbers: range, what: str) -> None:
        for number in numbers:
            self.node.set(f"k{number}", {what: number})

    def arrow(self) -> pa.Table:
        result = QueryBuilder().register("changes", DeltaTable(self.log)).execute("select * from changes")
        return pa.table(result.read_all()).cast(CHANGES_SCHEMA)

    def rows(self) -> list[dict[str, Any]]:
        return [row for row in self.arrow().to_pylist() if row["op"] != "system"]

    def check(self) -> None:
        """No change is logged twice; table and bucket are equal; the live changes lead to the bucket."""
        bucket = bucket_state("127.0.0.1", self.node.port)
        assert table_state(self.table) == bucket
        rows = self.rows()
        stands = Counter((r["vbucket"], r["vb_uuid"], r["seqno"]) for r in rows if r["op"] != "rollback")
        assert max(stands.values()) == 1
        back = [row for row in rows if row["op"] == "rollback"]
        live = [
            row
            for row in rows
            if row["op"] != "rollback" and not any(is_undone(row, rollback) for rollback in back)
        ]
        assert state_of(live) == {at: (doc.value, doc.seqno) for at, doc in bucket.items()}


def is_undone(row: dict[str, Any], back: dict[str, Any]) -> bool:
    return bool(
        row["vbucket"] == back["vbucket"]
        and row["seqno"] > back["seqno"]
        and row["log_version"] < back["log_version"]
    )


def state_of(live: list[dict[str, Any]]) -> dict[tuple[int, bytes], tuple[bytes, int]]:
    """What changes in order lead to."""
    state: dict[tuple[int, bytes], tuple[bytes, int]] = {}
    for row in sorted(live, key=lambda row: (row["vbucket"], row["seqno"])):
        at = (row["vbucket"], row["key"].encode())
        if row["op"] == "mutation":
            state[at] = (row["value"].encode(), row["seqno"])
        else:
            state.pop(at, None)
    return state


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with tailrace.testing.node(vbuckets=4) as node:
        yield Run(node, tmp_path)
    close_idle_sources()


def lose_some(run: Run) -> dict[int, int]:
    """Make changes, of which a failover loses the last ones; the seqnos before those."""
    run.fill(range(40), "first")
    run.once()
    marks = {vbucket: run.node.high_seqno(vbucket) for vbucket in range(4)}
    run.fill(range(0, 40, 2), "second")
    run.once()
    run.fill(range(0, 40, 3), "lost")
    run.node.delete("k1")
    run.once()
    run.check()
    assert not [row for row in run.rows() if row["op"] == "rollback"]
    # between two versions of the table: the mirror goes further back than the bucket, the log does not
    for vbucket, seqno in marks.items():
        run.node.rewind(vbucket, seqno + 2)
    run.fill(range(0, 40, 5), "other branch")
    run.once()
    return marks


def test_changes_stand_once_and_what_was_taken_back_is_marked(run: Run) -> None:
    marks = lose_some(run)
    run.check()
    back = {row["vbucket"]: row["seqno"] for row in run.rows() if row["op"] == "rollback"}
    assert back == {vbucket: seqno + 2 for vbucket, seqno in marks.items()}
    values = [json.loads(row["value"]) for row in run.rows() if row["value"]]
    assert sum("lost" in value for value in values) == 14, "what is no longer true stays in the log"


def test_a_round_reads_again_all_that_stands_in_the_log(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next round goes on from the end of this one, and would take the rest for new."""
    for number in range(3):
        run.node.set(f"k{number}", {"first": number}, vbucket=0)
    run.once()
    for number in range(3, 20):
        run.node.set(f"k{number}", {"second": number}, vbucket=0)
    run.once()
    run.node.rewind(0, 15)  # the table goes back to seqno 3, and the log to 15
    run.node.set("k1", {"other branch": 1}, vbucket=0)
    seen: list[tuple[int, int]] = []
    play = LocalJobs.run

    def look(jobs: LocalJobs, work: Any, pieces: Any, description: str, on_done: Any) -> list[Any]:
        for ranges in pieces if isinstance(work, RoundTask) and work.log is not None else ():
            seen.extend((ranges[v].end, branch.seqno) for v, branch in work.log.branches.items())
        return play(jobs, work, pieces, description, on_done)

    monkeypatch.setattr(LocalJobs, "run", look)
    run.once(options={"maxOffsetsPerTrigger": "4"})
    assert seen == [(15, 15)]
    run.check()


def test_changes_of_an_older_branch_that_the_bucket_still_has_stand_once(run: Run) -> None:
    for number in range(10):
        run.node.set(f"k{number}", {"first": number}, vbucket=0)
    run.node.rewind(0, 10)
    run.node.set("k1", {"second": 1}, vbucket=0)
    run.once()
    run.node.rewind(0, 5)  # the branch that the log stands on is gone, the one before it is not
    run.node.set("k2", {"third": 2}, vbucket=0)
    run.once()
    run.check()
    assert [row["seqno"] for row in run.rows() if row["op"] == "rollback"] == [5]


def test_a_bucket_that_goes_further_back_than_planned_and_stands_at_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan takes back what lies above a seqno; by the time the round reads, all is gone."""
    for number in range(10):
        run.node.set(f"k{number}", {"first": number}, vbucket=0)
    run.once()
    run.node.rewind(0, 5)
    play = LocalJobs.run
    flushes = [run.node.flush]

    def flush_first(jobs: LocalJobs, work: Any, *arguments: Any) -> list[Any]:
        if isinstance(work, RoundTask) and flushes:
            flushes.pop()()
        return play(jobs, work, *arguments)

    monkeypatch.setattr(LocalJobs, "run", flush_first)
    run.once()
    assert not flushes
    run.check()
    run.node.set("k1", {"second": 1}, vbucket=0)
    run.once()
    run.check()


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
def test_live_changes_on_spark(spark: Any, run: Run) -> None:
    lose_some(run)
    live = ts.live_changes(spark.createDataFrame(run.arrow())).where("op != 'system'").collect()
    bucket = bucket_state("127.0.0.1", run.node.port)
    assert state_of([row.asDict() for row in live]) == {at: (d.value, d.seqno) for at, d in bucket.items()}


def test_a_crash_between_the_log_and_the_table(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.fill(range(20), "first")
    run.once()
    run.fill(range(0, 20, 2), "second")

    class Crash(BaseException):
        pass

    def crash(name: str) -> None:
        if name == "mirror.after-changes":
            raise Crash

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(committing, "crash_point", crash)
        run.once()
    logged = len(run.rows())
    assert logged == 30
    run.fill(range(3), "third")
    run.once()
    run.check()
    assert len(run.rows()) == logged + 3


def test_a_log_that_begins_later_gets_everything(run: Run) -> None:
    rounds: list[RoundProgress] = []
    run.fill(range(12), "first")
    run.once(log=False)
    run.once(on_progress=rounds.append)
    run.check()
    assert len(run.rows()) == 12
    assert [progress.rolled_back for progress in rounds] == [()]  # nothing was taken back


def test_small_files_of_a_log_are_merged(run: Run) -> None:
    for number in range(20):
        run.fill(range(number, number + 3), f"round {number}")
        run.once()
    run.check()
    files = {action["path"] for action in pa.table(DeltaTable(run.log).get_add_actions()).to_pylist()}
    assert len(files) < 20


def test_changes_go_after_their_time(run: Run) -> None:
    run.fill(range(12), "first")
    run.once(changes_keep_s=3600.0)
    assert len(run.rows()) == 12
    run.once(changes_keep_s=0.0)
    assert run.rows() == []
    run.fill(range(2), "second")
    run.once()
    assert len(run.rows()) == 2


def test_a_rollback_is_told_as_long_as_what_it_took_back(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes that are logged with a rollback may be older than those it took back, and expire first."""
    monkeypatch.setattr("tailrace.spark.rounds.housekeeping.LOG_POLICY", CompactionPolicy(tier_files=1000))
    vbucket = run.node.vbucket_of("k1")
    run.fill(range(1, 2), "older")
    old = run.node.high_seqno(vbucket)
    run.fill(range(1, 2), "taken back")  # covers the older one before the log has seen it
    run.once()
    time.sleep(0.01)
    between = datetime.now(UTC)
    run.node.set("k1", {"taken back": 2})
    run.once()
    run.node.rewind(vbucket, old)
    run.once()  # a rollback, and with it only what was made before
    run.check()
    assert {row["op"] for row in run.rows()} == {"mutation", "rollback"}
    log = open_table(run.log)
    gone = set(expired_files(log.files(), between))
    back = [file.path for file in log.files() if "rollback" in ops_of(run.log, file.path)]
    assert back and not gone & set(back)
    assert len(expired_files(log.files(), datetime.now(UTC) + timedelta(hours=1))) == len(log.files())


def ops_of(log: str, path: str) -> list[str]:
    ops: list[str] = pq.read_table(f"{log}/{path}")["op"].to_pylist()
    return ops


def test_maintenance_of_a_log_leaves_every_change(run: Run) -> None:
    """Its files are merged by its own rule: no row replaces another."""
    for number in range(20):
        run.fill(range(3), f"round {number}")
        run.once(maintenance=False)
    rows = sorted(run.rows(), key=lambda row: (row["vbucket"], row["seqno"]))
    done = maintain_once(open_table(run.log), dry_run=False, compact=True, force=True, say=print)
    assert done.steps and all("tier" in step for step in done.steps)
    assert sorted(run.rows(), key=lambda row: (row["vbucket"], row["seqno"])) == rows
    run.fill(range(5), "last")
    run.once()
    run.check()
