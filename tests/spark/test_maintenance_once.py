"""Maintenance without a mirror: what is due is done, and a mirror that runs is left alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tailrace.testing
from spark.local_jobs import LocalJobs
from spark.naive import bucket_state, table_state
from tailrace.spark.rounds.idle_sources import close_idle_sources
from tailrace.spark.rounds.maintenance_once import maintain_once
from tailrace.spark.rounds.setup import build_mirror
from tailrace.table.opening import open_table


@pytest.fixture
def node() -> Iterator[Any]:
    with tailrace.testing.node(vbuckets=4) as running:
        yield running
    close_idle_sources()


def mirrored(node: Any, table: str, rounds: int) -> None:
    """A table of many small files without any maintenance."""
    for number in range(rounds):
        node.set(f"k{number}", {"n": number})
        made = build_mirror(LocalJobs(), node.url, table, once=True, maintenance=False, in_background=False)
        made.prepare()
        made.run()


def test_small_files_are_merged_and_the_rows_stay(node: Any, tmp_path: Path) -> None:
    table = str(tmp_path / "table")
    mirrored(node, table, 24)
    before = len(open_table(table).files())
    due = maintain_once(open_table(table), dry_run=True, compact=True, force=False, say=print)
    assert due.steps and len(open_table(table).files()) == before, "nothing was done"
    said: list[str] = []
    done = maintain_once(open_table(table), dry_run=False, compact=True, force=False, say=said.append)
    assert not done.steps and "a mirror wrote to the table" in said[0]
    done = maintain_once(open_table(table), dry_run=False, compact=True, force=True, say=said.append)
    assert done.steps
    assert len(open_table(table).files()) < before
    assert table_state(table) == bucket_state("127.0.0.1", node.port)


def test_a_mirror_that_has_caught_up_does_what_is_due_and_logs_each_step(
    node: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = str(tmp_path / "table")
    mirrored(node, table, 24)
    with caplog.at_level(logging.INFO, "tailrace.spark"):
        made = build_mirror(LocalJobs(), node.url, table, once=True, in_background=False)
        made.prepare()
        made.run()
    lines = [text for record in caplog.records if (text := record.getMessage()).startswith("compaction")]
    assert len(lines) == made.housekeeping.steps > 0
    assert all(f"table={table} what=" in line and " version=" in line for line in lines)
