"""A mirrored table with a history, and what it held at some versions, for testing other engines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tailrace.testing
from spark.local_jobs import LocalJobs
from spark.naive import bucket_state
from tailrace.spark.rounds.idle_sources import close_idle_sources
from tailrace.spark.rounds.setup import build_mirror
from tailrace.spark.rounds.verify import verify_table
from tailrace.table.compaction import CompactionPolicy
from tailrace.table.opening import open_table

EAGER = CompactionPolicy(tier_files=2, overlay=0.1, base_masked=0.1, least_rows=1)
DOCS = 3000
COLUMNS = "vbucket, key, value, seqno"

Rows = dict[str, tuple[int, str, int]]
"""By key: vbucket, value and seqno."""


@dataclass(frozen=True)
class Stage:
    """A version of the table, and the bucket at that moment."""

    name: str
    version: int
    rows: Rows

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "version": self.version, "rows": self.rows}

    @classmethod
    def from_json(cls, stage: Mapping[str, Any]) -> Stage:
        rows = {key: (row[0], row[1], row[2]) for key, row in stage["rows"].items()}
        return cls(stage["name"], stage["version"], rows)


def rows_by_key(rows: Iterable[Mapping[str, Any]]) -> Rows:
    """What an engine read, with the columns of `COLUMNS`; no key may appear twice."""
    by_key: Rows = {}
    for row in rows:
        assert row["key"] not in by_key, f"{row['key']} is there twice"
        by_key[row["key"]] = (row["vbucket"], row["value"], row["seqno"])
    return by_key


def aged_table(path: Path) -> list[Stage]:
    """Make the table: loaded, a third of it masked, compacted, rolled back."""
    stages: list[Stage] = []
    with tailrace.testing.node(vbuckets=8) as node:

        def mirror(name: str, **settings: Any) -> None:
            made = build_mirror(LocalJobs(), node.url, path, once=True, in_background=False, **settings)
            made.prepare()
            made.run()
            verdict = verify_table(LocalJobs(), {"connectionString": node.url}, open_table(path))
            rows = {
                key.decode(): (vbucket, document.value.decode(), document.seqno)
                for (vbucket, key), document in bucket_state("127.0.0.1", node.port).items()
            }
            assert verdict.equal and verdict.rows == len(rows)
            stages.append(Stage(name, open_table(path).version, rows))

        def write(numbers: Iterable[int], word: str) -> None:
            for number in numbers:
                node.set(f"key::{number}", {word: number, "text": "é" * (number % 40)})

        write(range(DOCS), "first")
        mirror("loaded", maintenance=False)
        write(range(0, DOCS, 4), "second")
        for number in range(1, DOCS, 12):
            node.delete(f"key::{number}")
        mirror("a third masked", maintenance=False)
        table = open_table(path)
        physical = sum(file.rows for file in table.files())
        masked = sum(len(table.mask(file)) for file in table.files())
        assert masked / physical > 0.25
        marks = {vbucket: node.high_seqno(vbucket) for vbucket in range(8)}
        write(range(2, DOCS, 9), "lost")
        mirror("compacted", policy=EAGER)
        assert any(version.operation == "TAILRACE COMPACT" for version in open_table(path).versions())
        for vbucket, seqno in marks.items():
            node.rewind(vbucket, seqno)
        write(range(3, DOCS, 50), "other")
        mirror("rolled back", maintenance=False)
    close_idle_sources()
    return stages


def save_stages(stages: Iterable[Stage], path: Path) -> None:
    """Save them for a program that compares in another environment."""
    path.write_text(json.dumps([stage.to_json() for stage in stages]))


def load_stages(path: Path) -> list[Stage]:
    return [Stage.from_json(stage) for stage in json.loads(path.read_text())]
