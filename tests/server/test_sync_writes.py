"""Durable writes are prepared, then committed or aborted: what clients, readers and replicas see of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import tailrace
import tailrace.testing
from server.controller import Controller, marker, mutation, until
from server.serverkit import Bench, Wire, ask, take
from server.test_durable_writes import set_map
from tailrace import Aborted, Committed, Deletion, Mutation, Prepared, SeqnoAdvanced
from tailrace.client.jsonlines import json_line
from tailrace.client.text_lines import TextLines
from tailrace.errors import UsageError
from tailrace.model import MAX_CAS, MAX_REPLICA_REV, MAX_SEQNO
from tailrace.server.served_map import NodeAddress, bucket_map
from tailrace.testing.running import RunningNode
from tailrace.wire.codes import DurabilityLevel, Feature, MarkerFlag, Status, VBucketState
from tailrace.wire.dcp import (
    DcpControl,
    DcpDeletion,
    DcpMutation,
    DcpOpen,
    DcpSeqnoAdvanced,
    DcpSnapshotMarker,
    DcpStreamRequest,
)
from tailrace.wire.dcp_replication import DcpAbort, DcpCommit, DcpPrepare, DcpSeqnoAcknowledged
from tailrace.wire.fields import Durability, encode_frame_infos
from tailrace.wire.kv import Delete, Get, GetReplica, Set

LEVELS = list(DurabilityLevel)
ALL_BITS = (1 << 32) - 1
MAJORITY, PERSIST = DurabilityLevel.MAJORITY, DurabilityLevel.PERSIST_TO_MAJORITY


def framing(level: DurabilityLevel = MAJORITY, timeout_ms: int = 60_000) -> bytes:
    return encode_frame_infos([Durability(level, timeout_ms).encode()])


def durable_set(key: bytes, value: bytes, opaque: int = 1, **options: Any) -> Set:
    return Set(key=key, value=value, framing=framing(**options), opaque=opaque)


class Client(Wire):
    """A client that writes durably."""

    def __init__(self, node: RunningNode) -> None:
        super().__init__(node.port)
        self.hello(Feature.ALT_REQUEST_SUPPORT, Feature.SYNC_REPLICATION, Feature.XERROR)

    def status(self, key: bytes, value: bytes = b"1", **options: Any) -> int:
        status: int = self.call(durable_set(key, value, **options)).status
        return status


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RunningNode]:
    """A node alone."""
    with tailrace.testing.node(vbuckets=1, data=tmp_path / "data") as made:
        yield made


@pytest.fixture
def nodes() -> Iterator[list[RunningNode]]:
    """An active and two replicas that receive nothing yet."""
    with ExitStack() as stack:
        nodes = [stack.enter_context(tailrace.testing.node(vbuckets=1)) for _ in range(3)]
        for each in nodes[1:]:
            each.set_vbucket_state(0, VBucketState.REPLICA)
        set_map(nodes, [0, 1, 2])
        yield nodes


def undecided(node: RunningNode) -> list[int]:
    return node.call(lambda n: [each.seqno for each in n.buckets["default"].store.vbuckets[0].undecided])


def prepare(node: RunningNode, key: bytes = b"k", value: bytes = b"new") -> Wire:
    """Begin a durable write; when it is prepared."""
    client = Client(node)
    client.send(durable_set(key, value))
    until(lambda: undecided(node), "nothing was prepared")
    return client


def events(node: RunningNode, kinds: tuple[type, ...], **options: Any) -> list[Any]:
    with tailrace.connect_sync(node.url, **options) as source:
        return [event for event in source.changes(end="now") if isinstance(event, kinds)]


def kinds_of(node: RunningNode, **options: Any) -> list[tuple[str, int]]:
    seen = (Mutation, Deletion, Prepared, Committed, Aborted, SeqnoAdvanced)
    return [(type(event).__name__, event.seqno) for event in events(node, seen, **options)]


class TestReaders:
    def test_who_asks_sees_how_it_goes(self, node: RunningNode) -> None:
        with Client(node) as client:
            assert client.status(b"k", b'{"n":1}', level=PERSIST) == Status.SUCCESS
            answer = client.call(Delete(key=b"k", framing=framing()))
            assert answer.status == Status.SUCCESS
        seen = events(node, (Mutation, Deletion, Prepared, Committed), sync_replication=True)
        first, commit, second, end = seen
        assert isinstance(first, Prepared)
        assert (first.seqno, first.key, first.value, first.datatype) == (1, b"k", b'{"n":1}', 1)
        assert (first.level, first.deleted, first.rev) == ("persist_to_majority", False, 1)
        assert isinstance(commit, Committed)
        assert (commit.seqno, commit.prepared_seqno, commit.key) == (2, 1, b"k")
        assert isinstance(second, Prepared)
        assert (second.deleted, second.level, second.rev) == (True, "majority", 2)
        assert isinstance(end, Committed)
        assert (end.seqno, end.prepared_seqno) == (4, 3)

    def test_others_see_changes(self, node: RunningNode) -> None:
        with Client(node) as client:
            assert client.status(b"k") == Status.SUCCESS
        assert kinds_of(node) == [("Mutation", 2)]
        with Client(node) as client:
            client.ok(Delete(key=b"k", framing=framing()))
        assert kinds_of(node)[-1] == ("Deletion", 4)

    def test_from_a_disk_a_commit_is_a_change(self, node: RunningNode) -> None:
        with Client(node) as client:
            assert client.status(b"k") == Status.SUCCESS

        def seal(running: Any) -> None:
            store = running.buckets["default"].store
            store.seal()
            store.forget_memory()

        node.call(seal)
        assert kinds_of(node, sync_replication=True) == [("Mutation", 2)]

    def test_one_that_is_undecided(self, nodes: list[RunningNode]) -> None:
        active = nodes[0]
        active.set(b"k", b"old")
        with prepare(active):
            assert kinds_of(active) == [("Mutation", 1), ("SeqnoAdvanced", 2)]
            assert kinds_of(active, sync_replication=True) == [("Mutation", 1), ("Prepared", 2)]
            for dialect in ("upr-a", "upr-b", "tap"):
                assert len(events(active, (Mutation,), dialect=dialect)) == 1

    def test_one_that_was_given_up(self, nodes: list[RunningNode]) -> None:
        active = nodes[0]
        with Client(active) as client:
            assert client.status(b"k", timeout_ms=200) == Status.SYNC_WRITE_AMBIGUOUS
        until(lambda: not undecided(active), "it was not aborted")
        assert active.get(b"k") is None
        assert kinds_of(active) == [("SeqnoAdvanced", 2)]
        seen = events(active, (Prepared, Aborted), sync_replication=True)
        assert [(type(event), event.seqno) for event in seen] == [(Prepared, 1), (Aborted, 2)]
        assert seen[1].prepared_seqno == 1

    def test_a_position_behind_a_prepare(self, nodes: list[RunningNode]) -> None:
        """A reader that was told its position resumes there, and gets the commit as a change."""
        active, replica, _ = nodes
        active.set(b"k", b"old")
        with prepare(active), tailrace.connect_sync(active.url) as source:
            assert [event.seqno for event in source.changes(end="now") if isinstance(event, Mutation)] == [1]
            position = source.positions()
            replica.replicate([0], active)
            until(lambda: not undecided(active), "it was not committed")
            more = list(source.changes(position, end="now"))
            assert [event.seqno for event in more if isinstance(event, Mutation)] == [3]

    def test_lines(self, node: RunningNode) -> None:
        with Client(node) as client:
            client.status(b"k", b'{"n":1}')
        prepared, commit = events(node, (Prepared, Committed), sync_replication=True)
        line = json.loads(json_line(prepared))
        assert (line["op"], line["level"], line["deleted"], line["value"]) == (
            "prepare",
            "majority",
            False,
            {"n": 1},
        )
        line = json.loads(json_line(commit))
        assert (line["op"], line["seqno"], line["prepared_seqno"], line["key"]) == ("commit", 2, 1, "k")
        text = TextLines().line(prepared) + TextLines().line(commit)
        assert b"prepare" in text and b"commit" in text

    def test_what_does_not_go_together(self, node: RunningNode) -> None:
        with pytest.raises(UsageError, match="whole bucket"):
            tailrace.connect_sync(node.url, sync_replication=True, collections=["_default._default"])
        with pytest.raises(UsageError, match="upr-b has no sync_replication"):
            tailrace.connect_sync(node.url, sync_replication=True, dialect="upr-b")
        with tailrace.connect_sync(node.url, sync_replication=True) as source:
            node.set("k", 1)
            with pytest.raises(UsageError, match="changes"):
                list(source.batches(end="now"))


class Reader(Wire):
    """A DCP connection, bare."""

    def __init__(self, port: int, *features: int, **controls: str) -> None:
        super().__init__(port)
        if features:
            self.hello(*features)
        self.ok(DcpOpen(key=b"reader", flags=1))
        for key, value in controls.items():
            self.ok(DcpControl(key=key.encode(), value=value.encode()))

    def stream(self, end: int = 1 << 63) -> None:
        self.ok(DcpStreamRequest(vbucket=0, end_seqno=end))


class TestOnTheWire:
    def test_a_replica(self, nodes: list[RunningNode]) -> None:
        active = nodes[0]
        name = f"127.0.0.1:{nodes[1].port}"
        with (
            Reader(active.port, enable_sync_writes="true", consumer_name=name) as replica,
            Client(active) as client,
        ):
            replica.stream()
            client.send(durable_set(b"k", b"v", opaque=5, level=PERSIST))
            said = replica.receive()
            assert isinstance(said, DcpSnapshotMarker)
            assert (said.version, said.end, said.max_visible_seqno) == (0, 1, 0)
            prepared = replica.receive()
            assert isinstance(prepared, DcpPrepare)
            assert (prepared.by_seqno, prepared.key, prepared.value) == (1, b"k", b"v")
            assert (prepared.durability, prepared.deleted) == (PERSIST, 0)
            replica.send(DcpSeqnoAcknowledged(prepared_seqno=1, vbucket=0))
            answer = client.frame()
            assert (answer.opaque, answer.status) == (5, Status.SUCCESS)
            assert answer.cas == prepared.cas
            assert isinstance(replica.receive(), DcpSnapshotMarker)
            frame = replica.frame()
            commit = DcpCommit.decode(frame)
            assert (commit.prepared_seqno, commit.commit_seqno, commit.key) == (1, 2, b"k")
            assert frame.cas == 0

    def test_an_abort(self, nodes: list[RunningNode]) -> None:
        active = nodes[0]
        with Reader(active.port, enable_sync_writes="true") as reader, Client(active) as client:
            reader.stream()
            assert client.status(b"k", timeout_ms=200) == Status.SYNC_WRITE_AMBIGUOUS
            assert isinstance(reader.receive(), DcpSnapshotMarker)
            assert isinstance(reader.receive(), DcpPrepare)
            assert isinstance(reader.receive(), DcpSnapshotMarker)
            abort = reader.receive()
            assert isinstance(abort, DcpAbort)
            assert (abort.prepared_seqno, abort.abort_seqno, abort.key) == (1, 2, b"k")

    def test_without_collections_a_snapshot_ends_with_a_change(self, nodes: list[RunningNode]) -> None:
        active, second, _ = nodes
        active.set(b"a", b"1")
        with prepare(active, b"b"), Reader(active.port) as reader:
            reader.stream()
            said = reader.receive()
            assert isinstance(said, DcpSnapshotMarker)
            assert said.end == 1
            assert isinstance(reader.receive(), DcpMutation)
            second.replicate([0], active)
            said = reader.receive()
            assert isinstance(said, DcpSnapshotMarker)
            assert (said.start, said.end) == (3, 3)
            commit = reader.receive()
            assert isinstance(commit, DcpMutation)
            assert (commit.by_seqno, commit.key) == (3, b"b")

    def test_with_collections_it_is_told_how_far_it_is(self, nodes: list[RunningNode]) -> None:
        with (
            prepare(nodes[0], b"b"),
            Reader(nodes[0].port, Feature.COLLECTIONS, enable_noop="true") as reader,
        ):
            reader.stream()
            assert isinstance(reader.receive(), DcpSnapshotMarker)
            advanced = reader.receive()
            assert isinstance(advanced, DcpSeqnoAdvanced)
            assert advanced.by_seqno == 1

    def test_high_seqnos(self, nodes: list[RunningNode]) -> None:
        from tailrace.wire.admin import GetAllVbSeqnos

        active = nodes[0]
        active.set(b"a", b"1")
        with prepare(active, b"b"):
            for features, seqno in (
                ((), 1),
                ((Feature.COLLECTIONS,), 1),
                ((Feature.SYNC_REPLICATION,), 1),
                ((Feature.COLLECTIONS, Feature.SYNC_REPLICATION), 2),
            ):
                with Wire(active.port) as wire:
                    wire.hello(*features)
                    assert wire.ok(GetAllVbSeqnos()).seqnos == {0: seqno}


class TestReplica:
    """What a node accepts as a replica, and what it reports."""

    @pytest.fixture
    def replica(self) -> Iterator[RunningNode]:
        with tailrace.testing.node(vbuckets=1) as made:
            made.set_vbucket_state(0, VBucketState.REPLICA)
            yield made

    def prepare(self, opaque: int, seqno: int, **fields: Any) -> DcpPrepare:
        given = {"key": b"k", "value": b"v", "cas": 50 + seqno, "rev_seqno": 1, **fields}
        return DcpPrepare(by_seqno=seqno, vbucket=0, opaque=opaque, **given)

    def test_prepare_and_commit(self, replica: RunningNode) -> None:
        with Controller(replica.port) as peer:
            opaque = peer.begin()
            peer.send(marker(opaque, 0, 1), self.prepare(opaque, 1))
            until(lambda: undecided(replica) == [1], "nothing came")
            assert peer.status_of(marker(opaque, 2, 3)) == 0
            assert peer.seqnos == [1]
            assert replica.get(b"k", vbucket=0) is None
            for unknown in (
                DcpCommit(key=b"other", prepared_seqno=1, commit_seqno=2, opaque=opaque),
                DcpCommit(key=b"k", prepared_seqno=7, commit_seqno=2, opaque=opaque),
            ):
                assert peer.status_of(unknown) == Status.KEY_ENOENT
            commit = DcpCommit(key=b"k", prepared_seqno=1, commit_seqno=2, opaque=opaque)
            assert peer.status_of(commit) == 0
            assert replica.get(b"k", vbucket=0) == b"v"
            again = DcpAbort(key=b"k", prepared_seqno=1, abort_seqno=2, opaque=opaque)
            assert peer.status_of(again) == Status.ERANGE
            with Wire(replica.port) as wire:
                answer = wire.ok(GetReplica(key=b"k", vbucket=0))
                assert (answer.value, answer.cas) == (b"v", 51)

    @pytest.mark.parametrize("number", [MAX_SEQNO + 1, 1 << 63, (1 << 64) - 1])
    def test_numbers_that_are_too_high_are_refused_when_they_come(
        self, replica: RunningNode, number: int
    ) -> None:
        """A commit makes them those of a document, and later versions are numbered from there."""
        highest = {"rev_seqno": MAX_REPLICA_REV, "cas": MAX_CAS, "flags": ALL_BITS, "expiry": ALL_BITS}
        with Controller(replica.port) as peer:
            opaque = peer.begin()
            assert peer.status_of(marker(opaque, 0, MAX_SEQNO)) == 0
            assert peer.status_of(self.prepare(opaque, number, cas=1)) == Status.ERANGE
            too_high = {"rev_seqno": max(number, MAX_REPLICA_REV + 1)}, {"cas": max(number, MAX_CAS + 1)}
            for wrong in too_high:
                assert peer.status_of(self.prepare(opaque, 1, **wrong)) == Status.EINVAL
            assert undecided(replica) == []
            assert peer.status_of(self.prepare(opaque, 1, **highest)) == 0
            for decision in (
                DcpCommit(key=b"k", prepared_seqno=1, commit_seqno=number, opaque=opaque),
                DcpAbort(key=b"k", prepared_seqno=1, abort_seqno=number, opaque=opaque),
            ):
                assert peer.status_of(decision) == Status.ERANGE
            commit = DcpCommit(key=b"k", prepared_seqno=1, commit_seqno=MAX_SEQNO - 1, opaque=opaque)
            assert peer.status_of(commit) == 0
            abort = DcpAbort(key=b"a", prepared_seqno=number, abort_seqno=MAX_SEQNO, opaque=opaque)
            assert peer.status_of(abort) == Status.ERANGE
        replica.set_vbucket_state(0, VBucketState.ACTIVE)
        replica.set(b"k", b"new", vbucket=0)
        replica.persist()
        replica.restart()
        assert replica.get(b"k", vbucket=0) == b"new"

    def test_it_says_nothing_before_the_snapshot_is_complete(self, replica: RunningNode) -> None:
        with Controller(replica.port) as peer:
            opaque = peer.begin()
            peer.send(marker(opaque, 0, 2))
            assert peer.status_of(self.prepare(opaque, 1)) == 0
            assert peer.seqnos == []
            assert peer.status_of(mutation(opaque, 2, b"other")) == 0
            assert peer.seqnos == [1]

    def test_what_must_be_on_disk_is_said_when_it_is(self, replica: RunningNode) -> None:
        """And nothing that came after it is reported before that."""
        with Controller(replica.port) as peer:
            opaque = peer.begin()
            replica.stop_persistence()
            levels = [MAJORITY, PERSIST, MAJORITY]
            for seqno, level in enumerate(levels, 1):
                peer.send(marker(opaque, seqno, seqno))
                sent = self.prepare(opaque, seqno, key=b"k%d" % seqno, durability=level)
                assert peer.status_of(sent) == 0
            assert peer.seqnos == [1]
            replica.start_persistence()
            while peer.seqnos[-1] != 3:
                peer.status_of(marker(opaque, 4, 5))
            assert set(peer.seqnos) <= {1, 2, 3}

    def test_a_new_stream_hears_of_it_again(self, replica: RunningNode) -> None:
        with Controller(replica.port) as peer:
            opaque = peer.begin()
            peer.send(marker(opaque, 0, 1))
            assert peer.status_of(self.prepare(opaque, 1)) == 0
        until(lambda: not replica.call(lambda n: n.buckets["default"].receiving), "still connected")
        with Controller(replica.port) as peer:
            opaque = peer.begin()
            assert peer.status_of(marker(opaque, 2, 3)) == 0
            assert peer.seqnos == [1]

    @pytest.mark.parametrize("decision", ["abort", "mutation", "deletion"])
    def test_other_ends(self, replica: RunningNode, decision: str) -> None:
        with Controller(replica.port) as peer:
            opaque = peer.begin()
            peer.send(marker(opaque, 0, 1))
            assert peer.status_of(self.prepare(opaque, 1)) == 0
            peer.send(marker(opaque, 2, 9, int(MarkerFlag.DISK)))
            sent: Any = {
                "abort": DcpAbort(key=b"k", prepared_seqno=1, abort_seqno=9, opaque=opaque),
                "mutation": mutation(opaque, 9, b"k"),
                "deletion": DcpDeletion(key=b"k", by_seqno=9, rev_seqno=4, cas=78, opaque=opaque),
            }[decision]
            assert peer.status_of(sent) == 0
            assert undecided(replica) == []
            assert (replica.get(b"k", vbucket=0) is not None) == (decision == "mutation")

    def test_a_producer_that_knows_nothing_of_it(self, replica: RunningNode) -> None:
        with Controller(replica.port, controls=Status.EINVAL) as peer:
            opaque = peer.begin()
            peer.send(marker(opaque, 0, 1))
            assert peer.status_of(self.prepare(opaque, 1)) == Status.NOT_SUPPORTED


class TestClients:
    def open(self, *chain: int) -> tuple[Bench, Any]:
        bench = Bench(vbuckets=1)
        addresses = [NodeAddress(port=1, host="a"), NodeAddress(port=2, host="b")]
        bench.node.set_map(
            "default", bucket_map("default", addresses, [list(chain)], epoch=2, rev=1, this_node=0)
        )
        session = bench.session()
        from tailrace.wire.admin import Hello

        codes = (Feature.ALT_REQUEST_SUPPORT, Feature.XERROR, Feature.UNORDERED_EXECUTION)
        features = (*codes, Feature.SYNC_REPLICATION, Feature.MUTATION_SEQNO)
        ask(bench, session, Hello(value=b"".join(int(code).to_bytes(2, "big") for code in features)))
        return bench, session

    def test_reads_have_the_old_value_and_other_writes_wait(self) -> None:
        bench, session = self.open(0, 1)
        ask(bench, session, Set(key=b"k", value=b"old"))
        assert ask(bench, session, durable_set(b"k", b"new", 5)) == []
        bench.run_jobs()
        (answer,) = ask(bench, session, Get(key=b"k", opaque=6))
        assert answer.value == b"old"
        for refused in (Set(key=b"k", value=b"x"), Delete(key=b"k"), durable_set(b"k", b"x", 7)):
            (answer,) = ask(bench, session, refused)
            assert answer.status == Status.SYNC_WRITE_IN_PROGRESS
        bench.node.buckets["default"].durability.reached(0, "b:2", 2)
        (answer,) = take(session)
        assert (answer.opaque, answer.status) == (5, 0)
        assert int.from_bytes(answer.body[8:16], "big") == 3, "the seqno of the commit"
        (answer,) = ask(bench, session, Get(key=b"k", opaque=8))
        assert answer.value == b"new"

    def test_it_is_given_up_in_time_also_when_the_client_is_gone(self) -> None:
        bench, session = self.open(0, 1)
        ask(bench, session, durable_set(b"k", b"v", 5, timeout_ms=500))
        session.close("gone")
        bench.advance(0.4)
        vbucket = bench.node.buckets["default"].store.vbuckets[0]
        assert vbucket is not None
        assert len(vbucket.undecided) == 1
        bench.advance(0.2)
        assert vbucket.undecided == []
        assert vbucket.get_any(b"\0k") is None
        (answer,) = ask(bench, bench.session(), Set(key=b"k", value=b"v"))
        assert answer.status == 0

    def test_it_is_committed_also_when_the_client_is_gone(self) -> None:
        bench, session = self.open(0, 1)
        ask(bench, session, durable_set(b"k", b"v", 5))
        session.close("gone")
        bench.run_jobs()
        bench.node.buckets["default"].durability.reached(0, "b:2", 1)
        (answer,) = ask(bench, bench.session(), Get(key=b"k"))
        assert answer.value == b"v"

    def test_too_few_copies_are_left(self) -> None:
        bench, session = self.open(0, 1)
        ask(bench, session, durable_set(b"k", b"v", 5))
        addresses = [NodeAddress(port=1, host="a"), NodeAddress(port=2, host="b")]
        made = bucket_map("default", addresses, [[0, -1]], epoch=2, rev=2, this_node=0)
        bench.node.set_map("default", made)
        assert [frame.status for frame in take(session)] == [Status.SYNC_WRITE_AMBIGUOUS]
        vbucket = bench.node.buckets["default"].store.vbuckets[0]
        assert vbucket is not None
        assert vbucket.undecided == []

    def test_a_refused_one_leaves_no_trace(self) -> None:
        """The next write is a plain one."""
        bench, session = self.open(0)
        (answer,) = ask(bench, session, Delete(key=b"none", framing=framing(), opaque=5))
        assert answer.status == Status.KEY_ENOENT
        (answer,) = ask(bench, session, Set(key=b"k", value=b"v", opaque=6))
        assert answer.status == 0
        vbucket = bench.node.buckets["default"].store.vbuckets[0]
        assert vbucket is not None
        assert (vbucket.high_seqno, vbucket.undecided) == (1, [])

    def test_a_rewind_behind_its_commit_commits_it_again(self, node: RunningNode) -> None:
        with Client(node) as client:
            assert client.status(b"k", b"v") == Status.SUCCESS
        node.rewind(0, 1)
        until(lambda: node.high_seqno(0) == 2 and not undecided(node), "it was not committed again")
        assert node.get(b"k") == b"v"


class TestFailover:
    def test_the_new_active_finishes_what_it_has(self, nodes: list[RunningNode]) -> None:
        active, second, third = nodes
        active.set(b"k", b"old")
        active.stop_persistence()  # so that it is not committed there
        for replica in (second, third):
            replica.replicate([0], active)
        with prepare(active):
            until(lambda: undecided(second) == undecided(third) == [2], "the replicas did not get it")
        active.stop()
        third.replicate([0], None)
        second.replicate([0], None)
        set_map([second, third], [0, 1])
        second.set_vbucket_state(0, VBucketState.ACTIVE)
        with Client(second) as client:
            for request in (Get(key=b"k"), Set(key=b"k", value=b"x"), durable_set(b"k", b"x")):
                assert client.refused(request) == Status.SYNC_WRITE_RE_COMMIT_IN_PROGRESS
            third.replicate([0], second)
            until(lambda: not undecided(second), "it was not committed")
            assert client.ok(Get(key=b"k")).value == b"new"
        until(lambda: third.get(b"k", vbucket=0) == b"new", "the replica did not hear of it")
        assert third.high_seqno(0) == second.high_seqno(0)

    def test_a_replica_that_did_not_hear_of_the_end_hears_of_it_from_the_new_active(
        self, nodes: list[RunningNode]
    ) -> None:
        """It goes back to what both have, and no prepare is left over."""
        active, second, third = nodes
        for replica in (second, third):
            replica.replicate([0], active)
        with Client(active) as client:
            assert client.status(b"a") == Status.SUCCESS
        until(lambda: third.high_seqno(0) == second.high_seqno(0) == 2, "not replicated")
        second.replicate([0], None)
        with Client(active) as client:
            assert client.status(b"b") == Status.SUCCESS
        until(lambda: third.high_seqno(0) == 4, "not replicated")
        active.stop()
        set_map([second, third], [0, 1])
        second.set_vbucket_state(0, VBucketState.ACTIVE)
        third.replicate([0], second)
        with Client(second) as client:
            assert client.status(b"c") == Status.SUCCESS
        until(lambda: third.get(b"c", vbucket=0) is not None, "not replicated")
        assert undecided(third) == undecided(second) == []
        assert third.get(b"b", vbucket=0) is None

    @pytest.mark.parametrize("how", ["stop", "kill"])
    def test_a_restart_finishes_it(self, node: RunningNode, how: str) -> None:
        set_map([node], [0, -1])
        made = bucket_map(
            "default",
            [NodeAddress(port=node.port, host="127.0.0.1"), NodeAddress(port=1, host="127.0.0.1")],
            [[0, 1]],
            epoch=3,
            rev=1,
            this_node=0,
        )
        node.call(lambda n: n.set_map("default", made))
        with prepare(node):
            node.persist()
        getattr(node, how)()
        node.start()
        until(lambda: node.get(b"k") == b"new", "it was not committed")
        assert undecided(node) == []
