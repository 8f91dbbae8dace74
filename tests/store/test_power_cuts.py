"""The store on a disk that loses power or fails: nothing durable is lost, nothing torn is served."""

from __future__ import annotations

import random

import pytest

from store.crash_script import KEYS, begin, look, open_store
from store.power_cuts import check_whole, run_until_cut, run_with_errors
from tailrace.errors import StoreError
from tailrace.store.format import StoredDocument
from tailrace.testing.faulty_files import Fault, FaultyFiles, SimulatedDisk, io_error, no_space


@pytest.mark.parametrize("part", range(8))
def test_power_cuts(part: int) -> None:
    for seed in range(part * 25, part * 25 + 25):
        try:
            run_until_cut(seed)
        except AssertionError as error:
            raise AssertionError(f"replay with run_until_cut({seed})") from error


@pytest.mark.long
def test_many_power_cuts() -> None:
    for seed in range(10_000, 20_000):
        try:
            run_until_cut(seed)
        except AssertionError as error:
            raise AssertionError(f"replay with run_until_cut({seed})") from error


@pytest.mark.parametrize("part", range(4))
def test_errors(part: int) -> None:
    failures = 0
    for seed in range(part * 25, part * 25 + 25):
        try:
            failures += run_with_errors(seed)
        except AssertionError as error:
            raise AssertionError(f"replay with run_with_errors({seed})") from error
    assert failures > 50


def test_a_failed_sync_is_never_counted() -> None:
    disk = SimulatedDisk()
    files = FaultyFiles(disk)
    _, script = begin(files, 1)
    bucket = script.bucket
    vb = bucket.vbuckets[0]
    answers: list[bool] = []
    vb.set(b"\0k1", b"1")
    vb.when_persisted(1, answers.append)
    files.plan = lambda _call, name, _path, _size: Fault(io_error()) if name == "sync" else None
    bucket.set_cursor("first", {"0": 1})
    bucket.set_cursor("second", {"0": 1})
    for number in range(3):
        with pytest.raises(StoreError):
            bucket.flush()
        bucket.set_cursor("second", {"0": number})
    assert (answers, vb.persisted_seqno, bucket.journal.failures) == ([], 0, 3)
    log = bucket.journal.number
    files.plan = None
    bucket.flush()
    assert (answers, vb.persisted_seqno) == ([True], 1)
    assert bucket.journal.number > log  # the file whose sync failed is not trusted again
    for seed in range(20):
        left = open_store(disk.power_cut(random.Random(seed)), 2).buckets["default"]
        assert StoredDocument.of(left.vbuckets[0].get(b"\0k1")).value == b"1"  # type: ignore[arg-type]
        assert left.cursors == {"first": {"0": 1}, "second": {"0": 2}}


def test_a_full_disk_keeps_serving_reads() -> None:
    disk = SimulatedDisk()
    files = FaultyFiles(disk)
    _, script = begin(files, 1)
    bucket = script.bucket
    vb = bucket.vbuckets[0]
    vb.set(b"\0k1", b"1")
    bucket.flush()
    files.plan = lambda _call, name, _path, size: Fault(no_space(), size // 2) if name == "append" else None
    vb.set(b"\0k1", b"2")
    with pytest.raises(StoreError, match="No space left"):
        bucket.flush()
    assert StoredDocument.of(vb.get(b"\0k1")).value == b"2"  # type: ignore[arg-type]
    with pytest.raises(StoreError):
        bucket.rollback({0: 1}, branch=True)
    assert vb.high_seqno == 2
    with pytest.raises(StoreError):
        bucket.seal()
    files.plan = None
    bucket.rollback({0: 1}, branch=True)
    assert StoredDocument.of(vb.get(b"\0k1")).value == b"1"  # type: ignore[arg-type]


@pytest.mark.parametrize("merging", [False, True])
def test_a_manifest_that_may_not_survive(merging: bool) -> None:
    """Its rename happened, the sync after it failed: whichever comes back must find its files."""
    disk = SimulatedDisk()
    files = FaultyFiles(disk)
    _, script = begin(files, 1)
    bucket = script.bucket
    vb = bucket.vbuckets[0]
    for i in range(60):
        vb.set(KEYS[i % 12], b"%d" % i)
        if i % 20 == 19:
            bucket.seal()
    vb.set(KEYS[0], b"last")
    bucket.flush()
    wanted = look(bucket)["vbuckets"]

    def plan(_call: int, name: str, _path: str, _size: int) -> Fault | None:
        after_rename = files.trace[-2] == ("rename", "bucket.default/MANIFEST")
        return Fault(io_error()) if name == "sync_directory" and after_rename else None

    files.plan = plan
    if merging:
        bucket.compact()
    else:
        bucket.seal()
    assert not bucket.sealed.manifest_file.is_durable
    assert look(bucket)["vbuckets"] == wanted
    files.plan = None
    for seed in range(20):
        again = open_store(disk.power_cut(random.Random(seed)), 2).buckets["default"]
        assert look(again)["vbuckets"] == wanted
    bucket.vbuckets[1].set(KEYS[0], b"")
    bucket.seal()
    assert bucket.sealed.manifest_file.is_durable
    names = disk.names("bucket.default")
    assert len([name for name in names if name.startswith("segment")]) == len(bucket.segments)
    check_whole(open_store(disk.power_cut(random.Random(1)), 3).buckets["default"])
