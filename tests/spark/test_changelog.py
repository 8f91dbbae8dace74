"""The change log beside a mirror: every change once, and what is still true is the bucket."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

import tailrace.spark as ts
import tailrace.testing
from spark.naive import bucket_state, table_state
from tailrace.spark import mirroring

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


class Run:
    """A node, its mirror and its change log."""

    def __init__(self, spark: Any, node: Any, folder: Path) -> None:
        self.spark, self.node = spark, node
        self.table, self.log = str(folder / "table"), str(folder / "changes")

    def once(self, *, log: bool = True) -> None:
        changes = self.log if log else None
        ts.mirror(self.spark, self.node.url, self.table, once=True, changes=changes).awaitTermination()

    def fill(self, numbers: range, what: str) -> None:
        for number in numbers:
            self.node.set(f"k{number}", {what: number})

    def rows(self) -> list[dict[str, Any]]:
        return DeltaTable(self.log).to_pyarrow_table().to_pylist()

    def check(self) -> None:
        """No change stands twice; table and bucket are equal; what is true of the log leads to the bucket."""
        bucket = bucket_state("127.0.0.1", self.node.port)
        assert table_state(self.table) == bucket
        rows = self.rows()
        stands = Counter((r["vbucket"], r["vb_uuid"], r["seqno"]) for r in rows if r["op"] != "rollback")
        assert max(stands.values()) == 1
        frame = self.spark.read.parquet(*DeltaTable(self.log).file_uris())
        state: dict[tuple[int, bytes], tuple[bytes, int]] = {}
        for row in ts.live_changes(frame).orderBy("vbucket", "seqno").collect():
            at = (row.vbucket, row.key.encode())
            if row.op == "mutation":
                state[at] = (row.value.encode(), row.seqno)
            else:
                state.pop(at, None)
        assert state == {at: (doc.value, doc.seqno) for at, doc in bucket.items()}


@pytest.fixture
def run(spark: Any, tmp_path: Path) -> Any:
    with tailrace.testing.node(vbuckets=4) as node:
        yield Run(spark, node, tmp_path)


def test_changes_stand_once_and_what_was_taken_back_is_marked(run: Run) -> None:
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
    run.check()
    back = {row["vbucket"]: row["seqno"] for row in run.rows() if row["op"] == "rollback"}
    assert back == {vbucket: seqno + 2 for vbucket, seqno in marks.items()}
    values = [json.loads(row["value"]) for row in run.rows() if row["value"]]
    assert sum("lost" in value for value in values) == 14, "what is no longer true stays in the log"


def test_a_crash_between_the_log_and_the_table(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.fill(range(20), "first")
    run.once()
    run.fill(range(0, 20, 2), "second")

    def crash(name: str) -> None:
        if name == "mirror.after-changes":
            raise RuntimeError("crashed on purpose")

    with monkeypatch.context() as patch, pytest.raises(Exception, match="crashed on purpose"):
        patch.setattr(mirroring, "crash_point", crash)
        run.once()
    logged = len(run.rows())
    assert logged == 30
    run.fill(range(3), "third")
    run.once()
    run.check()
    assert len(run.rows()) == logged + 3


def test_a_log_that_begins_later_gets_everything(run: Run) -> None:
    run.fill(range(12), "first")
    run.once(log=False)
    run.once()
    run.check()
    assert len(run.rows()) == 12
