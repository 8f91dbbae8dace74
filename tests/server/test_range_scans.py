"""Range scans over a real socket: keys and documents in order, samples, what must be on disk, their end."""

from __future__ import annotations

import base64
import gc
import json
import struct
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from server.serverkit import Bench, Wire, ask, take
from tailrace.server.call import Pending
from tailrace.server.session import Session
from tailrace.store.base import VBucket
from tailrace.testing.running import RunningNode
from tailrace.wire import kv, subdoc
from tailrace.wire.admin import Hello, SetCollectionsManifest
from tailrace.wire.codes import Datatype, Feature, Status, VBucketState
from tailrace.wire.fields import decode_leb128
from tailrace.wire.header import Frame

KEYS = [b"user%02d" % number for number in range(20)]
VBUCKET = 1


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with RunningNode(4, settings={"max_range_scans": 3}) as running:
        for key in KEYS:
            running.set(key, {"key": key.decode()}, vbucket=VBUCKET)
        running.set("other", 1, vbucket=VBUCKET)
        running.set("user99", 1, vbucket=0)
        running.persist()
        yield running


@pytest.fixture
def wire(node: RunningNode) -> Iterator[Wire]:
    with Wire(node.port) as connection:
        connection.hello(Feature.XERROR, Feature.JSON, Feature.XATTR, Feature.RANGE_SCAN_INCLUDE_XATTR)
        yield connection


def text(key: bytes) -> str:
    return base64.b64encode(key).decode()


def users(**more: Any) -> dict[str, Any]:
    return {"range": {"start": text(b"user"), "end": text(b"user\xff")}, **more}


def made(content: object, vbucket: int = VBUCKET) -> kv.RangeScanCreate:
    value = content if isinstance(content, bytes) else json.dumps(content).encode()
    return kv.RangeScanCreate(vbucket=vbucket, value=value, datatype=int(Datatype.JSON))


def begin(wire: Wire, content: object) -> bytes:
    scan_id: bytes = wire.ok(made(content)).value
    return scan_id


def go_on(wire: Wire, scan_id: bytes, max_items: int = 0, max_bytes: int = 0) -> tuple[Status, bytes]:
    answer = wire.call(
        kv.RangeScanContinue(vbucket=VBUCKET, scan_id=scan_id, max_items=max_items, max_bytes=max_bytes)
    )
    return Status(answer.status), answer.value


def keys_in(value: bytes) -> list[bytes]:
    keys = []
    while value:
        length, used = decode_leb128(value)
        keys.append(value[used : used + length])
        value = value[used + length :]
    return keys


def documents_in(value: bytes) -> list[tuple[bytes, bytes, int, int]]:
    """Key, value, seqno and datatype."""
    head = struct.Struct(">IIQQB")
    documents = []
    while value:
        _, _, seqno, _, datatype = head.unpack_from(value)
        parts = []
        value = value[head.size :]
        for _ in range(2):
            length, used = decode_leb128(value)
            parts.append(value[used : used + length])
            value = value[used + length :]
        documents.append((parts[0], parts[1], seqno, datatype))
    return documents


def test_keys_in_order_a_portion_at_a_time(wire: Wire) -> None:
    scan_id = begin(wire, users(key_only=True))
    status, value = go_on(wire, scan_id, max_items=7)
    assert (status, keys_in(value)) == (Status.RANGE_SCAN_MORE, KEYS[:7])
    status, value = go_on(wire, scan_id, max_bytes=1)
    assert (status, keys_in(value)) == (Status.RANGE_SCAN_MORE, KEYS[7:8])
    status, value = go_on(wire, scan_id)
    assert (status, keys_in(value)) == (Status.RANGE_SCAN_COMPLETE, KEYS[8:])
    assert go_on(wire, scan_id)[0] == Status.KEY_ENOENT


def test_a_portion_takes_no_longer_than_its_client_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    session = bench.session()
    ask(bench, session, Hello(key=b"test", value=struct.pack(">H", Feature.JSON)))
    ask(bench, session, *(kv.Set(key=key, value=b"1", vbucket=VBUCKET) for key in KEYS))
    (answer,) = ask(bench, session, made(users(key_only=True)))
    monkeypatch.setattr(bench.clock, "monotonic", count(1000.0, 0.0009).__next__)  # what a look takes
    portions = []
    for max_ms in (5, 1, 0):
        request = kv.RangeScanContinue(vbucket=VBUCKET, scan_id=bytes(answer.value), max_ms=max_ms)
        (portion,) = ask(bench, session, request)
        portions.append((Status(portion.status), keys_in(bytes(portion.value))))
    more, complete = Status.RANGE_SCAN_MORE, Status.RANGE_SCAN_COMPLETE
    assert portions == [(more, KEYS[:6]), (more, KEYS[6:8]), (complete, KEYS[8:])]


def test_documents_with_or_without_xattrs(node: RunningNode, wire: Wire) -> None:
    wire.ok(
        subdoc.SubdocDictUpsert(vbucket=VBUCKET, key=KEYS[3], value=b"_x1", path_length=2, subdoc_flags=0x05)
    )
    third = {"range": {"start": text(KEYS[3]), "end": text(KEYS[3])}}
    _, value = go_on(wire, begin(wire, third))
    ((key, body, seqno, datatype),) = documents_in(value)
    assert (key, json.loads(body), datatype) == (KEYS[3], {"key": "user03"}, Datatype.JSON)
    assert seqno == node.high_seqno(VBUCKET)
    _, value = go_on(wire, begin(wire, {**third, "include_xattrs": True}))
    ((_, body, _, datatype),) = documents_in(value)
    assert datatype == Datatype.JSON | Datatype.XATTR
    assert b"_x\x001\x00" in body


def test_bounds_may_be_left_out_of_the_range(wire: Wire) -> None:
    scan_id = begin(
        wire, {"key_only": True, "range": {"excl_start": text(KEYS[2]), "excl_end": text(KEYS[5])}}
    )
    assert keys_in(go_on(wire, scan_id)[1]) == KEYS[3:5]
    assert wire.refused(made({"range": {"start": text(b"zz"), "end": text(b"zzz")}})) == Status.KEY_ENOENT


def test_a_sample_is_the_same_for_the_same_seed(wire: Wire) -> None:
    samples = [
        keys_in(go_on(wire, begin(wire, {"key_only": True, "sampling": {"samples": 5, "seed": 9}}))[1])
        for _ in range(2)
    ]
    assert samples[0] == samples[1] == sorted(samples[0])
    assert len(set(samples[0])) == 5
    assert wire.refused(made({"sampling": {"samples": 500}})) == Status.ERANGE


def test_a_document_that_is_gone_is_left_out(node: RunningNode, wire: Wire) -> None:
    node.set("user-gone", 1, vbucket=VBUCKET)
    scan_id = begin(wire, users(key_only=True))
    node.delete("user-gone", vbucket=VBUCKET)
    assert keys_in(go_on(wire, scan_id)[1]) == KEYS


def test_requirements(node: RunningNode, wire: Wire) -> None:
    uuid, high = node.failover_log(VBUCKET)[0][0], node.high_seqno(VBUCKET)

    def needs(**requirements: Any) -> kv.RangeScanCreate:
        return made(users(key_only=True, snapshot_requirements=requirements))

    assert wire.refused(needs(vb_uuid=str(uuid + 1), seqno=1)) == Status.VB_UUID_NOT_EQUAL
    node.stop_persistence()
    node.set("user-late", 1, vbucket=VBUCKET)
    late = node.high_seqno(VBUCKET)
    assert wire.refused(needs(vb_uuid=str(uuid), seqno=late)) == Status.ETMPFAIL
    assert wire.refused(needs(vb_uuid=str(uuid), seqno=late, timeout_ms=20)) == Status.ETMPFAIL
    node.start_persistence()
    answer = wire.ok(needs(vb_uuid=str(uuid), seqno=late, timeout_ms=60_000, seqno_exists=True))
    assert b"user-late" in keys_in(go_on(wire, answer.value)[1])
    node.delete("user-late", vbucket=VBUCKET)
    node.persist()
    assert wire.refused(needs(vb_uuid=str(uuid), seqno=late, seqno_exists=True)) == Status.NOT_STORED
    assert high < late


def test_scans_end(node: RunningNode, wire: Wire) -> None:
    scan_id = begin(wire, users())
    cancel = kv.RangeScanCancel(vbucket=VBUCKET, scan_id=scan_id)
    assert wire.refused(kv.RangeScanCancel(vbucket=2, scan_id=scan_id)) == Status.KEY_ENOENT
    wire.ok(cancel)
    assert wire.refused(cancel) == Status.KEY_ENOENT
    with Wire(node.port) as other:
        other.hello(Feature.XERROR, Feature.JSON)
        for _ in range(3):
            begin(other, users())
        assert wire.refused(made(users())) == Status.EBUSY
    while node.call(lambda running: len(running.buckets["default"].range_scans)):
        pass  # the connection is gone, and the node will have noticed in a moment
    begin(wire, users())


def test_old_scans_are_cancelled() -> None:
    with RunningNode(4, settings={"range_scan_lifetime": 0.001}) as node, Wire(node.port) as wire:
        wire.hello(Feature.JSON)
        for key in KEYS:
            node.set(key, 1, vbucket=VBUCKET)
        scan_id = begin(wire, users())
        while (status := go_on(wire, scan_id, max_items=1)[0]) == Status.RANGE_SCAN_MORE:
            pass
        assert status == Status.RANGE_SCAN_CANCELLED


def test_another_collection() -> None:
    with RunningNode(2) as node, Wire(node.port) as wire:
        wire.hello(Feature.JSON, Feature.COLLECTIONS)
        manifest = {
            "uid": "1",
            "scopes": [{"name": "_default", "uid": "0", "collections": [{"name": "c", "uid": "8"}]}],
        }
        wire.ok(SetCollectionsManifest(value=json.dumps(manifest).encode(), datatype=int(Datatype.JSON)))
        wire.ok(kv.Set(vbucket=VBUCKET, key=b"\x08user1", value=b"1"))
        scan_id = begin(wire, users(collection="8", key_only=True))
        assert keys_in(go_on(wire, scan_id)[1]) == [b"user1"]
        assert wire.refused(made(users(collection="0"))) == Status.UNKNOWN_COLLECTION
        assert wire.refused(made(users(collection="99"))) == Status.UNKNOWN_COLLECTION


@pytest.mark.parametrize(
    "content",
    [
        b"no json",
        b"[]",
        {},
        users(sampling={"samples": 1}),
        users(key_only=True, include_xattrs=True),
        users(key_only=1),
        users(collection="x"),
        users(collection=8),
        users(name="x" * 51),
        users(snapshot_requirements={"vb_uuid": 5, "seqno": 1}),
        users(snapshot_requirements={"vb_uuid": "5"}),
        {"range": {"start": text(b"a")}},
        {"range": {"start": text(b"a"), "excl_start": text(b"a"), "end": text(b"b")}},
        {"range": {"start": "?", "end": text(b"b")}},
        {"range": {"start": text(b"x" * 251), "end": text(b"b")}},
        {"sampling": {"samples": 0}},
        {"sampling": {"samples": True}},
    ],
)
def test_nonsense(wire: Wire, content: object) -> None:
    assert wire.refused(made(content)) == Status.EINVAL


def test_only_the_active(node: RunningNode, wire: Wire) -> None:
    assert wire.refused(made(users(), vbucket=9)) == Status.NOT_MY_VBUCKET


def scanned_bench(**settings: Any) -> tuple[Bench, Session, VBucket]:
    """A node with a document that is not on disk, and a connection."""
    bench = Bench(vbuckets=2, **settings)
    session = bench.session()
    ask(bench, session, Hello(key=b"test", value=struct.pack(">H", Feature.JSON)))
    ask(bench, session, kv.Set(key=b"user1", value=b"1", vbucket=VBUCKET))
    vbucket = bench.node.buckets["default"].store.vbuckets[VBUCKET]
    assert vbucket is not None
    return bench, session, vbucket


def after_waiting(bench: Bench, session: Session, vbucket: VBucket, meanwhile: Callable[[], None]) -> Frame:
    """The answer to a peer that wants a scan of what is not on disk yet."""
    needs = {"vb_uuid": str(vbucket.uuid), "seqno": vbucket.high_seqno, "timeout_ms": 60_000}
    assert ask(bench, session, made(users(snapshot_requirements=needs))) == []
    meanwhile()
    for _ in range(2):
        bench.advance(1)
        bench.run_jobs()
    (answer,) = take(session)
    return answer


def change_state(bench: Bench, *states: VBucketState) -> None:
    bucket = bench.node.buckets["default"]
    for state in states:
        bucket.store.set_state(VBUCKET, state)
        bucket.vbucket_changed(VBUCKET)


@pytest.mark.parametrize(
    ("states", "status"),
    [
        ([VBucketState.REPLICA], Status.NOT_MY_VBUCKET),
        ([VBucketState.DEAD], Status.NOT_MY_VBUCKET),
        ([VBucketState.REPLICA, VBucketState.ACTIVE], Status.VB_UUID_NOT_EQUAL),
    ],
)
def test_what_was_right_when_it_was_asked_for_is_right_when_the_disk_has_it(
    states: list[VBucketState], status: Status
) -> None:
    bench, session, vbucket = scanned_bench()
    answer = after_waiting(bench, session, vbucket, lambda: change_state(bench, *states))
    assert Status(answer.status) == status
    assert len(bench.node.buckets["default"].range_scans) == 0


def test_the_life_of_a_scan_begins_with_it() -> None:
    bench, session, vbucket = scanned_bench(range_scan_lifetime=10)
    answer = after_waiting(bench, session, vbucket, lambda: bench.clock.advance(30))
    request = kv.RangeScanContinue(vbucket=VBUCKET, scan_id=bytes(answer.body))
    (answer,) = ask(bench, session, request)
    assert Status(answer.status) == Status.RANGE_SCAN_COMPLETE


def test_a_scan_does_not_go_on_on_another_branch() -> None:
    bench, session, vbucket = scanned_bench()
    scan_id = bytes(after_waiting(bench, session, vbucket, lambda: None).body)
    change_state(bench, VBucketState.REPLICA, VBucketState.ACTIVE)
    (answer,) = ask(bench, session, kv.RangeScanContinue(vbucket=VBUCKET, scan_id=scan_id))
    assert Status(answer.status) == Status.KEY_ENOENT


def test_who_gave_up_waiting_for_the_disk_is_forgotten() -> None:
    bench, session, vbucket = scanned_bench()

    def waiting() -> int:
        return sum(isinstance(held, Pending) for held in gc.get_objects())

    before = waiting()
    needs = {"vb_uuid": str(vbucket.uuid), "seqno": 1 << 40, "timeout_ms": 1}
    for _ in range(1_000):
        ask(bench, session, made(users(snapshot_requirements=needs)))
        bench.advance(0.002)
        take(session)
    assert waiting() - before < 300
