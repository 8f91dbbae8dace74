"""The store on a disk that loses power or fails: nothing durable is lost, nothing torn is served."""

from __future__ import annotations

import contextlib
import random

import pytest

from store.crash_script import KEYS, Script, begin, check_recovered, look, open_store, rehearse
from store.helpers_store import state_of, stream
from tailrace.errors import StoreError
from tailrace.store.format import StoredDocument
from tailrace.testing.faulty_files import (
    Fault,
    FaultyFiles,
    PowerCut,
    SimulatedDisk,
    at_call,
    io_error,
    no_space,
)

OPERATIONS = 120


def check_whole(bucket) -> None:
    """Every frame that can be read is what was written, and all ways of reading agree."""
    for vb in bucket:
        for memory in (True, False):
            documents = state_of(stream(vb, memory=memory))
            assert len(documents) == vb.item_count
            for key, document in documents.items():
                assert StoredDocument.of(vb.get(key)) == document


def cut_and_reopen(disk: SimulatedDisk, script: Script, rng: random.Random, seed: int) -> None:
    """Power goes; perhaps again while the store is opened; then everything must be there."""
    disk = disk.power_cut(rng)
    if rng.random() < 0.5:
        # A crash of the recovery itself, with another power cut on top.
        try:
            open_store(FaultyFiles(disk, at_call(rng.randint(1, 12), power_cut_at(rng))), seed + 1)
        except PowerCut:
            disk = disk.power_cut(rng)
        else:
            disk.unlock()
    engine = open_store(disk, seed + 2)
    bucket = engine.buckets.get("default")
    if bucket is None:
        assert script is None or script.durable == 0
        return
    check_recovered(bucket, script, durable=script.durable)
    check_whole(bucket)
    # ... and it goes on from there, and stops cleanly.
    bucket.vbuckets[0].set(b"\0k0", b"after")
    uuids = [vb.uuid for vb in bucket]
    after = look(bucket)
    engine.close()
    engine = open_store(disk, seed + 3)
    assert look(engine.buckets["default"]) == after
    assert [vb.uuid for vb in engine.buckets["default"]] == uuids


def power_cut_at(rng: random.Random):
    return lambda size: Fault(PowerCut(), rng.randint(0, size))


def run_until_cut(seed: int) -> None:
    rng = random.Random(seed)
    disk = SimulatedDisk()
    files = FaultyFiles(disk)
    _, script = begin(files, seed)
    files.calls = 0
    files.plan = at_call(rng.randint(1, 250), power_cut_at(rng))
    with contextlib.suppress(PowerCut):
        script.run(OPERATIONS)
    cut_and_reopen(disk, with_last_look(script), rng, seed)


def with_last_look(script: Script) -> Script:
    """The operation in which power went may have become durable, though nobody was told."""
    rehearsed = rehearse_from(script)
    script.looks += rehearsed.looks[len(script.looks) : len(script.looks) + 1]
    script.logs += rehearsed.logs[len(script.logs) : len(script.logs) + 1]
    return script


def rehearse_from(script: Script) -> Script:
    return rehearse(script.seed, len(script.looks))


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


def run_with_errors(seed: int) -> int:
    """Writes fail now and then; what could not be written stays queued; then power goes."""
    rng = random.Random(seed)
    disk = SimulatedDisk()
    files = FaultyFiles(disk)
    _, script = begin(files, seed)
    kind = rng.choice((no_space, io_error))
    share = rng.choice((0.02, 0.1, 0.5))

    def plan(_call: int, name: str, _path: str, size: int) -> Fault | None:
        if rng.random() < share and (kind is io_error or name in ("append", "create")):
            return Fault(kind(), rng.randint(0, size))
        return None

    files.plan = plan
    script.run(OPERATIONS)
    if rng.random() < 0.5:
        # The disk works again: everything that is in memory can be saved.
        files.plan = None
        script.bucket.flush()
        script.looks.append(look(script.bucket))
        script.logs.append(script.logs[-1])
        script.durable = len(script.looks) - 1
    cut_and_reopen(disk, script, rng, seed)
    return script.failures


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
