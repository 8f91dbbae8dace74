"""Every message has malformed twins: each is refused with a typed error and the status that answers it."""

from __future__ import annotations

import pytest

from tailrace.errors import FramingError, MalformedMessage
from tailrace.wire.codes import Status
from tailrace.wire.dialect import DIALECTS, KV_MESSAGES
from tailrace.wire.framing import Framer
from tailrace.wire.header import Frame
from tailrace.wire.message import Direction
from vectors.corpus import Vector, vectors
from vectors.twins import Malformed, malformed, shape_of, too_short, twins

GOOD = [vector for vector in vectors() if vector.framable and vector.error is None and not vector.notes]
SHAPED = [vector for vector in GOOD if shape_of(vector)]


def refuse(dialect: str, direction: str, data: bytes) -> MalformedMessage | None:
    """The error that a whole frame gives, or None if it is accepted."""
    framer = Framer()
    framer.feed(data)
    frame = framer.maybe_frame()
    assert frame is not None
    try:
        DIALECTS[dialect].decode(frame, Direction(direction))
    except MalformedMessage as error:
        return error
    return None


@pytest.mark.parametrize("vector", SHAPED, ids=str)
def test_twins_are_refused(vector: Vector) -> None:
    shape = shape_of(vector)
    assert shape is not None
    refusals = {what: refuse(vector.dialect, vector.direction, data) for what, data in twins(vector, shape)}
    assert refusals, "a message without a twin"
    assert {what: error.status if error else None for what, error in refusals.items()} == dict.fromkeys(
        refusals, Status.EINVAL
    )


def test_every_message_has_twins() -> None:
    broken = {
        (vector.dialect, DIALECTS[vector.dialect].find(Frame.parse(vector.data), Direction(vector.direction)))
        for vector in SHAPED
    }
    declared = {("kv", message) for message in KV_MESSAGES}
    declared |= {(dialect.name, message) for dialect in DIALECTS.values() for message in dialect.messages}
    assert declared <= broken


@pytest.mark.parametrize("broken", malformed(), ids=str)
def test_packet_that_is_wrong_in_its_own_way(broken: Malformed) -> None:
    error = refuse(broken.dialect, broken.direction, broken.data)
    assert error is not None, broken.why
    assert error.status == broken.status
    assert str(error)


@pytest.mark.parametrize("vector", [vector for vector in GOOD if too_short(vector)], ids=str)
def test_body_shorter_than_extras_and_key_is_no_frame(vector: Vector) -> None:
    data = too_short(vector)
    assert data is not None
    framer = Framer()
    framer.feed(data[:24])  # the header is enough
    with pytest.raises(FramingError):
        framer.maybe_frame()


def test_answer_that_is_no_success_needs_no_shape() -> None:
    """Whatever a peer puts into an error answer, it is not a protocol error."""
    for vector in GOOD:
        if vector.is_response and vector.dialect != "upr-a":
            for status in (Status.EINVAL, Status.ETMPFAIL, 0xFF01):
                data = vector.data[:6] + int(status).to_bytes(2) + vector.data[8:]
                message = DIALECTS[vector.dialect].decode(Frame.parse(data), Direction(vector.direction))
                assert getattr(message, "status", None) == status
