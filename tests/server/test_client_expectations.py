"""What gocbcore and the SDKs expect of a server by their published behaviour: transactions and replica reads.

A transaction stages a document's new body in the xattr ``txn`` and unstages it when it commits; an insert is
staged in a tombstone, so that nobody sees the document before its time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from server.serverkit import Wire
from server.test_subdoc_commands import looked_up, lookup, mutation, one
from tailrace.server.features import OFFERED
from tailrace.server.served_map import NodeAddress, bucket_map
from tailrace.testing.running import RunningNode
from tailrace.wire import kv, subdoc
from tailrace.wire.codes import Feature, Op, Status, VBucketState
from tailrace.wire.kv import GetReplica

XATTR, PARENTS, EXPAND = 4, 1, 0x10
ADD, ACCESS_DELETED, AS_DELETED, REVIVE, REPLICA = 2, 4, 8, 0x10, 0x20
UPSERT_OP, DELETE_OP = int(Op.SUBDOC_DICT_UPSERT), int(Op.SUBDOC_DELETE)
BODY_FROM_XATTR = int(Op.SUBDOC_REPLACE_BODY_WITH_XATTR)
UNSTAGE = ((BODY_FROM_XATTR, XATTR, b"txn.op.stgd", b""), (DELETE_OP, XATTR, b"txn", b""))


@pytest.fixture
def wire(shared_node: RunningNode) -> Iterator[Wire]:
    with Wire(shared_node.port) as connection:
        connection.hello(
            *(Feature.XERROR, Feature.JSON, Feature.XATTR, Feature.MUTATION_SEQNO, Feature.VATTR),
            *(Feature.SUBDOC_CREATE_AS_DELETED, Feature.SUBDOC_DOCUMENT_MACRO),
        )
        yield connection


def staged(kind: str, body: object = None) -> tuple[tuple[int, int, bytes, bytes], ...]:
    """The paths of a staged mutation: what is to be done, and what the document was."""
    operation: dict[str, Any] = {"type": kind}
    if body is not None:
        operation["stgd"] = body
    content = json.dumps({"id": {"txn": "t1", "atmpt": "a1"}, "op": operation}).encode()
    return (
        (UPSERT_OP, XATTR | PARENTS, b"txn", content),
        (UPSERT_OP, XATTR | PARENTS | EXPAND, b"txn.op.crc32", b'"${Mutation.value_crc32c}"'),
        (UPSERT_OP, XATTR | PARENTS | EXPAND, b"txn.restore.CAS", b'"${$document.CAS}"'),
        (UPSERT_OP, XATTR | PARENTS | EXPAND, b"txn.restore.revid", b'"${$document.revid}"'),
        (UPSERT_OP, XATTR | PARENTS | EXPAND, b"txn.restore.exptime", b'"${$document.exptime}"'),
    )


def txn_of(wire: Wire, key: bytes) -> Any:
    answer = wire.call(lookup(key, (int(Op.SUBDOC_GET), XATTR, b"txn"), doc_flags=ACCESS_DELETED))
    ((status, value),) = looked_up(answer.value)
    return json.loads(value) if status == Status.SUCCESS else None


def body_of(wire: Wire, key: bytes) -> Any:
    return json.loads(wire.ok(kv.Get(key=key)).value)


def test_what_transactions_look_for_is_announced(shared_node: RunningNode) -> None:
    assert {Feature.SUBDOC_REPLACE_BODY_WITH_XATTR, Feature.SUBDOC_REPLICA_READ} <= OFFERED
    served = bucket_map("b", [NodeAddress(1)], [[0]], rev=1)
    capabilities = set(json.loads(served.text)["bucketCapabilities"])
    assert {"subdoc.ReplaceBodyWithXattr", "subdoc.ReviveDocument", "subdoc.ReplicaRead"} <= capabilities
    assert {"subdoc.DocumentMacroSupport", "subdoc.AccessDeleted", "rangeScan"} <= capabilities


def test_replace_staged_and_committed(wire: Wire, key: bytes) -> None:
    before = wire.ok(kv.Set(key=key, value=b'{"v":1}'))
    answer = wire.ok(mutation(key, *staged("replace", {"v": 2}), doc_flags=ACCESS_DELETED, cas=before.cas))
    assert body_of(wire, key) == {"v": 1}, "nobody sees it before it is committed"
    txn = txn_of(wire, key)
    assert txn["op"]["stgd"] == {"v": 2}
    assert txn["restore"]["CAS"] == f"0x{before.cas:016x}"
    wire.ok(mutation(key, *UNSTAGE, cas=answer.cas))
    assert body_of(wire, key) == {"v": 2}
    assert txn_of(wire, key) is None


def test_replace_rolled_back(wire: Wire, key: bytes) -> None:
    wire.ok(kv.Set(key=key, value=b'{"v":1}'))
    wire.ok(mutation(key, *staged("replace", {"v": 2}), doc_flags=ACCESS_DELETED))
    wire.ok(mutation(key, (DELETE_OP, XATTR, b"txn", b""), doc_flags=ACCESS_DELETED))
    assert body_of(wire, key) == {"v": 1}
    assert txn_of(wire, key) is None


def test_insert_staged_in_a_tombstone_and_committed(wire: Wire, key: bytes) -> None:
    answer = wire.call(
        mutation(key, *staged("insert", {"v": 3}), doc_flags=AS_DELETED | ADD | ACCESS_DELETED)
    )
    assert answer.status == Status.SUBDOC_SUCCESS_DELETED
    assert wire.refused(kv.Get(key=key)) == Status.KEY_ENOENT
    # without the flag that revives it, what is deleted can't have a body
    again = wire.call(mutation(key, *UNSTAGE, doc_flags=ACCESS_DELETED, cas=answer.cas))
    assert again.status == Status.SUBDOC_MULTI_PATH_FAILURE_DELETED
    assert again.value == b"\0" + Status.SUBDOC_DELETED_DOCUMENT_CANT_HAVE_VALUE.to_bytes(2, "big")
    wire.ok(mutation(key, *UNSTAGE, doc_flags=ACCESS_DELETED | REVIVE, cas=answer.cas))
    assert body_of(wire, key) == {"v": 3}
    assert txn_of(wire, key) is None
    alive = mutation(key, *UNSTAGE, doc_flags=ACCESS_DELETED | REVIVE)
    assert wire.refused(alive) == Status.SUBDOC_CAN_ONLY_REVIVE_DELETED_DOCUMENTS


def test_insert_rolled_back(wire: Wire, key: bytes) -> None:
    wire.call(mutation(key, *staged("insert", {"v": 3}), doc_flags=AS_DELETED | ADD | ACCESS_DELETED))
    answer = wire.call(mutation(key, (DELETE_OP, XATTR, b"txn", b""), doc_flags=ACCESS_DELETED))
    assert answer.status == Status.SUBDOC_SUCCESS_DELETED
    assert txn_of(wire, key) is None
    assert wire.refused(kv.Get(key=key)) == Status.KEY_ENOENT


def test_remove_staged_and_committed(wire: Wire, key: bytes) -> None:
    wire.ok(kv.Set(key=key, value=b'{"v":1}'))
    answer = wire.ok(mutation(key, *staged("remove"), doc_flags=ACCESS_DELETED))
    assert body_of(wire, key) == {"v": 1}
    wire.ok(kv.Delete(key=key, cas=answer.cas))
    assert wire.refused(kv.Get(key=key)) == Status.KEY_ENOENT
    assert txn_of(wire, key) is None, "a deletion keeps system xattrs alone"
    # and it can be inserted again, on the tombstone
    wire.call(mutation(key, *staged("insert", {"v": 9}), doc_flags=AS_DELETED | ADD | ACCESS_DELETED))
    wire.ok(mutation(key, *UNSTAGE, doc_flags=ACCESS_DELETED | REVIVE))
    assert body_of(wire, key) == {"v": 9}


def test_two_transactions_on_one_document(wire: Wire, key: bytes) -> None:
    """The second notices the first by the CAS."""
    before = wire.ok(kv.Set(key=key, value=b'{"v":1}'))
    wire.ok(mutation(key, *staged("replace", {"v": 2}), doc_flags=ACCESS_DELETED, cas=before.cas))
    late = mutation(key, *staged("replace", {"v": 5}), doc_flags=ACCESS_DELETED, cas=before.cas)
    assert wire.refused(late) == Status.KEY_EEXISTS


def test_one_path_can_be_the_new_body(wire: Wire, key: bytes) -> None:
    wire.ok(kv.Set(key=key, value=b'{"v":1}'))
    wire.ok(one(subdoc.SubdocDictUpsert, key, b"txn", b'{"a":[1,{"v":7}]}', XATTR))
    wire.ok(one(subdoc.SubdocReplaceBodyWithXattr, key, b"txn.a[1]", flags=XATTR))
    assert body_of(wire, key) == {"v": 7}
    assert txn_of(wire, key) == {"a": [1, {"v": 7}]}, "the xattr stays"


def test_nonsense_with_the_body(wire: Wire, key: bytes) -> None:
    wire.ok(kv.Set(key=key, value=b'{"v":1}'))
    replace = subdoc.SubdocReplaceBodyWithXattr
    assert wire.refused(one(replace, key, b"v")) == Status.EINVAL, "a path of the body"
    assert wire.refused(one(replace, key, b"txn", b"1", XATTR)) == Status.EINVAL, "a value"
    assert wire.refused(one(replace, key, b"txn", flags=XATTR)) == Status.SUBDOC_PATH_ENOENT
    assert wire.refused(one(replace, key, b"$document", flags=XATTR)) == Status.SUBDOC_XATTR_CANT_MODIFY_VATTR
    assert body_of(wire, key) == {"v": 1}


# replica reads: SDKs ask the active by GET and every replica by GET_REPLICA, and take the first answer


@pytest.fixture
def replica() -> Iterator[Wire]:
    """A node with a document in vbucket 1, which is a replica there, and in vbucket 0, which is active."""
    with RunningNode(2) as node:
        for vbucket in (0, 1):
            node.set("k", {"a": vbucket}, vbucket=vbucket)
        node.set_vbucket_state(1, VBucketState.REPLICA)
        with Wire(node.port) as connection:
            connection.hello(Feature.XERROR, Feature.JSON, Feature.XATTR, Feature.SUBDOC_REPLICA_READ)
            yield connection


def test_get_replica_is_for_replicas_alone(replica: Wire) -> None:
    answer = replica.ok(GetReplica(vbucket=1, key=b"k"))
    assert json.loads(answer.value) == {"a": 1}
    assert answer.cas
    assert replica.refused(GetReplica(vbucket=1, key=b"x")) == Status.KEY_ENOENT
    assert replica.refused(GetReplica(vbucket=0, key=b"k")) == Status.NOT_MY_VBUCKET
    assert replica.refused(kv.Get(vbucket=1, key=b"k")) == Status.NOT_MY_VBUCKET


def test_paths_of_a_replica(replica: Wire) -> None:
    def path(vbucket: int, doc_flags: int) -> Any:
        request = one(subdoc.SubdocGet, b"k", b"a", doc_flags=doc_flags)
        request.vbucket = vbucket
        return replica.call(request)

    assert path(1, REPLICA).value == b"1"
    assert path(1, 0).status == Status.NOT_MY_VBUCKET
    assert path(0, REPLICA).status == Status.NOT_MY_VBUCKET
    several = lookup(b"k", (int(Op.SUBDOC_GET), 0, b"a"), (int(Op.GET), 0, b""), doc_flags=REPLICA)
    several.vbucket = 1
    assert [value for _, value in looked_up(replica.ok(several).value)] == [b"1", b'{"a": 1}']
