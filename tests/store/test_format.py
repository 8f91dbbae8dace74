"""The files are as docs/format.md says: read here by its tables alone, without the store's own code."""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest

from tailrace.clock import ManualClock
from tailrace.errors import StoreCorrupt, StoreTooNew
from tailrace.files import MemoryFiles
from tailrace.frames import seqnos_at
from tailrace.store.bucket import EngineBucket
from tailrace.store.engine import Engine


def u(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "little")


def a_store() -> tuple[MemoryFiles, list[Any]]:
    files = MemoryFiles()
    engine = Engine(files=files, clock=ManualClock())
    bucket = engine.create_bucket("default", 2)
    vb = bucket.vbuckets[1]
    frames = []
    for i in range(2_000):
        vb.set(b"\0k%d" % (i % 1500), bytes([i % 251]) * 900, expiry=4_000_000_000 + i)
        frames.append(vb.get(b"\0k%d" % (i % 1500)))
        if i % 500 == 499:
            bucket.flush()
    engine.close()
    return files, frames


def test_a_log() -> None:
    files, frames = a_store()
    data = bytes(files.files["bucket.default/log-0000000001"])
    assert data[:5] == b"TRLG\4"
    assert [u(data, at, 8) for at in (8, 16, 24, 32)] == [1, 0, 0, 1]
    salt = u(data, 40, 4)
    assert u(data, 60, 4) == zlib.crc32(data[:60])
    stored, notes, metas, at, number = [], [], [], 64, 0
    while at < len(data):
        number += 1
        assert data[at : at + 4] == b"TRBT"
        assert u(data, at + 4, 4) == zlib.crc32(data[at + 8 : at + 48], salt)
        assert u(data, at + 8, 8) == number
        count, meta, size = u(data, at + 24, 4), u(data, at + 28, 4), u(data, at + 32, 8)
        end = at + 48 + 12 * count + size + meta
        assert u(data, at + 40, 4) == zlib.crc32(data[at + 48 : end], salt)
        place = at + 48 + 12 * count
        for i in range(count):
            length = u(data, at + 48 + 4 * i, 4)
            stored.append(data[place : place + length])
            notes.append(u(data, at + 48 + 4 * count + 8 * i, 8))
            assert u(data, at + 16, 8) >= struct.unpack_from(">Q", stored[-1], 16)[0]
            place += length
        metas.append(json.loads(data[place:end]) if meta else {})
        at = end
    assert stored == frames
    assert notes[:1500] == [0x40] * 1500
    assert notes[1500:] == [(seqno << 8) | 0xC0 for seqno in range(1, 501)]
    assert metas[0]["clean"] is False
    assert set(metas[0]["vbuckets"]) == {"0", "1"}
    assert metas[-1] == {"clean": True}


def test_a_segment_and_the_manifest() -> None:
    files, frames = a_store()
    engine = Engine(files=files, clock=ManualClock())
    engine.buckets["default"].seal()
    engine.close()
    text = bytes(files.files["bucket.default/MANIFEST"])
    assert text[:9] == b"%08x " % zlib.crc32(text[9:-1])
    manifest = json.loads(text[9:])
    (entry,) = manifest["segments"]
    assert entry["clips"] == {}
    assert manifest["vbuckets"]["1"]["high_seqno"] == 2_000
    data = bytes(files.files["bucket.default/" + entry["file"]])
    assert data[:5] == b"TRSG\4"
    foot = len(data) - 48
    assert u(data, foot + 44, 4) == zlib.crc32(data[foot : foot + 44])
    table, entries, count, pairs = (u(data, foot + at, 8) for at in (0, 8, 16, 24))
    assert (entries, count, pairs) == (1, 2_000, 500)
    assert u(data, foot + 32, 4) == zlib.crc32(data[table:foot])
    assert [u(data, table + at, size) for at, size in ((0, 2), (4, 4), (8, 4), (12, 4))] == [
        1, 4_000_000_000, 2_000, 500,
    ]  # fmt: skip
    at, size, frame_bytes, pairs_at, first, last = (u(data, table + 24 + 8 * i, 8) for i in range(6))
    assert (frame_bytes, first, last) == (sum(map(len, frames)), 1, 2_000)
    news = [u(data, pairs_at + 8 * i, 8) for i in range(500)]
    olds = [u(data, pairs_at + 8 * (500 + i), 8) for i in range(500)]
    assert (news, olds) == (list(range(1501, 2001)), list(range(1, 501)))
    assert u(data, table + 16, 4) == zlib.crc32(data[pairs_at : pairs_at + 8_000])

    stored, end, blocks = [], at + size, 0
    while at < end:
        blocks += 1
        assert data[at : at + 4] == b"TRBK"
        assert u(data, at + 4, 4) == zlib.crc32(data[at + 8 : at + 64])
        n, length = u(data, at + 16, 4), u(data, at + 20, 4)
        columns = (17 * n + 7) // 8 * 8
        assert u(data, at + 8, 4) == zlib.crc32(data[at + 64 : at + 64 + columns])
        everything = data[at + 64 : at + 64 + columns + length]
        body = everything[columns:]
        place = 0
        for i in range(n):
            length_i = u(data, at + 64 + 8 * n + 4 * i, 4)
            stored.append(body[place : place + length_i])
            assert u(data, at + 64 + 12 * n + 4 * i, 4) == zlib.crc32(stored[-1])
            assert u(data, at + 64 + 8 * i, 8) == len(stored)
            assert data[at + 64 + 16 * n + i] & 0x40
            place += length_i
        assert place == length
        assert (u(data, at + 28, 8), u(data, at + 36, 8)) == (len(stored) - n + 1, len(stored))
        assert (u(data, at + 44, 8), u(data, at + 52, 8)) == checksum(everything)
        at += 64 + columns + (length + 7) // 8 * 8
    assert stored == frames
    assert blocks == 2


def checksum(body: bytes) -> tuple[int, int]:
    if len(body) <= 64 << 10:
        return zlib.crc32(body), 0
    body += bytes(-len(body) % 4096)
    sums = [sum(struct.unpack_from("<512Q", body, at)) for at in range(0, len(body), 4096)]
    weighted = sum(place * checksum for place, checksum in enumerate(sums, 1))
    return sum(sums) % (1 << 64), weighted % (1 << 64)


def test_the_format_file() -> None:
    files, _ = a_store()
    assert bytes(files.files["FORMAT"]) == b"tailrace store, format \4\n"


def test_the_marks() -> None:
    """The last one says where the newest log ends."""
    files, _ = a_store()
    data = bytes(files.files["bucket.default/SYNCED"])
    log = bytes(files.files["bucket.default/log-0000000001"])
    marks = [data[at : at + 32] for at in range(0, len(data), 32)]
    assert len(marks) == 1 + 2_000 // 500 + 1
    for mark in marks:
        assert mark[:4] == b"TRMK"
        assert u(mark, 28, 4) == zlib.crc32(mark[:28])
    assert [u(marks[-1], at, 8) for at in (4, 12, 20)] == [1, len(log), len(marks) + 1]


def test_the_list_of_buckets() -> None:
    files, _ = a_store()
    text = b'["default"]'
    assert bytes(files.files["BUCKETS"]) == b"%08x %s\n" % (zlib.crc32(text), text)


FORMAT_1 = Path(__file__).parent / "data" / "format-1.zip"
"""Of a Tailrace of that time: three documents in a small block, 400 in a large one, one in the log."""


def stream(bucket: EngineBucket) -> list[int]:
    seqnos = []
    for vb in bucket.vbuckets:
        snapshot = vb.snapshot_after(0)
        while snapshot is not None and (chunk := snapshot.read()) is not None:
            seqnos += seqnos_at(chunk.data, chunk.offsets).tolist()
    return seqnos


def test_a_store_of_format_1_is_read_and_goes_on_as_a_newer_one(tmp_path: Path) -> None:
    zipfile.ZipFile(FORMAT_1).extractall(tmp_path)
    with Engine(tmp_path, clock=ManualClock()) as engine:
        assert (tmp_path / "FORMAT").read_bytes() == b"tailrace store, format \4\n"
        bucket = engine.buckets["default"]
        bucket.seal()
        assert stream(bucket) == [1, 2, 3, *range(1, 402)]
        assert bucket.vbuckets[1].get(b"\0k399").endswith(b"\0k399" + b"399 " * 75)
        assert bucket.vbuckets[1].get(b"\0in the log").endswith(b"\0in the log1")
        assert {path.read_bytes()[4] for path in tmp_path.glob("*/segment-*")} == {1, 4}
        bucket.compact()
        assert stream(bucket) == [1, 2, 3, *range(1, 402)]
        assert {path.read_bytes()[4] for path in tmp_path.glob("*/segment-*")} == {4}


FORMAT_3 = FORMAT_1.with_name("format-3.zip")
"""Of the last Tailrace of that format: a durable write in a segment, a document and a prepare in the log."""


def test_a_store_of_format_3_goes_on_with_its_prepares(tmp_path: Path) -> None:
    zipfile.ZipFile(FORMAT_3).extractall(tmp_path)
    for _ in range(2):
        with Engine(tmp_path, clock=ManualClock()) as engine:
            assert (tmp_path / "FORMAT").read_bytes() == b"tailrace store, format \4\n"
            vbucket = engine.buckets["default"].vbuckets[0]
            assert vbucket.get(b"\0b").endswith(b"\0bcommitted")
            assert vbucket.get(b"\0c").endswith(b"\0cin the log")
            assert [prepare.key for prepare in vbucket.undecided] == [b"\0d"]
    assert {path.read_bytes()[4] for path in tmp_path.glob("*/segment-*")} == {3}
    with Engine(tmp_path, clock=ManualClock()) as engine:
        bucket = engine.buckets["default"]
        vbucket = bucket.vbuckets[0]
        vbucket.commit(vbucket.undecided[0].seqno)
        bucket.compact()
        assert vbucket.get(b"\0d").endswith(b"\0dpending")
    assert {path.read_bytes()[4] for path in tmp_path.glob("*/segment-*")} == {4}


@pytest.mark.parametrize(
    "name", ["FORMAT", "bucket.default/log-0000000002", "bucket.default/segment-0000000001"]
)
def test_a_newer_file_is_refused_with_what_to_do(tmp_path: Path, name: str) -> None:
    """Each file alone: an older Tailrace may find a store in the middle of its first start by a newer one."""
    zipfile.ZipFile(FORMAT_3).extractall(tmp_path)
    path = tmp_path / name
    data = bytearray(path.read_bytes())
    if name == "FORMAT":
        data[-2] = 5
    elif "log" in name:
        data[4] = 5
        data[60:64] = zlib.crc32(data[:60]).to_bytes(4, "little")
    else:
        data[-8] = 5
        data[-4:] = zlib.crc32(data[-48:-4]).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(StoreTooNew, match=r"has format 5, .* up to 4: use a newer Tailrace$"):
        Engine(tmp_path, clock=ManualClock())


@pytest.mark.parametrize("at", [64, 1_000, 8_000, 60_000, 100_000])
def test_damage_in_a_segment_of_format_1_is_found(tmp_path: Path, at: int) -> None:
    """A bit of the large block: in its columns, or in its frames."""
    zipfile.ZipFile(FORMAT_1).extractall(tmp_path)
    (path,) = tmp_path.glob("*/segment-*")
    data = bytearray(path.read_bytes())
    data[data.index(b"TRBK", data.index(b"TRBK") + 4) + at] ^= 4
    path.write_bytes(data)
    with Engine(tmp_path, clock=ManualClock()) as engine, pytest.raises(StoreCorrupt, match="vbucket 1"):
        stream(engine.buckets["default"])
