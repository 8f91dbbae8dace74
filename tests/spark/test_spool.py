"""The spool: small deliveries become few files, in order, and none is passed over."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.columns import SCHEMA
from tailrace.errors import TailraceError
from tailrace.model import Position
from tailrace.spark.source import spool as spool_module
from tailrace.spark.source import spool_place
from tailrace.spark.source.spool import FeedDelivery, Spool, SpoolSegment
from tailrace.spark.source.spool_place import FolderPlace

NOTHING_SAID: dict[str, Any] = {"max_rows": None, "max_bytes": None, "wait_s": 0.0}


def delivery(first: int, count: int = 3, *, back: int | None = None) -> FeedDelivery:
    rows = [{"op": "mutation", "vbucket": 0, "seqno": seqno} for seqno in range(first, first + count)]
    rollbacks = {} if back is None else {0: Position.at(7, back)}
    end = {0: Position.at(7, first + count - 1)}
    return FeedDelivery(pa.RecordBatch.from_pylist(rows, schema=SCHEMA), end, rollbacks)


def seqnos(segments: list[SpoolSegment], partition: int = 0) -> list[int]:
    seqnos = []
    for segment in segments:
        if path := segment.files.get(partition):
            with pa.memory_map(path) as source, pa.ipc.open_stream(source) as reader:
                seqnos += reader.read_all()["seqno"].to_pylist()
    return seqnos


def test_what_is_gathered_becomes_one_segment(tmp_path: Path) -> None:
    spool = Spool(FolderPlace(tmp_path), [0], 1 << 20)
    for first in (1, 4, 7):
        spool.append(delivery(first))
    assert not list(tmp_path.iterdir())
    segments = spool.take(0, **NOTHING_SAID)
    assert seqnos(segments) == list(range(1, 10))
    assert [(segment.number, segment.rows, segment.positions[0].seqno) for segment in segments] == [(0, 9, 9)]
    spool.release(1)
    assert not list(tmp_path.iterdir())


@given(
    runs=st.lists(st.tuples(st.integers(0, 7), st.integers(1, 600)), min_size=1, max_size=12),
    tail=st.lists(st.integers(0, 7), max_size=60),
    cuts=st.lists(st.integers(0, 3000), max_size=5),
)
def test_rows_go_to_their_partition_in_order(
    runs: list[tuple[int, int]], tail: list[int], cuts: list[int]
) -> None:
    """Long runs are passed on, short ones are copied together: the result is the same."""
    vbuckets = [vbucket for vbucket, count in runs for _ in range(count)] + tail
    columns = {"vbucket": pa.array(vbuckets, pa.int32()), "seqno": pa.array(range(len(vbuckets)), pa.int64())}
    rows = pa.RecordBatch.from_arrays(
        [columns.get(field.name, pa.nulls(len(vbuckets), field.type)) for field in SCHEMA], schema=SCHEMA
    )
    borders = sorted({0, len(vbuckets), *(cut for cut in cuts if cut < len(vbuckets))})
    with tempfile.TemporaryDirectory() as directory:
        spool = Spool(FolderPlace(Path(directory)), [0, 0, 1, 1, 2, 2, 0, 1], 1 << 30)
        spool.fill(FeedDelivery(rows.slice(a, b - a), {}) for a, b in pairwise(borders))
        segments = spool.take(0, **NOTHING_SAID)
        for partition, own in enumerate(({0, 1, 6}, {2, 3, 7}, {4, 5})):
            expected = [seqno for seqno, vbucket in enumerate(vbuckets) if vbucket in own]
            assert seqnos(segments, partition) == expected


def test_a_segment_is_never_larger_than_a_batch(tmp_path: Path) -> None:
    spool = Spool(FolderPlace(tmp_path), [0], 1 << 20, segment_rows=7)
    for first in (1, 4, 7, 10, 13):
        spool.append(delivery(first))
    assert [segment.rows for segment in spool.take(0, **NOTHING_SAID | {"max_rows": 7})] == [6]
    spool.flush()
    assert [segment.rows for segment in spool.take(0, **NOTHING_SAID)] == [6, 6, 3]
    assert seqnos(spool.take(1, **NOTHING_SAID)) == list(range(7, 16))


def test_what_went_back_begins_a_new_segment(tmp_path: Path) -> None:
    spool = Spool(FolderPlace(tmp_path), [0], 1 << 20)
    spool.append(delivery(1))
    spool.append(delivery(2, back=1))
    spool.append(delivery(5))
    spool.flush()
    segments = spool.take(0, **NOTHING_SAID)
    assert [dict(segment.rollbacks) for segment in segments] == [{}, {0: Position.at(7, 1)}]
    assert [segment.rows for segment in segments] == [3, 6]


def test_a_query_that_ends_waits_for_all_or_for_enough(tmp_path: Path) -> None:
    spool = Spool(FolderPlace(tmp_path), [0], 1 << 20)
    spool.append(delivery(1))
    spool.flush()
    assert spool.take(0, **NOTHING_SAID, gather_bytes=1 << 20) == []
    assert spool.take(0, **NOTHING_SAID | {"max_rows": 3}, gather_bytes=1 << 20)
    spool.fill([delivery(4)])
    assert spool.finished
    assert seqnos(spool.take(0, **NOTHING_SAID, gather_bytes=1 << 20)) == list(range(1, 7))


def test_a_full_spool_is_enough(tmp_path: Path) -> None:
    spool = Spool(FolderPlace(tmp_path), [0], 1)
    spool.append(delivery(1))
    waiting = threading.Thread(target=spool.append, args=(delivery(4),))
    waiting.start()
    assert seqnos(spool.take(0, **NOTHING_SAID, gather_bytes=1 << 20)) == [1, 2, 3]
    spool.release(1)
    waiting.join(60)
    assert seqnos(spool.take(1, **NOTHING_SAID, gather_bytes=1 << 20)) == [4, 5, 6]


def test_nothing_comes_after_what_could_not_be_written(tmp_path: Path) -> None:
    spool = Spool(FolderPlace(tmp_path), [0], 1 << 20)
    spool.append(delivery(1))
    spool.flush()
    spool.append(delivery(4))
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(spool_place, "write_scratch", side_effect=full), pytest.raises(TailraceError):
        spool.flush()
    spool.fill([delivery(7), delivery(10)])
    assert seqnos(spool.take(0, **NOTHING_SAID)) == [1, 2, 3]
    assert not spool.finished
    says = f"the spool in '{tmp_path}' can't be written: No space left on device; make room, or set spoolDir"
    with pytest.raises(TailraceError, match=f"^{re.escape(says)} to another folder$"):
        spool.take(1, **NOTHING_SAID)


def test_what_came_before_an_error_is_taken_first(tmp_path: Path) -> None:
    def broken() -> Any:
        yield delivery(1)
        raise RuntimeError("the source is gone")

    spool = Spool(FolderPlace(tmp_path), [0], 1 << 20)
    spool.fill(broken())
    assert seqnos(spool.take(0, **NOTHING_SAID)) == [1, 2, 3]
    with pytest.raises(RuntimeError, match="the source is gone"):
        spool.take(1, **NOTHING_SAID)


def test_changes_reach_the_spool_without_pandas(tmp_path: Path) -> None:
    """Arrow imports it at its first `pa.array` or `to_numpy`: half a second, in every process that reads."""
    code = """
        import sys
        from pathlib import Path
        from tailrace.columns.batch import decode
        from tailrace.spark.source.spool import FeedDelivery, Spool
        from tailrace.spark.source.spool_place import FolderPlace
        from tailrace.wire.dcp import DcpDeletion, DcpMutation
        changes = [
            DcpMutation(vbucket=0, by_seqno=1, rev_seqno=1, key=b"a", value=b"1", datatype=1),
            DcpDeletion(vbucket=1, by_seqno=1, rev_seqno=2, key=b"b"),
            DcpMutation(vbucket=0, by_seqno=2, rev_seqno=1, key=b"c", value=b"raw"),
        ]
        batch = decode(b"".join(one.encode() for one in changes)).batch
        spool = Spool(FolderPlace(Path(sys.argv[1])), [0, 1], 1 << 20)
        spool.append(FeedDelivery(batch, {}))
        files = spool.take(0, max_rows=None, max_bytes=None, wait_s=0.0)[0].files
        sys.exit("pandas" if "pandas" in sys.modules else 0 if len(files) == 2 else "not cut")
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_tasks_and_planning_do_without_the_client(tmp_path: Path) -> None:
    """Both get the stream's reader as a pickle, and at most pass on what is in files: importing the modules
    for connecting would take longer than that.
    """
    code = """
        import pickle, sys
        from pathlib import Path
        import pyarrow as pa
        from tailrace.spark.source.spool_place import FolderPlace
        from tailrace.spark.source.stream import SpooledPartition, StreamReader
        name, _ = FolderPlace(Path(sys.argv[1])).write([pa.RecordBatch.from_pydict({"n": [1, 2]})])
        planned = pickle.dumps((StreamReader({"path": "couchbase://127.0.0.1"}), SpooledPartition([name])))
        reader, partition = pickle.loads(planned)
        assert [batch.num_rows for batch in reader.read(partition)] == [2]
        heavy = ("tailrace.client", "tailrace.wire.dcp", "tailrace.table.store", "asyncio")
        sys.exit(" ".join(name for name in heavy if name in sys.modules) or 0)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("value_bytes", [1, 1 << 10, 64 << 10, 1 << 20, 20 << 20])
@pytest.mark.parametrize("per_delivery", [1, 40])
def test_what_is_held_and_what_is_handed_on_is_bounded_in_bytes(
    tmp_path: Path, value_bytes: int, per_delivery: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of any size: neither a segment in memory nor a batch for Spark grows with what waits."""
    segment_bytes, batch_bytes = 400 << 10, 100 << 10  # everything is 200 times smaller here
    monkeypatch.setattr(spool_module, "SEGMENT_BYTES", segment_bytes)
    monkeypatch.setattr(spool_module, "_JOINED_BYTES", batch_bytes)
    value = b"v" * max(1, value_bytes // 200)
    spool = Spool(FolderPlace(tmp_path), [0], 1 << 30)
    room = max(segment_bytes, per_delivery * (len(value) + 300))
    for number in range(60):
        first = number * per_delivery + 1
        rows = [
            {"op": "mutation", "vbucket": 0, "seqno": seqno, "value": value}
            for seqno in range(first, first + per_delivery)
        ]
        spool.append(FeedDelivery(pa.RecordBatch.from_pylist(rows, schema=SCHEMA), {}))
        assert spool.held_bytes <= room
    spool.flush()
    segments = spool.take(0, **NOTHING_SAID)
    assert seqnos(segments) == list(range(1, 60 * per_delivery + 1))
    for segment in segments:
        with pa.memory_map(segment.files[0]) as source, pa.ipc.open_stream(source) as reader:
            sizes = [batch.nbytes for batch in reader]
        assert max(sizes) <= max(batch_bytes, per_delivery * (len(value) + 300))


@pytest.mark.parametrize("name", ["with space", "größe", "a#b", "a?b", "a%41b"])
def test_a_place_however_it_is_written(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    target = tmp_path / name
    (tmp_path / "link").symlink_to(target)
    for written in (str(target), f"{target}/", name, target.as_uri(), "link"):
        place = spool_place.open_place(written, {})
        path, _ = place.write([delivery(1).rows])
        assert Path(path).parent.parent == target
        place.remove()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["link", name])


def test_a_place_that_can_not_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(**_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "mkdtemp", read_only)
    for where in (str(tmp_path), None):
        with pytest.raises(TailraceError, match=r"^the spool in .* can't be made: Read-only file system;"):
            spool_place.open_place(where, {})
