"""Bulk operations: each one's own answer decides, whatever a server refuses, delays, reorders or drops."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.fake_server import FakeServer
from tailrace.client.kv import KvClient
from tailrace.client.load import MadeUp
from tailrace.client.pipeline import AnswerKind, Answers, Pipeline, answers_in, judge
from tailrace.client.retry import RETRIED
from tailrace.client.write_batches import batched
from tailrace.errors import ConnectError, RemoteProtocolError, StatusError
from tailrace.wire.codes import Magic, Op, Status
from tailrace.wire.framing import Framer
from tailrace.wire.header import Frame
from tailrace.wire.kv import Delete, Set
from tailrace.wire.message import Message, Response

REFUSALS = sorted(int(status) for status in RETRIED)
VBUCKETS = 8


class Peer:
    """A node of the model: does what it is told, or refuses it, and answers in any order."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.answers: list[bytes] = []
        self.framer = Framer()

    def receive(self, data: bytes) -> None:
        self.framer.feed(data)
        for frame in self.framer.frames():
            status = self.world.handle(self, frame)
            self.answers.append(Response(opcode=frame.opcode, status=status, opaque=frame.opaque).encode())


class World:
    """Two nodes, the owner of each vbucket, and all documents."""

    def __init__(self, rng: random.Random, refuse: float, move: float, lose: float) -> None:
        self.rng = rng
        self.refuse, self.move, self.lose = refuse, move, lose
        self.peers = [Peer(self, "a"), Peer(self, "b")]
        self.owners = [rng.randrange(2) for _ in range(VBUCKETS)]
        self.map = list(self.owners)
        """As the client knows it."""
        self.documents: dict[bytes, bytes] = {}
        self.done = self.missed = 0
        self.lost = False

    def handle(self, peer: Peer, frame: Frame) -> int:
        if self.rng.random() < self.move:
            self.owners[frame.vbucket] = self.rng.randrange(2)
        if self.peers[self.owners[frame.vbucket]] is not peer:
            return Status.NOT_MY_VBUCKET
        if self.rng.random() < self.refuse:
            return self.rng.choice(REFUSALS)
        if frame.opcode == Op.SET:
            self.documents[frame.key] = frame.value
        elif self.documents.pop(frame.key, None) is None:
            self.missed += 1
            return Status.KEY_ENOENT
        self.done += 1
        return Status.SUCCESS


operations = st.lists(
    st.tuples(st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f"]), st.booleans()), max_size=60
)


@given(
    operations=operations,
    seed=st.integers(0, 1 << 32),
    most=st.integers(1, 20),
    refuse=st.sampled_from([0.0, 0.2, 0.8]),
    move=st.sampled_from([0.0, 0.1]),
    lose=st.sampled_from([0.0, 0.1]),
)
def test_every_operation_is_done_in_the_order_of_its_key(
    *, operations: list[tuple[bytes, bool]], seed: int, most: int, refuse: float, move: float, lose: float
) -> None:
    rng = random.Random(seed)
    world = World(rng, refuse, move, lose)
    wanted: dict[bytes, bytes] = {}
    requests: list[Message] = []
    for number, (key, is_set) in enumerate(operations):
        value = b"%d" % number
        vbucket = key[0] % VBUCKETS
        if is_set:
            requests.append(Set(key=key, value=value, vbucket=vbucket))
            wanted[key] = value
        else:
            requests.append(Delete(key=key, vbucket=vbucket))
            wanted.pop(key, None)
    pipeline: Pipeline[Peer] = Pipeline(rng=rng, patience_s=1e9)
    batches = list(batched(requests, most))
    finished = []
    now = 0.0
    while batches or not pipeline.is_empty:
        now += 0.01
        if batches and pipeline.has_room_for(batches[0]):
            pipeline.add(batches.pop(0))
        for peer, data in pipeline.to_send(now, lambda vbucket: world.peers[world.map[vbucket]]):
            peer.receive(bytes(data))
        for peer in world.peers:
            rng.shuffle(peer.answers)
            here = rng.randint(0, len(peer.answers))
            framer = Framer()
            framer.feed(b"".join(peer.answers[:here]))
            del peer.answers[:here]
            for answers in answers_in(framer):
                assert isinstance(answers, Answers)
                pipeline.receive(peer, answers, now)
            if rng.random() < world.lose:
                peer.answers.clear()
                world.lost |= pipeline.lost(peer, now) > 0
        if pipeline.is_misled:
            pipeline.is_misled = False
            world.map = list(world.owners)
        finished += pipeline.finished()
    assert world.documents == wanted
    assert sum(written.answered for written in finished) == len(operations)
    assert pipeline.taken == sum(written.taken for written in finished)
    if not world.lost:  # an operation whose answer is lost is repeated, and may be found done
        assert pipeline.taken == world.done
        assert sum(written.needless for written in finished) == world.missed


def frames(*opaques: int, opcode: int = Op.SET, status: int = 0, extras: bytes = b"") -> bytes:
    return b"".join(
        Frame(
            Magic.RESPONSE, opcode, vbucket=status, opaque=number, extras_length=len(extras), body=extras
        ).encode()
        for number in opaques
    )


@given(
    parts=st.lists(
        st.tuples(
            st.sampled_from([Op.SET, Op.DELETE]),
            st.sampled_from([0, 0x86, 0x01]),
            st.integers(1, 40),
            st.sampled_from([b"", b"x" * 16]),
        ),
        max_size=8,
    ),
    cuts=st.lists(st.integers(0, 5000), max_size=5),
)
def test_answers_are_the_same_one_by_one_and_many_at_once(
    parts: list[tuple[int, int, int, bytes]], cuts: list[int]
) -> None:
    data, wanted, opaque = b"", [], 0x8000_0000
    for opcode, status, count, extras in parts:
        data += frames(*range(opaque, opaque + count), opcode=opcode, status=status, extras=extras)
        wanted += [(opcode, status, number) for number in range(opaque, opaque + count)]
        opaque += count
    framer, got = Framer(), []
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    for start, end in itertools.pairwise(edges):
        framer.feed(data[start:end])
        for answers in answers_in(framer):
            got += [(answers.opcode, answers.status, number) for number in answers.opaques.tolist()]
    assert got == wanted


def under_way(count: int = 3, **options: Any) -> Pipeline[Any]:
    pipeline = Pipeline(rng=random.Random(1), patience_s=5.0, **options)
    (batch,) = batched(Set(key=b"%d" % number, value=b"v", vbucket=0) for number in range(count))
    pipeline.add(batch)
    assert len(pipeline.to_send(0.0, lambda _: "node")) == 1
    return pipeline


def answer(
    pipeline: Pipeline[Any],
    *opaques: int,
    status: int = 0,
    opcode: int = Op.SET,
    peer: str = "node",
    now: float = 0.0,
) -> None:
    framer = Framer()
    framer.feed(frames(*(0x8000_0000 + number for number in opaques), status=status, opcode=opcode))
    for answers in answers_in(framer):
        assert isinstance(answers, Answers)
        pipeline.receive(peer, answers, now)


def test_a_refused_operation_is_sent_again_after_a_pause_and_alone() -> None:
    pipeline = under_way()
    answer(pipeline, 0, 2)
    answer(pipeline, 1, status=0x86)
    assert pipeline.finished() == []
    assert not pipeline.has_room_for(next(batched([Set(key=b"x", vbucket=0)])))
    retry_at = pipeline.next_timer()
    assert retry_at is not None and retry_at > 0
    assert pipeline.to_send(retry_at / 2, lambda _: "node") == []
    ((_, data),) = pipeline.to_send(retry_at, lambda _: "node")
    framer = Framer()
    framer.feed(data)
    assert [frame.opaque for frame in framer.frames()] == [0x8000_0001]
    answer(pipeline, 1)
    assert pipeline.finished() == [(3, 0)]
    assert pipeline.is_empty


def test_pauses_grow_while_little_is_taken_and_end() -> None:
    pipeline = under_way(count=1)
    now, pauses = 0.0, []
    with pytest.raises(StatusError, match="1 writes are refused for 5 s, after 0 were taken") as error:
        while True:
            answer(pipeline, 0, status=0x86, now=now)
            due = pipeline.next_timer()
            assert due is not None
            pauses.append(due - now)
            now = due
            pipeline.to_send(now, lambda _: "node")
    assert error.value.status == 0x86
    assert pauses[0] < 0.02
    assert 0.25 <= max(pauses) <= 0.5
    assert 10 < len(pauses) < 40


def test_what_can_never_be_done_is_an_error() -> None:
    pipeline = under_way()
    answer(pipeline, 0)
    with pytest.raises(StatusError, match="after 1 were taken"):
        answer(pipeline, 1, status=Status.E2BIG)


@pytest.mark.parametrize(
    "wrong",
    [
        {"opaques": (0, 0)},
        {"opaques": (3,)},
        {"opaques": (0,), "opcode": Op.DELETE},
        {"opaques": (0,), "peer": "another"},
        {"opaques": (*range(9), 3)},
    ],
)
def test_an_answer_that_fits_no_request(wrong: dict[str, Any]) -> None:
    pipeline = under_way(count=9 if len(wrong["opaques"]) > 2 else 3)
    with pytest.raises(RemoteProtocolError):
        answer(pipeline, *wrong.pop("opaques"), **wrong)


def test_opaques_begin_anew_before_they_end() -> None:
    pipeline = Pipeline(rng=random.Random(1), patience_s=5.0, first_opaque=0xFFFF_FFFD)
    for _ in range(2):
        (batch,) = batched(Set(key=b"%d" % number, value=b"v", vbucket=0) for number in range(2))
        pipeline.add(batch)
        ((_, data),) = pipeline.to_send(0.0, lambda _: "node")
        framer = Framer()
        framer.feed(data)
        opaques = [frame.opaque for frame in framer.frames()]
        framer.feed(frames(*opaques))
        for answers in answers_in(framer):
            assert isinstance(answers, Answers)
            pipeline.receive("node", answers, 0.0)
        assert pipeline.finished() == [(2, 0)]
    assert opaques == [0x8000_0000, 0x8000_0001]


def test_what_answers_say() -> None:
    assert judge(Op.SET, 0) == AnswerKind.TAKEN
    assert judge(Op.DELETE, Status.KEY_ENOENT) == AnswerKind.NEEDLESS
    assert judge(Op.SET_WITH_META, Status.KEY_EEXISTS) == AnswerKind.NEEDLESS
    assert judge(Op.SET, Status.KEY_EEXISTS) == AnswerKind.FAILED
    assert {judge(Op.SET, status) for status in REFUSALS} == {AnswerKind.AGAIN}


# over sockets


class Unruly:
    """Answers writes late, in any order, and refuses some of them."""

    def __init__(self, seed: int, refuse: float) -> None:
        self.rng = random.Random(seed)
        self.refuse = refuse
        self.documents: dict[bytes, bytes] = {}
        self.taken = 0
        self.held: list[bytes] = []
        self.lock = threading.Lock()
        self.stopped = threading.Event()

    def __call__(self, server: FakeServer, frame: Frame) -> None:
        with self.lock:
            status = 0
            if self.rng.random() < self.refuse:
                status = self.rng.choice(REFUSALS)
            else:
                self.taken += 1
                self.documents[frame.key] = frame.value
            self.held.append(Response(opcode=frame.opcode, status=status, opaque=frame.opaque).encode())

    def run(self, server: FakeServer) -> None:
        while not self.stopped.wait(0.002):
            with self.lock:
                self.rng.shuffle(self.held)
                count = self.rng.randint(0, len(self.held))
                some, self.held = self.held[:count], self.held[count:]
            if some:
                server.connections[-1].send(*some)


@pytest.mark.parametrize("seed", range(4))
def test_a_server_that_refuses_delays_and_reorders(seed: int) -> None:
    unruly = Unruly(seed, refuse=0.3)
    with FakeServer(lambda *_: None, vbuckets=4) as server:
        server.answers[Op.SET] = unruly
        thread = threading.Thread(target=unruly.run, args=(server,), daemon=True)
        thread.start()
        try:
            with KvClient(server.url) as client:
                plan = MadeUp(3000, 100)
                batches = plan.batches(4, collections=client.collections, json_type=True, most=700)
                written = list(client.write_many(batches))
                assert client.manifest() == {"uid": "0", "scopes": []}  # the connection is as good as new
        finally:
            unruly.stopped.set()
            thread.join(10)
    assert sum(part.taken for part in written) == unruly.taken == len(unruly.documents) == 3000


def test_questions_between_the_writes(seed: int = 5) -> None:
    """The maker of the batches may ask the same server something while others are under way."""
    unruly = Unruly(seed, refuse=0.3)
    with FakeServer(lambda *_: None, vbuckets=4) as server:
        server.answers[Op.SET] = unruly
        thread = threading.Thread(target=unruly.run, args=(server,), daemon=True)
        thread.start()
        try:
            with KvClient(server.url) as client:

                def requests() -> Iterator[Set]:
                    for number in range(600):
                        if number % 50 == 0:
                            assert client.manifest()["uid"] == "0"
                        yield Set(key=b"\0%d" % number, value=b"v", vbucket=number % 4)

                written = list(client.write_many(batched(requests(), 40)))
        finally:
            unruly.stopped.set()
            thread.join(10)
    assert sum(part.taken for part in written) == len(unruly.documents) == 600


def test_answers_that_are_longer_than_requests_hold_nobody_up() -> None:
    """A refusal may carry a cluster map: a client that sent without reading would wait for ever."""
    config = b"x" * 20_000
    counts = {"refused": 0}

    def refuse_once(server: FakeServer, frame: Frame) -> bytes:
        if counts["refused"] < 2000:
            counts["refused"] += 1
            return Frame(
                Magic.RESPONSE, frame.opcode, vbucket=Status.NOT_MY_VBUCKET, opaque=frame.opaque, body=config
            ).encode()
        return server.answer(frame)

    with FakeServer(lambda *_: None, vbuckets=4) as server, KvClient(server.url) as client:
        server.answers[Op.SET] = refuse_once
        batches = MadeUp(2000, 2000).batches(4, collections=True, json_type=True, most=2000)
        assert sum(part.taken for part in client.write_many(batches)) == 2000


def test_a_server_that_goes_silent_is_an_error_and_the_client_can_go_on() -> None:
    with FakeServer(lambda *_: None, vbuckets=4) as server, KvClient(server.url, timeout_s=0.5) as client:
        server.answers[Op.SET] = None
        batches = MadeUp(10).batches(4, collections=True, json_type=True, most=10)
        with pytest.raises(ConnectError, match="does not answer"):
            list(client.write_many(batches))
        del server.answers[Op.SET]
        assert client.set("k", b"v").vbucket in range(4)


def test_a_refusal_ends_the_writing_and_leaves_the_client_usable() -> None:
    with FakeServer(lambda *_: None, vbuckets=4) as server, KvClient(server.url) as client:
        server.answers[Op.SET] = lambda _, frame: Response(
            opcode=frame.opcode, status=Status.EACCESS, opaque=frame.opaque
        ).encode()
        batches = MadeUp(100).batches(4, collections=True, json_type=True, most=10)
        with pytest.raises(StatusError):
            list(client.write_many(batches))
        del server.answers[Op.SET]
        assert client.set("k", b"v").vbucket in range(4)
