"""Rules of the reference for key-value commands that are about more than one check: which comes first, and
what a value in another form is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import tailrace.testing
from server.serverkit import Wire
from tailrace import snappy
from tailrace.testing.running import RunningNode
from tailrace.wire import admin, dcp, kv, subdoc
from tailrace.wire.codes import Datatype, Feature, Op, Status, VBucketState, WithMetaOption
from tailrace.wire.fields import join_xattrs, split_xattrs
from tailrace.wire.header import Frame

ELSEWHERE = 900
ALL = (1 << 64) - 1


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with tailrace.testing.node(vbuckets=4) as running:
        yield running


@pytest.fixture
def wire(node: RunningNode) -> Iterator[Wire]:
    with Wire(node.port) as connected:
        connected.hello(Feature.XERROR, Feature.JSON, Feature.SNAPPY, Feature.COLLECTIONS)
        yield connected


def manifest(uid: int, *collections: int) -> bytes:
    listed = [{"name": "_default", "uid": "0"}]
    listed += [{"name": f"c{collection}", "uid": f"{collection:x}"} for collection in collections]
    return json.dumps(
        {"uid": f"{uid:x}", "scopes": [{"name": "_default", "uid": "0", "collections": listed}]}
    ).encode()


# value, then key, then vbucket


def documents(key: bytes, value: bytes = b"1", datatype: int = 0) -> tuple[list[Any], list[Any]]:
    """Commands that have a key: those with a value, and the others."""
    with_value = [
        kv.Set(key=key, value=value, datatype=datatype),
        kv.Add(key=key, value=value, datatype=datatype),
        kv.Append(key=key, value=value, datatype=datatype),
        kv.SetWithMeta(key=key, value=value, datatype=datatype, meta_cas=1, rev_seqno=1),
    ]
    others = [
        kv.Get(key=key),
        kv.Delete(key=key),
        kv.Increment(key=key),
        kv.Touch(key=key),
        kv.GetLocked(key=key),
        kv.UnlockKey(key=key, cas=1),
        kv.GetMeta(key=key),
        kv.DelWithMeta(key=key, meta_cas=1, rev_seqno=1),
        subdoc.SubdocGet(key=key, path_length=1, value=b"a"),
        subdoc.SubdocDictUpsert(key=key, path_length=1, value=b"a1"),
    ]
    for request in with_value + others:
        request.vbucket = ELSEWHERE
    return with_value, others


def test_a_key_that_can_not_be_is_refused_before_the_vbucket_is_looked_for(wire: Wire) -> None:
    for key, status in [
        (b"\x09k", Status.UNKNOWN_COLLECTION),
        (b"\x01k", Status.EINVAL),  # a reserved collection
        (b"\x80\x00k", Status.EINVAL),  # not the shortest form
        (b"\0", Status.EINVAL),
        (b"\0k", Status.NOT_MY_VBUCKET),
    ]:
        with_value, others = documents(key)
        for request in with_value + others:
            assert wire.refused(request) == status, request


def test_a_value_that_can_not_be_is_refused_before_its_key_is_looked_at(wire: Wire) -> None:
    for value, datatype in [(b"\xff\xff\xff\xff\xff", Datatype.SNAPPY), (b"\0\0\0\0", Datatype.XATTR)]:
        for request in documents(b"\x09k", value, datatype)[0]:
            assert wire.refused(request) == Status.EINVAL, request


# counters in other forms


def test_a_counter_that_is_compressed_or_has_xattrs_counts(node: RunningNode) -> None:
    with Wire(node.port) as wire:
        wire.hello(Feature.XERROR, Feature.JSON, Feature.SNAPPY, Feature.XATTR)
        packed = snappy.deflate(b"41")
        wire.ok(kv.Set(key=b"packed", value=packed, datatype=Datatype.SNAPPY, flags=7))
        assert wire.ok(kv.Increment(key=b"packed")).number == 42
        answer = wire.ok(kv.Get(key=b"packed"))
        assert (answer.value, answer.flags, answer.datatype) == (b"42", 7, Datatype.JSON)

        value = join_xattrs({"_sys": b"1", "mine": b"2"}, b"10")
        wire.ok(kv.Set(key=b"dressed", value=value, datatype=Datatype.XATTR))
        assert wire.ok(kv.Decrement(key=b"dressed", delta=11)).number == 0
        assert wire.ok(kv.Get(key=b"dressed")).value == b"0"
        lookup = subdoc.SubdocGet(key=b"dressed", path_length=4, value=b"mine", subdoc_flags=4)
        assert wire.ok(lookup).value == b"2"

        wire.ok(kv.Set(key=b"words", value=join_xattrs({"a": b"1"}, b"ten"), datatype=Datatype.XATTR))
        assert wire.refused(kv.Increment(key=b"words")) == Status.DELTA_BADVAL
        assert split_xattrs(value)[1] == b"10"


# with meta


def test_a_cas_that_is_made_anew_need_not_be_one(wire: Wire) -> None:
    options = int(WithMetaOption.REGENERATE_CAS | WithMetaOption.SKIP_CONFLICT_RESOLUTION)
    for meta_cas in (0, ALL):
        request = kv.SetWithMeta(key=b"\0anew", value=b"1", rev_seqno=1, meta_cas=meta_cas, options=options)
        assert wire.ok(request).cas not in (0, ALL)
        plain = kv.SetWithMeta(key=b"\0anew", value=b"1", rev_seqno=9, meta_cas=meta_cas)
        assert wire.refused(plain) == Status.KEY_EEXISTS


# statistics


def test_the_value_of_stat_is_json_and_says_so(wire: Wire) -> None:
    for value, datatype in [(b"{}", 0), (b"{", Datatype.JSON), (b"", Datatype.JSON)]:
        frame = Frame(0x80, Op.STAT, datatype=datatype, opaque=5, body=value)
        wire.send(frame.encode())
        assert wire.frame().status == Status.EINVAL
    wire.send(Frame(0x80, Op.STAT, 7, datatype=Datatype.JSON, opaque=5, body=b"vbucket{}").encode())
    while (frame := wire.frame()).key:
        assert frame.status == 0
    assert not frame.value


# collections


def test_names_that_nobody_can_have_are_malformed(wire: Wire) -> None:
    for path in (b"%a.b", b"_a.b", b"_default.%b", b"_default._b", b"a b.c", b"a.b.c", b"a"):
        assert wire.refused(admin.GetCollectionId(value=path)) == Status.EINVAL, path
    for path in (b"%a", b"_a", b"a b", b"a.b.c"):
        assert wire.refused(admin.GetScopeId(value=path)) == Status.EINVAL, path
    for path in (b"_system._mobile", b"a.b"):
        assert wire.refused(admin.GetCollectionId(value=path)) == Status.UNKNOWN_SCOPE, path
    assert wire.refused(admin.GetCollectionId(value=b".b")) == Status.UNKNOWN_COLLECTION
    assert wire.refused(admin.GetScopeId(value=b"_system")) == Status.UNKNOWN_SCOPE
    assert wire.ok(admin.GetScopeId(value=b"_default._default")).scope_id == 0


def test_a_default_collection_that_was_dropped_is_unknown_to_everybody() -> None:
    with tailrace.testing.node(vbuckets=2) as node, Wire(node.port) as wire, Wire(node.port) as plain:
        wire.hello(Feature.XERROR)
        plain.ok(kv.Set(key=b"k", value=b"1"))
        plain.ok(kv.Get(key=b"k"))
        dropped = b'{"uid":"1","scopes":[{"name":"_default","uid":"0","collections":[]}]}'
        plain.ok(admin.SetCollectionsManifest(value=dropped))
        requests = (
            kv.Get(key=b"k"),
            kv.Set(key=b"k", value=b"2"),
            kv.Delete(key=b"k"),
            kv.Increment(key=b"n"),
        )
        for request in requests:
            assert wire.refused(request) == Status.UNKNOWN_COLLECTION
            assert plain.refused(request) == Status.EINVAL  # which it understands


def test_who_has_no_collections_is_told_the_seqnos_of_the_default_one() -> None:
    with tailrace.testing.node(vbuckets=2) as node, Wire(node.port) as wire, Wire(node.port) as plain:
        wire.hello(Feature.COLLECTIONS)
        wire.ok(kv.Set(key=b"\0a", value=b"1"))
        wire.ok(admin.SetCollectionsManifest(value=manifest(1, 8)))
        for at in range(3):
            wire.ok(kv.Set(key=b"\x08%d" % at, value=b"1"))
        assert wire.ok(admin.GetAllVbSeqnos(state=1)).seqnos == {0: 5, 1: 1}
        assert wire.ok(admin.GetAllVbSeqnos(state=1, collection_id=8)).seqnos == {0: 5, 1: 1}
        assert plain.ok(admin.GetAllVbSeqnos(state=1)).seqnos == {0: 1, 1: 0}
        # a stream up to there, and one that was asked for up to the end of everything, both come to an end
        for end in (1, 5):
            with Wire(node.port) as reader:
                reader.ok(dcp.DcpOpen(key=b"reader", flags=1))
                reader.send(dcp.DcpStreamRequest(vbucket=0, end_seqno=end))
                assert reader.frame().status == 0
                messages = [reader.receive() for _ in range(3)]
                assert [type(message) for message in messages] == [
                    dcp.DcpSnapshotMarker,
                    dcp.DcpMutation,
                    dcp.DcpStreamEnd,
                ]
        plain.ok(kv.Set(key=b"b", value=b"1"))
        assert plain.ok(admin.GetAllVbSeqnos()).seqnos == {0: 6, 1: 0}


@pytest.mark.parametrize("state", [VBucketState.REPLICA, VBucketState.PENDING, VBucketState.DEAD])
def test_a_vbucket_that_was_active_is_as_far_as_it_was(state: VBucketState) -> None:
    with tailrace.testing.node(vbuckets=1) as node, Wire(node.port) as wire:
        for at in range(3):
            node.set(f"k{at}", at, vbucket=0)
        node.set_vbucket_state(0, state)
        assert wire.ok(admin.GetAllVbSeqnos(state=state)).seqnos == {0: 3}
