"""Any bytes give frames and messages, or a typed protocol error, and nothing else.

A failure names the seed and the number of the input: set ``TAILRACE_FUZZ_SEED`` to replay it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from inspect import isgeneratorfunction

import pytest

from tailrace.errors import FramingError, MalformedMessage
from tailrace.wire.dialect import DIALECTS, Dialect, bind
from tailrace.wire.fields import (
    Durability,
    decode_failover_log,
    decode_frame_infos,
    decode_leb128,
    split_xattrs,
)
from tailrace.wire.framing import Framer
from tailrace.wire.header import Frame
from tailrace.wire.message import Direction, Message
from vectors.corpus import vectors

SEED = int(os.environ.get("TAILRACE_FUZZ_SEED", "20131001"))
GOLDEN = [vector.data for vector in vectors()]
HOME = [(DIALECTS[vector.dialect], Direction(vector.direction)) for vector in vectors()]
TABLES = [(dialect, direction) for dialect in DIALECTS.values() for direction in Direction]
MAGICS = bytes([0x80, 0x81, 0x08, 0x18, 0x82, 0x83])

Case = tuple[bytes, Dialect, Direction]


def any_bytes(rng: random.Random) -> Case:
    data = rng.randbytes(rng.choice([0, 1, 23, 24, 25, rng.randrange(200)]))
    return rng.choice(MAGICS).to_bytes() + data, *rng.choice(TABLES)


def fitting_frame(rng: random.Random) -> Case:
    """Lengths that fit, to reach the messages' own checks; opcodes that messages have."""
    magic = rng.choice(MAGICS)
    extras, key, value = (rng.choice([0, 0, 1, 4, 8, 16, rng.randrange(52)]) for _ in range(3))
    framing = rng.randrange(6) if magic in (0x08, 0x18) else 0
    body = rng.randbytes(framing + extras + key + value)
    opcode = rng.choice([rng.randrange(256), rng.randrange(0x40, 0x68), rng.randrange(6)])
    header = bytes(
        [magic, opcode, framing, key, extras, rng.choice([0, 1, 2, 3, 4, 5, 6, rng.randrange(256)])]
    )
    status = rng.choice([0, 0, 0x23, rng.randrange(1 << 16)])
    return (
        header + status.to_bytes(2) + len(body).to_bytes(4) + rng.randbytes(12) + body,
        *rng.choice(TABLES),
    )


def mutated_golden(rng: random.Random) -> Case:
    """A good packet with bytes changed, inserted or removed, its lengths corrected or not."""
    number = rng.randrange(len(GOLDEN))
    data = bytearray(GOLDEN[number])
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(data)) if data else 0
        match rng.randrange(5):
            case 0:
                data[at : at + 1] = rng.randbytes(1)
            case 1:
                data[at : at + 1] = rng.choice([b"\0", b"\xff", b"\x7f", b"\x80"])
            case 2:
                data[at:at] = rng.randbytes(rng.choice([1, 1, 8]))
            case 3:
                del data[at : at + rng.choice([1, 1, 8])]
            case _:
                data[2:6] = rng.choice(GOLDEN)[2:6]
    if len(data) >= 24 and rng.random() < 0.7:
        data[8:12] = (len(data) - 24).to_bytes(4)
    table = HOME[number] if rng.random() < 0.7 else rng.choice(TABLES)
    return bytes(data), *table


def golden_stream(rng: random.Random) -> Case:
    """Several good packets, one byte of them changed."""
    data = bytearray(b"".join(rng.choices(GOLDEN, k=3)))
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data), *rng.choice(TABLES)


KINDS: list[Callable[[random.Random], Case]] = [
    any_bytes,
    fitting_frame,
    mutated_golden,
    mutated_golden,
    golden_stream,
]


def cases(seed: int, count: int) -> Iterator[tuple[int, Case]]:
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        yield number, rng.choice(KINDS)(rng)


def survive(case: Case) -> tuple[int, int]:
    """How many messages a case gives, and how many frames; raises what must not be raised."""
    data, dialect, direction = case
    framer = Framer(limit=1 << 20)
    framer.feed(data)
    messages = frames = 0
    try:
        for frame in framer.frames():
            frames += 1
            assert Frame.parse(frame.encode()) == frame
            with suppress(MalformedMessage):
                bind(frame)
            try:
                message = dialect.decode(frame, direction)
            except MalformedMessage as refused:
                assert str(refused)
                continue
            messages += 1
            read_all(message)
            again = dialect.decode(Frame.parse(message.encode()), direction)
            assert again == message, "a message that does not survive a round trip"
    except FramingError as refused:
        assert str(refused)
    return messages, frames


READERS = ("options", "records", "specs")
"""Methods that take a value apart; everything else that does is a property."""


def read_all(message: Message) -> None:
    """Whatever a message offers to read may fail, but only with a typed error."""
    message.fields_by_name()
    for name in dir(type(message)):
        declared = getattr(type(message), name, None)
        if isinstance(declared, property) or name in READERS:
            with suppress(MalformedMessage):
                member = getattr(message, name)
                if isgeneratorfunction(declared):
                    list(member())
                elif callable(member):
                    member()
    for decode in (decode_leb128, split_xattrs, decode_failover_log):
        with suppress(MalformedMessage):
            decode(message.value)
    with suppress(MalformedMessage):
        for info in decode_frame_infos(message.framing):
            Durability.decode(info)


def campaign(seed: int, count: int) -> None:
    total_messages = total_frames = 0
    for number, case in cases(seed, count):
        try:
            messages, frames = survive(case)
        except Exception as error:
            data, dialect, direction = case
            where = f"seed {seed}, input {number}, {dialect.name} {direction.value}"
            raise AssertionError(f"{where}: {error!r} from {data.hex()}") from error
        total_messages += messages
        total_frames += frames
    # the inputs must reach the messages, or the campaign proves nothing
    assert total_frames > count // 2
    assert total_messages > count // 5


@pytest.mark.parametrize("part", range(5))
def test_50_000_inputs(part: int) -> None:
    campaign(SEED + part, 10_000)


@pytest.mark.long
@pytest.mark.timeout(0)
def test_1_000_000_inputs() -> None:
    seed = int(os.environ.get("TAILRACE_FUZZ_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"TAILRACE_FUZZ_SEED={seed}")
    campaign(seed, 1_000_000)
