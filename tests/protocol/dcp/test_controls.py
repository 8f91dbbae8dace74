"""Every control key, with every kind of value: what is accepted, what is refused, and with which status."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from protocol.producer_fakes import COLLECTIONS, FULL, PRODUCER, FakeBucket, FakeReader
from tailrace.protocol.dcp.controls import BackfillOrder, ConnectionOptions, Oso
from tailrace.wire.codes import ControlKey, Feature, OpenFlag, Status

OK, BAD, NOT_POSSIBLE = Status.SUCCESS, Status.EINVAL, Status.NOT_SUPPORTED
USER_XATTRS = int(OpenFlag.INCLUDE_DELETED_USER_XATTRS)
SNAPPY = frozenset({int(Feature.SNAPPY)})

ROWS: list[tuple[str, str, Status]] = [
    ("enable_noop", "true", OK),
    ("enable_noop", "whatever", OK),
    ("set_noop_interval", "20", OK),
    ("set_noop_interval", "180", OK),
    ("set_noop_interval", "10800", OK),
    ("set_noop_interval", "0.1", OK),
    ("set_noop_interval", "1.5", OK),
    ("set_noop_interval", "0.09", BAD),
    ("set_noop_interval", "0", BAD),
    ("set_noop_interval", "10801", BAD),
    ("set_noop_interval", "-1", BAD),
    ("set_noop_interval", "1e2", BAD),
    ("set_noop_interval", "nan", BAD),
    ("set_noop_interval", "1_0", BAD),
    ("set_noop_interval", "\u0664\u0665", BAD),
    ("connection_buffer_size", "20971520", OK),
    ("connection_buffer_size", "0", OK),
    ("connection_buffer_size", "1", OK),
    ("connection_buffer_size", "4294967295", OK),
    ("connection_buffer_size", "4294967296", BAD),
    ("connection_buffer_size", "-1", BAD),
    ("connection_buffer_size", "10k", BAD),
    ("connection_buffer_size", " 1", BAD),
    ("stream_buffer_size", "1", NOT_POSSIBLE),
    ("set_priority", "high", OK),
    ("set_priority", "medium", OK),
    ("set_priority", "low", OK),
    ("set_priority", "urgent", BAD),
    ("force_value_compression", "true", OK),
    ("force_value_compression", "false", OK),
    ("supports_cursor_dropping", "true", OK),
    ("supports_cursor_dropping_vulcan", "false", OK),
    ("supports_hifi_MFU", "true", OK),
    ("send_stream_end_on_client_close_stream", "true", OK),
    ("send_stream_end_on_client_close_stream", "false", OK),
    ("enable_expiry_opcode", "true", OK),
    ("enable_expiry_opcode", "false", OK),
    ("enable_stream_id", "true", OK),
    ("enable_stream_id", "false", BAD),
    ("enable_sync_writes", "true", OK),
    ("enable_sync_writes", "false", BAD),
    ("consumer_name", "replica", OK),
    ("enable_out_of_order_snapshots", "true", OK),
    ("enable_out_of_order_snapshots", "true_with_seqno_advanced", OK),
    ("enable_out_of_order_snapshots", "false", BAD),
    ("backfill_order", "round-robin", OK),
    ("backfill_order", "sequential", OK),
    ("backfill_order", "random", BAD),
    ("include_deleted_user_xattrs", "true", BAD),
    ("v7_dcp_status_codes", "true", OK),
    ("v7_dcp_status_codes", "false", BAD),
    ("flatbuffers_system_events", "true", OK),
    ("flatbuffers_system_events", "false", BAD),
    ("change_streams", "true", OK),
    ("change_streams", "false", BAD),
    ("max_marker_version", "2.2", OK),
    ("max_marker_version", "2.0", BAD),
    ("cache_transfer", "true", NOT_POSSIBLE),
    ("enable_ext_metadata", "true", BAD),
    ("no_such_key", "true", BAD),
]


@pytest.mark.parametrize(("key", "value", "status"), ROWS)
def test_row(key: str, value: str, status: Status) -> None:
    reader = FakeReader(FakeBucket())
    reader.open(FULL, noop=False)
    assert reader.control(key, value) == status
    answer = reader.answers[-1]
    assert (answer.opcode, answer.body) == (0x5E, b"")


def test_every_known_key_has_a_row() -> None:
    keys = {value.decode() for name, value in vars(ControlKey).items() if name.isupper()}
    assert keys <= {key for key, _, _ in ROWS}


def test_every_known_key_is_documented() -> None:
    page = Path(__file__).parents[3] / "docs" / "dcp-producer.md"
    rows = [line.split("|")[1] for line in page.read_text().splitlines() if line.startswith("| `")]
    documented = {key for row in rows for key in re.findall(r"`(\w+)`", row)}
    assert documented == {value.decode() for name, value in vars(ControlKey).items() if name.isupper()}


@pytest.mark.parametrize(
    ("features", "flags", "key", "value", "status"),
    [
        (frozenset(), PRODUCER, "force_value_compression", "true", BAD),
        (frozenset(), PRODUCER, "max_marker_version", "2.2", NOT_POSSIBLE),
        (SNAPPY, PRODUCER, "force_value_compression", "true", OK),
        (COLLECTIONS, FULL | USER_XATTRS, "include_deleted_user_xattrs", "true", OK),
        (COLLECTIONS, FULL | USER_XATTRS, "include_deleted_user_xattrs", "false", BAD),
    ],
)
def test_what_depends_on_the_connection(
    features: frozenset[int], flags: int, key: str, value: str, status: Status
) -> None:
    reader = FakeReader(FakeBucket(), features=features)
    reader.open(flags, noop=False)
    assert reader.control(key, value) == status


@pytest.mark.parametrize(
    ("first", "second"),
    [("enable_stream_id", "enable_sync_writes"), ("enable_sync_writes", "enable_stream_id")],
)
def test_stream_ids_and_sync_writes_exclude_each_other(first: str, second: str) -> None:
    reader = FakeReader(FakeBucket())
    reader.open()
    assert reader.control(first, "true") == OK
    assert reader.control(second, "true") == NOT_POSSIBLE


def options(flags: int = FULL) -> ConnectionOptions:
    return ConnectionOptions(COLLECTIONS, flags=OpenFlag(flags))


def test_effects() -> None:
    given = options()
    for key, value in [
        (b"enable_noop", b"true"),
        (b"connection_buffer_size", b"100"),
        (b"connection_buffer_size", b"200"),
        (b"set_noop_interval", b"1.5"),
        (b"enable_expiry_opcode", b"true"),
        (b"send_stream_end_on_client_close_stream", b"true"),
        (b"send_stream_end_on_client_close_stream", b"false"),
        (b"enable_out_of_order_snapshots", b"true_with_seqno_advanced"),
        (b"backfill_order", b"sequential"),
        (b"enable_sync_writes", b"true"),
    ]:
        assert given.control(key, value) == OK
    assert given.noop
    assert given.window.size == 200
    assert given.noop_interval_s == 1.5
    assert given.expirations
    assert given.end_on_close, "it can't be turned off again"
    assert given.oso is Oso.WITH_SEQNO_ADVANCED
    assert given.backfill_order is BackfillOrder.SEQUENTIAL
    assert not given.sync_replication, "a name is missing"
    assert given.control(b"consumer_name", "r\u00e9plica".encode()) == OK
    assert given.sync_replication


def test_expiry_opcode_needs_delete_times() -> None:
    given = options(PRODUCER)
    assert given.control(b"enable_expiry_opcode", b"true") == OK
    assert not given.expirations


def test_value_that_is_no_text() -> None:
    assert options().control(b"consumer_name", b"\xff") == BAD


GO = """enable_noop true; set_noop_interval 180; set_priority high; change_streams true;
    enable_expiry_opcode true; enable_stream_id true;
    enable_out_of_order_snapshots true_with_seqno_advanced; backfill_order round-robin;
    connection_buffer_size 20971520; max_marker_version 2.2; send_stream_end_on_client_close_stream true"""
JAVA = """connection_buffer_size 10485760; set_noop_interval 120; enable_noop true;
    force_value_compression true"""
SERVER = """enable_noop true; set_noop_interval 0.1; set_priority high; supports_cursor_dropping_vulcan true;
    supports_hifi_MFU true; send_stream_end_on_client_close_stream true; enable_expiry_opcode true;
    enable_sync_writes true; consumer_name ns_1; v7_dcp_status_codes true; flatbuffers_system_events true;
    change_streams true; max_marker_version 2.2; connection_buffer_size 10485760"""


@pytest.mark.parametrize("sent", [GO, JAVA, SERVER], ids=["go", "java", "server"])
def test_what_clients_send_is_accepted(sent: str) -> None:
    reader = FakeReader(FakeBucket())
    reader.open(FULL, noop=False)
    for setting in sent.split(";"):
        key, value = setting.split()
        assert reader.control(key, value) == OK, key
