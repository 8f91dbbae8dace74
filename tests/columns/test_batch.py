"""The columns: types, nulls, and what is decoded."""

from __future__ import annotations

import json
import struct
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from columns import message_by_message as plain
from tailrace.columns import SCHEMA, Names, decode, scan, to_batch
from tailrace.errors import FramingError, MalformedMessage
from tailrace.snappy import deflate
from tailrace.wire.codes import Status
from tailrace.wire.fields import join_xattrs

MAX = (1 << 64) - 1
DELETION = struct.pack(">QQH", 4, 1, 0)


def batch_of(*changes: bytes, **options: object) -> list[dict[str, object]]:
    context: dict[str, Any] = {
        "names": Names("default"),
        "vb_uuid": 1,
        "snapshot_start": 2,
        "snapshot_end": 3,
        **options,
    }
    batch = to_batch(scan(b"".join(changes)), **(context | options))
    batch.validate(full=True)
    rows: list[dict[str, object]] = batch.to_pylist()
    return rows


def test_all_columns_of_a_mutation() -> None:
    extras = struct.pack(">QQIIIHB", MAX, MAX - 1, 0xFFFF_FFFE, 0xFFFF_FFFF, 0, 0, 0)
    cas = 1_700_000_000_123_456_789 | 0xFFFF
    change = plain.frame(
        0x57, extras=extras, key=b"\xffkey", value=b'{"a":1}', datatype=1, vbucket=1023, opaque=7, cas=cas
    )
    assert batch_of(change, vb_uuid=MAX, snapshot_start=0, snapshot_end=MAX) == [
        {
            "op": "mutation",
            "key": b"\xffkey",
            "value": b'{"a":1}',
            "bucket": "default",
            "scope": "_default",
            "collection": "_default",
            "vbucket": 1023,
            "vb_uuid": -1,
            "seqno": -1,
            "rev": -2,
            "cas": cas,
            "flags": -2,
            "expiry": 0xFFFF_FFFF,
            "datatype": "json",
            "xattrs": None,
            "event_time": datetime(2023, 11, 14, 22, 13, 20, 123404, UTC),
            "snapshot_start": 0,
            "snapshot_end": -1,
        }
    ]


def test_removed_documents_have_no_value_flags_or_expiry() -> None:
    expiration = struct.pack(">QQI", 5, 1, 1_700_000_000)
    rows = batch_of(
        plain.frame(0x58, extras=DELETION, key=b"a"),
        plain.frame(0x59, extras=expiration, key=b"b"),
        plain.mutation(6, b"c", b""),
    )
    shown = [(row["op"], row["value"], row["flags"], row["expiry"]) for row in rows]
    assert shown == [
        ("deletion", None, None, None),
        ("expiration", None, None, None),
        ("mutation", b"", 0x0200_0006, 0),
    ]


def test_xattrs_are_one_json_object() -> None:
    value = join_xattrs({"_sync": b'{"rev": 1}', 'q"': b'"\xc3\xa4"'}, b"body")
    rows = batch_of(
        plain.mutation(1, b"a", value, datatype=4),
        plain.mutation(2, b"b", b"plain"),
        plain.mutation(3, b"c", join_xattrs({}, b"{}"), datatype=5),
        plain.frame(0x58, extras=DELETION, key=b"d", value=join_xattrs({"_s": b"1"}, b""), datatype=4),
    )
    assert [row["value"] for row in rows] == [b"body", b"plain", b"{}", None]
    assert [row["datatype"] for row in rows] == ["raw", "raw", "json", "raw"]
    xattrs = [row["xattrs"] and json.loads(str(row["xattrs"])) for row in rows]
    assert xattrs == [{"_sync": {"rev": 1}, 'q"': "ä"}, None, {}, {"_s": 1}]


@pytest.mark.parametrize("others", [[], [plain.mutation(9, b"other", b"plain")]], ids=["all", "some"])
def test_compressed_values_are_inflated(others: list[bytes]) -> None:
    body = b"0123456789" * 1000
    rows = batch_of(
        plain.mutation(1, b"a", deflate(body), datatype=2),
        plain.mutation(2, b"b", deflate(join_xattrs({"x": b"1"}, body)), datatype=7),
        plain.mutation(3, b"c", deflate(b""), datatype=3),
        *others,
    )
    assert [row["value"] for row in rows] == [body, body, b""] + [b"plain"] * len(others)
    assert [row["xattrs"] for row in rows] == [None, '{"x":1}', None] + [None] * len(others)


def test_the_datatype_of_a_value_that_was_not_sent() -> None:
    """With open flag 0x40 the datatype is that of the stored value, although no value comes."""
    rows = batch_of(plain.mutation(1, b"a", b"", datatype=7), no_value=True)
    assert (rows[0]["value"], rows[0]["xattrs"], rows[0]["datatype"]) == (None, None, "json")


@pytest.mark.parametrize(
    ("value", "datatype", "status"),
    [
        (deflate(b"x" * 100)[:-1], 2, Status.EINVAL),
        (b"\xff\xff\xff\xff\x0f", 2, Status.EINVAL),
        (b"\x81\x80\x80\x0f", 2, Status.EINVAL),
        (b"\0\0\0\x09abc", 4, Status.XATTR_EINVAL),
        (b"\0\0", 4, Status.XATTR_EINVAL),
        (join_xattrs({"x": b"{"}, b""), 4, Status.XATTR_EINVAL),
        (join_xattrs({"x": b"\xff"}, b""), 4, Status.XATTR_EINVAL),
        (join_xattrs({"x": b"1\0"}, b""), 4, Status.XATTR_EINVAL),
        (join_xattrs({"x": b"NaN"}, b""), 4, Status.XATTR_EINVAL),
        (join_xattrs({"x": b"[" * 100_000}, b""), 4, Status.XATTR_EINVAL),
    ],
    ids=["cut", "4 GiB", "above 30 MiB", "too long", "short", "no JSON", "no UTF-8", "UTF-16", "NaN", "deep"],
)
def test_values_that_can_not_be_undone(value: bytes, datatype: int, status: int) -> None:
    with pytest.raises(MalformedMessage, match="vbucket 3, seqno 8") as caught:
        batch_of(
            plain.mutation(7, b"ok", b"ok"), plain.mutation(8, b"a", value, datatype=datatype, vbucket=3)
        )
    assert caught.value.status == status


def test_collections_have_names() -> None:
    names = Names(
        "travel", {0: ("_default", "_default"), 8: ("inventory", "hotel"), 0x555: ("inventory", "air")}
    )
    prefixes = (b"\x08", b"\xd5\x0a", b"\x00", b"\x08")
    data = b"".join(plain.mutation(n + 1, prefix + b"key") for n, prefix in enumerate(prefixes))
    frames = scan(data, collections=True)
    rows = to_batch(frames, names=names, vb_uuid=1, snapshot_start=1, snapshot_end=9).to_pylist()
    shown = [(row["bucket"], row["scope"], row["collection"], row["key"]) for row in rows]
    assert shown == [
        ("travel", "inventory", "hotel", b"key"),
        ("travel", "inventory", "air", b"key"),
        ("travel", "_default", "_default", b"key"),
        ("travel", "inventory", "hotel", b"key"),
    ]
    with pytest.raises(MalformedMessage, match="0x555") as caught:
        to_batch(
            frames,
            names=Names("travel", {0: ("a", "b"), 8: ("c", "d")}),
            vb_uuid=1,
            snapshot_start=1,
            snapshot_end=9,
        )
    assert caught.value.status == Status.UNKNOWN_COLLECTION


def test_one_collection_for_all_rows() -> None:
    """It needs no name while none of its rows are wanted: it may have been dropped meanwhile."""
    data = b"".join(plain.mutation(n, b"\x08key") for n in range(1, 4))
    frames = scan(data, collections=True)
    context: dict[str, Any] = {"vb_uuid": 1, "snapshot_start": 1, "snapshot_end": 9}
    batch = to_batch(frames, names=Names("travel", {8: ("inventory", "hotel")}), **context)
    assert set(
        zip(*(batch[column].to_pylist() for column in ("scope", "collection", "key")), strict=True)
    ) == {("inventory", "hotel", b"key")}
    with pytest.raises(MalformedMessage, match="0x8"):
        to_batch(frames, names=Names("travel", {}), **context)
    assert to_batch(frames, slice(0, 0), names=Names("travel", {}), **context).num_rows == 0


def test_rows_can_be_chosen_and_have_their_own_numbers() -> None:
    frames = scan(b"".join(plain.mutation(n, b"key%d" % n, b"v" * n) for n in range(1, 30)))
    numbers = np.arange(29, dtype=np.uint64)
    for rows in (slice(5, 9), np.array([5, 6, 7, 8]), np.isin(np.arange(29), (5, 6, 7, 8))):
        batch = to_batch(
            frames,
            rows,
            names=Names("b"),
            vb_uuid=numbers[rows],
            snapshot_start=numbers[rows].astype(np.int64),
            snapshot_end=None,
        )
        assert batch["seqno"].to_pylist() == [6, 7, 8, 9]
        assert batch["key"].to_pylist() == [b"key6", b"key7", b"key8", b"key9"]
        assert batch["value"].to_pylist() == [b"v" * n for n in (6, 7, 8, 9)]
        assert batch["vb_uuid"].to_pylist() == batch["snapshot_start"].to_pylist() == [5, 6, 7, 8]
        assert batch["snapshot_end"].to_pylist() == [None] * 4
    with pytest.raises(ValueError, match="29 entries for 4 rows"):
        to_batch(frames, slice(5, 9), names=Names("b"), vb_uuid=numbers, snapshot_start=1, snapshot_end=1)
    too_narrow: Any = numbers.astype(np.uint32)
    with pytest.raises(ValueError, match="width"):
        to_batch(frames, names=Names("b"), vb_uuid=too_narrow, snapshot_start=1, snapshot_end=1)


def test_no_rows() -> None:
    batch, used = nothing = decode(b"")
    assert (batch.num_rows, batch.schema, used, nothing.controls) == (0, SCHEMA, 0, [])
    batch, used = noop = decode(plain.frame(0x5C))
    assert (batch.num_rows, used, noop.controls) == (0, 24, [(0, 0, 24)])


def test_decode_gives_a_pair_and_the_frames_between() -> None:
    first, noop, second = plain.mutation(1, b"a"), plain.frame(0x5C), plain.mutation(2, b"b")
    batch, used = decoded = decode(first + noop + second + first[:-1])
    assert batch["key"].to_pylist() == [b"a", b"b"]
    assert used == len(first + noop + second)
    assert decoded == (decoded.batch, decoded.used) == (batch, used)
    assert decoded.controls == [(1, len(first), len(first + noop))]


def test_a_batch_does_not_depend_on_the_buffer() -> None:
    received = bytearray(b"".join(plain.mutation(n, b"key%d" % n, b"value" * n) for n in range(1, 50)))
    batch = decode(received).batch
    before = batch.to_pylist()
    received[:] = bytes(len(received))
    assert batch.to_pylist() == before
    received.clear()  # raises while something still holds a view of it


def test_decode_raises_what_scan_reports() -> None:
    with pytest.raises(FramingError):
        decode(plain.mutation(1) + bytes(24))


def test_keys_and_values_of_every_length() -> None:
    """At 12 bytes Arrow's views change their form; the last value may end with the buffer."""
    changes = [plain.mutation(n + 1, b"k" * (n + 1), bytes(range(n))) for n in range(40)]
    for count in range(1, 41):
        batch = decode(b"".join(changes[:count])).batch
        assert batch["key"].to_pylist() == [b"k" * (n + 1) for n in range(count)]
        assert batch["value"].to_pylist() == [bytes(range(n)) for n in range(count)]


def test_batches_survive_ipc() -> None:
    """Columns of one word share memory; only what belongs to the batch is written."""
    batch = decode(b"".join(plain.mutation(n, b"key", b"value") for n in range(1, 6))).batch
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(batch)
    read = pa.ipc.open_stream(sink.getvalue()).read_next_batch()
    assert read.equals(batch)


@pytest.mark.spark
def test_the_schema_is_what_spark_makes_of_it() -> None:
    types = pytest.importorskip("pyspark.sql.types")
    to_arrow_schema = pytest.importorskip("pyspark.sql.pandas.types").to_arrow_schema
    words = {
        "string": types.StringType(),
        "binary": types.BinaryType(),
        "int32": types.IntegerType(),
        "int64": types.LongType(),
        "timestamp[us, tz=UTC]": types.TimestampType(),
    }
    spark = types.StructType([types.StructField(field.name, words[str(field.type)]) for field in SCHEMA])
    assert to_arrow_schema(spark, timezone="UTC") == SCHEMA
