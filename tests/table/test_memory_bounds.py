"""The memory of writing and merging follows their limits, whatever a vbucket or a document holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyroaring import BitMap

from tailrace.columns.batch import SCHEMA
from tailrace.table import datafile, merging
from tailrace.table.datafile import size_of
from tailrace.table.file_reading import read_rows_at
from tailrace.table.hashing import KeyHash
from tailrace.table.merging import MergeSource, merge_files
from tailrace.table.rows import table_schema
from tailrace.table.sink import TableWriter
from tailrace.table.store import TableStore

SECRET = bytes(16)
ROWS = table_schema(keep_deletes=False)


def changes(first: int, sizes: list[int], vbucket: int = 0) -> pa.RecordBatch:
    """Documents with values of some sizes."""
    rows = [
        {
            "op": "mutation",
            "key": b"key::%06d" % number,
            "value": b"x" * size,
            "vbucket": vbucket,
            "vb_uuid": 7,
            "seqno": number + 1,
        }
        for number, size in enumerate(sizes, first)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def test_one_large_vbucket_and_one_large_value(tmp_path: Path) -> None:
    """A snapshot of any length, in one vbucket: what waits is written when it fills a file."""
    limit = 64 << 10
    writer = TableWriter(TableStore(tmp_path), ROWS, SECRET, (), max_bytes=limit)
    sink = writer.sink()
    number = 0
    for _ in range(60):
        sink.add(changes(number, [1_000] * 40))
        number += 40
        assert sink._waiting_bytes < limit
    sink.add(changes(number, [20 * limit]))
    assert not sink._waiting_bytes, "larger than a file: it does not wait for others"
    sink.add(changes(0, [10] * 40))  # and once more, with another value
    result = sink.finish()
    assert (result.changes, result.rows_written) == (2441, 2441)
    assert len(result.added) >= 30
    live = sum(
        new.file.rows - len(BitMap.deserialize(new.masked) if new.masked else ()) for new in result.added
    )
    assert live == 2401


def test_of_many_files_with_large_values_a_few_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a reader that has handed on its row nor its decoder keeps it (16 of 20 MiB took 1.2 GiB)."""
    value_bytes, file_count = 1 << 20, 12
    monkeypatch.setattr(datafile, "_GROUP_BYTES", value_bytes // 2)  # a row each, as with values of 20 MiB
    store, key_hash = TableStore(tmp_path), KeyHash(SECRET)
    writer = TableWriter(store, ROWS, SECRET, ())
    sources = []
    for number in range(file_count):
        sink = writer.sink()
        sink.add(changes(number * 3, [value_bytes] * 3))
        (new,) = sink.finish().added
        sources.append(MergeSource(new.file, BitMap(range(3)).serialize()))
    base, held = pa.total_allocated_bytes(), []
    write = datafile.DataFileWriter.write

    def watched(self: datafile.DataFileWriter, *given: Any) -> None:
        held.append(pa.total_allocated_bytes() - base)
        write(self, *given)

    monkeypatch.setattr(datafile.DataFileWriter, "write", watched)
    monkeypatch.setattr(merging, "_PIECE_BYTES", value_bytes // 2)
    monkeypatch.setattr(merging, "_READ_BYTES", file_count * value_bytes // 2)
    files = merge_files(store, sources, ROWS, key_hash, kind="tier1")
    assert sum(file.rows for file in files) == 3 * file_count
    assert max(held) < file_count * value_bytes


def test_many_files_are_merged_in_small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What all readers hold together is limited, however many files there are."""
    store, key_hash = TableStore(tmp_path), KeyHash(SECRET)
    writer = TableWriter(store, ROWS, SECRET, ())
    sources = []
    for number in range(12):
        sink = writer.sink()
        sink.add(changes(number * 200, [1_000] * 200))
        (new,) = sink.finish().added
        sources.append(MergeSource(new.file, BitMap(range(200)).serialize()))
    largest = 0

    def watched(*given: Any, **more: Any) -> Iterator[pa.RecordBatch]:
        nonlocal largest
        for batch in read_rows_at(*given, **more):
            largest = max(largest, size_of(batch))
            yield batch

    monkeypatch.setattr(merging, "read_rows_at", watched)
    monkeypatch.setattr(merging, "_READ_BYTES", 240 << 10)
    monkeypatch.setattr(merging, "_LEAST_BATCH_BYTES", 1 << 10)
    files = merge_files(store, sources, ROWS, key_hash, kind="tier1")
    assert largest <= 2 * 20 << 10
    merged = [read_rows_at(store, file, np.ones(file.rows, np.bool_), ROWS) for file in files]
    keys = [key for batches in merged for batch in batches for key in batch["key"].to_pylist()]
    assert sorted(keys) == [f"key::{number:06d}" for number in range(2400)]


def test_a_merge_that_breaks_off_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, key_hash = TableStore(tmp_path), KeyHash(SECRET)
    writer = TableWriter(store, ROWS, SECRET, ())
    sink = writer.sink()
    sink.add(changes(0, [1_000] * 200))
    (new,) = sink.finish().added
    before = sorted(path.name for path in tmp_path.rglob("*"))

    def breaks(*given: Any, **more: Any) -> Iterator[pa.RecordBatch]:
        yield next(iter(read_rows_at(*given, **more)))
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(merging, "read_rows_at", breaks)
    monkeypatch.setattr(merging, "_READ_BYTES", 20 << 10)
    monkeypatch.setattr(merging, "_LEAST_BATCH_BYTES", 1 << 10)
    monkeypatch.setattr(merging, "_PIECE_BYTES", 10 << 10)
    with pytest.raises(OSError, match="Input/output") as raised:  # whose traceback keeps the writer alive
        merge_files(
            store, [MergeSource(new.file, BitMap(range(200)).serialize())], ROWS, key_hash, kind="tier1"
        )
    assert sorted(path.name for path in tmp_path.rglob("*")) == before, raised
