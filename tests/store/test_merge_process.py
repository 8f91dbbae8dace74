"""A large merge has its own process: the result is the same, and nothing is lost whatever becomes of it."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from store.helpers_store import maintain
from store.test_merging import ASKED, VBUCKETS, a_store, content
from tailrace.clock import ManualClock
from tailrace.errors import StoreCorrupt
from tailrace.rng import source
from tailrace.store import compaction, merge_process
from tailrace.store.base import Compaction, Job, StoreSettings
from tailrace.store.bucket import EngineBucket
from tailrace.store.engine import Engine

KILLED_AT_ONCE = "import os; os._exit(9)"
KILLED_HALFWAY = """
import os, pickle, sys
_root, _path, fd, _number = pickle.load(sys.stdin.buffer)
os.write(fd, b"half of a segment")
os._exit(9)
"""
NEVER_READY = "import time; time.sleep(1000)"


def open_store(directory: Path) -> Engine:
    settings = StoreSettings(history_changes=5, segment_fanout=100, garbage_share=1.0, quiet_time=1e9)
    return Engine(directory, settings=settings, clock=ManualClock(), rng=source(5))


def on_disk(directory: Path, seed: int = 1) -> Path:
    for name, data in a_store(seed).files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return directory


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every merge is large enough. The processes that were started."""
    monkeypatch.setattr(compaction, "OWN_PROCESS_BYTES", 0)
    processes: list[Any] = []
    start = merge_process.subprocess.Popen  # type: ignore[attr-defined]

    def popen(*args: Any, **options: Any) -> Any:
        processes.append(start(*args, **options))
        return processes[-1]

    monkeypatch.setattr(merge_process.subprocess, "Popen", popen)  # type: ignore[attr-defined]
    return processes


def begun(bucket: EngineBucket, asked: Compaction) -> Job:
    job = bucket.begin_compaction(asked)
    assert job is not None
    return job


def state(bucket: EngineBucket) -> tuple[object, ...]:
    losses = [(vb.rollback_floor, vb.purge_seqno, vb.forgotten.rev_floor) for vb in bucket]
    return losses, [content(segment) for segment in bucket.segments]


def merged(directory: Path, asked: Compaction) -> tuple[object, ...]:
    """What is there after the merge, and after a restart."""
    with open_store(directory) as engine:
        bucket = engine.buckets["default"]
        begun(bucket, asked).finish()
        merged = state(bucket)
    with open_store(directory) as engine:
        assert state(engine.buckets["default"]) == merged
    return merged


def merged_here(tmp_path: Path, asked: Compaction, seed: int = 1) -> tuple[object, ...]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "OWN_PROCESS_BYTES", 1 << 60)
        return merged(on_disk(tmp_path / "here", seed), asked)


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("seed", range(2))
def test_the_same_comes_out(tmp_path: Path, started: list[Any], seed: int, asked: str) -> None:
    here = merged_here(tmp_path, ASKED[asked], seed)
    assert not started
    assert merged(on_disk(tmp_path / "apart", seed), ASKED[asked]) == here
    (process,) = started
    assert process.returncode == 0


def test_an_order_that_is_larger_than_a_pipe(tmp_path: Path, started: list[Any]) -> None:
    asked = Compaction(vbuckets=list(range(300_000)), drop_tombstones=True)
    here = merged_here(tmp_path, asked)
    assert merged(on_disk(tmp_path / "apart"), asked) == here
    assert [process.returncode for process in started] == [0]


def test_maintenance_is_apart_and_a_call_that_waits_is_not(tmp_path: Path, started: list[Any]) -> None:
    with open_store(on_disk(tmp_path)) as engine:
        bucket = engine.buckets["default"]
        bucket.compact()
        assert not started
        for generation in range(2):
            for number in range(VBUCKETS):
                bucket.vbuckets[number].set(b"\0more%d" % generation, b"value")
            bucket.seal()
        bucket.settings.quiet_time = 0.0
        maintain(bucket)
        assert len(started) == 1
        assert len(bucket.segments) < 3


@pytest.mark.parametrize("program", [KILLED_AT_ONCE, KILLED_HALFWAY])
def test_a_process_that_dies(
    tmp_path: Path,
    started: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    program: str,
) -> None:
    here = merged_here(tmp_path, ASKED["tombstones"])
    monkeypatch.setattr(merge_process, "_PROGRAM", program)
    with caplog.at_level(logging.WARNING):
        assert merged(on_disk(tmp_path / "apart"), ASKED["tombstones"]) == here
    assert len(started) == 1
    assert "ended with 9; the merge runs in this process" in caplog.text


@pytest.mark.parametrize("missing", [("executable", "/no/such/python"), ("frozen", True)])
def test_no_process_to_be_had(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    missing: tuple[str, Any],
) -> None:
    here = merged_here(tmp_path, ASKED["superseded"])
    monkeypatch.setattr(compaction, "OWN_PROCESS_BYTES", 0)
    monkeypatch.setattr(merge_process.sys, *missing, raising=False)  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING):
        assert merged(on_disk(tmp_path / "apart"), ASKED["superseded"]) == here
    assert "no process for a merge" in caplog.text


def test_what_it_finds_damaged_is_said(tmp_path: Path, started: list[Any]) -> None:
    segment = sorted(on_disk(tmp_path).glob("**/segment-*"))[2]
    data = bytearray(segment.read_bytes())
    data[200] ^= 1
    segment.write_bytes(data)
    segments = sorted(tmp_path.glob("**/segment-*"))
    with open_store(tmp_path) as engine:
        job = begun(engine.buckets["default"], Compaction())
        with pytest.raises(StoreCorrupt, match=segment.name):
            job.finish()
        assert sorted(tmp_path.glob("**/segment-*")) == segments
    assert len(started) == 1


def test_it_can_be_broken_off(tmp_path: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_process, "_PROGRAM", NEVER_READY)
    with open_store(on_disk(tmp_path)) as engine:
        bucket = engine.buckets["default"]
        before = state(bucket)
        bucket.settings.garbage_share = 0.0
        job = bucket.begin_maintenance()
        assert isinstance(job, compaction.MergeJob)
        thread = threading.Thread(target=job.run)
        thread.start()
        while not started:
            thread.join(0.01)
        job.cancel()
        thread.join()
        job.finish()
        assert state(bucket) == before
    (process,) = started
    assert process.returncode is not None
    with open_store(tmp_path) as engine:
        assert state(engine.buckets["default"]) == before
