"""Strings of megabytes are the same strings, and take fewer page faults where the system has huge pages."""

from __future__ import annotations

import random

import pytest

from tailrace import large_bytes
from tailrace.large_bytes import LARGE_BYTES, LargeBytes, gather_large, join_large, put_before


@pytest.mark.parametrize("size", [0, 1, LARGE_BYTES - 4, LARGE_BYTES - 3, LARGE_BYTES, 5 * LARGE_BYTES + 17])
@pytest.mark.parametrize("advised", [True, False])
def test_parts_in_their_order(size: int, advised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not advised:
        monkeypatch.setattr(large_bytes, "_advise", None)
    value = random.Random(size).randbytes(size)
    for given in (value, memoryview(value)):
        made = join_large(b"a", b"", given, memoryview(b"bc"))
        assert made == b"a" + value + b"bc"
        assert hash(made) == hash(b"a" + value + b"bc")


@pytest.mark.parametrize("piece_bytes", [1, 1_000, 200_000, 2_000_000])
@pytest.mark.parametrize("native", [True, False])
def test_pieces_as_they_come(piece_bytes: int, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(large_bytes, "_new_bytes", None)
    whole = random.Random(piece_bytes).randbytes(20_000 if piece_bytes == 1 else LARGE_BYTES + 12_345)
    made = LargeBytes(len(whole))
    for at in range(0, len(whole), piece_bytes):
        if at % 7 == 0 and piece_bytes > 1:
            assert made.value() == whole[:at]
        piece = whole[at : at + piece_bytes]
        made.add(memoryview(piece) if at % 2 else piece)
    assert made.value() == whole
    assert made.value() is made.value()


def test_who_says_that_much_will_come_reserves_little(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    new = large_bytes._new_bytes
    if new is None:
        pytest.skip("there is no way to make a string in pieces here")

    def noted(content: None, size: int) -> bytes:
        sizes.append(size)
        return new(content, size)

    monkeypatch.setattr(large_bytes, "_new_bytes", noted)
    made = LargeBytes(20 << 20)
    made.add(bytes(2 << 20))
    assert not sizes
    made.add(bytes(1 << 20))
    assert sizes == [20 << 20]


@pytest.mark.parametrize("seed", range(20))
def test_parts_are_gathered_in_their_order(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice((0, 1, 100, 50_000, 300_000, LARGE_BYTES - 1, LARGE_BYTES)) for _ in range(seed)]
    parts = [rng.randbytes(size) for size in sizes]
    assert gather_large(iter(parts), sum(sizes)).tobytes() == b"".join(parts)


def test_a_front_goes_into_the_room_that_was_left_for_it_once() -> None:
    value = random.Random(3).randbytes(2 * LARGE_BYTES)
    made = LargeBytes(len(value), room=5)
    for at in range(0, len(value), 100_000):
        made.add(value[at : at + 100_000])
    view = made.value()
    assert view == value
    first = put_before(b"front", view)
    assert first == b"front" + value
    if isinstance(view, memoryview):
        assert first is view.obj, "nothing is copied"
    second = put_before(b"other", view)
    assert (first, second) == (b"front" + value, b"other" + value), "what is used stays as it is"
    assert put_before(b"a longer one", view) == b"a longer one" + value
    assert put_before(b"front", value) == first
