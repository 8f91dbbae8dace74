"""Every golden packet: encoded from its fields, decoded whole, byte by byte, and with bytes trailing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from tailrace.errors import FramingError, MalformedMessage
from tailrace.wire.codes import Op, ServerOpcode
from tailrace.wire.dialect import DIALECTS
from tailrace.wire.fields import FrameInfo, decode_frame_infos, encode_frame_infos
from tailrace.wire.framing import Framer
from tailrace.wire.header import Frame
from tailrace.wire.message import Direction, Message, Response
from vectors.corpus import Vector, as_bytes, vectors
from vectors.packet import Packet
from vectors.twins import shape_of, shapes

FRAMABLE = [vector for vector in vectors() if vector.framable]
GOOD = [vector for vector in FRAMABLE if vector.error is None]
UNFRAMABLE = [vector for vector in vectors() if not vector.framable]
SENT = [vector for vector in GOOD if not vector.notes]
"""Packets that we would send ourselves: not drawings that we only tolerate."""

VALUE_IN_FIELDS = {"Snapshot Marker", "Checkpoint Start", "Checkpoint End"}
"""Messages whose value is taken apart into fields."""


def decode(vector: Vector, frame: Frame) -> Message:
    return DIALECTS[vector.dialect].decode(frame, Direction(vector.direction))


def class_of(vector: Vector) -> type[Message]:
    return DIALECTS[vector.dialect].find(Frame.parse(vector.data), Direction(vector.direction))


def is_tap_push(vector: Vector) -> bool:
    return vector.dialect == "tap" and 0x41 <= vector.data[1] <= 0x47 and not vector.is_response


@pytest.mark.parametrize("vector", GOOD, ids=str)
def test_decoded_message_says_what_the_document_says(vector: Vector) -> None:
    message = decode(vector, Frame.parse(vector.data))
    assert_named(message, vector)
    for name, value in vector.header.items():
        assert getattr(message, "TYPE" if name == "subtype" else name) == value, name
    for name, value in vector.fields.items():
        assert said(message, name) == plain(value), name
    assert message.key == vector.key
    if vector.value is not None:
        assert message.value == vector.value


def assert_named(message: Message, vector: Vector) -> None:
    assert vector.name is not None
    if vector.is_response:
        assert isinstance(message, Response)
    elif vector.dialect == "kv":
        numbers = ServerOpcode if vector.data[0] in (0x82, 0x83) else Op
        assert numbers(message.OPCODE).name == vector.name
    else:
        assert vector.name.lower() in message.name()


def said(message: Message, name: str) -> Any:
    """What a message says under a name, in its fields, properties or options, as JSON would have it."""
    value = getattr(message, name, None)
    if value is None and hasattr(message, "options"):
        value = getattr(message.options(), name, None) if callable(message.options) else message.options
    if callable(value):
        value = list(value())
    return plain(value)


def plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict) and set(value) == {"hex"}:
        return as_bytes(value)
    if isinstance(value, dict) and value and all(isinstance(key, str) for key in value):
        return {key: plain(member) for key, member in value.items()}
    if isinstance(value, dict):
        return [[key, plain(member)] for key, member in value.items()]
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.encode() if isinstance(value, str) else value


@pytest.mark.parametrize("vector", SENT, ids=str)
def test_fields_are_encoded_into_the_packet(vector: Vector) -> None:
    assert class_of(vector)(**arguments(vector)).encode().hex(" ", 4) == vector.data.hex(" ", 4)


def arguments(vector: Vector) -> dict[str, Any]:
    """What the message is made of: fields of the extras from the document, key and value as bytes."""
    packet = Packet.split(vector.data, private=is_tap_push(vector))
    parameters = {field.name for field in fields(class_of(vector))}
    made: dict[str, Any] = {name: value for name, value in vector.header.items() if name != "subtype"}
    made |= {name: plain(value) for name, value in vector.fields.items() if name in parameters}
    made["key"] = vector.key
    if vector.name not in VALUE_IN_FIELDS:
        made["value"] = packet.value
    if "private" in parameters and (vector.name not in VALUE_IN_FIELDS or packet.value):
        made["private"] = packet.private
    if vector.frame_infos is not None:
        made["framing"] = encode_frame_infos(FrameInfo(*info) for info in vector.frame_infos)
        made["flexible"] = True
    if "opcode" in parameters:
        made["opcode"] = packet.opcode
    return made


@pytest.mark.parametrize("vector", SENT, ids=str)
def test_message_survives_a_round_trip(vector: Vector) -> None:
    frame = Frame.parse(vector.data)
    assert frame.encode() == vector.data
    assert decode(vector, frame).encode() == vector.data


@pytest.mark.parametrize("vector", [vector for vector in GOOD if vector.notes], ids=str)
def test_tolerated_packet_is_sent_in_its_corrected_form(vector: Vector) -> None:
    (corrected,) = (other for other in GOOD if other.source == vector.source and other.form == "corrected")
    assert decode(vector, Frame.parse(vector.data)).encode() == corrected.data


@pytest.mark.parametrize("vector", [vector for vector in GOOD if vector.frame_infos is not None], ids=str)
def test_framing_extras(vector: Vector) -> None:
    infos = decode_frame_infos(Frame.parse(vector.data).framing)
    assert [(info.id, info.data) for info in infos] == vector.frame_infos


@pytest.mark.parametrize("vector", FRAMABLE, ids=str)
def test_byte_by_byte(vector: Vector) -> None:
    framer = Framer()
    for at, byte in enumerate(vector.data):
        assert framer.maybe_frame() is None
        assert framer.buffered == at
        framer.feed(bytes([byte]))
    frame = framer.maybe_frame()
    assert frame is not None
    assert frame == Frame.parse(vector.data)
    assert framer.buffered == 0


@pytest.mark.parametrize("vector", FRAMABLE, ids=str)
def test_with_bytes_trailing(vector: Vector) -> None:
    for trailing in (b"\x80", b"\x00" * 23, vector.data[:-1]):
        framer = Framer()
        framer.feed(vector.data + trailing)
        assert framer.maybe_frame() == Frame.parse(vector.data)
        assert framer.take_rest() == trailing


@pytest.mark.parametrize("seed", range(10))
def test_all_packets_as_one_stream_in_any_pieces(seed: int) -> None:
    rng = random.Random(seed)
    order = rng.sample(FRAMABLE, len(FRAMABLE))
    stream = b"".join(vector.data for vector in order)
    framer = Framer()
    frames: list[Frame] = []
    for piece in pieces(stream, rng):
        framer.feed(piece)
        frames += framer.frames()
    assert [frame.encode() for frame in frames] == [vector.data for vector in order]
    assert framer.buffered == 0


def pieces(stream: bytes, rng: random.Random) -> Iterator[bytes]:
    largest = rng.choice([1, 7, 24, 100, 5000])
    while stream:
        size = rng.randint(1, largest)
        yield stream[:size]
        stream = stream[size:]


@pytest.mark.parametrize("vector", [vector for vector in FRAMABLE if vector.error is not None], ids=str)
def test_frame_that_is_no_message(vector: Vector) -> None:
    with pytest.raises(MalformedMessage) as caught:
        decode(vector, Frame.parse(vector.data))
    assert caught.value.status == vector.error


@pytest.mark.parametrize("vector", UNFRAMABLE, ids=str)
def test_drawing_that_no_socket_can_carry(vector: Vector) -> None:
    """The header is trusted: it waits for missing bytes, and extra bytes begin the next frame."""
    framer = Framer()
    framer.feed(vector.data)
    if vector.announces > len(vector.data):
        assert framer.maybe_frame() is None
        assert framer.buffered == len(vector.data)
    else:
        frame = framer.maybe_frame()
        assert frame is not None
        assert frame.size == vector.announces
        framer.feed(bytes(24))
        with pytest.raises(FramingError):
            framer.maybe_frame()


def test_every_shape_has_a_golden_packet() -> None:
    seen = {shape.place for vector in GOOD if (shape := shape_of(vector))}
    assert not shapes().keys() - seen


def test_every_length_of_the_extras_has_a_golden_packet() -> None:
    tolerated = {("upr-a", length) for length in (8, 36, 40)}
    seen = {(shape.place, Packet.split(vector.data).extras) for vector in GOOD if (shape := shape_of(vector))}
    lengths = {(place, len(extras)) for place, extras in seen}
    for place, shape in shapes().items():
        for length in shape.extras:
            assert (place, length) in lengths or (shape.dialect, length) in tolerated, (place, length)


def test_every_success_has_a_shape() -> None:
    without = [vector.id for vector in GOOD if not vector.header.get("status") and shape_of(vector) is None]
    assert not without
