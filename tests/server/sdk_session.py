"""What the official SDK does against a node; run in a process of its own, because its core can take one down.

python sdk_session.py HOST:PORT [USER PASSWORD [CA_FILE]]
"""

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from couchbase.auth import PasswordAuthenticator
from couchbase.bucket import Bucket
from couchbase.cluster import Cluster
from couchbase.collection import Collection
from couchbase.durability import DurabilityLevel, ServerDurability
from couchbase.exceptions import (
    CasMismatchException,
    CollectionAlreadyExistsException,
    CollectionNotFoundException,
    CouchbaseException,
    DocumentExistsException,
    DocumentLockedException,
    DocumentNotFoundException,
    PathExistsException,
    PathNotFoundException,
    ScopeAlreadyExistsException,
    ScopeNotFoundException,
    TransactionFailed,
)
from couchbase.management.collections import CreateCollectionSettings, UpdateCollectionSettings
from couchbase.options import (
    ClusterOptions,
    ClusterTimeoutOptions,
    DecrementOptions,
    GetOptions,
    IncrementOptions,
    InsertOptions,
    MutateInOptions,
    ReplaceOptions,
    UpsertOptions,
)
from couchbase.subdocument import (
    array_append,
    array_prepend,
    count,
    exists,
    get,
    increment,
    insert,
    remove,
    replace,
    upsert,
)
from couchbase.transactions.transactions import AttemptContext


def refused(error: type[CouchbaseException], act: Callable[..., Any]) -> bool:
    try:
        act()
    except error:
        return True
    raise AssertionError(f"{error.__name__} was expected")


def documents(c: Collection) -> None:
    first = c.upsert("doc", {"name": "Ada", "n": 1})
    assert first.cas
    assert first.mutation_token() is not None
    document = c.get("doc")
    assert document.content_as[dict] == {"name": "Ada", "n": 1}
    assert document.cas == first.cas
    assert c.exists("doc").exists
    assert not c.exists("nobody").exists
    refused(DocumentNotFoundException, lambda: c.get("nobody"))
    refused(DocumentExistsException, lambda: c.insert("doc", {}))
    c.insert("doc2", ["x"] * 200)  # large enough to come compressed
    assert c.get("doc2").content_as[list] == ["x"] * 200
    second = c.replace("doc", {"name": "Grace"}, ReplaceOptions(cas=first.cas))
    refused(CasMismatchException, lambda: c.replace("doc", {}, ReplaceOptions(cas=first.cas)))
    assert second.cas != first.cas
    refused(DocumentNotFoundException, lambda: c.replace("nobody", {}))
    c.remove("doc2")
    assert not c.exists("doc2").exists
    refused(DocumentNotFoundException, lambda: c.remove("doc2"))
    projected = c.get("doc", GetOptions(project=["name"]))
    assert projected.content_as[dict] == {"name": "Grace"}


def expiry(c: Collection) -> None:
    c.upsert("mortal", {"a": 1}, UpsertOptions(expiry=timedelta(seconds=3600)))
    document = c.get("mortal", GetOptions(with_expiry=True))
    assert 3500 < document.expiryTime.timestamp() - time.time() < 3700, document.expiryTime
    c.upsert("mortal", {"a": 2}, UpsertOptions(preserve_expiry=True))
    assert c.get("mortal", GetOptions(with_expiry=True)).expiryTime is not None
    c.touch("mortal", timedelta(seconds=7200))
    later = c.get("mortal", GetOptions(with_expiry=True)).expiryTime
    assert 7100 < later.timestamp() - time.time() < 7300
    c.get_and_touch("mortal", timedelta(seconds=0))
    assert c.get("mortal", GetOptions(with_expiry=True)).expiryTime is None
    c.upsert("brief", {}, UpsertOptions(expiry=timedelta(seconds=1)))
    deadline = time.monotonic() + 20
    while c.exists("brief").exists and time.monotonic() < deadline:
        time.sleep(0.1)
    refused(DocumentNotFoundException, lambda: c.get("brief"))


def locks(c: Collection) -> None:
    c.upsert("locked", {"v": 1})
    held = c.get_and_lock("locked", timedelta(seconds=20))
    from couchbase.options import RemoveOptions

    try:
        c.remove("locked", RemoveOptions(timeout=timedelta(milliseconds=600)))
        raise AssertionError("a locked document was removed")
    except (DocumentLockedException, Exception) as error:  # noqa: BLE001 - the SDK retries until its timeout
        assert "locked" in str(error).lower() or "timeout" in str(error).lower(), error
    c.unlock("locked", held.cas)
    c.upsert("locked", {"v": 2})


def counters(c: Collection) -> None:
    b = c.binary()
    from couchbase.options import DeltaValue, SignedInt64

    assert b.increment("count", IncrementOptions(delta=DeltaValue(5), initial=SignedInt64(10))).content == 10
    assert b.increment("count", IncrementOptions(delta=DeltaValue(5))).content == 15
    assert b.decrement("count", DecrementOptions(delta=DeltaValue(100))).content == 0
    from couchbase.transcoder import RawBinaryTranscoder

    raw = RawBinaryTranscoder()
    c.upsert("raw", b"mid", UpsertOptions(transcoder=raw))
    b.append("raw", b"-end")
    b.prepend("raw", b"start-")
    assert c.get("raw", GetOptions(transcoder=raw)).value == b"start-mid-end"


def paths(c: Collection) -> None:
    c.upsert("tree", {"a": {"b": [1, 2, 3]}, "n": 1, "s": "text"})
    looked_up = c.lookup_in("tree", [get("a.b[1]"), exists("a.x"), exists("s"), count("a.b"), get("nope")])
    assert looked_up.content_as[int](0) == 2
    assert looked_up.exists(1) is False
    assert looked_up.exists(2) is True
    assert looked_up.content_as[int](3) == 3
    refused(PathNotFoundException, lambda: looked_up.content_as[str](4))
    done = c.mutate_in(
        "tree",
        [
            upsert("a.c", {"deep": True}),
            insert("new.made.here", 1, create_parents=True),
            replace("s", "other"),
            array_append("a.b", 4, 5),
            array_prepend("a.b", 0),
            increment("n", 41),
            remove("a.c"),
        ],
    )
    assert done.cas
    assert done.content_as[int](5) == 42
    assert c.get("tree").content_as[dict] == {
        "a": {"b": [0, 1, 2, 3, 4, 5]},
        "n": 42,
        "s": "other",
        "new": {"made": {"here": 1}},
    }
    refused(PathExistsException, lambda: c.mutate_in("tree", [insert("n", 1)]))
    c.mutate_in("tree", [upsert("_mine", {"x": 1}, xattr=True), upsert("tag", "t", xattr=True)])
    xattrs = c.lookup_in("tree", [get("_mine.x", xattr=True), get("$document.datatype", xattr=True)])
    assert xattrs.content_as[int](0) == 1
    assert "xattr" in xattrs.content_as[list](1)
    c.upsert("tree", {"plain": 1})  # keeps the xattrs
    assert c.lookup_in("tree", [get("tag", xattr=True)]).content_as[str](0) == "t"
    from couchbase.subdocument import StoreSemantics

    c.mutate_in("made", [upsert("x", 1)], MutateInOptions(store_semantics=StoreSemantics.UPSERT))
    assert c.get("made").content_as[dict] == {"x": 1}
    refused(DocumentNotFoundException, lambda: c.mutate_in("nobody", [upsert("x", 1)]))


def durability(c: Collection) -> None:
    for level in (
        DurabilityLevel.MAJORITY,
        DurabilityLevel.MAJORITY_AND_PERSIST_TO_ACTIVE,
        DurabilityLevel.PERSIST_TO_MAJORITY,
    ):
        c.upsert("durable", {"l": str(level)}, UpsertOptions(durability=ServerDurability(level)))


def collections(bucket: Bucket) -> None:
    items = bucket.scope("shop").collection("items")
    other = bucket.default_collection()
    items.upsert("doc", {"where": "items"})
    other.upsert("doc", {"where": "default"})
    assert items.get("doc").content_as[dict] == {"where": "items"}
    assert other.get("doc").content_as[dict] == {"where": "default"}
    items.remove("doc")
    assert not items.exists("doc").exists
    assert other.exists("doc").exists
    items.insert("doc", {}, InsertOptions(expiry=timedelta(seconds=100)))
    items.mutate_in("doc", [upsert("p", 1)])
    assert items.lookup_in("doc", [get("p")]).content_as[int](0) == 1


def management(bucket: Bucket) -> None:
    manager = bucket.collections()
    manager.create_scope("made")
    assert refused(ScopeAlreadyExistsException, lambda: manager.create_scope("made"))
    manager.create_collection("made", "things", CreateCollectionSettings(max_expiry=timedelta(seconds=500)))
    assert refused(CollectionAlreadyExistsException, lambda: manager.create_collection("made", "things"))
    assert refused(ScopeNotFoundException, lambda: manager.create_collection("nowhere", "things"))
    scopes = {
        scope.name: [collection.name for collection in scope.collections]
        for scope in manager.get_all_scopes()
    }
    assert scopes["made"] == ["things"]
    things = bucket.scope("made").collection("things")
    things.upsert("doc", {"n": 1})
    assert things.get("doc", GetOptions(with_expiry=True)).expiry_time is not None
    manager.update_collection("made", "things", UpdateCollectionSettings(max_expiry=timedelta(seconds=900)))
    (made,) = (scope for scope in manager.get_all_scopes() if scope.name == "made")
    assert [collection.max_expiry for collection in made.collections] == [timedelta(seconds=900)]
    manager.drop_collection("made", "things")
    assert refused(CollectionNotFoundException, lambda: manager.drop_collection("made", "things"))
    manager.drop_scope("made")
    assert refused(ScopeNotFoundException, lambda: manager.drop_scope("made"))


def transactions(cluster: Cluster, c: Collection) -> None:
    for key in ("left", "right"):
        c.upsert(key, {"balance": 10})

    def transfer(attempt: AttemptContext) -> None:
        left, right = attempt.get(c, "left"), attempt.get(c, "right")
        attempt.replace(left, {"balance": 3})
        attempt.replace(right, {"balance": 17})
        attempt.insert(c, "receipt", {"moved": 7})

    cluster.transactions.run(transfer)
    assert c.get("left").content_as[dict] == {"balance": 3}
    assert c.get("right").content_as[dict] == {"balance": 17}
    assert c.get("receipt").content_as[dict] == {"moved": 7}

    def fail(attempt: AttemptContext) -> None:
        attempt.replace(attempt.get(c, "left"), {"balance": -1})
        attempt.insert(c, "second", {})
        raise RuntimeError("the program changes its mind")

    assert refused(TransactionFailed, lambda: cluster.transactions.run(fail))
    assert c.get("left").content_as[dict] == {"balance": 3}
    assert not c.exists("second").exists

    cluster.transactions.run(lambda attempt: attempt.remove(attempt.get(c, "receipt")))
    assert not c.exists("receipt").exists


def main(
    address: str, user: str = "Administrator", password: str = "password", ca_file: str | None = None
) -> None:
    timeouts = ClusterTimeoutOptions(
        kv_timeout=timedelta(seconds=20),
        kv_durable_timeout=timedelta(seconds=20),
        connect_timeout=timedelta(seconds=30),
        bootstrap_timeout=timedelta(seconds=30),
    )
    scheme = "couchbase" if ca_file is None else "couchbases"
    authenticator = PasswordAuthenticator(user, password, **({"cert_path": ca_file} if ca_file else {}))
    options = ClusterOptions(authenticator, timeout_options=timeouts)
    cluster = Cluster.connect(f"{scheme}://{address}", options)
    bucket = cluster.bucket("default")
    bucket.on_connect() if hasattr(bucket, "on_connect") else None
    c = bucket.default_collection()
    done = []
    for part in (documents, expiry, locks, counters, paths, durability):
        part(c)
        done.append(part.__name__)
    collections(bucket)
    done.append("collections")
    management(bucket)
    done.append("management")
    transactions(cluster, c)
    done.append("transactions")
    cluster.close()
    print(json.dumps(done))


if __name__ == "__main__":
    main(*sys.argv[1:])
