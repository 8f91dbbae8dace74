"""The table of settings, the cluster map and the error map as values."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from server.serverkit import Bench, Wire, ask, take
from tailrace.errors import UsageError
from tailrace.server.errormap import error_map
from tailrace.server.served_map import AlternateAddress, NodeAddress, bucket_map, global_map
from tailrace.server.session import Session
from tailrace.server.settings import Settings, table
from tailrace.store.base import StoreSettings
from tailrace.testing.running import RunningNode
from tailrace.wire import admin, kv
from tailrace.wire.codes import Feature, Status


def test_defaults_are_those_of_the_store() -> None:
    ours, theirs = Settings().for_store(), StoreSettings()
    for name in StoreSettings.__dataclass_fields__:
        if name != "tombstone_value":
            assert getattr(ours, name) == getattr(theirs, name), name


def test_every_setting_of_the_store_can_be_set() -> None:
    names = {setting.name for setting in table()}
    assert set(StoreSettings.__dataclass_fields__) - names == {"tombstone_value"}


def test_values() -> None:
    made = Settings.parse(["max_frame=1m", "idle_timeout=5m", "checkpoint_share=30%", "last_write_wins=yes"])
    assert (made.max_frame, made.idle_timeout, made.checkpoint_share) == (1 << 20, 300.0, 0.3)
    assert made.for_store().last_write_wins is True


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_frane=1", "max_frame"),
        ("max_frame", "NAME=VALUE"),
        ("max_frame=", "max_frame"),
        ("max_frame=1", "at least"),
        ("max_frame=1_000_000", "max_frame"),
        ("idle_timeout=inf", "idle_timeout"),
        ("idle_timeout=-1", "idle_timeout"),
        ("checkpoint_share=2", "checkpoint_share"),
        ("last_write_wins=2", "last_write_wins"),
        ("=", "no setting"),
    ],
)
def test_wrong_values(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Settings.parse([text])


def test_every_limit_is_kept_by_somebody() -> None:
    """A setting that nobody reads is a promise that nobody keeps."""
    from pathlib import Path

    import tailrace

    code = "".join(
        path.read_text()
        for path in Path(tailrace.__file__).parent.rglob("*.py")
        if path.name != "settings.py" and "cli" not in path.parts
    )
    for setting in table():
        assert f".{setting.name}" in code, setting.name


def test_a_map_of_several_nodes() -> None:
    nodes = [NodeAddress(port=1, tls_port=2, host="10.0.0.1"), NodeAddress(port=3, host="::1", web_port=9)]
    made = bucket_map("b", nodes, [[0, 1], [1, 0], [1, -1]], epoch=4, rev=5, this_node=1)
    content = json.loads(made.text)
    assert made.version == (4, 5)
    assert content["vBucketServerMap"]["serverList"] == ["10.0.0.1:1", "[::1]:3"]
    assert content["vBucketServerMap"]["numReplicas"] == 1
    assert content["nodesExt"][0] == {
        "services": {"kv": 1, "mgmt": 1, "kvSSL": 2, "mgmtSSL": 2},
        "hostname": "10.0.0.1",
    }
    assert content["nodesExt"][1]["thisNode"] is True
    assert content["nodesExt"][1]["services"] == {"kv": 3, "mgmt": 9}
    assert len(content["nodes"]) >= len(content["nodesExt"])
    assert set(json.loads(global_map(nodes, rev=1).text)) == {"rev", "revEpoch", "nodesExt"}


def test_the_error_map_knows_every_status_that_we_send() -> None:
    """Each status that the server's code names, in the map that it hands out."""
    import re
    from pathlib import Path

    import tailrace

    content = json.loads(error_map(2) or b"")
    folder = Path(tailrace.__file__).parent
    for path in [*(folder / "server").rglob("*.py"), *(folder / "store").glob("*.py")]:
        for name in set(re.findall(r"\bStatus\.([A-Z][A-Z0-9_]+)", path.read_text())):
            assert f"{Status[name]:x}" in content["errors"], name
    assert error_map(0) is None


def test_a_node_is_deterministic_under_one_seed() -> None:
    """The same clock, seed and requests give the same bytes: a simulation relies on it."""

    def run() -> list[bytes]:
        bench = Bench()
        session = bench.session()
        out = []
        for at in range(50):
            frames = ask(
                bench,
                session,
                kv.Set(key=b"k%d" % (at % 7), value=b"v", opaque=at, framing=b"\x11\x03" if at % 3 else b""),
                admin.GetFailoverLog(),
                admin.SaslAuth(key=b"SCRAM-SHA256", value=b"n,,n=Administrator,r=x"),
            )
            bench.advance(0.1)
            bench.run_jobs()
            out += [frame.encode() for frame in frames]
        return out

    assert run() == run()


def made_map(rev: int) -> admin.SetClusterConfig:
    nodes = [NodeAddress(port=port, host="10.0.0.1") for port in (1, 2, 3)]
    made = bucket_map("default", nodes, [[0, 1]] * 4, epoch=2, rev=rev, this_node=0)
    return admin.SetClusterConfig(key=b"default", value=made.text, epoch=2, revision=rev)


def subscriber(bench: Bench, *features: int) -> Session:
    session = bench.session()
    codes = (Feature.XERROR, Feature.DUPLEX, *features)
    hello = admin.Hello(value=b"".join(code.to_bytes(2, "big") for code in codes))
    ask(bench, session, hello, admin.SelectBucket(key=b"default"))
    return session


@pytest.mark.parametrize(
    "feature", [Feature.CLUSTERMAP_CHANGE_NOTIFICATION, Feature.CLUSTERMAP_CHANGE_NOTIFICATION_BRIEF]
)
def test_a_map_is_pushed_once(feature: int) -> None:
    """A coordinator sets the same one every two seconds."""
    bench = Bench()
    reader, coordinator = subscriber(bench, feature), bench.session()
    for rev, pushed in ((1, 1), (1, 0), (1, 0), (2, 1), (2, 0)):
        assert ask(bench, coordinator, made_map(rev))[0].status == 0
        frames = take(reader)
        assert [frame.opcode for frame in frames] == [admin.ClustermapChangeNotification.OPCODE] * pushed, rev


def test_a_map_that_a_connection_has_already_is_not_pushed() -> None:
    bench = Bench()
    coordinator = bench.session()
    ask(bench, coordinator, made_map(1))
    reader = subscriber(bench, Feature.CLUSTERMAP_CHANGE_NOTIFICATION)
    ask(bench, coordinator, made_map(2))
    assert len(take(reader)) == 1
    other = subscriber(bench, Feature.CLUSTERMAP_CHANGE_NOTIFICATION)
    assert json.loads(ask(bench, other, admin.GetClusterConfig())[0].value)["rev"] == 2
    bench.node._notify(bench.node.buckets["default"])
    assert take(other) == take(reader) == []


def test_who_asks_for_full_and_brief_pushes_gets_brief_ones() -> None:
    bench = Bench()
    session = bench.session()
    codes = (
        Feature.CLUSTERMAP_CHANGE_NOTIFICATION,
        Feature.DUPLEX,
        Feature.CLUSTERMAP_CHANGE_NOTIFICATION_BRIEF,
    )
    hello = admin.Hello(value=b"".join(code.to_bytes(2, "big") for code in codes))
    (granted,) = ask(bench, session, hello)
    assert granted.value == b"\x00\x0c\x00\x1f"


def test_what_a_client_names_as_newer_it_is_not_told() -> None:
    """It has that map from another node: neither a push nor the body of a 0x07 gives it an older one."""
    bench = Bench()
    ask(bench, bench.session(), made_map(1))
    codes = (Feature.CLUSTERMAP_CHANGE_NOTIFICATION, Feature.DEDUPE_NOT_MY_VBUCKET_CLUSTERMAP)
    reader = subscriber(bench, *codes)
    assert ask(bench, reader, admin.GetClusterConfig(epoch=2, revision=5))[0].value == b""
    ask(bench, bench.session(), made_map(2))
    assert take(reader) == []
    (refused,) = ask(bench, reader, kv.Get(key=b"k", vbucket=9))
    assert (refused.status, refused.value) == (Status.NOT_MY_VBUCKET, b"")
    ask(bench, bench.session(), made_map(6))
    assert len(take(reader)) == 1


def test_without_a_bucket_a_client_is_told_of_all_nodes_with_the_revision_of_the_map() -> None:
    bench = Bench()
    ask(bench, bench.session(), made_map(7))
    session = bench.session()
    hello = admin.Hello(value=int(Feature.SELECT_BUCKET).to_bytes(2, "big"))
    content = json.loads(ask(bench, session, hello, admin.GetClusterConfig())[1].value)
    assert (content["revEpoch"], content["rev"]) == (2, 7)
    assert [node["services"]["kv"] for node in content["nodesExt"]] == [1, 2, 3]
    assert "vBucketServerMap" not in content


# other networks


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("external=node1.example.com", {"hostname": "node1.example.com"}),
        ("vpn=10.8.0.1:31210", {"hostname": "10.8.0.1", "ports": {"kv": 31210, "mgmt": 31210}}),
        (
            "external=[2001:db8::1]:1:2",
            {"hostname": "2001:db8::1", "ports": {"kv": 1, "mgmt": 1, "kvSSL": 2, "mgmtSSL": 2}},
        ),
    ],
)
def test_alternate_addresses(text: str, entry: dict[str, Any]) -> None:
    address = AlternateAddress.parse(text)
    assert address.to_json() == entry
    made = bucket_map("b", [NodeAddress(5, alternates=(address,))], [[0]], rev=1, this_node=0)
    (described,) = json.loads(made.text)["nodesExt"]
    assert described["alternateAddresses"] == {address.network: entry}


@pytest.mark.parametrize(
    "text", ["", "external", "external=", "default=a", "x=a:0", "x=a:99999", "x=a:1:2:3", "x=a b"]
)
def test_what_is_no_alternate_address(text: str) -> None:
    with pytest.raises(UsageError):
        AlternateAddress.parse(text)


# the uuid of a bucket


def uuid_of(node: RunningNode) -> str:
    with Wire(node.port) as wire:
        wire.ok(admin.SelectBucket(key=b"default"))
        uuid: str = json.loads(wire.ok(admin.GetClusterConfig()).value)["uuid"]
        return uuid


def test_a_bucket_that_is_made_again_has_another_uuid(tmp_path: Path) -> None:
    """And one that is only stopped, or killed, keeps its own."""
    with RunningNode(2, data=tmp_path / "data") as node:
        first = uuid_of(node)
        assert len(first) == 32
        node.restart()
        assert uuid_of(node) == first
        node.set("a", 1)
        node.kill()
        node.start()
        assert uuid_of(node) == first
    shutil.rmtree(tmp_path / "data")
    with RunningNode(2, data=tmp_path / "data") as node:
        assert uuid_of(node) != first


def test_a_node_that_got_a_map_remembers_whose_part_it_is() -> None:
    with RunningNode(2) as node:
        address = NodeAddress(port=node.port, host="127.0.0.1")
        made = bucket_map("default", [address], [[0], [0]], epoch=2, rev=1, this_node=0, uuid="ab" * 16)
        with Wire(node.port) as wire:
            wire.ok(admin.SetClusterConfig(epoch=2, revision=1, key=b"default", value=made.text))
        assert uuid_of(node) == "ab" * 16
        node.restart()
        assert uuid_of(node) == "ab" * 16
