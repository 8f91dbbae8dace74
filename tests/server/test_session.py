"""A session without sockets: order of answers, what is held up, timers, limits."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.serverkit import Bench, ask, decode, frames_of, take
from tailrace.wire import admin, dcp, kv, tap
from tailrace.wire.codes import Datatype, DurabilityLevel, Feature, Op, RequestFrameId, Status
from tailrace.wire.fields import Durability, FrameInfo, encode_frame_infos
from tailrace.wire.header import HEADER
from tailrace.wire.message import Message


def hello(*features: int) -> admin.Hello:
    return admin.Hello(value=b"".join(struct.pack(">H", feature) for feature in features))


def durable(timeout_ms: int | None = None) -> bytes:
    return encode_frame_infos([Durability(DurabilityLevel.PERSIST_TO_MAJORITY, timeout_ms).encode()])


def test_a_request_has_one_durability() -> None:
    bench = Bench()
    session = bench.session()
    ask(bench, session, hello(Feature.ALT_REQUEST_SUPPORT, Feature.SYNC_REPLICATION))
    (answer,) = ask(bench, session, kv.Set(key=b"a", value=b"1", framing=durable() + durable(500)))
    assert answer.status == Status.EINVAL
    (answer,) = ask(bench, session, kv.Get(key=b"a"))
    assert answer.status == Status.KEY_ENOENT


def test_requests_of_a_read_are_answered_together_and_in_order() -> None:
    bench = Bench()
    session = bench.session()
    frames = ask(
        bench,
        session,
        kv.Set(key=b"a", value=b"1", opaque=1),
        kv.Get(key=b"a", opaque=2),
        kv.GetQ(key=b"missing", opaque=3),
        kv.Get(key=b"missing", opaque=4),
        kv.SetQ(key=b"b", value=b"2", opaque=5),
        kv.GetK(key=b"b", opaque=6),
        admin.Noop(opaque=7),
    )
    assert [(frame.opaque, frame.status) for frame in frames] == [
        (1, 0),
        (2, 0),
        (4, Status.KEY_ENOENT),
        (6, 0),
        (7, 0),
    ]
    assert frames[1].value == b"1"
    assert (frames[3].key, frames[3].value) == (b"b", b"2")


SCRIPT = b"".join(
    message.encode()
    for message in (
        kv.Set(key=b"a", value=b"x" * 300, opaque=1),
        kv.Get(key=b"a", opaque=2),
        admin.Version(opaque=3),
        kv.Increment(key=b"n", initial=7, opaque=4),
        kv.Get(key=b"a", opaque=5),
        admin.Stat(key=b"vbucket", opaque=6),
        kv.Delete(key=b"a", opaque=7),
        kv.Get(key=b"a", opaque=8),
    )
)


@given(st.lists(st.integers(0, len(SCRIPT)), max_size=12))
def test_cuts_don_t_matter(cuts: list[int]) -> None:
    """However the bytes are cut on the way, the answers are the same."""

    def answers(places: list[int]) -> list[tuple[int, int, bytes, bool]]:
        bench = Bench()
        session = bench.session()
        edges = [0, *sorted(places), len(SCRIPT)]
        out = b""
        for start, end in pairwise(edges):
            session.receive_data(SCRIPT[start:end], bench.now)
            out += b"".join(map(bytes, session.data_to_send()))
        return [(frame.opaque, frame.status, frame.value, frame.cas != 0) for frame in frames_of(out)]

    assert answers(cuts) == answers([])


def test_byte_by_byte() -> None:
    bench = Bench()
    session = bench.session()
    for at in range(len(SCRIPT)):
        session.receive_data(SCRIPT[at : at + 1], bench.now)
    assert {answer.opaque for answer in take(session)} == set(range(1, 9))


def test_an_answer_that_waits_for_the_disk_keeps_its_place() -> None:
    bench = Bench()
    session = bench.session()
    frames = ask(
        bench,
        session,
        kv.Set(key=b"a", value=b"1", opaque=1),
        kv.Set(key=b"b", value=b"2", opaque=2, framing=durable()),
        kv.Get(key=b"b", opaque=3),
        admin.Noop(opaque=4),
    )
    assert [frame.opaque for frame in frames] == [1]
    assert session.unfinished == 1
    woken = []
    session.wake = lambda: woken.append(1)
    bench.run_jobs()
    assert woken
    assert [answer.opaque for answer in take(session)] == [2, 3, 4]
    assert session.unfinished == 0


def test_one_commit_for_all_that_wait() -> None:
    bench = Bench()
    sessions = [bench.session() for _ in range(3)]
    for number, session in enumerate(sessions):
        for at in range(5):
            key = b"k%d-%d" % (number, at)
            ask(bench, session, kv.Set(key=key, value=b"v", opaque=at, framing=durable()))
    assert len(bench.jobs) == 1  # the first began one; the others are taken by the next
    bench.run_jobs()
    assert bench.node.buckets["default"].work.flush_times.count == 2
    assert all(len(take(session)) == 5 for session in sessions)


def test_too_many_unfinished_commands_hold_up_the_rest() -> None:
    bench = Bench(max_in_flight=3)
    session = bench.session()
    requests = [kv.Set(key=b"k%d" % at, value=b"v", opaque=at, framing=durable()) for at in range(10)]
    assert ask(bench, session, *requests) == []
    assert session.unfinished == 3
    assert not session.wants_data
    seen = []
    while len(seen) < 10:
        bench.run_jobs()
        seen += [answer.opaque for answer in take(session)]
        assert session.unfinished <= 3
    assert seen == list(range(10))
    assert session.wants_data


def test_a_peer_that_does_not_read_is_not_read() -> None:
    bench = Bench(max_output=65536)
    session = bench.session()
    ask(bench, session, kv.Set(key=b"big", value=b"x" * 20_000))
    session.receive_data(b"".join(kv.Get(key=b"big", opaque=at).encode() for at in range(200)), bench.now)
    assert not session.wants_data
    seen = []
    while parts := session.data_to_send(1):
        data = b"".join(map(bytes, parts))
        assert len(data) <= 65536 + 20_000 + 100  # never much more than the limit at once
        seen += [frame.opaque for frame in frames_of(data)]
    assert seen == list(range(200))
    assert session.wants_data


def test_durable_write_times_out_as_ambiguous() -> None:
    bench = Bench()
    session = bench.session()
    ask(bench, session, hello(Feature.XERROR))
    ask(bench, session, kv.Set(key=b"a", value=b"1", opaque=9, framing=durable(500)))
    bench.advance(0.4)
    assert take(session) == []
    bench.advance(0.2)
    (answer,) = take(session)
    assert (answer.opaque, answer.status) == (9, Status.SYNC_WRITE_AMBIGUOUS)
    bench.run_jobs()  # it gets there after all; nobody is told twice
    assert take(session) == []


def test_seqno_persistence_waits_and_times_out() -> None:
    bench = Bench(persist_timeout=5)
    session = bench.session()
    ask(bench, session, kv.Set(key=b"a", value=b"1"))
    assert ask(bench, session, admin.SeqnoPersistence(seqno=1, opaque=1)) == []
    bench.run_jobs()
    assert [answer.status for answer in take(session)] == [0]
    assert [answer.status for answer in ask(bench, session, admin.SeqnoPersistence(seqno=1))] == [0]
    assert ask(bench, session, admin.SeqnoPersistence(seqno=99, opaque=2)) == []
    bench.advance(5.1)
    assert [(answer.opaque, answer.status) for answer in take(session)] == [(2, Status.ETMPFAIL)]


def test_stopped_persistence_answers_nothing_as_persisted() -> None:
    bench = Bench(persist_timeout=5)
    session = bench.session()
    ask(bench, session, admin.StopPersistence(), kv.Set(key=b"a", value=b"1"))
    assert ask(bench, session, admin.SeqnoPersistence(seqno=1)) == []
    bench.run_jobs()
    assert take(session) == []
    assert ask(bench, session, admin.StartPersistence(opaque=5)) == []  # in its place behind the other
    bench.run_jobs()
    assert [answer.status for answer in take(session)] == [0, 0]


def test_a_silent_peer_is_closed() -> None:
    bench = Bench(idle_timeout=60)
    session = bench.session()
    bench.advance(50)
    ask(bench, session, admin.Noop())
    bench.advance(59)
    assert not session.closed
    session.receive_data(b"\x80\x00\x00", bench.now)  # less than a header is not a frame
    bench.advance(2)
    assert session.closed
    assert "idle" in (session.close_reason or "")


def test_who_sends_large_values_only_is_not_idle() -> None:
    bench = Bench(idle_timeout=60)
    session = bench.session()
    request = kv.Set(key=b"k", value=bytes(2 << 20)).encode()
    for _ in range(4):
        bench.clock.advance(20)
        for piece in (request[: 1 << 20], request[1 << 20 :]):  # which ends with the request
            session.receive_data(piece, bench.now)
        assert [frame.status for frame in take(session)] == [0]
        session.handle_timer(bench.now)
        assert not session.closed


def test_idle_timeout_can_be_off() -> None:
    bench = Bench(idle_timeout=0)
    session = bench.session()
    bench.advance(1_000)
    assert not session.closed


def test_who_must_log_in_and_doesn_t_is_closed() -> None:
    bench = Bench(users={"ada": "secret"}, auth_timeout=10)
    session = bench.session()
    for _ in range(9):
        ask(bench, session, hello())
        bench.advance(1)
    assert not session.closed
    bench.advance(2)
    assert session.closed


def plain(user: str, password: str) -> admin.SaslAuth:
    return admin.SaslAuth(key=b"PLAIN", value=f"\0{user}\0{password}".encode())


def test_login_is_needed_before_anything_else() -> None:
    bench = Bench(users={"ada": "secret"})
    session = bench.session()
    (refused,) = ask(bench, session, hello(Feature.XERROR), kv.Get(key=b"a"))[1:]
    assert refused.status == Status.EACCESS
    # what may come before
    answers = ask(
        bench, session, hello(Feature.XERROR), admin.SaslListMechs(), admin.GetErrorMap(value=b"\0\2")
    )
    assert [frame.status for frame in answers] == [0, 0, 0]
    assert answers[1].value == b"SCRAM-SHA512 SCRAM-SHA256 SCRAM-SHA1 PLAIN"
    assert ask(bench, session, plain("ada", "secret"))[0].status == 0
    assert ask(bench, session, kv.Set(key=b"a", value=b"1"))[0].status == 0
    # a failed attempt takes the login away
    assert ask(bench, session, plain("ada", "wrong"))[0].status == Status.AUTH_ERROR
    assert ask(bench, session, kv.Get(key=b"a"))[0].status == Status.EACCESS


def test_a_login_that_begins_ends_the_one_before() -> None:
    bench = Bench(users={"ada": "secret"})
    session = bench.session()
    ask(bench, session, hello(Feature.XERROR), plain("ada", "secret"))
    begun = ask(bench, session, admin.SaslAuth(key=b"SCRAM-SHA1", value=b"n,,n=bob,r=x"))
    assert begun[0].status == Status.AUTH_CONTINUE
    assert ask(bench, session, kv.Get(key=b"a"))[0].status == Status.EACCESS


def test_who_begins_a_second_login_has_the_time_of_a_first_one() -> None:
    bench = Bench(users={"ada": "secret"}, auth_timeout=10, idle_timeout=0)
    session = bench.session()
    ask(bench, session, plain("ada", "secret"))
    bench.advance(60)
    ask(bench, session, admin.SaslAuth(key=b"SCRAM-SHA1", value=b"n,,n=ada,r=x"))
    bench.advance(9)
    assert not session.closed
    bench.advance(2)
    assert session.closed


STREAM_OPENINGS: dict[str, list[Message]] = {
    "dcp producer": [dcp.DcpOpen(key=b"s", flags=1), dcp.DcpStreamRequest(end_seqno=2**64 - 1)],
    "dcp replica": [dcp.DcpOpen(key=b"s", flags=0)],
    "tap": [tap.TapConnect(key=b"s")],
}


@pytest.mark.parametrize("opening", STREAM_OPENINGS)
@pytest.mark.parametrize("password", ["secret", "wrong"])
@pytest.mark.parametrize("users", [{"ada": "secret"}, None])
def test_a_login_beside_a_change_stream_is_refused(
    opening: str, password: str, users: dict[str, str]
) -> None:
    """The user who opened the stream may go on reading it; nobody else takes it over, by login or without."""
    bench = Bench(users=users)
    session = bench.session()
    ask(bench, session, hello(Feature.XERROR), plain("ada", "secret") if users else admin.Noop())
    ask(bench, session, *STREAM_OPENINGS[opening])
    assert session.handler is not None
    attempts = [
        plain("ada", password),
        admin.SaslAuth(key=b"SCRAM-SHA1", value=b"n,,n=ada,r=x"),
        admin.SaslStep(key=b"SCRAM-SHA1", value=b"c=biws,r=x,p=AAAA"),
    ]
    for _ in range(bench.settings.max_logins):
        for login in attempts:
            answers = [frame for frame in ask(bench, session, login) if frame.opcode == login.OPCODE]
            assert [frame.status for frame in answers] == [Status.NOT_SUPPORTED]
    assert session.authenticated
    assert session.handler is not None
    assert not session.closed


def test_unknown_opcode_before_login_is_refused_for_the_login() -> None:
    bench = Bench(users={"ada": "secret"})
    session = bench.session()
    ask(bench, session, hello(Feature.XERROR))
    assert ask(bench, session, HEADER.pack(0x80, 0x77, 0, 0, 0, 0, 0, 1, 0))[0].status == Status.EACCESS


def test_a_peer_without_extended_errors_is_disconnected_instead() -> None:
    bench = Bench(users={"ada": "secret"})
    session = bench.session()
    assert ask(bench, session, kv.Get(key=b"a")) == []
    assert session.closed


def test_too_many_failed_logins_close() -> None:
    bench = Bench(users={"ada": "secret"}, max_logins=3)
    session = bench.session()
    answers = ask(bench, session, *[plain("ada", "wrong")] * 5)
    assert [frame.status for frame in answers] == [Status.AUTH_ERROR] * 3
    assert session.closed


def test_frames_are_small_before_the_login() -> None:
    bench = Bench(users={"ada": "secret"})
    session = bench.session()
    session.receive_data(HEADER.pack(0x80, Op.SASL_AUTH, 5, 0, 0, 0, 17_000, 0, 0), bench.now)
    assert session.closed  # as soon as the header is there
    session = bench.session()
    ask(bench, session, plain("ada", "secret"))
    session.receive_data(HEADER.pack(0x80, Op.SET, 1, 8, 0, 0, 17_000, 0, 0), bench.now)
    assert not session.closed


@pytest.mark.parametrize(
    "data",
    [
        b"\x7f" + bytes(23),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        HEADER.pack(0x80, 0, 10, 0, 0, 0, 5, 0, 0),  # key longer than the body
        HEADER.pack(0x80, 0, 0xFFFF, 0xFF, 0, 0, 0xFFFFFFFF, 0, 0),
        HEADER.pack(0x80, 1, 1, 8, 0, 0, 31 << 20, 0, 0),
        HEADER.pack(0x82, 1, 0, 0, 0, 0, 0, 0, 0),
        HEADER.pack(0x81, 0, 0, 0, 0, 0, 0, 0, 0),  # an answer to nothing
        HEADER.pack(0x08, 1, 0xFF01, 0, 0, 0, 3, 0, 0) + b"abc",  # framing longer than the body
    ],
)
def test_what_can_t_be_framed_closes(data: bytes) -> None:
    bench = Bench()
    other = bench.session()
    session = bench.session()
    answers = ask(bench, session, admin.Noop(opaque=3), data)
    assert [frame.opaque for frame in answers] == [3]
    assert session.closed
    assert ask(bench, other, admin.Noop())[0].status == 0


def test_responses_to_our_notifications_are_ignored() -> None:
    bench = Bench()
    session = bench.session()
    data = HEADER.pack(0x83, 1, 0, 0, 0, 0, 0, 0, 0)
    assert [answer.opcode for answer in ask(bench, session, data, admin.Noop())] == [Op.NOOP]


def test_quit_answers_and_closes_behind_what_is_unfinished() -> None:
    bench = Bench()
    session = bench.session()
    answers = ask(
        bench,
        session,
        kv.Set(key=b"a", value=b"1", opaque=1, framing=durable()),
        admin.Quit(opaque=2),
        admin.Noop(),
    )
    assert answers == []
    assert not session.closed
    bench.run_jobs()
    assert [answer.opaque for answer in take(session)] == [1, 2]
    assert session.closed


def test_quitq_closes_without_a_word() -> None:
    bench = Bench()
    session = bench.session()
    assert ask(bench, session, admin.QuitQ(), admin.Noop()) == []
    assert session.closed


def test_a_lost_connection_lets_go() -> None:
    bench = Bench()
    session = bench.session()
    ask(bench, session, kv.Set(key=b"a", value=b"1", framing=durable()))
    session.connection_lost()
    assert not bench.node.sessions
    bench.run_jobs()  # the answer comes too late, and goes nowhere


def test_connections_are_limited() -> None:
    bench = Bench(max_connections=2)
    first = bench.session()
    bench.session()
    assert bench.node.accept("x", bench.now) is None
    first.connection_lost()
    assert bench.node.accept("x", bench.now) is not None
    assert bench.node.counters.rejected_connections == 1
    (event,) = bench.node.events.recent
    assert (event["event"], event["peer"], event["connections"]) == ("connection_refused", "x", 2)


class TestFraming:
    def test_unknown_frame_info(self) -> None:
        bench = Bench()
        framing = encode_frame_infos([FrameInfo(9, b"")])
        (answer,) = ask(bench, bench.session(), kv.Set(key=b"a", value=b"1", framing=framing))
        assert answer.status == Status.UNKNOWN_FRAME_INFO

    @pytest.mark.parametrize(
        ("framing", "status"),
        [
            (b"\x11\x09", Status.DURABILITY_INVALID_LEVEL),
            (b"\x12\x01\x00", Status.EINVAL),
            (b"\x13\x01\x00\x00", Status.EINVAL),
            (b"\x13\x01\xff\xff", Status.EINVAL),
            (b"\x1f", Status.EINVAL),
            (b"\x14\x01", Status.EINVAL),
            (b"\x51\x01", Status.EINVAL),
            (b"\x01\x01", Status.EINVAL),
            (b"\x44user", Status.EACCESS),
        ],
    )
    def test_wrong_ones(self, framing: bytes, status: int) -> None:
        bench = Bench()
        session = bench.session()
        ask(bench, session, hello(Feature.XERROR))
        answers = ask(bench, session, kv.Set(key=b"a", value=b"1", framing=framing))
        assert [frame.status for frame in answers] == [status]
        assert ask(bench, session, kv.Get(key=b"a"))[0].status == Status.KEY_ENOENT

    def test_durability_of_a_read_makes_no_sense(self) -> None:
        bench = Bench()
        (answer,) = ask(bench, bench.session(), kv.Get(key=b"a", framing=durable()))
        assert answer.status == Status.EINVAL

    def test_preserve_ttl_and_barrier(self) -> None:
        bench = Bench()
        session = bench.session()
        expiry = bench.clock.time_ns() // 10**9 + 5_000_000
        ask(bench, session, kv.Set(key=b"a", value=b"1", expiry=expiry))
        keep = encode_frame_infos([FrameInfo(RequestFrameId.PRESERVE_TTL), FrameInfo(RequestFrameId.BARRIER)])
        ask(bench, session, kv.Set(key=b"a", value=b"2", framing=keep))
        (meta,) = ask(bench, session, kv.GetMeta(key=b"a", version=2))
        assert decode(meta).expiry == expiry
        ask(bench, session, kv.Set(key=b"a", value=b"3"))
        (meta,) = ask(bench, session, kv.GetMeta(key=b"a", version=2))
        assert decode(meta).expiry == 0


def test_a_bug_in_a_command_is_one_internal_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench()
    session = bench.session()
    ask(bench, session, kv.Set(key=b"secret-key", value=b"secret-value", flags=1))
    monkeypatch.setattr(
        type(bench.engine.buckets["default"].vbuckets[0]), "touch", lambda *_: 1 // 0, raising=True
    )
    answers = ask(bench, session, kv.Touch(key=b"secret-key"), admin.Noop())
    assert [frame.status for frame in answers] == [Status.EINTERNAL, 0]
    assert "secret" not in caplog.text.replace("test_session", "")


def test_json_is_looked_for_and_shown_to_those_who_asked() -> None:
    bench = Bench()
    plain_session, session = bench.session(), bench.session()
    ask(bench, session, hello(Feature.JSON))
    ask(bench, plain_session, kv.Set(key=b"j", value=b'{"a": [1, 2.5, null]}'))
    # the client's word is not taken
    ask(bench, session, kv.Set(key=b"n", value=b"{no json", datatype=Datatype.JSON))
    for _ in range(2):  # the second from the cache of answers
        assert ask(bench, session, kv.Get(key=b"j"))[0].datatype == Datatype.JSON
        assert ask(bench, plain_session, kv.Get(key=b"j"))[0].datatype == 0
        assert ask(bench, session, kv.Get(key=b"n"))[0].datatype == 0


def test_datatype_that_was_not_negotiated_is_refused() -> None:
    bench = Bench()
    session = bench.session()
    for datatype in (Datatype.JSON, Datatype.SNAPPY, Datatype.XATTR, 0x08, 0xFF):
        raw = HEADER.pack(0x80, Op.SET, 1, 8, datatype, 0, 10, 0, 0) + bytes(8) + b"k1"
        assert ask(bench, session, raw)[0].status == Status.EINVAL
    assert ask(bench, session, kv.Get(key=b"k"))[0].status == Status.KEY_ENOENT


@pytest.mark.parametrize("text", [b"stats\r\n", b"version\r\n", b"get a\r\n", b"\n", b"G"])
def test_a_client_that_speaks_text_is_closed_at_once(text: bytes) -> None:
    """It sends less than a header, and would wait for ever for an answer."""
    bench = Bench()
    session = bench.session()
    session.exchange(text, bench.now)
    assert session.closed
    assert take(session) == []


def test_text_behind_a_request_closes_after_its_answer() -> None:
    bench = Bench()
    session = bench.session()
    assert [frame.opaque for frame in ask(bench, session, admin.Noop(opaque=3), b"stats\r\n")] == [3]
    assert session.closed


def test_old_tools_log_in_with_a_bucket_s_name_and_no_password() -> None:
    bench = Bench(buckets=("default", "second"))
    session = bench.session()
    for name, password, status in (
        (b"second", b"", Status.SUCCESS),
        (b"second", b"guess", Status.AUTH_ERROR),
        (b"none", b"", Status.AUTH_ERROR),
        (b"default", b"", Status.SUCCESS),
    ):
        (answer,) = ask(bench, session, admin.SaslAuth(key=b"PLAIN", value=b"\0%b\0%b" % (name, password)))
        assert answer.status == status, (name, password)
        if status == Status.SUCCESS:
            assert session.bucket is bench.node.buckets[name.decode()]
    guarded = Bench(users={"default": "secret"})
    (answer,) = ask(guarded, guarded.session(), admin.SaslAuth(key=b"PLAIN", value=b"\0default\0"))
    assert answer.status == Status.AUTH_ERROR
