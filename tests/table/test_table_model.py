"""Sink, lookup, compaction and rollback against a dictionary: whatever is done to a table, in whatever
order, its live rows are the documents.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from pyroaring import BitMap

from table.memory_table import MemoryTable
from tailrace.columns.batch import SCHEMA
from tailrace.table import hashing
from tailrace.table.compaction import CompactionPolicy, CompactionStep, finish_step, next_step
from tailrace.table.contract import Commit, DataFile, Table, TaskResult
from tailrace.table.delta.table import DeltaMirrorTable
from tailrace.table.file_reading import scan
from tailrace.table.hashing import KeyHash
from tailrace.table.rollback import roll_back
from tailrace.table.rows import TABLE_SCHEMA
from tailrace.table.sink import TableWriter

VBUCKETS = 8
Model = dict[tuple[int, str], tuple[int, str]]
Change = tuple[int, str, int, str | None]
"""VBucket, key, seqno, value."""


def changes_table(changes: Iterable[Change]) -> pa.Table:
    rows = [
        {
            "op": "deletion" if value is None else "mutation",
            "key": key.encode(),
            "value": None if value is None else value.encode(),
            "vbucket": vbucket,
            "seqno": seqno,
            "vb_uuid": 1,
            "cas": seqno,
            "rev": 1,
            "flags": 0,
            "expiry": 0,
            "datatype": "json",
        }
        for vbucket, key, seqno, value in changes
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


class World:
    """A table and the documents that it must hold, at every version."""

    def __init__(self, folder: Path, seed: int, table: Table | None = None) -> None:
        self.random = random.Random(seed)
        self.table: Table = table or MemoryTable(folder)
        self.documents: Model = {}
        self.history: dict[int, Model] = {self.table.version: {}}
        self.seqno = 0
        self.pending: tuple[CompactionStep, list[DataFile]] | None = None

    def some_changes(self, count: int) -> list[Change]:
        made: list[Change] = []
        for _ in range(count):
            self.seqno += 1
            key = f"key-{self.random.randrange(60)}"
            value = None if self.random.random() < 0.2 else f'{{"n":{self.seqno}}}'
            made.append((self.random.randrange(VBUCKETS), key, self.seqno, value))
        return made

    def writer(self, max_rows: int) -> TableWriter:
        files = tuple(self.table.files())
        return TableWriter(self.table.store, self.table.schema, self.table.secret, files, max_rows=max_rows)

    def round(self) -> None:
        """Two tasks with half of the vbuckets each; some vbuckets are given up in the middle."""
        given_up = set(self.random.sample(range(VBUCKETS), self.random.choice([0, 0, 1])))
        changes = self.some_changes(self.random.randrange(1, 40))
        writer = self.writer(self.random.choice([5, 1000]))
        fresh = set(range(VBUCKETS)) - {vbucket for vbucket, _ in self.documents}
        results = []
        for half in (range(VBUCKETS // 2), range(VBUCKETS // 2, VBUCKETS)):
            own = [change for change in changes if change[0] in half]
            task = writer.sink(fresh & set(half))
            cut = self.random.randrange(len(own) + 1)
            task.add(changes_table(own[:cut]))
            if self.random.random() < 0.5:
                task.discard(given_up)
            task.add(changes_table(own[cut:]))
            task.discard(given_up)
            results.append(TaskResult.from_bytes(task.finish().to_bytes()))
        masked: dict[str, BitMap] = {}
        for result in results:
            for path, rows in result.masked.items():
                masked.setdefault(path, BitMap()).update(BitMap.deserialize(rows))
        self.commit(
            Commit("TAILRACE ROUND", added=[new for result in results for new in result.added], masked=masked)
        )
        for vbucket, key, seqno, value in changes:
            if vbucket not in given_up:
                self.documents.pop((vbucket, key), None)
                if value is not None:
                    self.documents[vbucket, key] = (seqno, value)
        self.history[self.table.version] = dict(self.documents)

    def begin_compaction(self) -> None:
        policy = CompactionPolicy(
            tier_files=self.random.choice([2, 3]),
            least_rows=self.random.choice([1, 10]),
            step_bytes=self.random.choice([1, 4000, 1 << 30]),
        )
        step = next_step(self.table, policy)
        if step is not None:
            written = step.run(self.table.store, self.table.schema, self.table.secret)
            self.pending = (step, written)

    def end_compaction(self) -> None:
        if self.pending is None:
            return
        step, written = self.pending
        self.pending = None
        done = finish_step(self.table, step, written)
        if done is not None:
            self.commit(done)

    def overtaken_compaction(self) -> None:
        """A rollback comes between the beginning of a compaction and its end."""
        self.begin_compaction()
        self.roll_back(oldest=max(0, self.table.version - 4))
        self.end_compaction()

    def roll_back(self, oldest: int = 0) -> None:
        vbuckets = self.random.sample(range(VBUCKETS), self.random.choice([1, 3, VBUCKETS]))
        versions = [None, *(version for version in self.history if version >= oldest)]
        back: dict[int, int | None] = {vbucket: self.random.choice(versions) for vbucket in vbuckets}
        self.commit(roll_back(self.table, back).commit())
        self.documents = {
            document: row for document, row in self.documents.items() if document[0] not in back
        }
        for vbucket, version in back.items():
            if version is not None:
                then = self.history[version]
                self.documents |= {key: row for key, row in then.items() if key[0] == vbucket}
        self.history[self.table.version] = dict(self.documents)

    def commit(self, commit: Commit) -> None:
        self.table.commit(commit)
        self.history[self.table.version] = dict(self.documents)

    def rows(self, version: int | None = None) -> Model:
        files = self.table.files(version)
        masks = {file.path: self.table.mask(file) for file in files}
        state: Model = {}
        for batch in scan(
            self.table.store, files, masks, self.table.schema, key_hash=KeyHash(self.table.secret)
        ):
            for row in batch.to_pylist():
                assert (row["vbucket"], row["key"]) not in state, "a document is there twice"
                state[row["vbucket"], row["key"]] = (row["seqno"], row["value"])
        return state

    def check(self) -> None:
        assert self.rows() == self.documents
        base = sorted((file for file in self.table.files() if file.kind == "base"), key=lambda file: file.low)
        for below, other in pairwise(base):
            assert below.high < other.low, "two files of the base overlap"


def play(world: World, steps: int) -> None:
    for _ in range(steps):
        world.random.choices(
            [
                world.round,
                world.begin_compaction,
                world.end_compaction,
                world.roll_back,
                world.overtaken_compaction,
            ],
            [6, 4, 3, 1, 1],
        )[0]()
        world.check()
    version = world.random.choice(list(world.history))
    assert world.rows(version) == world.history[version]


@pytest.mark.parametrize("seed", range(8))
def test_the_live_rows_are_the_documents(tmp_path: Path, seed: int) -> None:
    play(World(tmp_path / "table", seed), 40)


@pytest.mark.parametrize("seed", range(6))
def test_documents_with_the_same_h1_are_told_apart(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weaken(monkeypatch)
    play(World(tmp_path / "table", seed), 40)


def weaken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep only two bits of the key in h1."""
    hash_keys = hashing.KeyHash.hash

    def weak(
        self: KeyHash, keys: pa.ChunkedArray, vbuckets: np.ndarray[tuple[int], np.dtype[np.int32]]
    ) -> tuple[hashing.Hashes, hashing.Hashes]:
        h1, h2 = hash_keys(self, keys, vbuckets)
        return h1 & np.uint64(0xFFFF_C000_0000_0000), h2

    monkeypatch.setattr(hashing.KeyHash, "hash", weak)


@pytest.mark.parametrize("seed", range(4))
def test_a_delta_table_is_the_same_for_other_engines(tmp_path: Path, seed: int) -> None:
    table = DeltaMirrorTable.open_or_create(
        tmp_path / "table", schema=TABLE_SCHEMA, source={"bucket": "b"}, checkpoint_every=7
    )
    table.claim()
    world = World(tmp_path, seed, table)
    play(world, 40)
    opened = DeltaMirrorTable.open(tmp_path / "table")
    world.table = opened
    world.check()
    expected = {(vbucket, key, *row) for (vbucket, key), row in world.documents.items()}
    for engine, rows in read_by_others(tmp_path / "table").items():
        told = {(row["vbucket"], row["key"], row["seqno"], row["value"]) for row in rows}
        assert told == expected, engine
        assert len(rows) == len(expected), engine


def read_by_others(path: Path) -> dict[str, list[dict[str, Any]]]:
    names = "vbucket, key, seqno, value"
    builder = QueryBuilder().register("t", DeltaTable(path))
    return {
        "delta-rs": pa.table(builder.execute(f"select {names} from t")).to_pylist(),
        "polars": polars.scan_delta(str(path)).select(names.split(", ")).collect().to_dicts(),
    }


def test_vbuckets_that_come_one_after_the_other_become_files_of_the_base(tmp_path: Path) -> None:
    world = World(tmp_path / "table", 0)
    task = world.writer(100).sink(range(VBUCKETS))
    for vbucket in range(VBUCKETS):
        for first in range(0, 36, 9):
            task.add(changes_table((vbucket, f"k{key}", key + 1, "{}") for key in range(first, first + 9)))
    files = [new.file for new in task.finish().added]
    assert [file.kind for file in files] == ["base"] * len(files)
    assert len(files) > 2
    assert sum(file.rows for file in files) == VBUCKETS * 36


@pytest.mark.long
def test_many_seeds(tmp_path: Path) -> None:
    for seed in range(100, 400):
        play(World(tmp_path / str(seed), seed), 60)
