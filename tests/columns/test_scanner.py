"""What `scan` takes, what it refuses, and that `wire` agrees."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
import pytest

from columns import message_by_message as plain
from tailrace.columns import scan, scanner
from tailrace.errors import FrameTooLarge, FramingError, MalformedMessage, RemoteProtocolError
from tailrace.wire.codes import DcpOpcode
from tailrace.wire.dialect import DCP
from tailrace.wire.header import MAX_FRAME, Frame, frame_size
from tailrace.wire.message import Direction

GOOD = plain.mutation(5, b"before", b"value")
DELETION = struct.pack(">QQH", 4, 1, 0)
DELETION_V2 = struct.pack(">QQIB", 4, 1, 9, 0)
EXPIRATION = struct.pack(">QQI", 4, 1, 9)


def patched(frame: bytes, at: int, new: bytes) -> bytes:
    return frame[:at] + new + frame[at + len(new) :]


UNFRAMEABLE = {
    "an unknown magic": patched(GOOD, 0, b"\x79"),
    "a magic of zero": patched(GOOD, 0, b"\0"),
    "a body shorter than the extras": patched(GOOD, 8, (30).to_bytes(4, "big")),
    "a body shorter than extras and key": patched(GOOD, 8, (36).to_bytes(4, "big")),
    "a key longer than the body": patched(GOOD, 2, b"\xff\xff"),
    "framing extras longer than the body": patched(patched(GOOD, 0, b"\x08"), 2, b"\xff"),
    "a control frame with a key that is too long": plain.frame(0x5C)[:2] + b"\0\1" + plain.frame(0x5C)[4:],
}
TOO_LARGE = {
    "one byte above the limit": patched(GOOD, 8, (MAX_FRAME - 23).to_bytes(4, "big")),
    "4 GiB": patched(GOOD, 8, b"\xff\xff\xff\xff"),
    "a control frame": patched(plain.frame(0x5C), 8, b"\xff\xff\xff\xff"),
}
MALFORMED = {
    "seqno 0": plain.mutation(0),
    "no key": plain.mutation(1, b""),
    "a key of 252 bytes": plain.mutation(1, b"k" * 252),
    "datatype 8": plain.mutation(1, datatype=8),
    "metadata longer than the value": plain.mutation(1, value=b"abc", nmeta=4),
    "mutation without extras": plain.frame(0x57, key=b"key"),
    "mutation with 30 bytes of extras": plain.frame(0x57, extras=bytes(7) + b"\1" + bytes(22), key=b"key"),
    "mutation with 32 bytes of extras": plain.frame(0x57, extras=bytes(7) + b"\1" + bytes(24), key=b"key"),
    "deletion with 20 bytes of extras": plain.frame(0x58, extras=EXPIRATION, key=b"key"),
    "deletion with 31 bytes of extras": plain.frame(0x58, extras=bytes(7) + b"\1" + bytes(23), key=b"key"),
    "expiration with 18 bytes of extras": plain.frame(0x59, extras=DELETION, key=b"key"),
    "expiration with 21 bytes of extras": plain.frame(0x59, extras=DELETION_V2, key=b"key"),
    "deletion with a value": plain.frame(0x58, extras=DELETION, key=b"key", value=b"x"),
    "deletion that is JSON": plain.frame(0x58, extras=DELETION, key=b"key", datatype=1),
    "expiration with a value": plain.frame(0x59, extras=EXPIRATION, key=b"key", value=b"x"),
    "deletion with metadata longer than the value": plain.frame(
        0x58, extras=struct.pack(">QQH", 4, 1, 1), key=b"key"
    ),
}


def refused(bad: bytes) -> RemoteProtocolError:
    """The error of a scan that delivers what comes before the bad frame, and nothing from it on."""
    noop = plain.frame(0x5C)
    frames = scan(GOOD + noop + bad + GOOD)
    assert frames.used == len(GOOD + noop)
    assert frames.seqno.tolist() == [5]
    assert list(frames.controls) == [(1, len(GOOD), len(GOOD) + 24)]
    assert frames.error is not None
    assert frames.error.__traceback__ is None
    alone = scan(bad)
    assert (alone.used, len(alone), str(alone.error)) == (0, 0, str(frames.error))
    return frames.error


@pytest.mark.parametrize("bad", UNFRAMEABLE.values(), ids=UNFRAMEABLE)
def test_unframeable(bad: bytes) -> None:
    error = refused(bad)
    assert type(error) is FramingError
    with pytest.raises(FramingError, match=str(error)):
        frame_size(bad)


@pytest.mark.parametrize("bad", TOO_LARGE.values(), ids=TOO_LARGE)
def test_too_large(bad: bytes) -> None:
    error = refused(bad)
    assert isinstance(error, FrameTooLarge)
    assert error.limit == MAX_FRAME
    # Known from the header alone, before the body has come.
    assert isinstance(scan(bad[:24]).error, FrameTooLarge)
    assert scan(bad[:23]).error is None


@pytest.mark.parametrize("bad", MALFORMED.values(), ids=MALFORMED)
def test_malformed(bad: bytes) -> None:
    error = refused(bad)
    assert type(error) is MalformedMessage
    with pytest.raises(MalformedMessage) as caught:
        DCP.decode(Frame.parse(bad), Direction.TO_RECEIVER)
    assert (caught.value.what, caught.value.status) == (error.what, error.status)


def test_the_limit_is_the_callers() -> None:
    size = len(GOOD)
    assert scan(GOOD, limit=size).error is None
    error = scan(GOOD, limit=size - 1).error
    assert isinstance(error, FrameTooLarge)
    assert (error.size, error.limit) == (size, size - 1)
    with pytest.raises(ValueError, match="above"):
        scan(GOOD, limit=scanner.SCAN_LIMIT + 1)


def test_wire_takes_what_scan_takes() -> None:
    """Changes with any fields: a row exactly if the message decoder accepts it."""
    rng = random.Random(3)
    taken = 0
    for _ in range(4000):
        opcode = rng.choice((0x57, 0x58, 0x59))
        extras = rng.randbytes(rng.choice((18, 20, 21, 31)))
        if rng.random() < 0.8:
            extras = extras[:16] + bytes(len(extras) - 16)
        magic = rng.choice((0x80, 0x80, 0x08))
        forgotten = magic == 0x08 and rng.random() < 0.5  # the framing length that servers leave out
        frame = plain.frame(
            opcode,
            magic=magic,
            extras=extras,
            key=rng.randbytes(rng.choice((0, 1, 20, 250))),
            value=rng.randbytes(rng.choice((0, 0, 1, 50))),
            framing=b"\x22\x01\x02" if forgotten else b"",
            framing_length=0,
            datatype=rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 9)),
            cas=1,
        )
        frames = scan(frame)
        try:
            message: Any = DCP.decode(Frame.parse(frame), Direction.TO_RECEIVER)
        except MalformedMessage as error:
            assert str(frames.error) == str(error)
            continue
        assert frames.error is None
        assert frames.seqno.tolist() == [message.by_seqno]
        assert frames.data[frames.key_start[0] : frames.value_start[0]].tobytes() == message.key
        taken += 1
    assert taken > 500


def test_stream_ids_are_skipped() -> None:
    framing: dict[str, Any] = {"magic": 0x08, "framing": b"\x22\x01\x02", "key": b"key"}
    forgotten = {**framing, "framing_length": 0}
    expected = plain.mutation(4, magic=0x08, framing=b"\x22\x01\x02") + b"".join(
        plain.frame(opcode, extras=extras, **how)
        for how in (framing, forgotten)
        for opcode, extras in ((0x58, DELETION), (0x58, DELETION_V2), (0x59, EXPIRATION))
    )
    frames = scan(expected)
    assert frames.error is None
    assert frames.seqno.tolist() == [4] * 7
    keys = [
        frames.data[start:end].tobytes()
        for start, end in zip(frames.key_start, frames.value_start, strict=True)
    ]
    assert keys == [b"key"] * 7
    assert frames.size.sum() == len(expected)


def test_counted_bytes() -> None:
    """docs/spec/dcp.md#counted-bytes: 55, 42, 45 and 44 bytes and key and value; 3 more with a stream id."""
    changes = (
        plain.mutation(1, b"abc", b"de"),
        plain.frame(0x58, extras=DELETION, key=b"abc"),
        plain.frame(0x58, extras=DELETION_V2, key=b"abc"),
        plain.frame(0x59, extras=EXPIRATION, key=b"abc"),
        plain.mutation(1, b"abc", b"de", magic=0x08, framing=b"\x22\x00\x01"),
    )
    assert scan(b"".join(changes)).size.tolist() == [55 + 5, 42 + 3, 45 + 3, 44 + 3, 58 + 5]


def test_collection_ids() -> None:
    ids = {
        0: b"\x00",
        0x7F: b"\x7f",
        0x80: b"\x80\x01",
        0x555: b"\xd5\x0a",
        0xFFFF_FFFF: b"\xff\xff\xff\xff\x0f",
    }
    frames = scan(b"".join(plain.mutation(1, prefix + b"key") for prefix in ids.values()), collections=True)
    assert frames.error is None
    assert frames.collection.tolist() == list(ids)
    assert (frames.value_start - frames.key_start).tolist() == [3] * len(ids)


@pytest.mark.parametrize(
    "key",
    [
        b"\x80\x00key",
        b"\x80",
        b"\xff\xff\xff\xff\x1fkey",
        b"\x80\x80\x80\x80\x80\x01key",
        b"\x00",
        b"\xd5\x0a",
    ],
    ids=["not the shortest", "cut off", "33 bits", "six bytes", "nothing behind it", "nothing behind two"],
)
def test_collection_ids_that_are_none(key: bytes) -> None:
    frames = scan(plain.mutation(1, b"\x00ok") + plain.mutation(2, key), collections=True)
    assert isinstance(frames.error, MalformedMessage)
    assert frames.seqno.tolist() == [1]


def test_any_kind_of_buffer() -> None:
    data = GOOD * 3
    for buffer in (data, bytearray(data), memoryview(data), np.frombuffer(data, np.uint8)):
        assert len(scan(buffer)) == 3
    assert (scan(b"").used, len(scan(b""))) == (0, 0)


def test_more_than_one_scan_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanner, "SCAN_LIMIT", 1000)
    data = memoryview(b"".join(plain.mutation(n, b"key", b"v" * 50) for n in range(1, 101)))
    seqnos: list[int] = []
    while (frames := scan(data, limit=1000)).used:
        assert frames.used <= 1000
        seqnos += frames.seqno.tolist()
        data = data[frames.used :]
    assert seqnos == list(range(1, 101))


def test_opcodes_are_those_of_changes() -> None:
    """Every request that DCP knows, with no body: only the three changes are not control frames."""
    for opcode in DcpOpcode:
        frames = scan(plain.frame(opcode))
        is_change = opcode in (DcpOpcode.MUTATION, DcpOpcode.DELETION, DcpOpcode.EXPIRATION)
        assert (len(list(frames.controls)), frames.error is not None) == (
            (0, True) if is_change else (1, False)
        )
