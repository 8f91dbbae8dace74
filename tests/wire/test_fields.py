"""The encodings inside fields."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import MalformedMessage
from tailrace.wire.codes import DurabilityLevel, Status
from tailrace.wire.fields import (
    Durability,
    FrameInfo,
    decode_failover_log,
    decode_frame_infos,
    decode_leb128,
    encode_failover_log,
    encode_frame_infos,
    encode_leb128,
    join_xattrs,
    split_xattrs,
)

U64 = st.integers(0, (1 << 64) - 1)


def status_of(refused: pytest.ExceptionInfo[MalformedMessage]) -> int:
    return refused.value.status


@pytest.mark.parametrize(
    ("number", "encoded"),
    [(0, "00"), (8, "08"), (0x7F, "7f"), (0x80, "8001"), (0x555, "d50a"), (0xFFFF_FFFF, "ffffffff0f")],
)
def test_leb128(number: int, encoded: str) -> None:
    assert encode_leb128(number).hex() == encoded
    assert decode_leb128(bytes.fromhex(encoded) + b"key") == (number, len(encoded) // 2)


@given(st.integers(0, 0xFFFF_FFFF), st.binary(max_size=5))
def test_leb128_round_trip(number: int, rest: bytes) -> None:
    encoded = encode_leb128(number)
    assert decode_leb128(encoded + rest) == (number, len(encoded))


@given(st.binary(max_size=6))
def test_leb128_has_one_form_only(data: bytes) -> None:
    try:
        number, used = decode_leb128(data)
    except MalformedMessage:
        return
    assert encode_leb128(number) == data[:used]


@pytest.mark.parametrize("data", ["", "80", "8000", "ffffffff", "ffffffff1f", "ffffffff7f", "808080808001"])
def test_leb128_that_is_none(data: str) -> None:
    with pytest.raises(MalformedMessage) as refused:
        decode_leb128(bytes.fromhex(data))
    assert status_of(refused) == Status.EINVAL


@given(st.lists(st.builds(FrameInfo, st.integers(0, 270), st.binary(max_size=270)), max_size=4))
def test_frame_infos_round_trip(infos: list[FrameInfo]) -> None:
    assert decode_frame_infos(encode_frame_infos(infos)) == infos


@pytest.mark.parametrize(
    ("infos", "encoded"),
    [
        ([], ""),
        ([FrameInfo(2, b"\x00\x47")], "220047"),
        ([FrameInfo(14, b"")], "e0"),
        ([FrameInfo(15, b"")], "f000"),
        ([FrameInfo(16, b"\x07")], "f10107"),
        ([FrameInfo(0, bytes(14))], "0e" + "00" * 14),
        ([FrameInfo(0, bytes(15))], "0f00" + "00" * 15),
        ([FrameInfo(15, bytes(16))], "ff0001" + "00" * 16),
    ],
)
def test_frame_infos(infos: list[FrameInfo], encoded: str) -> None:
    assert encode_frame_infos(infos).hex() == encoded
    assert decode_frame_infos(bytes.fromhex(encoded)) == infos


@pytest.mark.parametrize("data", ["f0"[:2], "f1", "0f", "ff", "ff00", "22", "2200", "22004722", "0f0000"])
def test_frame_infos_that_are_cut_off(data: str) -> None:
    with pytest.raises(MalformedMessage) as refused:
        decode_frame_infos(bytes.fromhex(data))
    assert status_of(refused) == Status.EINVAL


@pytest.mark.parametrize("durability", [Durability(DurabilityLevel(1)), Durability(DurabilityLevel(3), 3000)])
def test_durability_round_trip(durability: Durability) -> None:
    assert Durability.decode(durability.encode()) == durability


@pytest.mark.parametrize(
    ("data", "status"),
    [
        ("", 0x04),
        ("0100", 0x04),
        ("01000000", 0x04),
        ("00", 0xA0),
        ("04", 0xA0),
        ("010000", 0x04),
        ("01ffff", 0x04),
    ],
)
def test_durability_that_is_none(data: str, status: int) -> None:
    with pytest.raises(MalformedMessage) as refused:
        Durability.decode(FrameInfo(1, bytes.fromhex(data)))
    assert status_of(refused) == status


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
).map(lambda value: json.dumps(value).encode())


@given(st.dictionaries(NAMES, JSON, max_size=3), st.binary(max_size=20))
def test_xattrs_round_trip(xattrs: dict[str, bytes], body: bytes) -> None:
    assert split_xattrs(join_xattrs(xattrs, body)) == (xattrs, body)


def test_xattrs_by_hand() -> None:
    """u32 length of all pairs; then a pair: u32 length, key NUL value NUL."""
    value = bytes.fromhex("0000000a000000065f73007b7d00") + b"body"
    assert split_xattrs(value) == ({"_s": b"{}"}, b"body")
    assert join_xattrs({"_s": b"{}"}, b"body") == value


@pytest.mark.parametrize(
    "value",
    [
        "",
        "000000",
        "00000001",
        "0000000a000000065f73007b7d",
        "000000020000",
        "0000000400000000",
        "0000000a000000075f73007b7d0000",
        "0000000a000000065f73007b7d01",
        "0000000a000000065f73017b7d00",
        "0000000a000000065f73007b7b00",
        "0000000900000005007b7d0000",
        "0000000a00000006ffff007b7d00",
        "00000014" + ("000000065f73007b7d00") * 2,
    ],
)
def test_xattrs_that_are_broken(value: str) -> None:
    with pytest.raises(MalformedMessage) as refused:
        split_xattrs(bytes.fromhex(value))
    assert status_of(refused) == Status.XATTR_EINVAL


@pytest.mark.parametrize(
    "text",
    [b"NaN", b"-Infinity", b'{"a":[Infinity]}', b"1\0", "{}".encode("utf-16"), b"\xef\xbb\xbf1", b"\xff"],
)
def test_xattrs_are_json_for_everybody(text: bytes) -> None:
    """What Python's json accepts but other readers don't."""
    with pytest.raises(MalformedMessage) as refused:
        split_xattrs(join_xattrs({"x": text}, b""))
    assert status_of(refused) == Status.XATTR_EINVAL


@given(st.lists(st.tuples(U64, U64), min_size=1, max_size=5))
def test_failover_log_round_trip(entries: list[tuple[int, int]]) -> None:
    assert decode_failover_log(encode_failover_log(entries)) == entries


@pytest.mark.parametrize("size", [0, 1, 15, 17, 24, 31])
def test_failover_log_that_is_none(size: int) -> None:
    with pytest.raises(MalformedMessage):
        decode_failover_log(bytes(size))
