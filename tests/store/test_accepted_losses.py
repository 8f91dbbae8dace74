"""What was persisted and is not there any more: an error that names the file, or an accepted loss."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from store.crash_script import open_store
from store.helpers_store import stream, values
from tailrace.errors import StoreCorrupt
from tailrace.files import MemoryFiles
from tailrace.store.bucket import EngineBucket
from tailrace.store.engine import Engine
from tailrace.testing.faulty_files import Fault, FaultyFiles, PowerCut, at_call
from tailrace.wire.codes import VBucketState

DIRECTORY = "bucket.default/"


def copy_of(files: MemoryFiles) -> MemoryFiles:
    copy = MemoryFiles()
    copy.files = {path: bytearray(data) for path, data in files.files.items()}
    return copy


def newest(files: MemoryFiles, kind: str) -> str:
    return max(path for path in files.files if path.startswith(DIRECTORY + kind))


def write(bucket: EngineBucket, name: bytes, count: int = 20) -> None:
    for i in range(count):
        bucket.vbuckets[i % 2].set(b"\0k%d" % i, name)


@pytest.fixture(scope="module", params=["stopped", "killed"])
def node(request: pytest.FixtureRequest) -> MemoryFiles:
    """Two segments, an old log and a new one, each with newer versions of the same documents."""
    files = MemoryFiles()
    engine = open_store(files, 1)
    bucket = engine.create_bucket("default", 4)
    bucket.set_state(3, VBucketState.REPLICA)
    write(bucket, b"first segment")
    bucket.seal()
    write(bucket, b"second segment", 10)
    bucket.vbuckets[0].delete(b"\0k18")
    bucket.seal()
    write(bucket, b"old log", 4)
    engine.close()
    engine = open_store(files, 2)
    bucket = engine.buckets["default"]
    write(bucket, b"new log", 2)
    bucket.flush()
    bucket.vbuckets[0].set(b"\0last", b"last batch")
    bucket.flush()
    (engine.close if request.param == "stopped" else engine.crash)()
    return files


def vb_uuids(bucket: EngineBucket) -> list[int]:
    return [vb.uuid for vb in bucket]


def refused(files: MemoryFiles, path: str) -> None:
    """The start names the file, says what to do, and leaves everything as it was."""
    before = {name: bytes(data) for name, data in files.files.items()}
    with pytest.raises(StoreCorrupt, match=rf"^{re.escape(path)}.*--accept-loss"):
        open_store(files, 3)
    assert {name: bytes(data) for name, data in files.files.items()} == before


def accepted(files: MemoryFiles) -> tuple[Engine, EngineBucket | None]:
    """A start that goes on without it; the one after that has nothing to complain about."""
    engine = Engine(files=files, accept_loss=True)
    bucket = engine.buckets.get("default")
    if bucket is not None:
        seen = [(vb.uuid, vb.high_seqno, values(vb)) for vb in bucket]
        for vb in bucket:
            stream(vb, memory=False)  # no document twice
        engine.crash()
        engine = open_store(copy_of(files), 4)
        assert [(vb.high_seqno, values(vb)) for vb in engine.buckets["default"]] == [s[1:] for s in seen]
        engine.crash()
        engine = open_store(files, 5)
        bucket = engine.buckets["default"]
        bucket.vbuckets[0].set(b"\0after", b"the loss")
        bucket.compact()
        assert len(stream(bucket.vbuckets[0])) == 1
    return engine, bucket


def known_uuids(files: MemoryFiles) -> set[int]:
    engine = open_store(copy_of(files), 6)
    uuids = {entry.vb_uuid for vb in engine.buckets["default"] for entry in vb.failover_log.entries}
    engine.crash()
    return uuids


@pytest.mark.parametrize("how", ["gone", "emptied", "renamed", "header only", "one batch short", "torn"])
def test_the_newest_log(node: MemoryFiles, how: str) -> None:
    files = copy_of(node)
    path = newest(files, "log-")
    if how in ("gone", "renamed"):
        data = files.files.pop(path)
        if how == "renamed":
            files.files[path + ".bak"] = data
    else:
        data = files.files[path]
        # what the last batches, each with its mark, left in the file
        marks = files.files[DIRECTORY + "SYNCED"]
        ends = [int.from_bytes(marks[at + 12 : at + 20], "little") for at in range(0, len(marks), 32)]
        assert ends[-1] == len(data)
        del data[{"emptied": 0, "header only": 64, "one batch short": ends[-2], "torn": ends[-1] - 1}[how] :]
    refused(files, path)
    engine, bucket = accepted(files)
    assert not known_uuids(node) & {bucket.vbuckets[0].uuid, bucket.vbuckets[1].uuid}
    whole = how in ("one batch short", "torn")
    value = b"new log" if whole else b"old log"
    assert values(bucket.vbuckets[0])[b"\0k0"] == value
    assert values(bucket.vbuckets[0])[b"\0k2"] == b"old log"
    assert (path + ".bak" in files.files) == (how == "renamed")
    engine.close()


def test_both_logs(node: MemoryFiles) -> None:
    files = copy_of(node)
    logs = sorted(path for path in files.files if "/log-" in path)
    assert len(logs) == 2
    for path in logs:
        del files.files[path]
    refused(files, logs[-1])
    _, bucket = accepted(files)
    assert values(bucket.vbuckets[0])[b"\0k0"] == b"second segment"


def test_an_older_log_takes_the_newer_ones_with_it(node: MemoryFiles) -> None:
    """What comes after a gap can't be applied; it is set aside, not thrown away."""
    files = copy_of(node)
    old, new = sorted(path for path in files.files if "/log-" in path)
    del files.files[old]
    refused(files, old)
    _, bucket = accepted(files)
    assert values(bucket.vbuckets[0])[b"\0k0"] == b"second segment"
    assert new.replace("/log-", "/lost-log-") in files.files


@pytest.mark.parametrize("how", ["gone", "emptied", "cut", "footer"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_segment(node: MemoryFiles, how: str, which: int) -> None:
    files = copy_of(node)
    path = sorted(path for path in files.files if "/segment-" in path)[which]
    if how == "gone":
        del files.files[path]
    elif how == "footer":
        files.files[path][-10] ^= 1
    else:
        del files.files[path][0 if how == "emptied" else len(files.files[path]) // 2 :]
    refused(files, path)
    engine, bucket = accepted(files)
    left = values(bucket.vbuckets[0]) | values(bucket.vbuckets[1])
    assert left[b"\0k0"] == b"new log"
    assert left[b"\0k3"] == b"old log"
    assert left.get(b"\0k8") == (b"second segment" if which == 0 else b"first segment")
    assert left.get(b"\0k19") == (None if which == 0 else b"first segment")
    assert (b"\0k18" in left) is (which == 1)  # its deletion is lost
    for vb in bucket:  # no reader may go on with what it knows
        assert len(vb.failover_log.entries) == 1 + (vb.state == VBucketState.ACTIVE)
        assert not known_uuids(node) & {entry.vb_uuid for entry in vb.failover_log.entries}
        assert vb.item_count == len(values(vb))
    if how != "gone":
        assert path.replace("/segment-", "/lost-segment-") in files.files
    engine.close()


@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_a_manifest(node: MemoryFiles, how: str) -> None:
    """Without it nothing of the bucket can be read: it is set aside as a whole."""
    files = copy_of(node)
    path = DIRECTORY + "MANIFEST"
    if how == "gone":
        del files.files[path]
    else:
        files.files[path][20] ^= 1
    refused(files, path)
    engine, bucket = accepted(files)
    assert bucket is None
    assert newest(node, "log-").replace("bucket.", "lost-bucket.") in files.files
    engine.create_bucket("default", 2)
    engine.close()
    open_store(files, 5).close()


@pytest.mark.parametrize("path", ["FORMAT", "BUCKETS", DIRECTORY + "SYNCED"])
@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_what_says_what_must_be_there(node: MemoryFiles, path: str, how: str) -> None:
    files = copy_of(node)
    if how == "gone":
        del files.files[path]
    else:
        files.files[path] = bytearray(b"x")
    refused(files, path)
    engine, bucket = accepted(files)
    assert values(bucket.vbuckets[0])[b"\0last"] == b"last batch"
    engine.close()


@pytest.mark.parametrize("how", ["gone", "emptied"])
def test_a_whole_bucket(node: MemoryFiles, how: str, tmp_path: Path) -> None:
    from tailrace.files import DiskFiles

    for path, data in node.files.items():
        target = tmp_path / path
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(data)
    for file in (tmp_path / "bucket.default").iterdir():
        file.unlink()
    if how == "gone":
        (tmp_path / "bucket.default").rmdir()
    with pytest.raises(StoreCorrupt, match=r"bucket\.default"):
        open_store(DiskFiles(tmp_path), 1)
    engine = Engine(tmp_path, accept_loss=True)
    assert not engine.buckets
    engine.close()
    open_store(DiskFiles(tmp_path), 1).close()


def test_accepting_a_loss_always_begins_a_branch(node: MemoryFiles) -> None:
    """A restored old copy of everything can't be told from a node that was stopped long ago."""
    files = copy_of(node)
    engine = Engine(files=files, accept_loss=True)
    bucket = engine.buckets["default"]
    assert not known_uuids(node) & {bucket.vbuckets[0].uuid, bucket.vbuckets[1].uuid}
    assert bucket.vbuckets[0].failover_log.newest.seqno == bucket.vbuckets[0].high_seqno
    assert values(bucket.vbuckets[0])[b"\0last"] == b"last batch"
    engine.close()


@pytest.mark.parametrize("lost", ["log", "segment", "MANIFEST"])
def test_a_kill_while_a_loss_is_accepted(node: MemoryFiles, lost: str) -> None:
    """Until the new branches are on disk the loss is still reported; then nobody can go on with the old."""
    whole = copy_of(node)
    old = known_uuids(node)
    path = DIRECTORY + "MANIFEST" if lost == "MANIFEST" else newest(whole, f"{lost}-")
    del whole.files[path]
    refusals = starts = 0
    for call in range(1, 200):
        files = copy_of(whole)
        faulty = FaultyFiles(files, at_call(call, lambda size: Fault(PowerCut(), size // 2)))
        try:
            Engine(files=faulty, accept_loss=True).crash()
        except PowerCut:
            files.locked = False
        else:
            break
        try:
            engine = open_store(files, call)
        except StoreCorrupt:
            refusals += 1
            engine = Engine(files=files, accept_loss=True)
        else:
            starts += 1
        for vb in engine.buckets["default"] if lost != "MANIFEST" else ():
            if vb.state == VBucketState.ACTIVE:
                assert vb.uuid not in old
                stream(vb)
        engine.close()
        open_store(files, call).close()
    else:
        raise AssertionError("it never came to its end")
    assert refusals > 3
    assert starts
