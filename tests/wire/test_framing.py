"""The framer: limits apply as soon as the header has come, and never more than one frame is held."""

from __future__ import annotations

import random

import pytest

from tailrace.errors import FrameTooLarge, FramingError
from tailrace.wire.framing import Framer
from tailrace.wire.header import HEADER_SIZE, MAX_FRAME, MAX_FRAME_BEFORE_LOGIN, Frame

LIMITS = [MAX_FRAME, MAX_FRAME_BEFORE_LOGIN, 1000, HEADER_SIZE]
MAGICS = [0x80, 0x81, 0x08, 0x18, 0x82, 0x83]


def header(total: int, magic: int = 0x80, lengths: str = "000000") -> bytes:
    """A header that announces a body of ``total`` bytes; ``lengths`` are bytes 2 to 4."""
    return bytes([magic, 0]) + bytes.fromhex(lengths) + bytes(3) + total.to_bytes(4) + bytes(12)


def test_limits_are_those_of_the_documents() -> None:
    assert MAX_FRAME == 30 * 1024 * 1024
    assert MAX_FRAME_BEFORE_LOGIN == 16 * 1024


@pytest.mark.parametrize("limit", LIMITS)
def test_frame_of_exactly_the_limit_is_accepted(limit: int) -> None:
    framer = Framer(limit)
    framer.feed(header(limit - HEADER_SIZE))
    if limit > HEADER_SIZE:
        assert framer.maybe_frame() is None
        framer.feed(bytes(limit - HEADER_SIZE))
    frame = framer.maybe_frame()
    assert frame is not None
    assert frame.size == limit


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("announced", ["one more", "all that 32 bits can say"])
def test_larger_frame_is_refused_with_its_header(limit: int, announced: str) -> None:
    total = limit - HEADER_SIZE + 1 if announced == "one more" else 0xFFFF_FFFF
    framer = Framer(limit)
    framer.feed(header(total)[:-1])
    assert framer.maybe_frame() is None
    framer.feed(b"\0")
    with pytest.raises(FrameTooLarge) as caught:
        framer.maybe_frame()
    assert (caught.value.size, caught.value.limit) == (HEADER_SIZE + total, limit)
    assert framer.buffered == 0


@pytest.mark.parametrize("magic", sorted(set(range(256)) - set(MAGICS)))
def test_unknown_magic_is_no_frame(magic: int) -> None:
    framer = Framer()
    framer.feed(header(0, magic))
    with pytest.raises(FramingError):
        framer.maybe_frame()


@pytest.mark.parametrize("magic", MAGICS)
@pytest.mark.parametrize(
    ("lengths", "needed", "needed_flexible"), [("000100", 1, 1), ("0000ff", 255, 255), ("010203", 0x105, 6)]
)
def test_lengths_must_fit_into_the_body(magic: int, lengths: str, needed: int, needed_flexible: int) -> None:
    inner = needed_flexible if magic in (0x08, 0x18) else needed
    fits, short = Framer(), Framer()
    fits.feed(header(inner, magic, lengths) + bytes(inner))
    assert fits.maybe_frame() is not None
    short.feed(header(inner - 1, magic, lengths))
    with pytest.raises(FramingError):
        short.maybe_frame()


def test_after_an_error_nothing_more_comes_out() -> None:
    framer = Framer()
    framer.feed(b"\x7f" * 24)
    with pytest.raises(FramingError) as first:
        framer.maybe_frame()
    framer.feed(header(0) * 1000)
    assert framer.buffered == 0
    with pytest.raises(FramingError) as second:
        framer.maybe_frame()
    assert second.value is first.value


def test_frames_before_an_error_are_handed_out() -> None:
    framer = Framer()
    framer.feed(header(3) + b"abc" + b"\xff" * 24)
    frames = framer.frames()
    assert next(frames).body == b"abc"
    with pytest.raises(FramingError):
        next(frames)


def test_limit_may_change_between_two_frames() -> None:
    """A login raises it, and what was sent after the login comes under the new one."""
    large = header(MAX_FRAME_BEFORE_LOGIN) + bytes(MAX_FRAME_BEFORE_LOGIN)
    framer = Framer(MAX_FRAME_BEFORE_LOGIN)
    framer.feed(header(0) + large)
    frames = framer.frames()
    next(frames)
    framer.limit = MAX_FRAME
    assert next(frames).size == len(large)
    framer.limit = MAX_FRAME_BEFORE_LOGIN
    framer.feed(large)
    with pytest.raises(FrameTooLarge):
        framer.maybe_frame()


@pytest.mark.parametrize("seed", range(5))
def test_no_more_than_one_frame_is_kept(seed: int) -> None:
    """After the frames are taken, less than one frame is held, whatever pieces the bytes come in."""
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 50, 5000, 100_000]) for _ in range(200)]
    stream = b"".join(header(size) + bytes(size) for size in sizes)
    framer = Framer()
    at = taken = 0
    while at < len(stream):
        piece = stream[at : at + rng.choice([1, 23, 24, 25, 4096, 300_000])]
        at += len(piece)
        framer.feed(piece)
        taken += sum(1 for _ in framer.frames())
        begun = HEADER_SIZE + sizes[taken] if taken < len(sizes) else 1
        assert framer.buffered < begun
        assert len(framer._buffer) == framer.buffered, "bytes of frames that were taken are still held"
    assert taken == len(sizes)


def test_taken_frame_does_not_change_with_the_buffer() -> None:
    framer = Framer()
    framer.feed(header(3) + b"abc")
    frame = framer.maybe_frame()
    framer.feed(header(3) + b"xyz")
    assert framer.maybe_frame() is not None
    assert frame is not None
    assert frame.body == b"abc"
    assert isinstance(frame.body, bytes)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_can_be_fed(kind: type) -> None:
    framer = Framer()
    framer.feed(kind(header(1) + b"a"))
    assert framer.maybe_frame() == Frame(0x80, 0, body=b"a")
