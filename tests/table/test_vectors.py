"""Deletion vectors: the bytes that Delta's protocol shows, round trips, and damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from tailrace.table.contract import TableDamaged, Vector
from tailrace.table.delta.vectors import (
    VectorFile,
    decode_inline,
    decode_stored,
    decode_vector,
    encode_vector,
    encode_z85,
    vector_path,
)

GOLDEN: list[dict[str, Any]] = json.loads((Path(__file__).parent / "vectors.json").read_text())


def inline_vector(data: bytes, cardinality: int) -> Vector:
    """A vector in the log itself, as others may write it."""
    return Vector("i", encode_z85(data + bytes(-len(data) % 4)), None, len(data), cardinality)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: str(case["what"]))
def test_golden_vectors(case: dict[str, Any]) -> None:
    rows = BitMap(case["rows"])
    data = bytes.fromhex(case["data"])
    assert decode_vector(data) == rows
    inline = inline_vector(data, len(rows))
    assert inline.path_or_inline == case["inline"]
    assert inline.size == len(data)
    assert decode_inline(inline) == rows
    if case["ours"]:
        assert encode_vector(rows) == data


def test_the_path_that_the_protocol_shows() -> None:
    vector = Vector("u", "ab^-aqEH.-t@S}K{vb[*k^", 4, 40, 6)
    assert vector_path(vector) == "ab/deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin"
    assert vector_path(Vector("u", "^-aqEH.-t@S}K{vb[*k^", 4, 40, 6)) == (
        "deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin"
    )
    assert vector_path(Vector("i", "anything", None, 40, 6)) is None
    with pytest.raises(TableDamaged, match="clone"):
        vector_path(Vector("p", "s3://elsewhere/x.bin", 4, 40, 6))
    with pytest.raises(TableDamaged, match="does not name"):
        vector_path(Vector("u", "short", 4, 40, 6))


row_sets = st.one_of(
    st.sets(st.integers(0, 400_000), min_size=1, max_size=200),
    st.tuples(st.integers(0, 300_000), st.integers(1, 100_000)).map(lambda r: set(range(r[0], r[0] + r[1]))),
)


@given(st.lists(row_sets, min_size=1, max_size=4))
def test_vectors_come_back_from_a_file(sets: list[set[int]]) -> None:
    file = VectorFile("00112233445566778899aabbccddeeff")
    assert file.empty
    vectors = [file.add(encode_vector(BitMap(rows)), len(rows)) for rows in sets]
    stored = file.to_bytes()
    assert stored[0] == 1 and vectors[0].offset == 1
    for vector, rows in zip(vectors, sets, strict=True):
        assert vector_path(vector) == file.path
        assert vector.offset is not None
        piece = stored[vector.offset : vector.offset + vector.size + 8]
        assert decode_stored(vector, piece) == BitMap(rows)


def test_damage_is_noticed() -> None:
    file = VectorFile("00112233445566778899aabbccddeeff")
    vector = file.add(encode_vector(BitMap([1, 2, 3, 70_000])), 4)
    stored = file.to_bytes()[1:]
    for place in range(len(stored)):
        broken = bytearray(stored)
        broken[place] ^= 1
        with pytest.raises(TableDamaged, match=r"_dv/deletion_vector_00112233-.*\.bin is damaged"):
            decode_stored(vector, bytes(broken))
    with pytest.raises(TableDamaged, match="too short"):
        decode_stored(vector, stored[:-1])
    wrong_count = Vector(vector.storage, vector.path_or_inline, vector.offset, vector.size, 5)
    with pytest.raises(TableDamaged, match="4 rows in place of 5"):
        decode_stored(wrong_count, stored)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_vector_or_an_error(data: bytes) -> None:
    for candidate in (data, encode_vector(BitMap([1]))[:16] + data):
        try:
            rows = decode_vector(candidate)
        except ValueError:
            continue
        assert isinstance(rows, BitMap)


@pytest.mark.parametrize("text", ["abc", "a\tb\tc", "~~~~~", "ääääa", "00000"])
def test_text_that_is_no_vector(text: str) -> None:
    with pytest.raises(TableDamaged, match="in the log is damaged"):
        decode_inline(Vector("i", text, None, 4, 1))
