"""Layouts, and what is derived from them: structs of all or some fields, places, numpy records."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from tailrace.wire.dcp import MUTATION
from tailrace.wire.header import HEADER_LAYOUT, Frame
from tailrace.wire.layout import NO_EXTRAS, layout, record

PAIR = layout("""
    H first   a number
    B second  another
    B third   and one more
    I fourth
""")


def test_the_header_is_what_the_documents_draw() -> None:
    places = {name: (HEADER_LAYOUT.at(name), HEADER_LAYOUT.field(name).size) for name in HEADER_LAYOUT.names}
    assert places == {
        "magic": (0, 1),
        "opcode": (1, 1),
        "key_length": (2, 2),
        "extras_length": (4, 1),
        "datatype": (5, 1),
        "vbucket": (6, 2),
        "body_length": (8, 4),
        "opaque": (12, 4),
        "cas": (16, 8),
    }


def test_all_fields() -> None:
    assert PAIR.size == 8
    assert PAIR.struct.pack(1, 2, 3, 4) == bytes.fromhex("0001 02 03 00000004")
    assert NO_EXTRAS.size == 0 and NO_EXTRAS.names == ()


def test_some_fields() -> None:
    some = PAIR.only("second", "fourth")
    assert (some.names, some.size) == (("second", "fourth"), PAIR.size)
    assert some.struct.unpack(bytes.fromhex("0001 02 03 00000004")) == (2, 4)
    assert some.struct.pack(2, 4) == bytes.fromhex("0000 02 00 00000004")
    assert PAIR.only("first").struct.unpack(bytes(8)) == (0,)


def test_neighbours_as_one_number_and_other_codes() -> None:
    some = PAIR.only("second+third", "fourth:4s")
    assert some.names == ("second+third", "fourth")
    assert some.struct.unpack(bytes.fromhex("0001 02 03 00000004")) == (0x0203, bytes([0, 0, 0, 4]))
    assert PAIR.only("first+second+third").at("first+second+third") == 0


@pytest.mark.parametrize("wanted", [("fourth", "first"), ("first+third",), ("first", "first")])
def test_fields_out_of_order_or_apart_are_refused(wanted: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError):
        PAIR.only(*wanted)


@pytest.mark.parametrize("code", ["fourth:H", "first:Q"])
def test_another_code_has_the_same_size(code: str) -> None:
    with pytest.raises(AssertionError):
        PAIR.only(code)


def test_an_unknown_field() -> None:
    with pytest.raises(KeyError, match="fifth"):
        PAIR.only("fifth")


def test_layouts_behind_each_other() -> None:
    whole = HEADER_LAYOUT + MUTATION
    assert whole.size == 24 + 31
    assert whole.at("by_seqno") == 24
    with pytest.raises(AssertionError):
        _ = PAIR.only("first") + PAIR  # a gap would be lost


def test_records_are_the_same_bytes() -> None:
    whole = HEADER_LAYOUT + MUTATION
    frame = Frame(
        0x80, 0x57, 1, 31, 1, 7, 9, 2**63 + 1, body=struct.pack(">QQIIIHB", 1, 2, 3, 4, 5, 6, 7) + b"k"
    )
    head = frame.encode()[: whole.size]
    (row,) = np.frombuffer(head, record(whole))
    assert {name: int(row[name]) for name in whole.names} == dict(
        zip(whole.names, whole.struct.unpack(head), strict=True)
    )
    some = record(whole.only("magic+opcode", "opaque:4s", "expiry"))
    assert some.itemsize == whole.size
    (row,) = np.frombuffer(head, some)
    assert (row["magic+opcode"], bytes(row["opaque"]), row["expiry"]) == (0x8057, bytes([0, 0, 0, 9]), 4)
