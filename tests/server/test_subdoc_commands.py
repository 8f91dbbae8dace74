"""Sub-document commands over a real socket: bodies, xattrs, flags, several paths at once."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from server.serverkit import Wire
from tailrace import snappy
from tailrace.testing.running import RunningNode
from tailrace.wire import kv, subdoc
from tailrace.wire.codes import Datatype, Feature, Op, Status
from tailrace.wire.header import HEADER
from tailrace.wire.message import Message
from tailrace.wire.subdoc import SubdocMultiLookup, SubdocMultiMutation

XATTR, PARENTS, EXPAND = 4, 1, 0x10
UPSERT, ADD, ACCESS_DELETED, AS_DELETED, REVIVE = 1, 2, 4, 8, 16


@pytest.fixture
def wire(shared_node: RunningNode) -> Iterator[Wire]:
    with Wire(shared_node.port) as connection:
        connection.hello(Feature.XERROR, Feature.JSON, Feature.XATTR, Feature.SNAPPY, Feature.MUTATION_SEQNO)
        yield connection


@pytest.fixture
def doc(wire: Wire, key: bytes) -> bytes:
    wire.ok(kv.Set(key=key, value=b'{"a":{"b":[1,2,3]},"n":1}', flags=9))
    return key


def one(
    message_class: Callable[..., Message],
    key: bytes,
    path: bytes,
    value: bytes = b"",
    flags: int = 0,
    **more: Any,
) -> Any:
    return message_class(key=key, path_length=len(path), value=path + value, subdoc_flags=flags, **more)


def lookup(key: bytes, *specs: tuple[int, int, bytes], **more: Any) -> SubdocMultiLookup:
    value = b"".join(struct.pack(">BBH", op, flags, len(path)) + path for op, flags, path in specs)
    return subdoc.SubdocMultiLookup(key=key, value=value, **more)


def mutation(key: bytes, *specs: tuple[int, int, bytes, bytes], **more: Any) -> SubdocMultiMutation:
    value = b"".join(
        struct.pack(">BBHI", op, flags, len(path), len(new)) + path + new for op, flags, path, new in specs
    )
    return subdoc.SubdocMultiMutation(key=key, value=value, **more)


def looked_up(value: bytes) -> list[tuple[Status, bytes]]:
    results = []
    while value:
        status, length = struct.unpack_from(">HI", value)
        results.append((Status(status), value[6 : 6 + length]))
        value = value[6 + length :]
    return results


def body(wire: Wire, key: bytes) -> Any:
    return json.loads(wire.ok(kv.Get(key=key)).value)


def test_one_path_read(wire: Wire, doc: bytes) -> None:
    answer = wire.ok(one(subdoc.SubdocGet, doc, b"a.b[1]"))
    assert (answer.value, bool(answer.cas)) == (b"2", True)
    assert wire.ok(one(subdoc.SubdocGetCount, doc, b"a.b")).value == b"3"
    assert wire.ok(one(subdoc.SubdocGetCount, doc, b"")).value == b"2"
    assert wire.ok(one(subdoc.SubdocExists, doc, b"n")).value == b""
    assert wire.refused(one(subdoc.SubdocExists, doc, b"x")) == Status.SUBDOC_PATH_ENOENT
    assert wire.refused(one(subdoc.SubdocGet, doc, b"n.x")) == Status.SUBDOC_PATH_MISMATCH
    assert wire.refused(one(subdoc.SubdocGet, doc, b"..")) == Status.SUBDOC_PATH_EINVAL
    assert wire.refused(one(subdoc.SubdocGet, doc, b"")) == Status.SUBDOC_PATH_EINVAL
    assert wire.refused(one(subdoc.SubdocGet, doc + b"x", b"a")) == Status.KEY_ENOENT
    assert wire.refused(one(subdoc.SubdocGet, doc, b"a", b"junk")) == Status.EINVAL


def test_one_path_written(wire: Wire, doc: bytes) -> None:
    before = wire.ok(kv.Get(key=doc))
    answer = wire.ok(one(subdoc.SubdocDictUpsert, doc, b"a.new", b'"x"'))
    assert answer.by_seqno
    assert answer.cas != before.cas
    assert wire.ok(one(subdoc.SubdocCounter, doc, b"n", b"41")).value == b"42"
    wire.ok(one(subdoc.SubdocReplace, doc, b"a.b[0]", b"0"))
    wire.ok(one(subdoc.SubdocArrayPushLast, doc, b"a.b", b"4,5"))
    wire.ok(one(subdoc.SubdocArrayPushFirst, doc, b"a.b", b"-1"))
    wire.ok(one(subdoc.SubdocArrayInsert, doc, b"a.b[1]", b'"i"'))
    wire.ok(one(subdoc.SubdocArrayAddUnique, doc, b"a.b", b"9"))
    wire.ok(one(subdoc.SubdocDictAdd, doc, b"deep.er", b"1", PARENTS))
    wire.ok(one(subdoc.SubdocDelete, doc, b"a.new"))
    assert body(wire, doc) == {"a": {"b": [-1, "i", 0, 2, 3, 4, 5, 9]}, "n": 42, "deep": {"er": 1}}
    document = wire.ok(kv.Get(key=doc))
    assert (document.flags, document.datatype) == (9, Datatype.JSON)
    stale = one(subdoc.SubdocDictUpsert, doc, b"x", b"1", cas=before.cas)
    assert wire.refused(stale) == Status.KEY_EEXISTS


def test_documents_are_made(wire: Wire, key: bytes) -> None:
    assert wire.refused(one(subdoc.SubdocDictUpsert, key, b"a", b"1")) == Status.KEY_ENOENT
    wire.ok(one(subdoc.SubdocDictUpsert, key, b"a", b"1", doc_flags=UPSERT))
    assert wire.refused(one(subdoc.SubdocDictUpsert, key, b"a", b"1", doc_flags=ADD)) == Status.KEY_EEXISTS
    assert body(wire, key) == {"a": 1}
    wire.ok(one(subdoc.SubdocArrayPushLast, key + b"l", b"", b"1", doc_flags=ADD))
    assert body(wire, key + b"l") == [1]
    for flags in (UPSERT | ADD, 0x40):
        message = one(subdoc.SubdocDictUpsert, key, b"a", b"1", doc_flags=flags)
        assert wire.refused(message) == Status.SUBDOC_XATTR_INVALID_FLAG_COMBO


def test_what_is_no_json(wire: Wire, key: bytes) -> None:
    wire.ok(kv.Set(key=key, value=b"no json"))
    assert wire.refused(one(subdoc.SubdocGet, key, b"a")) == Status.SUBDOC_DOC_NOT_JSON
    assert wire.refused(one(subdoc.SubdocDictUpsert, key, b"a", b"1")) == Status.SUBDOC_DOC_NOT_JSON


def test_compressed_documents(wire: Wire, key: bytes) -> None:
    text = json.dumps({"list": list(range(500)), "x": 1}).encode()
    wire.ok(kv.Set(key=key, value=snappy.deflate(text), datatype=Datatype.SNAPPY))
    assert wire.ok(one(subdoc.SubdocGet, key, b"list[499]")).value == b"499"
    wire.ok(one(subdoc.SubdocDictUpsert, key, b"x", b"2"))
    assert body(wire, key)["x"] == 2


def test_several_paths_read(wire: Wire, doc: bytes) -> None:
    message = lookup(
        doc,
        (Op.SUBDOC_GET, 0, b"n"),
        (Op.SUBDOC_EXISTS, 0, b"a"),
        (Op.SUBDOC_GET_COUNT, 0, b"a.b"),
        (Op.GET, 0, b""),
    )
    answer = wire.ok(message)
    assert looked_up(answer.value) == [
        (Status.SUCCESS, b"1"),
        (Status.SUCCESS, b""),
        (Status.SUCCESS, b"3"),
        (Status.SUCCESS, b'{"a":{"b":[1,2,3]},"n":1}'),
    ]
    answer = wire.call(
        lookup(doc, (Op.SUBDOC_GET, 0, b"n"), (Op.SUBDOC_GET, 0, b"x"), (Op.SUBDOC_GET, 0, b"n.y"))
    )
    assert answer.status == Status.SUBDOC_MULTI_PATH_FAILURE
    assert [status for status, _ in looked_up(answer.value)] == [
        Status.SUCCESS,
        Status.SUBDOC_PATH_ENOENT,
        Status.SUBDOC_PATH_MISMATCH,
    ]
    assert wire.refused(lookup(doc, (Op.SUBDOC_DELETE, 0, b"n"))) == Status.SUBDOC_INVALID_COMBO
    wire.ok(lookup(doc, *[(Op.SUBDOC_GET, 0, b"n")] * 16))
    too_many = doc + b"\xc5\0\0\1n" * 17
    wire.send(HEADER.pack(0x80, Op.SUBDOC_MULTI_LOOKUP, len(doc), 0, 0, 0, len(too_many), 0, 0) + too_many)
    assert wire.frame().status == Status.SUBDOC_INVALID_COMBO
    assert wire.refused(lookup(doc, (Op.SUBDOC_GET, 0, b"n"), (Op.SUBDOC_GET, XATTR, b"t"))) == (
        Status.SUBDOC_INVALID_XATTR_ORDER
    )
    assert wire.refused(lookup(doc, (Op.SUBDOC_GET, 0x80, b"n"))) == Status.SUBDOC_XATTR_INVALID_FLAG_COMBO


def test_several_paths_written_all_or_none(wire: Wire, doc: bytes) -> None:
    before = wire.ok(kv.Get(key=doc))
    answer = wire.call(
        mutation(doc, (Op.SUBDOC_DICT_UPSERT, 0, b"x", b"1"), (Op.SUBDOC_REPLACE, 0, b"nope", b"1"))
    )
    assert answer.status == Status.SUBDOC_MULTI_PATH_FAILURE
    assert answer.value == struct.pack(">BH", 1, Status.SUBDOC_PATH_ENOENT)
    assert wire.ok(kv.Get(key=doc)).cas == before.cas
    answer = wire.ok(
        mutation(
            doc,
            (Op.SUBDOC_DICT_UPSERT, 0, b"x", b"1"),
            (Op.SUBDOC_COUNTER, 0, b"n", b"-1"),
            (Op.SUBDOC_DELETE, 0, b"a", b""),
        )
    )
    assert answer.value == struct.pack(">BHI", 1, 0, 1) + b"0"
    assert body(wire, doc) == {"x": 1, "n": 0}
    assert wire.ok(kv.GetMeta(key=doc)).rev_seqno == 2  # one version for all paths


def test_the_whole_document(wire: Wire, doc: bytes) -> None:
    wire.ok(
        mutation(doc, (Op.SUBDOC_DICT_UPSERT, XATTR, b"_sync", b'{"r":1}'), (Op.SET, 0, b"", b'{"new":true}'))
    )
    assert body(wire, doc) == {"new": True}
    assert wire.ok(one(subdoc.SubdocGet, doc, b"_sync.r", flags=XATTR)).value == b"1"
    wire.ok(mutation(doc, (Op.SUBDOC_DICT_UPSERT, XATTR, b"_sync.r", b"2"), (Op.DELETE, 0, b"", b"")))
    assert wire.refused(kv.Get(key=doc)) == Status.KEY_ENOENT
    assert wire.refused(one(subdoc.SubdocGet, doc, b"_sync.r", flags=XATTR)) == Status.KEY_ENOENT
    answer = wire.call(one(subdoc.SubdocGet, doc, b"_sync.r", flags=XATTR, doc_flags=ACCESS_DELETED))
    assert (answer.status, answer.value) == (Status.SUBDOC_SUCCESS_DELETED, b"2")


def test_xattrs(wire: Wire, doc: bytes) -> None:
    wire.ok(one(subdoc.SubdocDictUpsert, doc, b"tag", b'{"v":[1]}', XATTR))
    wire.ok(one(subdoc.SubdocArrayPushLast, doc, b"tag.v", b"2", XATTR))
    wire.ok(one(subdoc.SubdocDictUpsert, doc, b"a.deep.er", b"1", XATTR | PARENTS))
    assert wire.ok(one(subdoc.SubdocGet, doc, b"tag.v", flags=XATTR)).value == b"[1,2]"
    assert wire.ok(one(subdoc.SubdocGet, doc, b"a", flags=XATTR)).value == b'{"deep":{"er":1}}'
    assert body(wire, doc) == {"a": {"b": [1, 2, 3]}, "n": 1}  # the body is another text
    toc = wire.ok(one(subdoc.SubdocGet, doc, b"$XTOC", flags=XATTR)).value
    assert json.loads(toc) == ["tag", "a"]
    wire.ok(one(subdoc.SubdocDelete, doc, b"tag", flags=XATTR))
    wire.ok(one(subdoc.SubdocDelete, doc, b"a", flags=XATTR))
    assert wire.ok(kv.GetMeta(key=doc, version=2)).stored_datatype == Datatype.JSON
    for path in (b"", b"[0]", b"sixteen-bytes-xx.a"):
        assert wire.refused(one(subdoc.SubdocDictUpsert, doc, path, b"1", XATTR)) == Status.SUBDOC_PATH_EINVAL


def test_virtual_xattrs(wire: Wire, doc: bytes, shared_node: RunningNode) -> None:
    answer = wire.ok(one(subdoc.SubdocGet, doc, b"$document", flags=XATTR))
    content = json.loads(answer.value)
    assert int(content["CAS"], 16) == answer.cas
    assert int(content["vbucket_uuid"], 16) == shared_node.failover_log(0)[0][0]
    assert content["flags"] == 9
    assert content["exptime"] == 0
    assert content["deleted"] is False
    assert content["datatype"] == ["json"]
    assert content["value_bytes"] == 25
    assert wire.ok(one(subdoc.SubdocGet, doc, b"$document.flags", flags=XATTR)).value == b"9"
    assert (
        wire.refused(one(subdoc.SubdocGet, doc, b"$nothing", flags=XATTR))
        == Status.SUBDOC_XATTR_UNKNOWN_VATTR
    )
    assert wire.refused(one(subdoc.SubdocDictUpsert, doc, b"$document", b"1", XATTR)) == (
        Status.SUBDOC_XATTR_CANT_MODIFY_VATTR
    )


def test_macros(wire: Wire, doc: bytes) -> None:
    message = mutation(
        doc,
        (Op.SUBDOC_DICT_UPSERT, XATTR | EXPAND, b"_m", b'"${Mutation.seqno}"'),
        (Op.SUBDOC_DICT_UPSERT, XATTR | EXPAND | PARENTS, b"_c.crc", b'"${Mutation.value_crc32c}"'),
        (Op.SUBDOC_DICT_UPSERT, XATTR | EXPAND, b"_cas", b'"${Mutation.CAS}"'),
    )
    answer = wire.ok(message)
    seqno = json.loads(wire.ok(one(subdoc.SubdocGet, doc, b"_m", flags=XATTR)).value)
    assert int(seqno, 16) == answer.by_seqno
    crc = json.loads(wire.ok(one(subdoc.SubdocGet, doc, b"$document.value_crc32c", flags=XATTR)).value)
    assert json.loads(wire.ok(one(subdoc.SubdocGet, doc, b"_c.crc", flags=XATTR)).value) == crc
    cas = json.loads(wire.ok(one(subdoc.SubdocGet, doc, b"_cas", flags=XATTR)).value)
    assert cas == "0x" + answer.cas.to_bytes(8, "little").hex()
    assert wire.ok(kv.Get(key=doc)).cas == answer.cas
    unknown = one(subdoc.SubdocDictUpsert, doc, b"_x", b'"${nothing}"', XATTR | EXPAND)
    assert wire.refused(unknown) == Status.SUBDOC_XATTR_UNKNOWN_MACRO
    on_body = one(subdoc.SubdocDictUpsert, doc, b"x", b'"${Mutation.seqno}"', EXPAND)
    assert wire.refused(on_body) == Status.SUBDOC_XATTR_INVALID_FLAG_COMBO


def test_macros_of_the_document_are_facts_before_the_mutation(wire: Wire, doc: bytes) -> None:
    before = json.loads(wire.ok(one(subdoc.SubdocGet, doc, b"$document", flags=XATTR)).value)
    message = mutation(
        doc,
        (Op.SUBDOC_DICT_UPSERT, XATTR | EXPAND, b"all", b'"${$document}"'),
        (Op.SUBDOC_DICT_UPSERT, XATTR | EXPAND | PARENTS, b"t.cas", b'"${$document.CAS}"'),
        (Op.SUBDOC_DICT_UPSERT, XATTR | EXPAND, b"t.exp", b'"${$document.exptime}"'),
        (Op.SUBDOC_DICT_UPSERT, 0, b"n", b"2"),
    )
    assert wire.ok(message).cas != int(before["CAS"], 16)
    assert json.loads(wire.ok(one(subdoc.SubdocGet, doc, b"all", flags=XATTR)).value) == before
    together = json.loads(wire.ok(one(subdoc.SubdocGet, doc, b"t", flags=XATTR)).value)
    assert together == {"cas": before["CAS"], "exp": before["exptime"]}
    for macro, status in {
        b'"${$document.nothing}"': Status.SUBDOC_XATTR_UNKNOWN_VATTR_MACRO,
        b'"${$document"': Status.SUBDOC_XATTR_UNKNOWN_MACRO,
        b'"${$document.}"': Status.SUBDOC_XATTR_UNKNOWN_MACRO,
        b'"${$vbucket}"': Status.SUBDOC_XATTR_UNKNOWN_MACRO,
    }.items():
        assert wire.refused(one(subdoc.SubdocDictUpsert, doc, b"x", macro, XATTR | EXPAND)) == status


def test_macros_of_a_document_that_is_made(wire: Wire, key: bytes) -> None:
    made = one(subdoc.SubdocDictUpsert, key, b"c", b'"${$document.CAS}"', XATTR | EXPAND, doc_flags=ADD)
    wire.ok(made)
    assert wire.ok(one(subdoc.SubdocGet, key, b"c", flags=XATTR)).value == b'"0x0000000000000000"'


def test_the_clock_of_a_vbucket_is_now(wire: Wire, doc: bytes) -> None:
    wire.ok(kv.SetWithMeta(key=doc, value=b"{}", flags=0, expiry=0, rev_seqno=99, meta_cas=5))
    now = json.loads(wire.ok(one(subdoc.SubdocGet, doc, b"$vbucket.HLC.now", flags=XATTR)).value)
    assert int(now) > 1_700_000_000


@pytest.mark.parametrize("doc_flags", [UPSERT, ADD])
def test_making_a_document_makes_the_parents_too(wire: Wire, key: bytes, doc_flags: int) -> None:
    wire.ok(one(subdoc.SubdocDictUpsert, key, b"a.b.c", b"1", doc_flags=doc_flags))
    assert body(wire, key) == {"a": {"b": {"c": 1}}}


def test_mkdoc_makes_the_parents_in_a_document_that_is_there_too(wire: Wire, doc: bytes) -> None:
    assert wire.refused(one(subdoc.SubdocDictUpsert, doc, b"x.y", b"1")) == Status.SUBDOC_PATH_ENOENT
    wire.ok(
        mutation(
            doc,
            (Op.SUBDOC_DICT_UPSERT, XATTR, b"t.u.v", b"1"),
            (Op.SUBDOC_DICT_UPSERT, 0, b"x.y", b"1"),
            doc_flags=UPSERT,
        )
    )
    assert body(wire, doc)["x"] == {"y": 1}
    assert wire.ok(one(subdoc.SubdocGet, doc, b"t.u.v", flags=XATTR)).value == b"1"


def test_expiry(wire: Wire, doc: bytes) -> None:
    wire.ok(kv.Touch(key=doc, expiry=1000))
    expiry = wire.ok(kv.GetMeta(key=doc)).expiry
    wire.ok(one(subdoc.SubdocDictUpsert, doc, b"x", b"1"))
    assert wire.ok(kv.GetMeta(key=doc)).expiry == expiry  # kept where none is given
    wire.ok(one(subdoc.SubdocDictUpsert, doc, b"x", b"1", expiry=2000))
    assert wire.ok(kv.GetMeta(key=doc)).expiry > expiry
    wire.ok(one(subdoc.SubdocDictUpsert, doc, b"x", b"1", expiry=50, framing=b"\x50"))
    assert wire.ok(kv.GetMeta(key=doc)).expiry > expiry
    wire.ok(mutation(doc, (Op.SUBDOC_DICT_UPSERT, 0, b"x", b"2"), expiry=0))
    assert wire.ok(kv.GetMeta(key=doc)).expiry == 0


def test_deleted_documents(wire: Wire, key: bytes) -> None:
    made = one(subdoc.SubdocDictUpsert, key, b"_s", b"1", XATTR, doc_flags=ADD | AS_DELETED | ACCESS_DELETED)
    assert wire.call(made).status == Status.SUBDOC_SUCCESS_DELETED
    assert wire.refused(kv.Get(key=key)) == Status.KEY_ENOENT
    assert wire.ok(kv.GetMeta(key=key)).deleted == 1
    on_body = one(subdoc.SubdocDictUpsert, key, b"b", b"1", doc_flags=ACCESS_DELETED)
    assert wire.refused(on_body) == Status.SUBDOC_DELETED_DOCUMENT_CANT_HAVE_VALUE
    more = one(subdoc.SubdocCounter, key, b"_s", b"1", XATTR, doc_flags=ACCESS_DELETED)
    answer = wire.call(more)
    assert (answer.status, answer.value) == (Status.SUBDOC_SUCCESS_DELETED, b"2")
    alive = one(subdoc.SubdocDictUpsert, key, b"b", b"1", doc_flags=REVIVE | ACCESS_DELETED)
    wire.ok(alive)
    assert body(wire, key) == {"b": 1}
    assert wire.ok(one(subdoc.SubdocGet, key, b"_s", flags=XATTR)).value == b"2"
    assert wire.refused(alive) == Status.SUBDOC_CAN_ONLY_REVIVE_DELETED_DOCUMENTS


def test_durable_paths(wire: Wire, doc: bytes) -> None:
    answer = wire.ok(one(subdoc.SubdocDictUpsert, doc, b"x", b"1", framing=b"\x11\x03"))
    assert answer.by_seqno


@pytest.mark.parametrize("opcode", range(0xC5, 0xD3))
def test_malformed(wire: Wire, opcode: int, key: bytes) -> None:
    for extras, value in ((0, b""), (2, b"a"), (3, b"\xff\xff\x00a"), (5, b"abc"), (9, b"")):
        body_ = bytes(extras) + key + value if value[:2] != b"\xff\xff" else b"\xff\xff\x00" + key + b"a"
        wire.send(HEADER.pack(0x80, opcode, len(key), extras, 0, 0, len(body_), 0, 0) + body_)
        assert wire.frame().status != Status.SUCCESS
