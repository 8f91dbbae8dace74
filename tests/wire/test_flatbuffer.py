"""What is read from the FlatBuffers in system events, and from bytes that are not FlatBuffers."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import MalformedMessage
from tailrace.wire.codes import SystemEventId
from tailrace.wire.dcp import DcpSystemEvent
from tailrace.wire.event_forms import as_flatbuffer, as_integers
from tailrace.wire.flatbuffer import EventContent, flatbuffer_event

# docs/spec/servers.md#flatbuffers-system-events: uid 2, scope 9, id 8, max TTL 72000, history
EXAMPLE = bytes.fromhex(
    "18000000000012002400180008000c000600100014000700"
    "120000000000010109000000080000004019010010000000"
    "0200000000000000000000000c0000006d79636f6c6c656374696f6e00000000"
)


@pytest.mark.parametrize("event", [SystemEventId.COLLECTION_BEGIN, SystemEventId.COLLECTION_MODIFIED])
def test_the_example_of_the_document(event: SystemEventId) -> None:
    assert flatbuffer_event(event, EXAMPLE) == EventContent(2, 9, 8, 72_000, True)


def test_fields_that_are_not_there_have_their_defaults() -> None:
    without = bytearray(EXAMPLE)
    struct.pack_into("<H", without, 6, 4 + 2 * 3)  # a shorter vtable: uid, scope and collection
    assert flatbuffer_event(0, bytes(without)) == EventContent(2, 9, 8, None, False)


@given(st.sampled_from([0, 1, 3, 4]), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.binary())
def test_what_our_node_writes(event: int, uid: int, collection: int, name: bytes) -> None:
    ids = (7,) if event in (3, 4) else (7, collection)
    made = DcpSystemEvent(by_seqno=1, event=event, key=name, value=struct.pack(f">Q{len(ids)}I", uid, *ids))
    content = flatbuffer_event(event, as_flatbuffer(made).value)
    assert content[:4] == (uid, 7, collection if len(ids) == 2 else None, None)
    assert as_integers(as_flatbuffer(made)) == made


@given(st.sampled_from([0, 1, 3, 4, 5]), st.binary(max_size=100))
def test_any_bytes(event: int, value: bytes) -> None:
    """They are read or refused, and nothing else happens."""
    with contextlib.suppress(MalformedMessage):
        made = DcpSystemEvent(by_seqno=1, event=event, version=2, key=b"x", value=value)
        made.check_fields()
        assert made.scope_id < 1 << 32


@given(st.integers(0, 79), st.integers(0, 255))
def test_a_byte_that_is_wrong(place: int, byte: int) -> None:
    broken = EXAMPLE[:place] + bytes([byte]) + EXAMPLE[place + 1 :]
    with contextlib.suppress(ValueError):
        flatbuffer_event(0, broken)
