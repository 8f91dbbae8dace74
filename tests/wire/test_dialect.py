"""The first change-stream packet of a connection binds its dialect, and the tests for it never overlap."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tailrace.errors import MalformedMessage
from tailrace.wire import kv
from tailrace.wire.codes import Status
from tailrace.wire.dcp import DcpDeletion, DcpExpiration, DcpMutation
from tailrace.wire.dialect import DCP, DIALECTS, KV, KV_MESSAGES, TAP, UPR_A, UPR_B, Dialect, Role, bind
from tailrace.wire.header import Frame
from tailrace.wire.message import Direction
from vectors.corpus import Vector, vectors

PRODUCER, REPLICA = Role.PRODUCER, Role.REPLICA


def frame(magic: int, opcode: int, extras: int, key: int = 0, *, byte_5: int = 0, fill: int = 0) -> Frame:
    return Frame(magic, opcode, key, extras, byte_5, body=bytes([fill]) * (extras + key))


BINDS = [
    (frame(0x80, 0x40, 0), TAP, PRODUCER),
    (frame(0x80, 0x40, 4, 5), TAP, PRODUCER),
    *((frame(0x80, opcode, 8), TAP, REPLICA) for opcode in range(0x41, 0x48)),
    (frame(0x80, 0x41, 16, 1), TAP, REPLICA),
    (frame(0x80, 0x01, 32, byte_5=1), UPR_A, PRODUCER),
    (frame(0x80, 0x01, 40, 3, byte_5=1), UPR_A, PRODUCER),
    (frame(0x80, 0x01, 0, byte_5=2), UPR_A, PRODUCER),
    (frame(0x80, 0x50, 40), UPR_B, PRODUCER),
    (frame(0x80, 0x50, 40, 3), UPR_B, PRODUCER),
    (frame(0x80, 0x51, 0), UPR_B, PRODUCER),
    (frame(0x80, 0x50, 8, 1, fill=1), DCP, PRODUCER),
    (frame(0x08, 0x50, 8, 1, fill=1), DCP, PRODUCER),
    (frame(0x80, 0x50, 8, 1), DCP, REPLICA),
]
ORDINARY = [
    *(
        frame(0x80, opcode, 0)
        for opcode in (0x1F, 0x20, 0x21, 0x89, 0x10, 0x0B, 0x0A, 0xB5, 0x48, 0x96, 0x00, 0xDF)
    ),
    frame(0x80, 0x01, 8, 1),
    frame(0x80, 0x01, 8, 1, byte_5=1),
    frame(0x80, 0x01, 0, byte_5=0),  # the header sample of draft A
    frame(0x08, 0x01, 8, 1),
    frame(0x81, 0x50, 8, 1),
    frame(0x82, 0x01, 4),
]
REFUSED = [
    *(frame(0x80, opcode, 0) for opcode in range(0x52, 0x68)),
    frame(0x80, 0x50, 8),
    frame(0x80, 0x50, 0, 1),
    frame(0x80, 0x51, 4),
    frame(0x08, 0x50, 40),
]


@pytest.mark.parametrize(("first", "dialect", "role"), BINDS, ids=lambda case: getattr(case, "name", ""))
def test_first_packet_binds(first: Frame, dialect: Dialect, role: Role) -> None:
    assert bind(first) == (dialect, role)


@pytest.mark.parametrize("first", ORDINARY, ids=lambda frame: f"{frame.magic:02x}-{frame.opcode:02x}")
def test_ordinary_command_binds_nothing(first: Frame) -> None:
    assert bind(first) is None


@pytest.mark.parametrize("first", REFUSED, ids=lambda frame: f"{frame.opcode:02x}-{frame.extras_length}")
def test_change_stream_command_that_opens_nothing_is_refused(first: Frame) -> None:
    with pytest.raises(MalformedMessage) as refused:
        bind(first)
    assert refused.value.status == Status.EINVAL


OPENERS = {"tap": {0x40}, "upr-a": {0x01}, "upr-b": {0x50, 0x51}, "dcp": {0x50}}


@pytest.mark.parametrize(
    "vector",
    [
        vector
        for vector in vectors()
        if vector.dialect in OPENERS
        and vector.data[0] in (0x80, 0x08)
        and vector.data[1] in OPENERS[vector.dialect]
        and vector.direction == "to-producer"
        and vector.framable
        and vector.error is None
    ],
    ids=str,
)
def test_golden_openers_bind_their_own_dialect(vector: Vector) -> None:
    bound = bind(Frame.parse(vector.data))
    assert bound is not None
    assert bound[0].name == vector.dialect


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda dialect: dialect.name)
def test_every_dialect_has_the_key_value_commands(dialect: Dialect) -> None:
    """A command's opcode may only be taken where the dialect has a message of its own in that place."""
    for cls in KV_MESSAGES:
        if dialect is not KV and any(message.OPCODE == cls.OPCODE for message in dialect.messages):
            continue
        classes = {dialect.find(Frame(cls.MAGIC, cls.OPCODE), direction) for direction in Direction}
        assert cls in classes


def test_set_is_told_from_a_draft_a_request() -> None:
    for byte_5 in (0, 1):
        command = kv.Set(key=b"k", value=b"v", datatype=byte_5)
        assert UPR_A.decode(Frame.parse(command.encode()), Direction.TO_PRODUCER) == command


def test_same_bytes_mean_different_things() -> None:
    """0x52 and 0x54 without a body: only dialect and direction tell them apart."""
    names = {
        (dialect.name, direction.value): dialect.find(Frame(0x80, 0x54), direction).name()
        for dialect in (UPR_B, DCP)
        for direction in Direction
    }
    assert names == {
        ("upr-b", "to-producer"): "unknown",
        ("upr-b", "to-consumer"): "upr b snapshot start",
        ("dcp", "to-producer"): "dcp get failover log",
        ("dcp", "to-consumer"): "unknown",
    }


@pytest.mark.parametrize(
    "sent",
    [
        DcpDeletion(by_seqno=5, rev_seqno=1, key=b"hello"),
        DcpDeletion(by_seqno=5, rev_seqno=1, delete_time=1, key=b"hello"),
        DcpExpiration(by_seqno=5, rev_seqno=1, delete_time=1, key=b"hello"),
    ],
    ids=("deletion V1", "deletion V2", "expiration"),
)
def test_stream_id_is_found_where_a_server_forgot_to_count_it(sent: DcpDeletion | DcpExpiration) -> None:
    """docs/spec/dcp.md#stream-id-without-length: the three bytes are there, but byte 2 says 0."""
    right = replace(sent, framing=b"\x22\x00\x47", vbucket=7, flexible=True)
    data = bytearray(right.encode())
    data[2] = 0
    received = DCP.decode(Frame.parse(data), Direction.TO_RECEIVER)
    assert received == right
    assert received.encode() == right.encode()


def test_nothing_else_is_taken_for_a_forgotten_stream_id() -> None:
    high = DcpDeletion(by_seqno=0x22 << 56, rev_seqno=1, key=b"k", flexible=True)
    assert DCP.decode(high.to_frame(), Direction.TO_RECEIVER) == high  # it does not fit in front of the key
    xattrs = replace(high, value=bytes(5), datatype=4, flexible=False)
    assert DCP.decode(xattrs.to_frame(), Direction.TO_RECEIVER) == xattrs
    mutation = DcpMutation(by_seqno=0x22 << 56, rev_seqno=1, key=b"k", value=b"value", flexible=True)
    assert DCP.decode(mutation.to_frame(), Direction.TO_RECEIVER) == mutation


def test_counts_are_those_of_the_documents() -> None:
    assert {name: len(dialect.messages) for name, dialect in DIALECTS.items()} == {
        "dcp": 24,
        "upr-a": 15,
        "upr-b": 11,
        "tap": 9,
        "kv": 0,
    }
