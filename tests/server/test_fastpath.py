"""The hot path answers as the long way does, byte for byte, whatever comes and however it is cut."""

from __future__ import annotations

import struct
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from server.serverkit import Bench, frames_of
from tailrace.wire import admin, kv
from tailrace.wire.codes import Feature, Op
from tailrace.wire.header import HEADER

VBUCKETS = 2
KEYS = (b"a", b"b", b"key", b"kez", b"\0a", b"\1a", b"", b"k" * 249, b"k" * 250, b"k" * 251)
VALUES = (b"one", b"two", b"[1]", b"{}", b"", b"v" * 300, b"w" * 300)
FEATURES = ((), (Feature.COLLECTIONS,), (Feature.JSON,), (Feature.COLLECTIONS, Feature.JSON))


def raw(opcode: int, key: bytes, extras: bytes, value: bytes, **header: int) -> bytes:
    """A request whose header may say anything."""
    total = len(extras) + len(key) + len(value)
    datatype, vbucket, cas = (header.get(name, 0) for name in ("datatype", "vbucket", "cas"))
    return (
        HEADER.pack(0x80, opcode, len(key), len(extras), datatype, vbucket, total, header["opaque"], cas)
        + extras
        + key
        + value
    )


def u32(*numbers: int) -> bytes:
    return struct.pack(f">{len(numbers)}I", *numbers)


keys = st.sampled_from(KEYS[:3]) | st.sampled_from(KEYS)
values = st.sampled_from(VALUES)
nothing = st.just(b"")
placed = {"vbucket": st.integers(0, VBUCKETS), "opaque": st.integers(0, 0xFFFF_FFFF)}
gets = st.builds(raw, st.sampled_from([Op.GET, Op.GETQ]), keys, nothing, nothing, **placed)
sets = st.builds(
    raw,
    st.sampled_from([Op.SET, Op.SETQ]),
    keys,
    st.sampled_from([u32(0, 0), u32(1, 0), u32(2, 0), u32(0, 5)]),
    values,
    **placed,
    datatype=st.sampled_from([0, 0, 1, 2]),
    cas=st.sampled_from([0, 0, 0, 1]),
)
odd = st.one_of(
    st.builds(raw, st.just(Op.GET), keys, st.sampled_from([b"", b"four"]), values, **placed),
    st.builds(raw, st.just(Op.GET), keys, nothing, nothing, **placed, cas=st.integers(1, 1 << 63)),
    st.builds(raw, st.just(Op.GET), keys, nothing, nothing, **placed, datatype=st.just(1)),
    st.builds(raw, st.just(Op.SET), keys, st.sampled_from([bytes(4), bytes(9)]), values, **placed),
    st.builds(raw, st.just(Op.DELETE), keys, nothing, nothing, **placed),
    st.builds(raw, st.just(Op.APPEND), keys, nothing, values, **placed),
    st.builds(raw, st.just(Op.TOUCH), keys, st.sampled_from([u32(0), u32(2)]), nothing, **placed),
    st.builds(raw, st.just(Op.GET_LOCKED), keys, st.just(u32(2)), nothing, **placed),
    st.builds(raw, st.just(Op.NOOP), nothing, nothing, nothing, **placed),
    st.builds(raw, st.just(Op.SET_VBUCKET), nothing, st.sampled_from([u32(1), u32(2)]), nothing, **placed),
)
requests = gets | gets | sets | odd
reads = st.tuples(
    st.sampled_from([0, 1]),  # which of two connections
    st.lists(requests, max_size=12).map(b"".join),
    st.lists(st.integers(0, 400), max_size=2),  # where it is cut
    st.sampled_from([0, 0, 0, 1, 4]),  # seconds that pass
)


def answers(
    script: list[tuple[int, bytes, list[int], int]],
    features: tuple[tuple[int, ...], tuple[int, ...]],
    *,
    hot: bool,
) -> tuple[list[bytes], int, int]:
    bench = Bench(vbuckets=VBUCKETS, max_output=4096)
    bench.node.buckets["default"].collections.is_plain = hot
    sessions = []
    for some in features:
        sessions.append(bench.session())
        hello = admin.Hello(value=b"".join(struct.pack(">H", feature) for feature in (Feature.XERROR, *some)))
        sessions[-1].receive_data(hello.encode(), bench.now)
    out = [b"", b""]
    for which, data, cuts, seconds in script:
        edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
        session = sessions[which]
        for start, end in pairwise(edges):
            out[which] += session.exchange(data[start:end], bench.now)
            bench.run_jobs()
            while parts := session.data_to_send():
                out[which] += b"".join(map(bytes, parts))
        bench.advance(seconds)
    return out, bench.node.counters.get_hits, bench.node.counters.cmd_set


def stored(key: bytes, value: bytes) -> bytes:
    return raw(Op.SET, key, bytes(8), value, opaque=1)


def asked(key: bytes, cas: int = 0) -> bytes:
    return raw(Op.GET, key, b"", b"", opaque=2, cas=cas)


CAS_THAT_A_GET_MUST_NOT_HAVE = [
    (0, stored(b"a", b"one") + asked(b"a") * 2 + asked(b"a", cas=1 << 8) + asked(b"a", cas=1), [], 0)
]
JSON_THAT_COMES_AND_GOES = [
    (0, stored(b"a", text) + asked(b"a") * 2, [], 0) for text in (b"one", b"[1]", b"two", b"nix")
]


@example(CAS_THAT_A_GET_MUST_NOT_HAVE, ((), ()))
@example(JSON_THAT_COMES_AND_GOES, ((Feature.JSON,), ()))
@given(st.lists(reads, max_size=8), st.tuples(st.sampled_from(FEATURES), st.sampled_from(FEATURES)))
def test_as_the_long_way(
    script: list[tuple[int, bytes, list[int], int]], features: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    fast, slow = (answers(script, features, hot=hot) for hot in (True, False))
    for quick, other in zip(fast[0], slow[0], strict=True):
        assert list(frames_of(quick)) == list(frames_of(other))
    assert fast[1:] == slow[1:]


def test_a_key_in_two_vbuckets_is_two_documents() -> None:
    bench = Bench(vbuckets=2)
    session = bench.session()

    def get(vbucket: int) -> bytes:
        answer = session.exchange(kv.Get(key=b"k", vbucket=vbucket).encode(), bench.now)
        (frame,) = frames_of(answer)
        return frame.value

    for vbucket in (0, 1):
        session.exchange(kv.Set(key=b"k", value=b"of %d" % vbucket, vbucket=vbucket).encode(), bench.now)
    assert [get(0), get(0), get(1), get(1), get(0)] == [b"of 0", b"of 0", b"of 1", b"of 1", b"of 0"]
    session.exchange(kv.Set(key=b"k", value=b"new1", vbucket=1).encode(), bench.now)
    assert [get(0), get(1), get(0)] == [b"of 0", b"new1", b"of 0"]


def test_a_peer_can_t_have_more_answers_made_than_may_wait() -> None:
    """Many gets of a large document in one read: each is answered when there is room for its answer."""
    bench = Bench(max_output=64 << 10)
    session = bench.session()
    value = b"v" * 10_000
    session.exchange(kv.Set(key=b"small", value=b"v").encode() * 2, bench.now)
    session.exchange(kv.Get(key=b"small").encode(), bench.now)
    session.exchange(kv.Set(key=b"large", value=value).encode(), bench.now)
    many = kv.Get(key=b"large").encode() * 500
    got = session.exchange(many, bench.now)
    sizes = [len(got)]
    while parts := session.data_to_send(1):
        sizes.append(sum(map(len, parts)))
    assert max(sizes) < (64 << 10) + 2 * len(value)
    assert sum(sizes) == 500 * (24 + 4 + len(value))
