"""Files that are not as they were written: torn tails are dropped, everything else is an error that names the
file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from store.conftest import stored
from store.crash_script import look, open_store
from store.helpers_store import stream
from tailrace.errors import StoreCorrupt, StoreError, StoreLocked, StoreTooNew, TailraceError
from tailrace.files import DiskFiles, MemoryFile, MemoryFiles
from tailrace.store.bucket import EngineBucket
from tailrace.store.engine import Engine
from tailrace.store.format import LOG
from tailrace.store.log import log_header, read_log

DIRECTORY = "bucket.default/"
SYNCED = DIRECTORY + "SYNCED"


def store(files: MemoryFiles) -> tuple[Engine, EngineBucket]:
    engine = open_store(files, 1)
    return engine, engine.buckets.get("default") or engine.create_bucket("default", 2)


def newest_log(files: MemoryFiles) -> str:
    return max(path for path in files.files if path.startswith(DIRECTORY + "log-"))


def copy_of(files: MemoryFiles) -> MemoryFiles:
    copy = MemoryFiles()
    copy.files = {path: bytearray(data) for path, data in files.files.items()}
    return copy


@pytest.fixture(scope="module")
def torn() -> tuple[MemoryFiles, str, int]:
    """A store whose log ends with one batch of 64 KiB; where that begins."""
    files = MemoryFiles()
    engine, bucket = store(files)
    for i in range(10):
        bucket.vbuckets[0].set(b"\0k%d" % i, b"first")
    bucket.flush()
    path = newest_log(files)
    start = len(files.files[path])
    mark = bytes(files.files[SYNCED])
    for i in range(200):
        bucket.vbuckets[i % 2].set(b"\0k%d" % (i % 20), b"second" * 40)
    bucket.flush()
    engine.crash()
    files.files[SYNCED][:] = mark  # a mark is written when its batch is durable, and this one never was
    assert len(files.files[path]) - start > 60_000
    return files, path, start


def batches_of(path: str, data: bytearray) -> list[int]:
    file = MemoryFile(path, data)
    header = log_header(file)
    assert header is not None
    return [end for end, _ in read_log(file, header, None)]


def test_every_byte_of_a_torn_tail(torn: tuple[MemoryFiles, str, int]) -> None:
    files, path, start = torn
    data = bytearray(files.files[path])
    wanted = batches_of(path, data)
    assert wanted[-1] == len(data)
    while len(data) > start:
        del data[-1]
        assert batches_of(path, data) == wanted[:-1]


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.long)])
def test_every_flipped_byte_of_the_tail(torn: tuple[MemoryFiles, str, int], step: int) -> None:
    files, path, start = torn
    whole = bytearray(files.files[path])
    wanted = batches_of(path, whole)
    for place in range(start, len(whole), step):
        whole[place] ^= 0x40
        assert batches_of(path, whole) == wanted[:-1]
        whole[place] ^= 0x40


def test_a_store_with_a_torn_tail_opens(torn: tuple[MemoryFiles, str, int]) -> None:
    files, path, start = torn
    whole = bytes(files.files[path])
    for length in [*range(start, len(whole), 997), start + 1, len(whole) - 1]:
        copy = copy_of(files)
        copy.files[path] = bytearray(whole[:length])
        engine, bucket = store(copy)
        assert [vb.high_seqno for vb in bucket] == [10, 0]
        assert stored(bucket.vbuckets[0].get(b"\0k3")).value == b"first"
        bucket.vbuckets[1].set(b"\0after", b"")
        engine.close()
        _, bucket = store(copy)
        assert [vb.high_seqno for vb in bucket] == [10, 1]


def test_damage_before_the_tail_is_no_torn_tail(torn: tuple[MemoryFiles, str, int]) -> None:
    files, path, start = torn
    copy = copy_of(files)
    for place in range(LOG.size, start, 7):
        copy.files[path][place] ^= 0x01
        with pytest.raises(StoreCorrupt, match=re.escape(path)):
            store(copy)
        copy.files[path][place] ^= 0x01


def test_a_document_that_looks_like_a_batch_is_none() -> None:
    """Somebody stores a piece of a log as a value; the salt tells it from a batch of this log."""
    files = MemoryFiles()
    engine, bucket = store(files)
    bucket.vbuckets[0].set(b"\0a", b"1")
    bucket.flush()
    piece = bytes(files.files[newest_log(files)])
    engine.close()
    engine, bucket = store(files)
    bucket.flush()
    start = len(files.files[newest_log(files)])
    mark = bytes(files.files[SYNCED])
    bucket.vbuckets[0].set(b"\0b", piece)
    bucket.flush()
    path = newest_log(files)
    engine.crash()
    files.files[SYNCED][:] = mark
    files.files[path][start + 20] ^= 1
    _, bucket = store(files)
    assert bucket.vbuckets[0].get(b"\0b") is None
    assert bucket.vbuckets[0].get(b"\0a") is not None


@pytest.fixture(scope="module")
def sealed() -> MemoryFiles:
    """A store with two segments, one of them clipped, and a log."""
    files = MemoryFiles()
    engine, bucket = store(files)
    vb = bucket.vbuckets[0]
    for i in range(30):
        vb.set(b"\0k%d" % (i % 12), b"%d" % i * 10, expiry=4_000_000_000)
    bucket.seal()
    bucket.rollback({0: 20}, branch=True)
    for i in range(30):
        bucket.vbuckets[i % 2].set(b"\0k%d" % (i % 12), b"%d" % i * 10)
    bucket.seal()
    vb.set(b"\0last", b"")
    engine.close()
    return files


def read_all(files: MemoryFiles) -> list[Any]:
    """Everything there is, read in every way."""
    engine, bucket = store(files)
    every = [
        [stream(vb) + stream(vb, memory=False) for vb in bucket],
        look(bucket)["vbuckets"],
        [vb.get(b"\0k%d" % i) for vb in bucket for i in range(12)],
        [vb.failover_log for vb in bucket],
    ]
    bucket.compact()
    every.append([stream(vb) + stream(vb, memory=False) for vb in bucket])
    engine.crash()
    return every


def test_every_flipped_byte_of_everything_else(sealed: MemoryFiles) -> None:
    """Nothing is lost or changed silently: the same is read, or the file is named."""
    wanted = read_all(copy_of(sealed))
    refused = 0
    for path, data in sealed.files.items():
        for place in range(0, len(data), 5 if "segment" in path else 3):
            copy = copy_of(sealed)
            copy.files[path][place] ^= 0x10
            try:
                assert read_all(copy) == wanted
            except TailraceError as error:
                assert isinstance(error, StoreCorrupt | StoreTooNew)
                assert path.removeprefix(DIRECTORY) in str(error) or path == "FORMAT"
                refused += 1
    assert refused > 500


def test_missing_files_are_named(sealed: MemoryFiles) -> None:
    for path in sealed.files:
        copy = copy_of(sealed)
        del copy.files[path]
        if path != "LOCK":
            with pytest.raises(StoreCorrupt, match=re.escape(path)):
                read_all(copy)


def test_a_lost_log_in_the_middle_is_named() -> None:
    files = MemoryFiles()
    for i in range(4):
        engine, bucket = store(files)
        bucket.vbuckets[0].set(b"\0a", b"%d" % i)
        engine.close()
    logs = sorted(path for path in files.files if "log-" in path)
    assert len(logs) == 4
    for path in logs[:-1]:
        copy = copy_of(files)
        del copy.files[path]
        with pytest.raises(StoreCorrupt, match="log-"):
            store(copy)


def test_a_newer_format_is_refused_untouched(tmp_path: Path) -> None:
    engine = open_store(DiskFiles(tmp_path), 1)
    engine.create_bucket("default", 2).vbuckets[0].set(b"\0a", b"1")
    engine.close()
    version = tmp_path / "FORMAT"
    data = bytearray(version.read_bytes())
    data[-2] += 1
    version.write_bytes(data)
    (tmp_path / "LOCK").unlink()

    def everything() -> dict[Path, Any]:
        return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.rglob("*") if p.is_file()}

    before = everything()
    with pytest.raises(StoreTooNew, match="newer Tailrace"):
        open_store(DiskFiles(tmp_path), 1)
    assert everything() == before


def test_a_directory_that_is_no_store_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(StoreError, match="precious"):
        open_store(DiskFiles(tmp_path), 1)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        open_store(DiskFiles(tmp_path / "file"), 1)


def test_another_process_is_refused(tmp_path: Path) -> None:
    import subprocess
    import sys

    engine = open_store(DiskFiles(tmp_path), 1)
    code = f"from tailrace.store.engine import Engine\nEngine({str(tmp_path)!r})"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "StoreLocked" in child.stderr
    with pytest.raises(StoreLocked):
        open_store(DiskFiles(tmp_path), 1)
    engine.crash()
    open_store(DiskFiles(tmp_path), 1).close()


def test_leftovers_are_removed() -> None:
    files = MemoryFiles()
    engine, bucket = store(files)
    bucket.vbuckets[0].set(b"\0a", b"1")
    bucket.seal()
    engine.close()
    for name in ("segment-0000000099", "MANIFEST.new", "log-0000000099"):
        files.files[DIRECTORY + name] = bytearray(b"half written")
    files.files["bucket.half/MAKING"] = bytearray()
    files.files["bucket.half/log-0000000001"] = bytearray()
    files.files["bucket.halfgone/DELETED"] = bytearray(b"what was the manifest")
    engine, bucket = store(files)
    assert stored(bucket.vbuckets[0].get(b"\0a")).value == b"1"
    assert set(engine.buckets) == {"default"}
    left = set(files.files)
    assert not any("99" in path or path.endswith(".new") or "half" in path for path in left)
    engine.close()
