"""Document commands over a real socket, one by one."""

from __future__ import annotations

import time

import pytest

from server.serverkit import Wire
from tailrace import snappy
from tailrace.testing.running import RunningNode
from tailrace.wire import admin, kv
from tailrace.wire.codes import Datatype, Feature, Op, Status, WithMetaOption
from tailrace.wire.fields import join_xattrs
from tailrace.wire.header import HEADER

ALL_ONES = (1 << 64) - 1


def test_set_get_delete(wire: Wire, key: bytes) -> None:
    assert wire.refused(kv.Get(key=key)) == Status.KEY_ENOENT
    stored = wire.ok(kv.Set(key=key, value=b"v1", flags=0xDEADBEEF))
    assert stored.cas
    assert stored.vb_uuid is None  # nobody asked for positions
    for _ in range(2):
        answer = wire.ok(kv.Get(key=key))
        assert (answer.value, answer.flags, answer.cas, answer.key) == (b"v1", 0xDEADBEEF, stored.cas, b"")
    assert wire.ok(kv.GetK(key=key)).key == key
    deleted = wire.ok(kv.Delete(key=key))
    assert deleted.cas == 0  # the classic rule for peers without MutationSeqno
    assert wire.refused(kv.Get(key=key)) == Status.KEY_ENOENT
    assert wire.refused(kv.Delete(key=key)) == Status.KEY_ENOENT


def test_empty_values_are_values(wire: Wire, key: bytes) -> None:
    wire.ok(kv.Set(key=key, value=b""))
    for _ in range(2):
        assert wire.ok(kv.Get(key=key)).value == b""


def test_cas(wire: Wire, key: bytes) -> None:
    assert wire.refused(kv.Set(key=key, value=b"x", cas=5)) == Status.KEY_ENOENT
    first = wire.ok(kv.Set(key=key, value=b"1")).cas
    second = wire.ok(kv.Set(key=key, value=b"2", cas=first)).cas
    assert second > first
    assert wire.refused(kv.Set(key=key, value=b"3", cas=first)) == Status.KEY_EEXISTS
    assert wire.refused(kv.Delete(key=key, cas=first)) == Status.KEY_EEXISTS
    assert wire.ok(kv.Get(key=key)).value == b"2"
    wire.ok(kv.Delete(key=key, cas=second))


def test_add_and_replace(wire: Wire, key: bytes) -> None:
    assert wire.refused(kv.Replace(key=key, value=b"x")) == Status.KEY_ENOENT
    wire.ok(kv.Add(key=key, value=b"1"))
    assert wire.refused(kv.Add(key=key, value=b"2")) == Status.KEY_EEXISTS
    cas = wire.ok(kv.Replace(key=key, value=b"3")).cas
    assert wire.refused(kv.Replace(key=key, value=b"4", cas=cas + 1)) == Status.KEY_EEXISTS
    assert wire.ok(kv.Get(key=key)).value == b"3"


def test_quiet_commands_are_silent_where_nothing_is_to_be_said(wire: Wire, key: bytes) -> None:
    wire.send(
        kv.SetQ(key=key, value=b"1", opaque=1),
        kv.AddQ(key=key, value=b"2", opaque=2),  # exists: answered
        kv.ReplaceQ(key=key + b"x", value=b"2", opaque=3),  # missing: answered
        kv.GetQ(key=key, opaque=4),
        kv.GetQ(key=key + b"x", opaque=5),
        kv.GetKQ(key=key, opaque=6),
        kv.GetKQ(key=key + b"x", opaque=7),
        kv.AppendQ(key=key, value=b"!", opaque=8),
        kv.PrependQ(key=key, value=b"!", opaque=9),
        kv.IncrementQ(key=key + b"n", opaque=10),
        kv.DecrementQ(key=key + b"n", opaque=11),
        kv.GatQ(key=key, expiry=0, opaque=12),
        kv.GatQ(key=key + b"x", expiry=0, opaque=13),
        kv.GetMetaQ(key=key + b"x", opaque=14),
        kv.DeleteQ(key=key, opaque=15),
        kv.DeleteQ(key=key, opaque=16),  # missing: answered
        admin.Noop(opaque=17),
    )
    seen = []
    while not seen or seen[-1][0] != 17:
        frame = wire.frame()
        seen.append((frame.opaque, frame.status))
    assert seen == [
        (2, Status.KEY_EEXISTS),
        (3, Status.KEY_ENOENT),
        (4, 0),
        (6, 0),
        (12, 0),
        (16, Status.KEY_ENOENT),
        (17, 0),
    ]


def test_getq_from_the_cache_has_its_own_opcode(wire: Wire, key: bytes) -> None:
    wire.ok(kv.Set(key=key, value=b"1"))
    for _ in range(2):
        wire.send(kv.GetQ(key=key))
        assert wire.frame().opcode == Op.GETQ


def test_counters(wire: Wire, key: bytes) -> None:
    assert wire.refused(kv.Increment(key=key, expiry=0xFFFFFFFF)) == Status.KEY_ENOENT
    made = wire.ok(kv.Increment(key=key, delta=5, initial=10))
    assert (made.number, bool(made.cas)) == (10, True)
    assert wire.ok(kv.Increment(key=key, delta=5)).number == 15
    assert wire.ok(kv.Get(key=key)).value == b"15"
    assert wire.ok(kv.Decrement(key=key, delta=100)).number == 0
    wire.ok(kv.Set(key=key, value=str((1 << 64) - 1).encode()))
    assert wire.ok(kv.Increment(key=key, delta=2)).number == 1  # modulo 2^64
    for text in (b"abc", b"-1", b" 1", b"1 ", b"1.5", b"18446744073709551616", b"\xd9\xa1"):
        wire.ok(kv.Set(key=key, value=text))
        assert wire.refused(kv.Increment(key=key)) == Status.DELTA_BADVAL


def test_append_and_prepend(wire: Wire, key: bytes) -> None:
    assert wire.refused(kv.Append(key=key, value=b"x")) == Status.NOT_STORED
    assert wire.refused(kv.Prepend(key=key, value=b"x")) == Status.NOT_STORED
    cas = wire.ok(kv.Set(key=key, value=b"[1]", flags=7)).cas
    assert wire.refused(kv.Append(key=key, value=b"x", cas=cas + 1)) == Status.KEY_EEXISTS
    wire.hello(Feature.JSON, Feature.SNAPPY)
    assert wire.ok(kv.Get(key=key)).datatype == Datatype.JSON
    wire.ok(kv.Append(key=key, value=b" x", cas=cas))
    answer = wire.ok(kv.Get(key=key))
    assert (answer.value, answer.flags, answer.datatype) == (b"[1] x", 7, 0)
    wire.ok(kv.Prepend(key=key, value=snappy.deflate(b"<<<<<<<<<<<<"), datatype=Datatype.SNAPPY))
    assert wire.ok(kv.Get(key=key)).value == b"<<<<<<<<<<<<[1] x"


def test_append_to_a_compressed_document(wire: Wire, key: bytes) -> None:
    wire.hello(Feature.SNAPPY)
    wire.ok(kv.Set(key=key, value=snappy.deflate(b"a" * 100), datatype=Datatype.SNAPPY))
    wire.ok(kv.Append(key=key, value=b"b"))
    assert wire.ok(kv.Get(key=key)).value == b"a" * 100 + b"b"


def test_expiry_touch_and_gat(wire: Wire, key: bytes) -> None:
    now = int(time.time())
    wire.ok(kv.Set(key=key, value=b"1", expiry=1000))
    assert abs(wire.ok(kv.GetMeta(key=key)).expiry - (now + 1000)) < 60
    touched = wire.ok(kv.Touch(key=key, expiry=now + 5_000_000))
    assert touched.value == b""
    assert touched.cas
    assert wire.ok(kv.GetMeta(key=key)).expiry == now + 5_000_000
    got = wire.ok(kv.Gat(key=key, expiry=0))
    assert got.value == b"1"
    assert wire.ok(kv.GetMeta(key=key)).expiry == 0
    for command in (kv.Touch, kv.Gat):
        assert wire.refused(command(key=key + b"x", expiry=1)) == Status.KEY_ENOENT
    wire.ok(kv.Touch(key=key, expiry=now - 5))  # in the past
    for _ in range(2):
        assert wire.refused(kv.Get(key=key)) == Status.KEY_ENOENT
    assert wire.ok(kv.GetMeta(key=key)).deleted == 1


def test_a_document_that_expires_is_not_served_from_the_cache(wire: Wire, key: bytes) -> None:
    wire.ok(kv.Set(key=key, value=b"1", expiry=1))
    deadline = time.monotonic() + 20
    while wire.call(kv.Get(key=key)).status == Status.SUCCESS:
        assert time.monotonic() < deadline


def test_locks(wire: Wire, key: bytes) -> None:
    wire.hello(Feature.XERROR)
    assert wire.refused(kv.GetLocked(key=key)) == Status.KEY_ENOENT
    cas = wire.ok(kv.Set(key=key, value=b"1")).cas
    wire.ok(kv.Get(key=key))
    assert wire.refused(kv.UnlockKey(key=key, cas=cas)) == Status.NOT_LOCKED
    locked = wire.ok(kv.GetLocked(key=key, lock_s=20))
    assert locked.value == b"1"
    assert locked.cas not in (cas, 0)
    assert wire.refused(kv.GetLocked(key=key)) == Status.LOCKED
    assert wire.refused(kv.Set(key=key, value=b"2")) == Status.LOCKED
    assert wire.refused(kv.Set(key=key, value=b"2", cas=cas)) in (Status.KEY_EEXISTS, Status.LOCKED)
    assert wire.ok(kv.Get(key=key)).cas == ALL_ONES  # readers see that it is locked, not by which CAS
    assert wire.refused(kv.UnlockKey(key=key, cas=cas)) == Status.LOCKED
    wire.ok(kv.UnlockKey(key=key, cas=locked.cas))
    wire.ok(kv.GetLocked(key=key))
    assert wire.refused(kv.Delete(key=key)) == Status.LOCKED


def test_locks_for_peers_without_extended_errors(wire: Wire, key: bytes) -> None:
    wire.ok(kv.Set(key=key, value=b"1"))
    locked = wire.ok(kv.GetLocked(key=key))
    assert wire.refused(kv.Set(key=key, value=b"2")) == Status.KEY_EEXISTS
    assert wire.refused(kv.GetLocked(key=key)) == Status.ETMPFAIL
    wire.ok(kv.Set(key=key, value=b"2", cas=locked.cas))


def test_mutation_extras(wire: Wire, key: bytes, shared_node: RunningNode) -> None:
    wire.hello(Feature.MUTATION_SEQNO)
    uuid = shared_node.failover_log(0)[0][0]
    seqnos = []
    for message in (
        kv.Set(key=key, value=b"1"),
        kv.Replace(key=key, value=b"2"),
        kv.Append(key=key, value=b"3"),
        kv.Increment(key=key + b"n"),
        kv.Delete(key=key),
    ):
        answer = wire.ok(message)
        assert answer.vb_uuid == uuid
        assert answer.cas
        seqnos.append(answer.by_seqno)
    assert seqnos == list(range(seqnos[0], seqnos[0] + 5))


def test_not_my_vbucket(wire: Wire, key: bytes) -> None:
    for message in (kv.Get(key=key), kv.Set(key=key, value=b"1"), kv.Delete(key=key)):
        message.vbucket = 4
        answer = wire.call(message)
        assert answer.status == Status.NOT_MY_VBUCKET
        assert b'"vBucketMap"' in answer.value
        assert answer.datatype == 0


def test_keys_have_limits(wire: Wire) -> None:
    assert wire.ok(kv.Set(key=b"k" * 250, value=b"1")).cas
    assert wire.refused(kv.Set(key=b"k" * 251, value=b"1")) == Status.EINVAL
    assert wire.refused(kv.Get(key=b"k" * 251)) == Status.EINVAL
    raw = HEADER.pack(0x80, Op.GET, 0, 0, 0, 0, 0, 1, 0)
    wire.send(raw)
    assert wire.frame().status == Status.EINVAL


def test_large_values(wire: Wire, key: bytes) -> None:
    value = bytes(range(256)) * 4096 * 20
    assert len(value) == 20 << 20
    wire.ok(kv.Set(key=key, value=value))
    assert wire.ok(kv.Get(key=key)).value == value
    assert wire.refused(kv.Set(key=key, value=value + b"x")) == Status.E2BIG
    wire.ok(kv.Delete(key=key))


class TestDatatypes:
    def test_snappy_is_inflated_for_who_does_not_know_it(
        self, wire: Wire, key: bytes, shared_node: RunningNode
    ) -> None:
        text = b'{"list": [' + b",".join([b"1"] * 200) + b"]}"
        packed = snappy.deflate(text)
        wire.hello(Feature.SNAPPY, Feature.JSON)
        wire.ok(kv.Set(key=key, value=packed, datatype=Datatype.SNAPPY))
        answer = wire.ok(kv.Get(key=key))
        assert (answer.value, answer.datatype) == (packed, Datatype.SNAPPY | Datatype.JSON)
        with Wire(shared_node.port) as other:
            answer = other.ok(kv.Get(key=key))
            assert (answer.value, answer.datatype) == (text, 0)

    def test_broken_snappy_is_refused(self, wire: Wire, key: bytes) -> None:
        wire.hello(Feature.SNAPPY)
        bomb = b"\xff\xff\xff\xff\x0f" + bytes(100)  # says 4 GiB
        for value in (b"", b"\xff", b"\x05abc", bomb):
            answer = wire.call(kv.Set(key=key, value=value, datatype=Datatype.SNAPPY))
            assert answer.status == Status.EINVAL, value
        assert wire.refused(kv.Get(key=key)) == Status.KEY_ENOENT

    def test_xattrs_are_not_shown_by_get_and_kept_by_set(self, wire: Wire, key: bytes) -> None:
        wire.hello(Feature.XATTR, Feature.JSON, Feature.SNAPPY)
        value = join_xattrs({"_sys": b'{"a":1}', "user": b"2"}, b'{"body":1}')
        wire.ok(kv.Set(key=key, value=value, datatype=Datatype.XATTR))
        answer = wire.ok(kv.Get(key=key))
        assert (answer.value, answer.datatype) == (b'{"body":1}', Datatype.JSON)
        assert wire.ok(kv.GetMeta(key=key, version=2)).stored_datatype == Datatype.XATTR | Datatype.JSON
        for new in (b"raw body", b'{"body":2}'):
            wire.ok(kv.Set(key=key, value=new))
            assert wire.ok(kv.Get(key=key)).value == new
            assert wire.ok(kv.GetMeta(key=key, version=2)).stored_datatype & Datatype.XATTR
        wire.ok(kv.Append(key=key, value=b" "))
        wire.ok(kv.Prepend(key=key, value=b"\n"))
        assert wire.ok(kv.Get(key=key)).value == b'\n{"body":2} '
        assert wire.ok(kv.GetMeta(key=key, version=2)).stored_datatype & Datatype.XATTR
        wire.ok(kv.Delete(key=key))
        # the system xattr outlives the document
        meta = wire.ok(kv.GetMeta(key=key, version=2))
        assert (meta.deleted, meta.stored_datatype) == (1, Datatype.XATTR)

    @pytest.mark.parametrize(
        "value",
        [
            b"",
            b"\0\0",
            b"\0\0\0\x09body",
            b"\xff\xff\xff\xff" + bytes(20),
            b"\0\0\0\x08\0\0\0\x04a\0b",
            join_xattrs({"a": b"no json"}, b""),
            join_xattrs({"x" * 16: b"1"}, b""),
        ],
    )
    def test_broken_xattrs_are_refused(self, wire: Wire, key: bytes, value: bytes) -> None:
        wire.hello(Feature.XATTR, Feature.XERROR)
        assert wire.refused(kv.Set(key=key, value=value, datatype=Datatype.XATTR)) == Status.XATTR_EINVAL

    def test_hostile_json_is_no_json(self, wire: Wire, key: bytes) -> None:
        wire.hello(Feature.JSON)
        for value in (
            b"[" * 100_000,
            b"[" * 100_000 + b"]" * 100_000,
            b'{"a":' * 50_000,
            b"NaN",
            b"[Infinity]",
            b'"\xff"',
            b"1 2",
            b"\xff\xfe1\0",
            b"{'a':1}",
            b"01",
        ):
            wire.ok(kv.Set(key=key, value=value, datatype=Datatype.JSON))
            answer = wire.ok(kv.Get(key=key))
            assert (answer.value, answer.datatype) == (value, 0)
        for value in (b"1", b' {"a": "\\u00e9"} ', b"[]", b"9" * 10_000, b'"\xc3\xa9"', b"-0.5e-7"):
            wire.ok(kv.Set(key=key, value=value))
            assert wire.ok(kv.Get(key=key)).datatype == Datatype.JSON, value[:20]


class TestWithMeta:
    def test_get_meta(self, wire: Wire, key: bytes) -> None:
        assert wire.refused(kv.GetMeta(key=key)) == Status.KEY_ENOENT
        cas = wire.ok(kv.Set(key=key, value=b"{}", flags=3)).cas
        meta = wire.ok(kv.GetMeta(key=key))
        assert (meta.deleted, meta.flags, meta.expiry, meta.rev_seqno, meta.cas) == (0, 3, 0, 1, cas)
        assert meta.stored_datatype is None
        assert wire.ok(kv.GetMeta(key=key, version=1)).stored_datatype is None
        assert wire.ok(kv.GetMeta(key=key, version=2)).stored_datatype == Datatype.JSON
        wire.ok(kv.Delete(key=key))
        two = wire.ok(kv.GetMeta(key=key, version=2))
        assert (two.deleted, two.rev_seqno) == (1, 2)
        wire.send(HEADER.pack(0x80, Op.GET_META, 1, 1, 0, 0, 2, 0, 0) + b"\x03k")
        assert wire.frame().status == Status.EINVAL

    def test_set_and_delete(self, wire: Wire, key: bytes) -> None:
        for rev, cas in ((1 << 63, 1000), (1, 1 << 63), (ALL_ONES, 1000)):
            assert wire.refused(kv.SetWithMeta(key=key, rev_seqno=rev, meta_cas=cas)) == Status.EINVAL
            assert wire.refused(kv.DelWithMeta(key=key, rev_seqno=rev, meta_cas=cas)) == Status.EINVAL
        wire.ok(kv.SetWithMeta(key=key, value=b"1", flags=9, rev_seqno=5, meta_cas=1000))
        meta = wire.ok(kv.GetMeta(key=key))
        assert (meta.rev_seqno, meta.cas, meta.flags) == (5, 1000, 9)
        # loses: lower rev
        assert (
            wire.refused(kv.SetWithMeta(key=key, value=b"2", rev_seqno=4, meta_cas=2000))
            == Status.KEY_EEXISTS
        )
        # ties on rev, wins by CAS
        wire.ok(kv.SetWithMeta(key=key, value=b"3", rev_seqno=5, meta_cas=2000))
        assert wire.ok(kv.Get(key=key)).value == b"3"
        assert (
            wire.refused(kv.AddWithMeta(key=key, value=b"4", rev_seqno=9, meta_cas=1)) == Status.KEY_EEXISTS
        )
        assert (
            wire.refused(kv.SetWithMeta(key=key, value=b"5", rev_seqno=9, meta_cas=1, cas=7))
            == Status.KEY_EEXISTS
        )
        wire.ok(kv.DelWithMeta(key=key, expiry=123456, rev_seqno=6, meta_cas=3000))
        meta = wire.ok(kv.GetMeta(key=key))
        assert (meta.deleted, meta.rev_seqno, meta.cas) == (1, 6, 3000)
        wire.ok(kv.AddWithMeta(key=key, value=b"6", rev_seqno=7, meta_cas=1, nmeta=0))
        assert wire.ok(kv.Get(key=key)).value == b"6"

    def test_extended_meta_is_cut_off(self, wire: Wire, key: bytes) -> None:
        wire.ok(kv.SetWithMeta(key=key, value=b"bodyEXTRA", rev_seqno=1, meta_cas=5, nmeta=5))
        assert wire.ok(kv.Get(key=key)).value == b"body"

    @pytest.mark.parametrize(
        "options",
        [WithMetaOption.FORCE_ACCEPT, WithMetaOption.REGENERATE_CAS, 0x100, WithMetaOption.IS_EXPIRATION],
    )
    def test_wrong_options(self, wire: Wire, key: bytes, options: int) -> None:
        message = kv.SetWithMeta(key=key, value=b"1", rev_seqno=1, meta_cas=5, options=int(options))
        assert wire.refused(message) == Status.EINVAL

    def test_right_options(self, wire: Wire, key: bytes) -> None:
        wire.ok(kv.Set(key=key, value=b"1"))
        skip = WithMetaOption.SKIP_CONFLICT_RESOLUTION
        wire.ok(kv.SetWithMeta(key=key, value=b"old", rev_seqno=1, meta_cas=5, options=int(skip)))
        assert wire.ok(kv.Get(key=key)).cas == 5
        both = int(skip | WithMetaOption.REGENERATE_CAS)
        answer = wire.ok(kv.SetWithMeta(key=key, value=b"new", rev_seqno=1, meta_cas=5, options=both))
        assert answer.cas != 5
        assert wire.ok(kv.Get(key=key)).cas == answer.cas

    def test_a_deletion_has_no_body(self, wire: Wire, key: bytes) -> None:
        assert wire.refused(kv.DelWithMeta(key=key, value=b"x", rev_seqno=1, meta_cas=5)) == Status.EINVAL

    def test_quiet_ones(self, wire: Wire, key: bytes) -> None:
        wire.send(
            kv.SetWithMetaQ(key=key, value=b"1", rev_seqno=1, meta_cas=5, opaque=1),
            kv.AddWithMetaQ(key=key, value=b"1", rev_seqno=1, meta_cas=5, opaque=2),
            kv.DelWithMetaQ(key=key, rev_seqno=9, meta_cas=5, opaque=3),
            kv.GetMetaQ(key=key, opaque=4),
        )
        seen = [wire.frame() for _ in range(2)]
        assert [(answer.opaque, answer.status) for answer in seen] == [(2, Status.KEY_EEXISTS), (4, 0)]


class TestWrongShapes:
    """Each document command with parts that it must not have, or without what it needs."""

    SHAPES = {
        Op.GET: (0, True, False, False),
        Op.GETK: (0, True, False, False),
        Op.SET: (8, True, None, True),
        Op.ADD: (8, True, None, False),
        Op.REPLACE: (8, True, None, True),
        Op.DELETE: (0, True, False, True),
        Op.INCREMENT: (20, True, False, False),
        Op.DECREMENT: (20, True, False, False),
        Op.APPEND: (0, True, True, True),
        Op.PREPEND: (0, True, True, True),
        Op.TOUCH: (4, True, False, False),
        Op.GAT: (4, True, False, False),
    }

    @pytest.mark.parametrize("opcode", list(SHAPES), ids=lambda op: op.name)
    def test_wrong_shape(self, wire: Wire, opcode: Op, key: bytes) -> None:
        extras, _, value, cas = self.SHAPES[opcode]
        wrong = [(extras + 1, key, b"v" if value else b"", 0), (extras, b"", b"v" if value else b"", 0)]
        if extras and opcode != Op.SET:
            wrong.append((0, key, b"v" if value else b"", 0))
        if value is False:
            wrong.append((extras, key, b"v", 0))
        if value is True:
            wrong.append((extras, key, b"", 0))
        if not cas:
            wrong.append((extras, key, b"v" if value else b"", 1))
        for extras_length, a_key, a_value, a_cas in wrong:
            total = extras_length + len(a_key) + len(a_value)
            header = HEADER.pack(0x80, opcode, len(a_key), extras_length, 0, 0, total, 0, a_cas)
            wire.send(header + bytes(extras_length) + a_key + a_value)
            assert wire.frame().status == Status.EINVAL, (extras_length, a_key, a_value, a_cas)
        wire.ok(admin.Noop())
