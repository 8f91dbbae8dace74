"""Drawings that no socket can carry are read from the whole packet, with a note for each erratum."""

from __future__ import annotations

import struct

import pytest

from tailrace.wire.dialect import DCP, DIALECTS, UPR_A, UPR_B, Dialect
from tailrace.wire.drawn_packets import mend, tolerated
from tailrace.wire.header import Frame
from tailrace.wire.message import Direction
from vectors.corpus import Vector, vectors

UNFRAMABLE = [vector for vector in vectors() if not vector.framable]
TOLERATED = [vector for vector in vectors() if vector.framable and (vector.notes or vector.remarks)]
FAULTLESS = [
    vector for vector in vectors() if vector.framable and vector.error is None and vector not in TOLERATED
]


def named(notes: tuple[str, ...] | list[str]) -> list[str]:
    """The errata that notes name, ``erratum A1: …``."""
    return sorted(note.split()[1].rstrip(":") for note in notes)


def corrected(vector: Vector) -> Vector:
    (corrected,) = (
        other for other in vectors() if other.source == vector.source and other.form == "corrected"
    )
    return corrected


@pytest.mark.parametrize("given", ["the dialect given", "the dialect found out"])
@pytest.mark.parametrize("vector", UNFRAMABLE, ids=str)
def test_drawing_is_mended(vector: Vector, given: str) -> None:
    dialect: Dialect = DIALECTS[vector.dialect]
    mended = mend(vector.data, dialect if given == "the dialect given" else None)
    assert mended is not None
    assert (mended.dialect, mended.direction) == (dialect, Direction(vector.direction))
    assert named(mended.notes) == sorted(vector.notes)
    message = dialect.decode(mended.frame, mended.direction)
    right = corrected(vector).data
    assert message.encode() == right
    assert message == dialect.decode(Frame.parse(right), mended.direction)


@pytest.mark.parametrize("vector", UNFRAMABLE, ids=str)
def test_other_dialects_leave_it_alone(vector: Vector) -> None:
    for name, dialect in DIALECTS.items():
        if name != vector.dialect:
            assert mend(vector.data, dialect) is None


@pytest.mark.parametrize("vector", UNFRAMABLE, ids=str)
def test_other_lengths_are_not_mended(vector: Vector) -> None:
    """Only the known drawings are read: with a byte more or less a packet is not one of them."""
    assert mend(vector.data[:-1]) is None
    assert mend(vector.data + b"\0") is None


@pytest.mark.parametrize("vector", TOLERATED, ids=str)
def test_tolerated_packet_is_noted(vector: Vector) -> None:
    notes = tolerated(Frame.parse(vector.data), DIALECTS[vector.dialect], Direction(vector.direction))
    assert named(notes) == sorted(vector.notes + vector.remarks)


@pytest.mark.parametrize(
    ("dialect", "frame", "erratum"),
    [
        (UPR_A, Frame(0x81, 0x02, datatype=1, body=bytes(16)), "A7"),
        (DCP, Frame(0x81, 0x53, vbucket=0x8B), "D5"),
        (DCP, Frame(0x18, 0x54, body=bytes(31) + b"\1", framing=b"\2\0\0"), "D7"),
    ],
)
def test_answer_that_nobody_should_send_is_noted(dialect: Dialect, frame: Frame, erratum: str) -> None:
    dialect.decode(frame, Direction.TO_RECEIVER)
    assert named(tolerated(frame, dialect, Direction.TO_RECEIVER)) == [erratum]


def test_a_log_with_equal_seqnos_is_in_order() -> None:
    log = struct.pack(">8Q", 4, 9, 3, 9, 2, 5, 1, 0)
    for dialect, opcode in ((DCP, 0x53), (DCP, 0x54), (UPR_B, 0x51)):
        assert tolerated(Frame(0x81, opcode, body=log), dialect, Direction.TO_RECEIVER) == []


@pytest.mark.parametrize("vector", FAULTLESS, ids=str)
def test_faultless_packet_is_neither_mended_nor_noted(vector: Vector) -> None:
    assert mend(vector.data) is None
    assert not tolerated(Frame.parse(vector.data), DIALECTS[vector.dialect], Direction(vector.direction))
