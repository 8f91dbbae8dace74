"""Frames in bulk, compared with the same done one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.frames import collections_at, cut_out, frames_of, keys_at, seqnos_at, set_opaques
from tailrace.wire.codes import DcpOpcode
from tailrace.wire.dcp import DcpDeletion, DcpExpiration, DcpMutation
from tailrace.wire.fields import encode_leb128
from tailrace.wire.message import Message

collection_ids = st.sampled_from([0, 1, 8, 0x7F, 0x80, 0x555, 0x3FFF, 0x4000, 0xFFFF_FFFF])


@st.composite
def changes(draw: st.DrawFn) -> Message:
    """A mutation, deletion or expiration in any collection."""
    key = encode_leb128(draw(collection_ids)) + draw(st.binary(min_size=1, max_size=20))
    common: dict[str, Any] = {
        "by_seqno": draw(st.integers(1, 2**64 - 1)),
        "rev_seqno": 1,
        "key": key,
        "vbucket": 3,
    }
    opcode = draw(st.sampled_from([DcpOpcode.MUTATION, DcpOpcode.DELETION, DcpOpcode.EXPIRATION]))
    if opcode == DcpOpcode.MUTATION:
        return DcpMutation(**common, value=draw(st.binary(max_size=50)))
    if opcode == DcpOpcode.DELETION:
        return DcpDeletion(**common, delete_time=7, unused=0)
    return DcpExpiration(**common, delete_time=7)


def bulk(messages: list[Message]) -> tuple[np.ndarray, np.ndarray, list[bytes]]:
    frames = [message.encode() for message in messages]
    lengths = np.array([len(frame) for frame in frames], np.int64)
    return np.frombuffer(bytearray().join(frames), np.uint8), np.cumsum(lengths) - lengths, frames


@settings(deadline=None)
@given(st.lists(changes(), min_size=1, max_size=20), st.integers(0, 2**32 - 1), st.data())
def test_bulk_is_the_same_as_one_by_one(messages: list[Any], opaque: int, data: st.DataObject) -> None:
    chunk, offsets, frames = bulk(messages)

    assert seqnos_at(chunk, offsets).tolist() == [message.by_seqno for message in messages]
    expected = []
    for message in messages:
        number, at = 0, 0
        while message.key[at] & 0x80:
            number |= (message.key[at] & 0x7F) << 7 * at
            at += 1
        expected.append(number | message.key[at] << 7 * at)
    assert collections_at(chunk, offsets).tolist() == expected

    wanted = np.array([data.draw(st.booleans()) for _ in messages], np.bool_)
    kept, kept_offsets = frames_of(chunk, offsets, wanted)
    left = [frame for frame, keep in zip(frames, wanted, strict=True) if keep]
    assert kept.tobytes() == b"".join(left)
    assert kept_offsets.tolist() == [sum(map(len, left[:n])) for n in range(len(left))]

    places = keys_at(chunk, offsets)
    stripped = bytearray(chunk.tobytes())
    for place in reversed(places.tolist()):
        del stripped[place]
    assert cut_out(chunk, places).tobytes() == stripped

    set_opaques(chunk, offsets, opaque)
    for message in messages:
        message.opaque = opaque
    assert chunk.tobytes() == b"".join(message.encode() for message in messages)
