"""A dedicated schedule for a bug that random ones seldom catch: rows that were given up come back."""

from __future__ import annotations

from pathlib import Path

from pyroaring import BitMap

import tailrace.testing
from chaos.planted import BUGS
from spark.local_jobs import LocalJobs
from tailrace.spark.rounds.assignment import Assignment, MirrorSettings
from tailrace.spark.rounds.idle_sources import close_idle_sources
from tailrace.spark.rounds.mirror import Mirror
from tailrace.spark.rounds.verify import verify_table
from tailrace.table.contract import Commit
from tailrace.table.opening import open_or_create
from tailrace.table.rows import table_schema

SOURCE = {"bucket": "default", "scope": "_default", "collection": "_default"}


def differences(directory: Path) -> int:
    """How many documents differ at the end.

    A row is lost, and a repair reads the vbucket again. Then the bucket goes back to a seqno that the table
    had only before the repair: on a branch that the bucket still knows, without that row.
    """
    with tailrace.testing.node(vbuckets=1) as node:
        options = {"connectionString": node.url, "bucket": "default", "retryFor": "60"}
        table = open_or_create(directory, schema=table_schema(keep_deletes=False), source=SOURCE)

        def mirror(*start_over: int) -> None:
            running = Mirror(
                Assignment(
                    LocalJobs(),
                    options,
                    [table],
                    "default",
                    MirrorSettings(once=True),
                    in_background=False,
                    start_over=frozenset(start_over),
                )
            )
            running.prepare()
            running.run()

        for number in range(5):
            node.set(f"k{number}", number)
        mirror()
        (file,) = table.files()
        table.commit(Commit("TAILRACE ROUND", masked={file.path: BitMap([0])}))
        for number in range(5, 7):
            node.set(f"k{number}", number)
        mirror()
        mirror(0)
        assert verify_table(LocalJobs(), options, table).equal
        node.rewind(vbucket=0, to_seqno=5)
        mirror()
        verdict = verify_table(LocalJobs(), options, table)
        assert verdict.documents == 5
        close_idle_sources()
        return len(verdict.differences)


def test_a_dead_branch_is_not_restored(tmp_path: Path) -> None:
    assert differences(tmp_path / "right") == 0
    (bug,) = [bug for bug in BUGS if bug.name == "a dead branch restored"]
    with bug.plant():
        assert differences(tmp_path / "wrong") > 0
