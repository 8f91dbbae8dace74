"""The golden packets are what the seed documents draw, and differ from them only where an erratum says so."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import repeat
from pathlib import Path

import pytest

from vectors.corpus import Vector, vectors
from vectors.seed_drawings import DRAWN, Drawing, drawings

LITERAL = [vector for vector in vectors("seed_*") if vector.form == "literal"]
CORRECTED = [vector for vector in vectors("seed_*") if vector.form == "corrected"]
ERRATA = Path(__file__).parents[2] / "docs" / "dialects.md"


@cache
def drawn() -> dict[str, Drawing]:
    """Every drawing by its source, as in "002 L86"."""
    return {
        f"{document} L{drawing.line}": drawing
        for document, path in DRAWN.items()
        for drawing in drawings(path.read_text())
    }


def test_every_drawing_has_one_vector() -> None:
    assert len(drawn()) == 51
    assert Counter(vector.source for vector in LITERAL) == Counter(drawn().keys())


@pytest.mark.parametrize("vector", LITERAL, ids=str)
def test_vector_is_what_is_drawn(vector: Vector) -> None:
    assert vector.data.hex(" ", 4) == drawn()[vector.source].data.hex(" ", 4)


@pytest.mark.parametrize("vector", LITERAL, ids=str)
def test_breakdown_contradicts_drawing_only_by_an_erratum(vector: Vector) -> None:
    admitted = [line for lines in vector.contradictions.values() for line in lines]
    assert sorted(drawn()[vector.source].contradictions()) == sorted(admitted)
    assert set(vector.contradictions) <= set(vector.errata)


@pytest.mark.parametrize("vector", [vector for vector in LITERAL if vector.error is None], ids=str)
def test_expected_fields_are_what_the_breakdown_states(vector: Vector) -> None:
    """Expectations don't come from our decoder: each line that is right is found in the vector."""
    expected = _meanings(vector)
    drawing = drawn()[vector.source]
    for said in drawing.stated:
        name = said.name.lower()
        if name not in expected:
            assert name in _STRUCTURE, f"nobody checks {said}"
        elif next(expected[name]) != said.content:
            assert not said.agrees(drawing.data), f"{vector} does not say {said}"
    left_over = {name: rest for name, values in expected.items() if (rest := list(values)[:1])}
    assert not left_over.keys() - {"reserved"}, "the vector says more than the breakdown"


_STRUCTURE = {"magic", "opcode", "key length", "extra length", "total body", "engine priv."}
"""Lines about the frame itself; test_vector_is_what_is_drawn has compared them already."""

_SPELLINGS = {
    "vbucket": ["vbucket"],
    "datatype": ["data type"],
    "subtype": ["request type"],
    "opaque": ["opaque", "request id"],
    "start_seqno": ["start seqno", "start by seqno"],
    "end_seqno": ["end seqno", "end by seqno"],
    "vb_uuid": ["vb uuid", "vbucket uuid"],
    "high_seqno": ["high seqno"],
    "snapshot_start": ["snapshot start seqno"],
    "snapshot_end": ["snapshot end seqno"],
    "rollback_seqno": ["rollback #", "rollback seqno"],
    "item_flags": ["item flags"],
    "tap_flags": ["flags"],
    "stream_flags": ["flags"],
    "flags": ["flags", "item flags"],
    "expiry": ["expiration", "item exp"],
    "checkpoint_id": ["vb state"],
    "state": ["vb state", "state"],
    "backfill_date": ["backfill date"],
    "key": ["key", "name", "group id"],
}
"""Our name of a field, and the names that the seeds use for it where they differ."""


def _meanings(vector: Vector) -> dict[str, Iterator[bytes]]:
    """What a breakdown must say, as bytes in order, under the name that this drawing uses."""
    drawing = drawn()[vector.source]
    stated = {said.name.lower(): said for said in drawing.stated}
    fields: dict[str, list[bytes]] = {}

    def expect(ours: str, *values: int | bytes) -> None:
        for spelling in _SPELLINGS.get(ours, [ours.replace("_", " ")]):
            if spelling in stated:
                width = stated[spelling].last - stated[spelling].first + 1
                fields.setdefault(spelling, []).extend(
                    value if isinstance(value, bytes) else value.to_bytes(width) for value in values
                )
                return
        assert ours == "code", f"the breakdown of {vector} has no line for {ours}"  # erratum T14

    for name, value in vector.header.items():
        expect(name, value)
    for name, value in vector.fields.items():
        if name == "vbuckets":
            fields["# listed"] = [len(value).to_bytes(2)]
            fields["vbucket"] += [vbucket.to_bytes(2) for vbucket in value]
        elif name == "failover_log":
            expect("vb_uuid", *(uuid for uuid, _ in value))
            expect("high_seqno" if "high seqno" in stated else "vb_seqno", *(seqno for _, seqno in value))
        else:
            expect(name, value)
    if vector.key:
        expect("key", vector.key)
    if vector.value:
        expect("value", vector.value)
    return {**{name: iter(values) for name, values in fields.items()}, "reserved": _zeros(stated)}


def _zeros(stated: Mapping[str, object]) -> Iterator[bytes]:
    width = 1 if "ttl" in stated else 4
    return repeat(bytes(width), 3 if width == 1 else 1) if "reserved" in stated else iter(())


@pytest.mark.parametrize("vector", LITERAL, ids=str)
def test_what_the_header_announces_is_known(vector: Vector) -> None:
    assert vector.announces == 24 + int.from_bytes(vector.data[8:12])
    if not vector.framable:
        assert vector.notes, "a packet that can't be framed must be noted by the lenient decoder"
        assert set(vector.notes) <= set(vector.errata)


@pytest.mark.parametrize("vector", CORRECTED, ids=str)
def test_corrected_packet_differs_only_where_the_errata_say(vector: Vector) -> None:
    (literal,) = (other for other in LITERAL if other.source == vector.source)
    data = bytearray(literal.data)
    for repair in vector.repairs:
        at, drawn_there = repair["offset"], bytes.fromhex(repair["drawn"])
        assert data[at : at + len(drawn_there)] == drawn_there
        data[at : at + len(drawn_there)] = bytes.fromhex(repair["sent"])
    assert data == vector.data
    assert vector.framable
    assert {repair["erratum"] for repair in vector.repairs} == set(literal.notes)
    for same in ("dialect", "direction", "name", "header", "fields", "key", "value"):
        assert getattr(vector, same) == getattr(literal, same)


def test_every_packet_that_cannot_be_sent_is_corrected() -> None:
    assert {vector.source for vector in CORRECTED} == {vector.source for vector in LITERAL if vector.notes}
    assert {vector.source for vector in LITERAL if not vector.framable} <= {
        vector.source for vector in CORRECTED
    }


def test_errata_exist() -> None:
    known = set(re.findall(r"^\| ([ABTD]\d+) \|", ERRATA.read_text(), re.M))
    assert len(known) == 59
    assert {erratum for vector in LITERAL for erratum in vector.errata} <= known
    assert all(set(vector.remarks) <= set(vector.errata) for vector in LITERAL)


def test_how_many_packets_there_are() -> None:
    assert (len(LITERAL), len(CORRECTED), len(vectors("built"))) == (51, 11, 24)
