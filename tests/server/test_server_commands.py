"""Connection, vbucket, collection and cluster commands over a real socket."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tailrace.testing
from server.serverkit import Wire
from tailrace import rng
from tailrace.protocol.sasl import MECHANISMS, client_for
from tailrace.server.call import COMMANDS
from tailrace.server.stats import GROUPS
from tailrace.snappy import inflate
from tailrace.testing.running import RunningNode
from tailrace.wire import admin, kv
from tailrace.wire.codes import Datatype, Feature, Magic, Op, Status, VBucketState
from tailrace.wire.dialect import KV
from tailrace.wire.fields import encode_leb128
from tailrace.wire.header import HEADER

MANIFEST = {
    "uid": "2",
    "scopes": [
        {"name": "_default", "uid": "0", "collections": [{"name": "_default", "uid": "0"}]},
        {
            "name": "shop",
            "uid": "8",
            "collections": [{"name": "items", "uid": "9"}, {"name": "carts", "uid": "200", "maxTTL": 60}],
        },
    ],
}


def login(wire: Wire, mechanism: str, user: str, password: str) -> int:
    client = client_for(mechanism, user, password, rng.source(1))
    answer = wire.call(admin.SaslAuth(key=mechanism.encode(), value=client.start()))
    if answer.status == Status.AUTH_CONTINUE:
        answer = wire.call(admin.SaslStep(key=mechanism.encode(), value=client.step(answer.value)))
    if answer.status == Status.SUCCESS:
        client.finish(answer.value)
    return Status(answer.status)


def test_the_groups_of_statistics_are_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "node.md").read_text()
    sentence = page.split("the STAT command offer the groups (none)")[1].split(". ")[0]
    assert re.findall(r"`(\S+)`", sentence) == [name for name in GROUPS if name]


def stats(wire: Wire, group: bytes = b"") -> Any:
    wire.send(admin.Stat(key=group))
    figures = {}
    while True:
        frame = wire.frame()
        if frame.status:
            return Status(frame.status)
        if not frame.key:
            assert not frame.value
            return figures
        figures[frame.key.decode()] = frame.value.decode()


def test_every_declared_command_has_a_handler() -> None:
    declared = {request.OPCODE for request in KV._requests.values()}
    assert declared <= set(COMMANDS)


def test_an_unknown_opcode_is_no_reason_to_close(wire: Wire) -> None:
    wire.send(HEADER.pack(0x80, 0x77, 0, 0, 0, 0, 0, 0xABCD, 0))
    frame = wire.frame()
    assert (frame.opcode, frame.status, frame.opaque) == (0x77, Status.UNKNOWN_COMMAND, 0xABCD)
    wire.ok(admin.Noop())


def test_small_talk(wire: Wire) -> None:
    assert wire.ok(admin.Version()).value[:1].isdigit()
    wire.ok(admin.Verbosity(level=3))
    assert wire.ok(admin.SaslListMechs()).value == " ".join(MECHANISMS).encode()
    wire.ok(admin.Quit())
    assert wire.is_closed()


def test_error_map(wire: Wire) -> None:
    for asked, got in ((1, 1), (2, 2), (9, 2)):
        content = json.loads(wire.ok(admin.GetErrorMap(value=struct.pack(">H", asked))).value)
        assert content["version"] == got
        assert content["errors"]["1"]["name"] == "KEY_ENOENT"
        assert all({"name", "desc", "attrs"} == set(entry) for entry in content["errors"].values())
    assert wire.refused(admin.GetErrorMap(value=b"\0\0")) == Status.KEY_ENOENT
    wire.send(HEADER.pack(0x80, Op.GET_ERROR_MAP, 0, 0, 0, 0, 1, 0, 0) + b"\1")
    assert wire.frame().status == Status.EINVAL


class TestHello:
    def test_grants_a_subset_in_the_order_asked(self, wire: Wire) -> None:
        asked = [0x0B, 0x7777, 0x0F, 0x06, 0x12, 0x0B, 0x01, 0x02]
        assert wire.hello(*asked) == [0x0B, 0x06, 0x12]

    def test_each_hello_clears_the_one_before(self, wire: Wire, key: bytes) -> None:
        wire.hello(Feature.MUTATION_SEQNO)
        assert wire.ok(kv.Set(key=key, value=b"1")).by_seqno
        wire.hello()
        assert wire.ok(kv.Set(key=key, value=b"1")).by_seqno is None

    def test_what_the_sdks_ask_for(self, wire: Wire) -> None:
        cpp = "03 06 07 08 0b 0c 10 0f 11 15 12 17 14 1c 21 0e 0d 1e 0a 04"
        go = "02 06 08 1e 1d 0c 07 0b 04 0a 13 0f 12 10 17 19 14 1c 11"
        java = "01 06 07 08 0a 0c 0d 12"
        for text in (cpp, go, java):
            asked = [int(number, 16) for number in text.split()]
            granted = wire.hello(*asked)
            assert set(granted) <= set(asked)
            assert {0x06, 0x07, 0x08, 0x12} <= set(granted)

    @pytest.mark.parametrize(
        "features",
        [(0x0D,), (0x1F,), (0x15,), (0x18, 0x0B)],
    )
    def test_a_feature_without_what_it_stands_on(self, wire: Wire, features: tuple[int]) -> None:
        value = b"".join(struct.pack(">H", feature) for feature in features)
        assert wire.refused(admin.Hello(value=value)) == Status.EINVAL

    def test_odd_length(self, wire: Wire) -> None:
        wire.send(HEADER.pack(0x80, Op.HELLO, 0, 0, 0, 0, 3, 0, 0) + b"\0\1\0")
        assert wire.frame().status == Status.EINVAL

    @pytest.mark.parametrize(
        "name",
        [b'{"a":"sdk\\n/1.0","i":"x"}', b"{broken", b'{"a":5}', b"\xff\xfe", b"[" * 200, b'{"a":' * 50],
    )
    def test_client_names(self, shared_node: RunningNode, name: bytes) -> None:
        with Wire(shared_node.port) as wire:
            wire.ok(admin.Hello(key=name))
            figures = stats(wire, b"connections")
            assert all("\n" not in value for value in figures.values())


class TestLogin:
    @pytest.fixture
    def guarded(self) -> Iterator[RunningNode]:
        with tailrace.testing.node(vbuckets=1, users={"ada": "pass,=word", "bob": "x"}) as node:
            yield node

    @pytest.mark.parametrize("mechanism", MECHANISMS)
    def test_every_mechanism(self, guarded: RunningNode, mechanism: str) -> None:
        with Wire(guarded.port) as wire:
            wire.hello(Feature.XERROR)
            assert wire.refused(kv.Get(key=b"a")) == Status.EACCESS
            assert login(wire, mechanism, "ada", "wrong") == Status.AUTH_ERROR
            assert login(wire, mechanism, "nobody", "x") == Status.AUTH_ERROR
            assert login(wire, mechanism, "ada", "pass,=word") == Status.SUCCESS
            wire.ok(kv.Set(key=b"a", value=b"1"))

    def test_unknown_mechanism_and_stray_step(self, guarded: RunningNode) -> None:
        with Wire(guarded.port) as wire:
            assert wire.refused(admin.SaslAuth(key=b"CRAM-MD5", value=b"")) == Status.AUTH_ERROR
            assert wire.refused(admin.SaslStep(key=b"SCRAM-SHA1", value=b"x")) == Status.EINVAL

    def test_without_users_the_default_one_is_known(self, shared_node: RunningNode) -> None:
        for mechanism in MECHANISMS:
            with Wire(shared_node.port) as wire:
                assert login(wire, mechanism, "Administrator", "password") == Status.SUCCESS
                assert login(wire, mechanism, "Administrator", "wrong") == Status.AUTH_ERROR
                wire.ok(admin.Noop())  # nobody has to log in


class TestBuckets:
    def test_each_has_its_own_documents(self, shared_node: RunningNode, key: bytes) -> None:
        with Wire(shared_node.port) as wire:
            wire.ok(kv.Set(key=key, value=b"default's"))
            wire.ok(admin.SelectBucket(key=b"second"))
            assert wire.refused(kv.Get(key=key)) == Status.KEY_ENOENT
            wire.ok(kv.Set(key=key, value=b"second's"))
            wire.ok(admin.SelectBucket(key=b"default"))
            assert wire.ok(kv.Get(key=key)).value == b"default's"

    def test_no_such_bucket(self, wire: Wire) -> None:
        assert wire.refused(admin.SelectBucket(key=b"nothing")) == Status.KEY_ENOENT
        wire.hello(Feature.XERROR)
        assert wire.refused(admin.SelectBucket(key=b"nothing")) == Status.EACCESS

    def test_no_bucket(self, wire: Wire) -> None:
        wire.hello(Feature.XERROR)
        wire.ok(admin.SelectBucket(key=b"@no bucket@"))
        assert wire.refused(kv.Get(key=b"a")) == Status.NO_BUCKET
        wire.ok(admin.Noop())


class TestClusterConfig:
    def test_of_the_bucket(self, wire: Wire, shared_node: RunningNode) -> None:
        content = json.loads(wire.ok(admin.GetClusterConfig()).value)
        assert content["name"] == "default"
        assert content["nodeLocator"] == "vbucket"
        assert content["vBucketServerMap"]["vBucketMap"] == [[0]] * 4
        assert content["vBucketServerMap"]["serverList"] == [f"$HOST:{shared_node.port}"]
        port = shared_node.port
        assert content["nodes"] == [{"hostname": f"$HOST:{port}", "ports": {"direct": port}}]
        assert content["nodesExt"] == [{"services": {"kv": port, "mgmt": port}, "thisNode": True}]
        assert "collections" in content["bucketCapabilities"]

    def test_without_a_selected_bucket_for_those_who_select(self, wire: Wire) -> None:
        wire.hello(Feature.SELECT_BUCKET)
        content = json.loads(wire.ok(admin.GetClusterConfig()).value)
        assert set(content) == {"rev", "revEpoch", "nodesExt"}
        wire.ok(admin.SelectBucket(key=b"second"))
        assert json.loads(wire.ok(admin.GetClusterConfig()).value)["name"] == "second"

    def test_known_revision(self, wire: Wire) -> None:
        content = json.loads(wire.ok(admin.GetClusterConfig()).value)
        epoch, rev = content["revEpoch"], content["rev"]
        assert wire.ok(admin.GetClusterConfig(epoch=epoch, revision=rev)).value == b""
        assert wire.ok(admin.GetClusterConfig(epoch=epoch, revision=rev - 1)).value
        assert wire.ok(admin.GetClusterConfig(epoch=-1, revision=rev)).value

    def test_a_revision_that_none_can_be(self, wire: Wire) -> None:
        for epoch, revision in ((1, 0), (0, 1), (-2, 1), (1, -1)):
            extras = struct.pack(">qq", epoch, revision)
            wire.send(struct.pack(">BBHBBHIIQ", 0x80, 0xB5, 0, 16, 0, 0, 16, 7, 0) + extras)
            assert wire.frame().status == Status.EINVAL

    def test_it_is_json_for_those_who_know_json(self, wire: Wire) -> None:
        wire.hello(Feature.JSON)
        assert wire.ok(admin.GetClusterConfig()).datatype == 1

    def test_state_changes_and_set_configs_are_pushed(self) -> None:
        with tailrace.testing.node(vbuckets=2) as node, Wire(node.port) as full, Wire(node.port) as brief:
            full.hello(Feature.DUPLEX, Feature.CLUSTERMAP_CHANGE_NOTIFICATION, Feature.JSON)
            full.ok(admin.SelectBucket(key=b"default"))
            brief.hello(Feature.DUPLEX, Feature.CLUSTERMAP_CHANGE_NOTIFICATION_BRIEF)
            brief.ok(admin.SelectBucket(key=b"default"))
            before = json.loads(full.ok(admin.GetClusterConfig()).value)
            node.set_vbucket_state(1, VBucketState.DEAD)
            frame = full.frame()
            assert (frame.magic, frame.opcode, frame.key) == (Magic.SERVER_REQUEST, 1, b"default")
            content = json.loads(frame.value)
            assert content["vBucketServerMap"]["vBucketMap"] == [[0], [-1]]
            assert content["rev"] > before["rev"]
            assert struct.unpack(">qq", frame.extras) == (content["revEpoch"], content["rev"])
            frame = brief.frame()
            assert (frame.key, frame.value) == (b"default", b"")

            content["revEpoch"], content["rev"] = 5, 1
            text = json.dumps(content).encode()
            with Wire(node.port) as coordinator:
                coordinator.ok(admin.SetClusterConfig(key=b"default", value=text, epoch=5, revision=1))
                assert full.frame().value == text
                assert coordinator.ok(admin.GetClusterConfig()).value == text
                older = json.dumps({**content, "revEpoch": 4}).encode()
                message = admin.SetClusterConfig(key=b"default", value=older, epoch=4, revision=1)
                assert coordinator.refused(message) == Status.ERANGE
                for bad in (b"{", b"[]", b'{"rev":1,"revEpoch":6}', b"[" * 5000):
                    message = admin.SetClusterConfig(key=b"default", value=bad, epoch=6, revision=1)
                    assert coordinator.refused(message) == Status.EINVAL
                message = admin.SetClusterConfig(key=b"nobody", value=text, epoch=5, revision=1)
                assert coordinator.refused(message) == Status.KEY_ENOENT

    def test_a_peer_that_takes_snappy_everywhere_gets_compressed_maps(self) -> None:
        with tailrace.testing.node(vbuckets=2) as node, Wire(node.port) as wire, Wire(node.port) as plain:
            wire.hello(
                Feature.DUPLEX,
                Feature.CLUSTERMAP_CHANGE_NOTIFICATION,
                Feature.JSON,
                Feature.SNAPPY_EVERYWHERE,
            )
            plain.hello(Feature.JSON, Feature.SNAPPY)
            packed = Datatype.JSON | Datatype.SNAPPY
            for peer in (wire, plain):
                peer.ok(admin.SelectBucket(key=b"default"))
            asked, refused = wire.ok(admin.GetClusterConfig()), wire.call(kv.Get(key=b"a", vbucket=9))
            assert (asked.datatype, refused.datatype) == (packed, packed)
            shown = plain.ok(admin.GetClusterConfig())
            assert shown.datatype == Datatype.JSON
            assert inflate(asked.value) == inflate(refused.value) == shown.value
            node.set_vbucket_state(1, VBucketState.DEAD)
            pushed = wire.frame()
            assert (pushed.opcode, pushed.datatype) == (1, packed)
            assert json.loads(inflate(pushed.value))["vBucketServerMap"]["vBucketMap"] == [[0], [-1]]

    def test_not_my_vbucket_leaves_out_a_known_map(self, shared_node: RunningNode) -> None:
        with Wire(shared_node.port) as wire:
            wire.hello(Feature.DEDUPE_NOT_MY_VBUCKET_CLUSTERMAP, Feature.JSON)
            first = wire.call(kv.Get(key=b"a", vbucket=9))
            assert (first.datatype, first.value[:1]) == (1, b"{")
            second = wire.call(kv.Get(key=b"a", vbucket=9))
            assert (second.status, second.datatype, second.value) == (Status.NOT_MY_VBUCKET, 0, b"")


class TestVBuckets:
    @pytest.fixture
    def node(self) -> Iterator[RunningNode]:
        with tailrace.testing.node(vbuckets=4) as running:
            yield running

    def test_states(self, node: RunningNode) -> None:
        with Wire(node.port) as wire:
            assert wire.ok(admin.GetVBucket(vbucket=1)).state == 1
            wire.ok(kv.Set(key=b"a", value=b"1", vbucket=1))
            for state in (2, 3, 4, 1):
                wire.ok(admin.SetVBucket(vbucket=1, state=state))
                assert wire.ok(admin.GetVBucket(vbucket=1)).state == state
                status = wire.call(kv.Get(key=b"a", vbucket=1)).status
                assert status == (Status.SUCCESS if state == 1 else Status.NOT_MY_VBUCKET)
            assert wire.refused(admin.SetVBucket(vbucket=4, state=1)) == Status.ERANGE
            assert wire.refused(admin.GetVBucket(vbucket=4)) == Status.NOT_MY_VBUCKET
            for value in (b"[]", b"{", b"[" * 10_000):
                message = admin.SetVBucket(vbucket=1, state=1, value=value, datatype=1)
                assert wire.refused(message) == Status.EINVAL
            wire.ok(admin.SetVBucket(vbucket=1, state=1, value=b'{"topology":[["n1"]]}', datatype=1))

    def test_deletion(self, node: RunningNode) -> None:
        with Wire(node.port) as wire:
            wire.ok(kv.Set(key=b"a", value=b"1", vbucket=2))
            assert wire.refused(admin.DelVBucket(vbucket=2)) == Status.EINVAL  # it is not dead
            wire.ok(admin.SetVBucket(vbucket=2, state=4))
            wire.ok(admin.DelVBucket(vbucket=2, value=b"async=0"))
            assert wire.refused(admin.GetVBucket(vbucket=2)) == Status.NOT_MY_VBUCKET
            assert wire.refused(admin.DelVBucket(vbucket=2)) == Status.NOT_MY_VBUCKET
            wire.ok(admin.SetVBucket(vbucket=2, state=1))
            assert wire.refused(kv.Get(key=b"a", vbucket=2)) == Status.KEY_ENOENT

    def test_seqnos(self, node: RunningNode) -> None:
        with Wire(node.port) as wire:
            for count in range(3):
                wire.ok(kv.Set(key=b"a", value=b"%d" % count, vbucket=1))
            wire.ok(admin.SetVBucket(vbucket=3, state=2))
            assert wire.ok(admin.GetAllVbSeqnos()).seqnos == {0: 0, 1: 3, 2: 0}
            assert wire.ok(admin.GetAllVbSeqnos(state=0)).seqnos == {0: 0, 1: 3, 2: 0, 3: 0}
            assert wire.ok(admin.GetAllVbSeqnos(state=2)).seqnos == {3: 0}
            assert wire.ok(admin.GetAllVbSeqnos(state=4)).seqnos == {}
            assert wire.refused(admin.GetAllVbSeqnos(state=1, collection_id=0)) == Status.EINVAL
            wire.hello(Feature.COLLECTIONS, Feature.XERROR)
            assert wire.ok(admin.GetAllVbSeqnos(state=1, collection_id=0)).seqnos[1] == 3
            assert wire.refused(admin.GetAllVbSeqnos(state=1, collection_id=77)) == Status.UNKNOWN_COLLECTION
            wire.send(HEADER.pack(0x80, Op.GET_ALL_VB_SEQNOS, 0, 4, 0, 0, 4, 0, 0) + b"\0\0\0\5")
            assert wire.frame().status == Status.EINVAL

    def test_persistence_observed(self, node: RunningNode) -> None:
        with Wire(node.port) as wire:
            node.stop_persistence()
            cas = wire.ok(kv.Set(key=b"a", value=b"1")).cas
            uuid = node.failover_log(0)[0][0]

            def observed(key: bytes) -> Any:
                value = struct.pack(">HH", 0, len(key)) + key
                return next(wire.ok(admin.Observe(value=value)).records())[2:]

            assert observed(b"a") == (0x00, cas)
            assert observed(b"b") == (0x80, 0)
            answer = wire.ok(admin.ObserveSeqno(value=struct.pack(">Q", uuid)))
            assert (answer.persisted_seqno, answer.current_seqno, answer.old_branch) == (0, 1, None)
            wire.ok(admin.StartPersistence())
            wire.ok(admin.SeqnoPersistence(seqno=1))
            assert observed(b"a") == (0x01, cas)
            answer = wire.ok(admin.ObserveSeqno(value=struct.pack(">Q", uuid)))
            assert answer.persisted_seqno == 1
            wire.ok(admin.StopPersistence())
            wire.ok(kv.Delete(key=b"a"))
            assert observed(b"a")[0] == 0x81
            wire.ok(admin.StartPersistence())
            wire.ok(admin.SeqnoPersistence(seqno=2))
            assert observed(b"a")[0] == 0x80
            node.rewind(0, 1)
            answer = wire.ok(admin.ObserveSeqno(value=struct.pack(">Q", uuid)))
            assert answer.old_branch == (uuid, 1)
            assert answer.current_vb_uuid == node.failover_log(0)[0][0]
            assert wire.refused(admin.ObserveSeqno(value=struct.pack(">Q", 12345))) == Status.KEY_ENOENT
            assert wire.refused(admin.ObserveSeqno(value=bytes(8), vbucket=9)) == Status.NOT_MY_VBUCKET
            wire.send(HEADER.pack(0x80, Op.OBSERVE, 0, 0, 0, 0, 5, 0, 0) + b"\0\0\0\x05a")
            assert wire.frame().status == Status.EINVAL

    def test_failover_log(self, node: RunningNode) -> None:
        with Wire(node.port) as wire:
            wire.ok(kv.Set(key=b"a", value=b"1"))
            log = wire.ok(admin.GetFailoverLog()).value
            assert len(log) == 16
            node.rewind(0, 0)
            assert wire.ok(admin.GetFailoverLog()).value[16:] == log
            assert wire.refused(admin.GetFailoverLog(vbucket=9)) == Status.NOT_MY_VBUCKET

    def test_compaction_purges(self, node: RunningNode) -> None:
        with Wire(node.port) as wire:
            for at in range(20):
                wire.ok(kv.Set(key=b"k%d" % at, value=b"1"))
            for at in range(10):
                wire.ok(kv.Delete(key=b"k%d" % at))
            assert stats(wire, b"vbucket-seqno 0")["vb_0:purge_seqno"] == "0"
            wire.ok(admin.Compact(drop_deletes=1))
            assert int(stats(wire, b"vbucket-seqno 0")["vb_0:purge_seqno"]) > 0
            assert wire.ok(kv.Get(key=b"k15")).value == b"1"
            assert wire.refused(admin.Compact(vbucket=9)) == Status.NOT_MY_VBUCKET
            wire.send(HEADER.pack(0x80, Op.COMPACT, 0, 8, 0, 0, 8, 0, 0) + bytes(8))
            assert wire.frame().status == Status.EINVAL

    def test_last_closed_checkpoint(self, node: RunningNode) -> None:
        with Wire(node.port) as wire:
            assert len(wire.ok(admin.LastClosedCheckpoint()).value) == 8


class TestTimeMachine:
    @pytest.fixture
    def node(self) -> Iterator[RunningNode]:
        with tailrace.testing.node(vbuckets=2) as running:
            yield running

    def test_rewind_brings_back_what_was(self, node: RunningNode) -> None:
        with Wire(node.port) as wire:
            wire.hello(Feature.XERROR, Feature.MUTATION_SEQNO)
            first = wire.ok(kv.Set(key=b"a", value=b"old"))
            wire.ok(kv.Set(key=b"a", value=b"new"))
            wire.ok(kv.Set(key=b"b", value=b"b"))
            wire.ok(kv.Get(key=b"a"))  # into the cache of answers
            answer = wire.ok(admin.Rewind(number=1, value=b"\0\0"))
            assert json.loads(answer.value) == {"0": 1}
            document = wire.ok(kv.Get(key=b"a"))
            assert (document.value, document.cas) == (b"old", first.cas)
            assert wire.refused(kv.Get(key=b"b")) == Status.KEY_ENOENT
            log = node.failover_log(0)
            assert [entry[1] for entry in log] == [1, 0]
            again = wire.ok(kv.Set(key=b"c", value=b"other"))
            assert (again.by_seqno, again.vb_uuid) == (2, log[0][0])  # the same seqno, another change

    def test_rewind_all_by_losing(self, node: RunningNode) -> None:
        with Wire(node.port) as wire:
            for at in range(5):
                wire.ok(kv.Set(key=b"k%d" % at, value=b"1"))
            wire.ok(kv.Set(key=b"x", value=b"1", vbucket=1))
            answer = wire.ok(admin.Rewind(mode=1, number=2))
            assert json.loads(answer.value) == {"0": 3, "1": 0}

    def test_impossible_ones(self, node: RunningNode) -> None:
        with Wire(node.port) as wire:
            wire.hello(Feature.XERROR)
            wire.ok(kv.Set(key=b"a", value=b"1"))
            answer = wire.call(admin.Rewind(number=7, value=b"\0\0"))
            assert answer.status == Status.ERANGE
            assert b"high seqno is 1, the lowest possible is 0" in answer.value
            assert wire.refused(admin.Rewind(number=0, value=b"\0\x09")) == Status.NOT_MY_VBUCKET
            wire.send(HEADER.pack(0x80, Op.REWIND, 0, 9, 0, 0, 10, 0, 0) + bytes(10))
            assert wire.frame().status == Status.EINVAL

    def test_flush_empties_everything(self, node: RunningNode) -> None:
        with Wire(node.port) as wire:
            wire.ok(kv.Set(key=b"a", value=b"1"))
            wire.ok(kv.Get(key=b"a"))
            before = node.failover_log(0)
            wire.ok(admin.Flush())
            assert wire.refused(kv.Get(key=b"a")) == Status.KEY_ENOENT
            assert node.high_seqno(0) == 0
            assert node.failover_log(0)[0] not in before
            wire.ok(admin.Flush(expiry=0))
            wire.send(admin.FlushQ(), admin.Noop(opaque=9))
            assert wire.frame().opaque == 9
            wire.send(HEADER.pack(0x80, Op.FLUSH, 0, 4, 0, 0, 4, 0, 0) + b"\0\0\0\1")
            assert wire.frame().status == Status.EINVAL

    def test_both_are_durable_when_answered(self, node: RunningNode) -> None:
        with Wire(node.port) as wire:
            wire.ok(kv.Set(key=b"a", value=b"1", vbucket=0))
            wire.ok(kv.Set(key=b"b", value=b"1", vbucket=1))
            wire.ok(kv.Set(key=b"b", value=b"2", vbucket=1))
            wire.ok(admin.SeqnoPersistence(vbucket=1, seqno=2))
            wire.ok(admin.Rewind(number=1, value=b"\0\1"))
        uuid = node.failover_log(1)[0]
        node.kill()
        node.start()
        assert node.get("b", vbucket=1) == 1
        assert uuid in node.failover_log(1)


class TestCollections:
    @pytest.fixture
    def node(self) -> Iterator[RunningNode]:
        with tailrace.testing.node(vbuckets=1) as running:
            with Wire(running.port) as wire:
                text = wire.ok(admin.GetCollectionsManifest()).value
                assert json.loads(text)["scopes"][0]["name"] == "_default"
                wire.ok(admin.SetCollectionsManifest(value=json.dumps(MANIFEST).encode()))
            yield running

    @pytest.fixture
    def wire(self, node: RunningNode) -> Iterator[Wire]:
        with Wire(node.port) as connection:
            connection.hello(Feature.COLLECTIONS, Feature.XERROR, Feature.JSON)
            yield connection

    def test_manifest(self, wire: Wire) -> None:
        assert json.loads(wire.ok(admin.GetCollectionsManifest()).value) == MANIFEST
        older = {**MANIFEST, "uid": "1"}
        assert wire.refused(admin.SetCollectionsManifest(value=json.dumps(older).encode())) == Status.ERANGE
        for bad in (b"{", b"[" * 100_000, b'{"uid":"x","scopes":[]}', b'{"uid":"9","scopes":5}'):
            assert wire.refused(admin.SetCollectionsManifest(value=bad)) == Status.EINVAL
        assert json.loads(wire.ok(admin.GetCollectionsManifest()).value) == MANIFEST

    @pytest.mark.parametrize(
        ("path", "uid"),
        [(b"shop.items", 9), (b"shop.carts", 0x200), (b"_default._default", 0), (b".", 0), (b"._default", 0)],
    )
    def test_ids(self, wire: Wire, path: bytes, uid: int) -> None:
        answer = wire.ok(admin.GetCollectionId(value=path))
        assert (answer.manifest_uid, answer.collection_id) == (2, uid)
        assert wire.ok(admin.GetCollectionId(key=path)).collection_id == uid

    @pytest.mark.parametrize(
        ("path", "status"),
        [
            (b"shop.nothing", Status.UNKNOWN_COLLECTION),
            (b"nothing.items", Status.UNKNOWN_SCOPE),
            (b"shop", Status.EINVAL),
            (b"a.b.c", Status.EINVAL),
            (b"shop.b!d", Status.EINVAL),
            (b"shop.\xff", Status.EINVAL),
        ],
    )
    def test_unknown_and_illegal(self, wire: Wire, path: bytes, status: int) -> None:
        answer = wire.call(admin.GetCollectionId(value=path))
        assert answer.status == status
        if status != Status.EINVAL:
            assert json.loads(answer.value)["manifest_uid"] == "2"

    def test_scope_ids(self, wire: Wire) -> None:
        assert wire.ok(admin.GetScopeId(value=b"shop")).scope_id == 8
        assert wire.ok(admin.GetScopeId(value=b"_default")).scope_id == 0
        assert wire.refused(admin.GetScopeId(value=b"nothing")) == Status.UNKNOWN_SCOPE

    def test_documents_are_apart(self, wire: Wire, node: RunningNode) -> None:
        keys = [encode_leb128(uid) + b"doc" for uid in (0, 9, 0x200)]
        for at, key in enumerate(keys):
            wire.ok(kv.Set(key=key, value=b"%d" % at))
        for at, key in enumerate(keys):
            for _ in range(2):
                assert wire.ok(kv.Get(key=key)).value == b"%d" % at
        with Wire(node.port) as plain:
            assert plain.ok(kv.Get(key=b"doc")).value == b"0"
        assert wire.ok(kv.GetMeta(key=keys[2])).expiry > 0  # maxTTL of the collection
        assert wire.ok(kv.GetMeta(key=keys[1])).expiry == 0

    @pytest.mark.parametrize(
        ("raw", "status"),
        [
            (b"\x08doc", Status.UNKNOWN_COLLECTION),
            (b"\x01doc", Status.EINVAL),
            (b"\x07doc", Status.EINVAL),
            (b"\x80\x00doc", Status.EINVAL),  # not the shortest form
            (b"\xff\xff\xff\xff\x1fdoc", Status.EINVAL),
            (b"\xff\xff\xff\xff\xff\xffdoc", Status.EINVAL),
            (b"\x00", Status.EINVAL),  # no key behind it
            (b"\x09" + b"k" * 247, Status.EINVAL),
        ],
    )
    def test_wrong_prefixes(self, wire: Wire, raw: bytes, status: int) -> None:
        for message in (kv.Get(key=raw), kv.Set(key=raw, value=b"1")):
            assert wire.refused(message) == status
        wire.ok(kv.Set(key=b"\x09" + b"k" * 246, value=b"1"))
        wire.ok(kv.Set(key=b"\x00" + b"k" * 250, value=b"1"))

    def test_random_key(self, wire: Wire, node: RunningNode) -> None:
        assert wire.refused(admin.GetRandomKey(collection_id=9)) == Status.KEY_ENOENT
        wire.ok(kv.Set(key=b"\x09doc", value=b"{}", flags=5))
        answer = wire.ok(admin.GetRandomKey(collection_id=9))
        assert (answer.key, answer.value, answer.flags) == (b"\x09doc", b"{}", 5)
        assert wire.refused(admin.GetRandomKey(collection_id=77)) == Status.UNKNOWN_COLLECTION
        assert wire.refused(admin.GetRandomKey()) == Status.EINVAL
        with Wire(node.port) as plain:
            assert plain.refused(admin.GetRandomKey()) == Status.KEY_ENOENT
            assert plain.refused(admin.GetRandomKey(collection_id=0)) == Status.EINVAL
            plain.ok(kv.Set(key=b"solo", value=b"1"))
            assert plain.ok(admin.GetRandomKey()).key == b"solo"

    def test_a_dropped_collection_is_gone(self, wire: Wire) -> None:
        wire.ok(kv.Set(key=b"\x09doc", value=b"1"))
        wire.ok(kv.Set(key=b"\x00doc", value=b"1"))
        wire.ok(kv.Get(key=b"\x00doc"))
        smaller = {"uid": "3", "scopes": [MANIFEST["scopes"][0]]}
        wire.ok(admin.SetCollectionsManifest(value=json.dumps(smaller).encode()))
        assert wire.refused(kv.Get(key=b"\x09doc")) == Status.UNKNOWN_COLLECTION
        assert wire.ok(kv.Get(key=b"\x00doc")).value == b"1"

    def test_the_default_collection_can_go(self, wire: Wire, node: RunningNode) -> None:
        wire.ok(kv.Set(key=b"\x00doc", value=b"1"))
        wire.ok(kv.Get(key=b"\x00doc"))
        without = {"uid": "3", "scopes": [{"name": "_default", "uid": "0", "collections": []}]}
        wire.ok(admin.SetCollectionsManifest(value=json.dumps(without).encode()))
        assert wire.refused(kv.Get(key=b"\x00doc")) == Status.UNKNOWN_COLLECTION
        assert wire.refused(kv.Set(key=b"\x00doc", value=b"1")) == Status.UNKNOWN_COLLECTION


class TestStats:
    def test_general(self, wire: Wire) -> None:
        figures = stats(wire)
        assert int(figures["curr_connections"]) >= 1
        assert figures["bucket"] == "default"
        assert figures["vb_active_num"] == "4"

    def test_seqnos_and_failovers(self, wire: Wire, shared_node: RunningNode) -> None:
        figures = stats(wire, b"vbucket-seqno")
        names = {name.split(":", 1)[1] for name in figures}
        assert names == {
            "high_seqno", "abs_high_seqno", "last_persisted_seqno", "uuid", "purge_seqno",
            "last_persisted_snap_start", "last_persisted_snap_end", "max_visible_seqno",
            "high_prepared_seqno",
        }  # fmt: skip
        assert set(stats(wire, b"vbucket-seqno 2")) == {f"vb_2:{name}" for name in names}
        log = shared_node.failover_log(1)
        assert stats(wire, b"failovers 1") == {
            "vb_1:num_entries": str(len(log)),
            **{f"vb_1:{at}:id": str(entry[0]) for at, entry in enumerate(log)},
            **{f"vb_1:{at}:seq": str(entry[1]) for at, entry in enumerate(log)},
        }

    @pytest.mark.parametrize(
        "group", ["vbucket", "vbucket-details", "vbucket-details 1", "checkpoint", "dcp", "tap", "timings"]
    )
    def test_groups(self, wire: Wire, group: str) -> None:
        assert isinstance(stats(wire, group.encode()), dict)

    def test_groups_with_words(self, wire: Wire) -> None:
        assert stats(wire, b"settings")["max_in_flight"] == "32"
        assert stats(wire, b"dcp-vbtakeover 1 name")["name"] == "name"
        assert stats(wire, b"connections")["0:dialect"] == "kv"

    @pytest.mark.parametrize(
        ("group", "status"),
        [
            (b"nothing", Status.KEY_ENOENT),
            (b"\xff\xfe", Status.KEY_ENOENT),
            (b"failovers 99", Status.NOT_MY_VBUCKET),
            (b"failovers 1_0", Status.EINVAL),
            (b"failovers -1", Status.EINVAL),
            (b"failovers \xd9\xa1", Status.EINVAL),  # an Arabic digit
            (b"dcp-vbtakeover", Status.EINVAL),
        ],
    )
    def test_wrong_groups(self, wire: Wire, group: bytes, status: int) -> None:
        assert stats(wire, group) == status

    def test_deregister_tap_client_is_always_a_success(self, wire: Wire) -> None:
        wire.ok(admin.DeregisterTapClient(key=b"nobody"))
