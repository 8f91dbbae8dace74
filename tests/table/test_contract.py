"""The types that join the parts of a table."""

from __future__ import annotations

import pickle

from pyroaring import BitMap

from tailrace.table.contract import DataFile, NewFile, TaskResult, Vector

FILE = DataFile(
    "tier0-1.parquet", 100, 10, "tier0", 5, (1 << 64) - 1, 4, '{"numRecords":10}', 1_700_000_000_000
)


def test_a_result_goes_to_the_driver_and_arrives_whole() -> None:
    masked = BitMap([1, 70_000]).serialize()
    other = DataFile("größe #1.parquet", 1, 1, "base", 0, 1, None, "{}", 1, Vector("u", "x", 1, 2, 3), 4)
    result = TaskResult(
        (NewFile(FILE, BitMap([3]).serialize()), NewFile(other)), {"a b.parquet": masked, "c": b""}, 5, 6, 7
    )
    for again in (TaskResult.from_bytes(result.to_bytes()), pickle.loads(pickle.dumps(result))):
        assert again == result
        assert BitMap.deserialize(again.masked["a b.parquet"]) == BitMap([1, 70_000])
    assert TaskResult.from_bytes(TaskResult().to_bytes()) == TaskResult()


def test_live_rows() -> None:
    assert FILE.live_rows == 10
    assert DataFile("a", 1, 10, "base", 0, 1, None, "{}", 1, Vector("i", "", None, 2, 3)).live_rows == 7
