"""Values and datatypes for every kind of reader (docs/spec/dcp.md#values), and events as FlatBuffers."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.producer_fakes import COLLECTIONS, PRODUCER, FakeBucket, FakeReader
from tailrace.snappy import deflate, inflate
from tailrace.wire.codes import Datatype, Feature, OpenFlag, StreamEndStatus, SystemEventId
from tailrace.wire.dcp import DcpSystemEvent
from tailrace.wire.event_forms import as_flatbuffer
from tailrace.wire.fields import join_xattrs, split_xattrs

BODY = b'{"a":1,"text":"' + b"x" * 200 + b'"}'
XATTRS = {"_sys": b"1", "user": b'"u"'}
WITH_XATTRS = join_xattrs(XATTRS, BODY)
ONLY_XATTRS = join_xattrs(XATTRS, b"")
JSON, SNAPPY, XATTR = (int(bit) for bit in (Datatype.JSON, Datatype.SNAPPY, Datatype.XATTR))

X = int(OpenFlag.INCLUDE_XATTRS)
NO = int(OpenFlag.NO_VALUE)
NO_KEEP = int(OpenFlag.NO_VALUE_WITH_UNDERLYING_DATATYPE)
TIMES = int(OpenFlag.INCLUDE_DELETE_TIMES)
USER = int(OpenFlag.INCLUDE_DELETED_USER_XATTRS)
NO_SNAPPY = COLLECTIONS - {int(Feature.SNAPPY)}


def streamed(
    bucket: FakeBucket, flags: int, *, snappy: bool = True, **controls: Any
) -> list[tuple[bytes, int]]:
    """Value and datatype of every item."""
    reader = FakeReader(bucket, features=COLLECTIONS if snappy else NO_SNAPPY)
    reader.open(PRODUCER | flags, **controls)
    stream = reader.stream()
    assert stream.ended is None
    assert stream.is_complete
    return [(item.value, item.datatype) for item in stream.items]


def stored(value: bytes, datatype: int) -> FakeBucket:
    bucket = FakeBucket()
    bucket.vbuckets[0].set(b"before")
    bucket.vbuckets[0].set(b"key", value, datatype=datatype)
    bucket.vbuckets[0].set(b"after")
    return bucket


# What is stored, and what comes with which flags, with snappy and without.

PLAIN = (BODY, JSON)
PACKED = (deflate(BODY), JSON | SNAPPY)
RICH = (WITH_XATTRS, JSON | XATTR)
RICH_PACKED = (deflate(WITH_XATTRS), JSON | XATTR | SNAPPY)

MUTATIONS = [
    # stored, flags, with snappy, without
    (PLAIN, 0, PLAIN, PLAIN),
    (PLAIN, X, PLAIN, PLAIN),
    (PLAIN, NO, (b"", 0), (b"", 0)),
    (PLAIN, X | NO, (b"", 0), (b"", 0)),
    (PLAIN, NO_KEEP, (b"", JSON), (b"", JSON)),
    (PACKED, 0, PACKED, PLAIN),
    (PACKED, X, PACKED, PLAIN),
    (PACKED, NO, (b"", 0), (b"", 0)),
    (PACKED, NO_KEEP, (b"", JSON | SNAPPY), (b"", JSON | SNAPPY)),
    (RICH, 0, PLAIN, PLAIN),
    (RICH, X, RICH, RICH),
    (RICH, NO, (b"", 0), (b"", 0)),
    (RICH, X | NO, (ONLY_XATTRS, XATTR), (ONLY_XATTRS, XATTR)),
    (RICH, X | NO_KEEP, (ONLY_XATTRS, JSON | XATTR), (ONLY_XATTRS, JSON | XATTR)),
    (RICH_PACKED, 0, PLAIN, PLAIN),
    (RICH_PACKED, X, RICH_PACKED, RICH),
    (RICH_PACKED, X | NO, (ONLY_XATTRS, XATTR), (ONLY_XATTRS, XATTR)),
    (
        RICH_PACKED,
        X | NO_KEEP,
        (ONLY_XATTRS, JSON | XATTR | SNAPPY),
        (ONLY_XATTRS, JSON | XATTR | SNAPPY),
    ),
]


@pytest.mark.parametrize(("kept", "flags", "with_snappy", "without"), MUTATIONS)
def test_mutation(
    kept: tuple[bytes, int], flags: int, with_snappy: tuple[bytes, int], without: tuple[bytes, int]
) -> None:
    bucket = stored(*kept)
    assert streamed(bucket, flags)[1] == with_snappy
    items = streamed(bucket, flags, snappy=False)
    assert items[1] == without
    assert items[0] == items[2] == ((b"", 0) if flags & (NO | NO_KEEP) else (b"v", 0)), "the neighbours"


DELETIONS = [
    # flags, and what comes of system and user xattrs
    (TIMES, (b"", 0)),
    (0, (b"", 0)),
    (TIMES | X, (join_xattrs({"_sys": b"1"}, b""), XATTR)),
    (X, (join_xattrs({"_sys": b"1"}, b""), XATTR)),
    (TIMES | X | USER, (ONLY_XATTRS, XATTR)),
    (X | USER, (ONLY_XATTRS, XATTR)),
    (X | NO, (join_xattrs({"_sys": b"1"}, b""), XATTR)),
]


@pytest.mark.parametrize("expired", [True, False])
@pytest.mark.parametrize("snappy", [True, False])
@pytest.mark.parametrize(("flags", "expected"), DELETIONS)
def test_deletion(flags: int, expected: tuple[bytes, int], snappy: bool, expired: bool) -> None:
    for value, datatype in ((ONLY_XATTRS, XATTR), (deflate(ONLY_XATTRS), XATTR | SNAPPY)):
        bucket = FakeBucket()
        bucket.vbuckets[0].delete(b"key", value=value, datatype=datatype, expired=expired)
        [sent] = streamed(bucket, flags, snappy=snappy, enable_expiry_opcode="true")
        if sent[1] & SNAPPY:
            assert snappy
            sent = inflate(sent[0]), sent[1] & ~SNAPPY
        assert sent == expected


def test_deletion_with_user_xattrs_only() -> None:
    bucket = FakeBucket()
    bucket.vbuckets[0].delete(b"key", value=join_xattrs({"user": b"1"}, b""), datatype=XATTR)
    assert streamed(bucket, TIMES | X) == [(b"", 0)]


def test_force_compression() -> None:
    bucket = stored(*RICH)
    items = streamed(bucket, X, force_value_compression="true")
    assert items[0] == items[2] == (b"v", 0), "what does not shrink stays as it is"
    value, datatype = items[1]
    assert (inflate(value), datatype) == (WITH_XATTRS, JSON | XATTR | SNAPPY)
    stripped, datatype = streamed(bucket, 0, force_value_compression="true")[1]
    assert (inflate(stripped), datatype) == (BODY, JSON | SNAPPY)
    assert streamed(bucket, NO, force_value_compression="true")[1] == (b"", 0)


@pytest.mark.parametrize(
    ("value", "datatype"),
    [(b"\xff\xff\xff\xff\xff", SNAPPY), (b"\x05ab", SNAPPY), (b"\0\0\0\xff", XATTR)],
)
def test_value_that_is_not_what_it_says(value: bytes, datatype: int) -> None:
    """The store may hold a value that is not what its datatype says: the stream ends, the node lives."""
    reader = FakeReader(stored(value, datatype), features=NO_SNAPPY)
    reader.open(PRODUCER)
    assert reader.stream().ended == StreamEndStatus.BACKFILL_FAIL
    assert reader.producer.close_requested is None


@settings(deadline=None, max_examples=60)
@given(
    documents=st.lists(
        st.tuples(
            st.sampled_from(["set", "delete", "expire"]),
            st.binary(max_size=300),
            st.booleans(),
            st.booleans(),
        ),
        min_size=1,
        max_size=30,
    ),
    flags=st.sampled_from([0, X, TIMES, X | TIMES, X | TIMES | USER, NO, X | NO]),
    snappy=st.booleans(),
    collections=st.booleans(),
    force=st.booleans(),
)
def test_any_mixture(
    *,
    documents: list[tuple[str, bytes, bool, bool]],
    flags: int,
    snappy: bool,
    collections: bool,
    force: bool,
) -> None:
    """Whatever is next to it, it gets the right body, and the xattrs where they are wanted."""
    bucket = FakeBucket()
    for number, (kind, body, packed, rich) in enumerate(documents):
        key, datatype = b"k%d" % number, 0
        if kind != "set":
            body = b""
        value = join_xattrs(XATTRS, body) if rich else body
        datatype |= XATTR if rich else 0
        if packed and value:
            value, datatype = deflate(value), datatype | SNAPPY
        if kind == "set":
            bucket.vbuckets[0].set(key, value, datatype=datatype)
        else:
            bucket.vbuckets[0].delete(key, value=value, datatype=datatype, expired=kind == "expire")
    features = {Feature.COLLECTIONS} if collections else set()
    if snappy:
        features.add(Feature.SNAPPY)
    reader = FakeReader(bucket, features=frozenset(map(int, features)))
    reader.open(PRODUCER | flags)
    if force:
        reader.control("force_value_compression", "true")
    stream = reader.stream()
    assert stream.last_seqno == len(documents)
    for number, (item, (kind, body, _, rich)) in enumerate(zip(stream.items, documents, strict=True)):
        assert item.key == b"\0" * collections + b"k%d" % number
        value, datatype = item.value, item.datatype
        if datatype & SNAPPY:
            assert snappy
            value = inflate(value)
        assert bool(datatype & XATTR) == (rich and bool(flags & X))
        xattrs = {}
        if datatype & XATTR:
            xattrs, value = split_xattrs(value)
        assert value == (b"" if kind != "set" or flags & NO else body)
        if rich and flags & X:
            assert xattrs == (XATTRS if kind == "set" or flags & USER else {"_sys": b"1"})


# FlatBuffers


def read_table(data: bytes, shapes: str) -> list[object]:
    """A separate reader, by the format's description: u64 Q, u32 I, bool ?, text s; None if absent."""
    (table,) = struct.unpack_from("<I", data)
    vtable = table - struct.unpack_from("<i", data, table)[0]
    vtable_size, table_size = struct.unpack_from("<HH", data, vtable)
    fields: list[object] = []
    for number, shape in enumerate(shapes):
        place = 4 + 2 * number
        (offset,) = struct.unpack_from("<H", data, vtable + place) if place < vtable_size else (0,)
        if not offset:
            fields.append(None)
            continue
        assert offset < table_size
        at = table + offset
        if shape == "s":
            at += struct.unpack_from("<I", data, at)[0]
            (length,) = struct.unpack_from("<I", data, at)
            assert data[at + 4 + length] == 0
            fields.append(data[at + 4 : at + 4 + length])
        else:
            assert at % struct.calcsize(shape) == 0, "aligned"
            fields.append(struct.unpack_from("<" + shape, data, at)[0])
    return fields


VALUE = struct.pack(">QII", 0x1122334455667788, 10, 128)


@pytest.mark.parametrize(
    ("event", "version", "name", "value", "shapes", "expected"),
    [
        (SystemEventId.COLLECTION_BEGIN, 0, b"coll", VALUE, "QII?Is?", [10, 128, False, 0, b"coll", False]),
        (
            SystemEventId.COLLECTION_BEGIN,
            1,
            b"",
            VALUE + b"\0\0\0\x3c",
            "QII?Is?",
            [10, 128, True, 60, b"", False],
        ),
        (SystemEventId.COLLECTION_END, 0, b"", VALUE, "QII?", [10, 128, None]),
        (SystemEventId.SCOPE_CREATED, 0, b"scope", VALUE[:12], "QIs", [10, b"scope"]),
        (SystemEventId.SCOPE_DROPPED, 0, b"", VALUE[:12], "QI?", [10, None]),
    ],
)
def test_flatbuffer(
    *, event: int, version: int, name: bytes, value: bytes, shapes: str, expected: list[object]
) -> None:
    made = as_flatbuffer(
        DcpSystemEvent(by_seqno=1, event=event, version=version, key=name, value=value)
    ).value
    assert read_table(made, shapes) == [0x1122334455667788, *expected]


def test_flatbuffer_bytes() -> None:
    """The reference library (flatbuffers 25.12) reads these bytes as the fields given here."""
    event = DcpSystemEvent(by_seqno=1, event=0, version=1, key=b"name5", value=VALUE + b"\0\0\0\x3c")
    assert as_flatbuffer(event).value.hex() == (
        "1800000012002200080010001400200018001c00210000001400000000000000"
        "88776655443322110a000000800000003c0000000800000001000000050000006e616d6535000000"
    )
