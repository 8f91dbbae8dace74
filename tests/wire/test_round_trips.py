"""Every declared message survives a round trip, and so do undeclared ones."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.errors import LocalProtocolError
from tailrace.wire import dcp, tap
from tailrace.wire.dialect import DCP, DIALECTS, KV, KV_MESSAGES, Dialect
from tailrace.wire.framing import Framer
from tailrace.wire.header import Frame
from tailrace.wire.message import Direction, Message, Part, Response, Unknown
from vectors.corpus import vectors
from wire.strategies import frames, messages

DECLARED = [(KV, message) for message in KV_MESSAGES] + [
    (dialect, message) for dialect in DIALECTS.values() for message in dialect.messages
]
ANSWERED = list(
    {
        (dialect.name, message.RESPONSE): (dialect, message)
        for dialect, message in DECLARED
        if message.RESPONSE
    }.values()
)
"""One request for each shape of an answer."""


@cache
def golden() -> dict[tuple[str, type[Message]], Message]:
    """A good message of each class, from the golden packets."""
    messages: dict[tuple[str, type[Message]], Message] = {}
    for vector in vectors():
        if vector.framable and vector.error is None:
            message = DIALECTS[vector.dialect].decode(Frame.parse(vector.data), Direction(vector.direction))
            messages.setdefault((vector.dialect, type(message)), message)
    return messages


WITH_GOLDEN = [(dialect, message) for dialect, message in DECLARED if (dialect.name, message) in golden()]

few = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def name_of(case: Dialect | type[Message]) -> str:
    return case.name if isinstance(case, Dialect) else case.__name__


def received(data: bytes) -> Frame:
    framer = Framer()
    framer.feed(data)
    frame = framer.maybe_frame()
    assert frame is not None
    assert framer.buffered == 0
    return frame


def directions(cls: type[Message]) -> list[Direction]:
    return list(Direction) if cls.DIRECTION is None else [cls.DIRECTION]


@pytest.mark.parametrize(("dialect", "cls"), DECLARED, ids=name_of)
@few
@given(data=st.data())
def test_request(dialect: Dialect, cls: type[Message], data: st.DataObject) -> None:
    message = data.draw(messages(cls))
    encoded = message.encode()
    for direction in directions(cls):
        again = dialect.decode(received(encoded), direction)
        assert type(again) is cls
        assert again == message
        assert again.encode() == encoded


@pytest.mark.parametrize(("dialect", "cls"), ANSWERED, ids=name_of)
@few
@given(data=st.data())
def test_answer(dialect: Dialect, cls: type[Message], data: st.DataObject) -> None:
    assert cls.RESPONSE is not None
    message = data.draw(messages(cls.RESPONSE, int(cls.OPCODE)))
    encoded = message.encode()
    for direction in directions(cls):
        again = dialect.decode(received(encoded), direction.opposite)
        assert type(again) is cls.RESPONSE
        assert again == message
        assert again.encode() == encoded


OTHER_STATUSES = st.one_of(st.sampled_from([0x04, 0x07, 0x81, 0x86, 0xFF01]), st.integers(0x100, 0xFFFF))


@pytest.mark.parametrize(("dialect", "cls"), ANSWERED, ids=name_of)
@few
@given(data=st.data(), status=OTHER_STATUSES)
def test_any_other_status_comes_back_as_it_was(
    dialect: Dialect, cls: type[Message], data: st.DataObject, status: int
) -> None:
    assert cls.RESPONSE is not None
    frame = replace(data.draw(frames(cls.RESPONSE.MAGIC, cls.OPCODE)), vbucket=status)
    answer = dialect.decode(received(frame.encode()), directions(cls)[0].opposite)
    assert isinstance(answer, Response)
    assert (answer.status, answer.value) == (status, frame.value)
    assert answer.encode() == frame.encode()


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=name_of)
@given(frame=frames(), direction=st.sampled_from(Direction))
def test_unknown_opcode_comes_back_as_it_was(dialect: Dialect, frame: Frame, direction: Direction) -> None:
    if dialect.find(frame, direction) is not Unknown:
        frame = replace(frame, opcode=0xDF)  # unused
    message = dialect.decode(received(frame.encode()), direction)
    assert isinstance(message, Unknown)
    assert (message.opcode, message.extras) == (frame.opcode, frame.extras)
    assert (message.key, message.value) == (frame.key, frame.value)
    assert message.encode() == frame.encode()


@given(flags=st.integers(0, 0xFFFF_FFFF))
def test_unknown_flags_come_back_as_they_were(flags: int) -> None:
    marker = dcp.DcpSnapshotMarker(start=1, end=2, flags=flags)
    assert DCP.decode(received(marker.encode()), Direction.TO_RECEIVER) == marker
    end = dcp.DcpStreamEnd(status=flags)
    assert DCP.decode(received(end.encode()), Direction.TO_RECEIVER) == end
    push = tap.TapFlush(tap_flags=flags & 0xFFFF)
    assert DIALECTS["tap"].decode(received(push.encode()), Direction.TO_RECEIVER) == push
    unknown_only = flags & ~0xC5  # bits that carry no value
    connect = tap.TapConnect(flags=unknown_only, key=b"n")
    assert DIALECTS["tap"].decode(received(connect.encode()), Direction.TO_PRODUCER) == connect


@pytest.mark.parametrize(("dialect", "cls"), WITH_GOLDEN, ids=name_of)
def test_what_breaks_a_declared_rule_is_not_sent(dialect: Dialect, cls: type[Message]) -> None:
    """The mistake is ours, and we get the error before anything is on the wire."""
    good = golden()[dialect.name, cls]
    broken = [replace(good, key=b"k" * 252)]
    if cls.KEY is Part.REQUIRED:
        broken.append(replace(good, key=b""))
    if cls.KEY is Part.FORBIDDEN:
        broken.append(replace(good, key=b"k"))
    if cls.VALUE is Part.FORBIDDEN:
        broken.append(replace(good, value=b"v"))
    if cls.CAS is Part.FORBIDDEN:
        broken.append(replace(good, cas=1))
    if cls.LAYOUTS[0].fields:
        broken.append(replace(good, **{cls.LAYOUTS[0].names[-1]: 1 << 64}))  # type: ignore[arg-type]
    broken.append(replace(good, opaque=1 << 32))
    for message in broken:
        with pytest.raises(LocalProtocolError):
            message.encode()


def test_every_message_has_a_golden_packet() -> None:
    assert {message for _, message in DECLARED} == {message for _, message in WITH_GOLDEN}
