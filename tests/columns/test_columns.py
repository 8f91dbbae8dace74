"""Columns against the message-by-message decoder: same rows, same control frames, same end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from columns import message_by_message as plain
from tailrace.columns import SCHEMA, Names, ScannedFrames, scan, to_batch, walk
from tailrace.errors import FramingError, MalformedMessage

ERRORS: dict[type[Exception] | None, type] = {
    plain.Framing: FramingError,
    plain.Malformed: MalformedMessage,
    None: type(None),
}
NAMES = Names("travel", plain.Buffers.NAMES)


@pytest.fixture
def eager_lockstep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lockstep walk even for a handful of frames."""
    monkeypatch.setattr(walk, "_LOCKSTEP_FRAMES", 0)
    monkeypatch.setattr(walk, "_SAMPLE_FRAMES", 2)
    monkeypatch.setattr(walk, "_FRAMES_PER_LANE", 2)
    monkeypatch.setattr(walk, "_MAX_STEPS", 5)
    monkeypatch.setattr(walk, "_LEFT_OVER", 1)
    monkeypatch.setattr(walk, "_STEPS_PER_LOOK", 1)


def columns_of(frames: ScannedFrames) -> list[dict[str, Any]]:
    batch = to_batch(frames, names=NAMES, vb_uuid=5, snapshot_start=None, snapshot_end=(1 << 64) - 1)
    batch.validate(full=True)
    assert batch.schema == SCHEMA
    rows: list[dict[str, Any]] = batch.to_pylist()
    for row in rows:
        assert row.pop("vb_uuid") == 5
        assert row.pop("snapshot_start") is None
        assert row.pop("snapshot_end") == -1
        if row["xattrs"] is not None:
            row["xattrs"] = json.loads(row["xattrs"])
    return rows


def check(data: bytes, *, collections: bool = False, contents: bool = True) -> ScannedFrames:
    """Compare both decoders on a buffer."""
    expected = plain.decode(data, collections=NAMES.collections if collections else None)
    frames = scan(data, collections=collections)
    assert frames.used == expected.used
    assert isinstance(frames.error, ERRORS[expected.error])
    assert list(frames.controls) == expected.controls
    assert frames.size.tolist() == expected.sizes
    assert frames.opaque.tolist() == expected.opaques
    looked_at: tuple[Any, ...] = (frames.opcode, frames.datatype, frames.collection)
    for known, column in zip(frames.common, looked_at, strict=True):
        assert known is None or set(column.tolist()) <= {known}
    for control in frames.controls:
        assert frames.frame(control).encode() == data[control.start : control.end]
    raw = [data[a:b] for a, b in zip(frames.value_start, frames.value_end, strict=True)]
    assert raw == [row["value"] for row in expected.rows]
    if contents:
        assert columns_of(frames) == [
            plain.finish(row, NAMES.collections, NAMES.bucket) for row in expected.rows
        ]
    return frames


def compare_random_buffers(seeds: range) -> None:
    rows = errors = 0
    for seed in seeds:
        collections = seed % 2 == 1
        # A changed byte may be in a compressed value or name another collection: compare what was framed.
        hostile = seed % 4 < 2
        buffers = plain.Buffers(seed, collections=collections, hostile=hostile)
        frames = check(buffers.buffer(seed % 23 + 1), collections=collections, contents=not hostile)
        rows += len(frames)
        errors += frames.error is not None
    assert rows > 3 * len(seeds)
    assert errors > len(seeds) // 30


def test_equal_on_random_buffers() -> None:
    compare_random_buffers(range(5000))


@pytest.mark.usefixtures("eager_lockstep")
def test_equal_on_random_buffers_in_lockstep() -> None:
    compare_random_buffers(range(5000, 10_000))


@pytest.mark.long
@pytest.mark.parametrize("lockstep", [False, True])
def test_equal_on_ten_thousand_random_buffers(request: pytest.FixtureRequest, lockstep: bool) -> None:
    if lockstep:
        request.getfixturevalue("eager_lockstep")
    compare_random_buffers(range(10_000, 20_000))


# The short way, for buffers of nothing but sound mutations, is left for one frame that is not.
@pytest.mark.parametrize(
    "odd",
    [
        plain.mutation(9, b"\x08odd", b"value"),
        plain.mutation(9, b"\x88\x01odd", b"value"),
        plain.mutation(9, b"\xff\xff\xff\xff\x0fodd", b"value"),
        plain.mutation(9, b"\xff\xff\xff\xff\x10odd", b"value"),
        plain.mutation(9, b"\x88\x00odd", b"value"),
        plain.mutation(9, b"\x00", b"value"),
        plain.mutation(9, b"\x88", b"value"),
        plain.mutation(9, b"", b"value"),
        plain.mutation(9, b"\x00" + b"k" * 250, b"value"),
        plain.mutation(0, b"\x00odd", b"value"),
        plain.mutation(9, b"\x00odd", b"value", nmeta=3),
        plain.mutation(9, b"\x00odd", b""),
        plain.mutation(9, b"\x00odd", b"x" * 3000, datatype=7, vbucket=1023, opaque=0xFFFF_FFFF, cas=0),
        plain.mutation(9, b"\x00odd", b"value", datatype=8),
        plain.mutation((1 << 64) - 1, b"\x00odd", b"value", cas=(1 << 64) - 1),
        # fewer bits than the others have, or more of them
        plain.frame(0x56, extras=bytes(7) + b"\x09" + bytes(23), key=b"\x00odd", value=b"value"),
        plain.frame(0x5F, extras=bytes(7) + b"\x09" + bytes(23), key=b"\x00odd", value=b"value"),
        plain.frame(0x57, extras=bytes(7) + b"\x09" + bytes(22), key=b"\x00odd", value=b"value"),
        plain.frame(0x57, magic=0x81, extras=bytes(31), key=b"\x00odd", value=b"value"),
    ],
)
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("collections", [False, True])
def test_mutations_and_an_odd_one(odd: bytes, at: int, collections: bool) -> None:
    usual = [plain.mutation(7, b"\x00usual", b'{"a":1}'), plain.mutation(8, b"\x09k", b"v" * 13, datatype=1)]
    frames = check(b"".join([*usual[:at], odd, *usual[at:]]), collections=collections, contents=False)
    assert frames.seqno[: min(at, len(frames))].tolist() == [7, 8][:at]


@pytest.mark.parametrize("collections", [False, True])
def test_cut_off_at_every_byte(collections: bool) -> None:
    data = b"".join(plain.Buffers(7, collections=collections).any_frame() for _ in range(12))
    for end in range(len(data)):
        check(data[:end], collections=collections, contents=False)


@pytest.mark.usefixtures("eager_lockstep")
def test_cut_off_at_every_byte_in_lockstep() -> None:
    data = b"".join(plain.Buffers(8).any_frame() for _ in range(12))
    for end in range(len(data)):
        check(data[:end], contents=False)
