"""Hypothesis strategies: any frame, and any message that keeps the rules of its declaration."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from tailrace.errors import MalformedMessage
from tailrace.wire import admin, dcp, dcp_replication, kv, subdoc, tap, upr
from tailrace.wire.codes import Magic
from tailrace.wire.fields import FrameInfo, encode_frame_infos
from tailrace.wire.header import Frame
from tailrace.wire.message import MAX_KEY, Message, Part, Response

__all__ = ["frame_infos", "frames", "messages"]

_BITS = {"B": 8, "H": 16, "I": 32, "Q": 64}


def _number(bits: int, low: int = 0) -> st.SearchStrategy[int]:
    """Small numbers, edges and anything: the places where a wrong width shows."""
    top = (1 << bits) - 1
    return st.one_of(st.integers(low, min(top, 9)), st.just(top), st.integers(low, top))


def _of_code(code: str) -> st.SearchStrategy[Any]:
    if code in _BITS:
        return _number(_BITS[code])
    if code == "q":
        return st.integers(-(1 << 63), (1 << 63) - 1)
    length = struct.calcsize(code)
    return st.binary(min_size=length, max_size=length)


def _records(*formats: str) -> st.SearchStrategy[bytes]:
    """A value of whole records, each packed by one of the formats."""
    element = st.one_of(
        *(
            st.tuples(*map(_of_code, code)).map(lambda numbers, code=code: struct.pack(">" + code, *numbers))  # type: ignore[misc]
            for code in formats
        )
    )
    return st.lists(element, max_size=4).map(b"".join)


def _log() -> st.SearchStrategy[bytes]:
    return _records("QQ").filter(bool)


_SEQNO = _number(64, low=1)
_EPOCH = st.one_of(st.just(-1), st.integers(1, (1 << 63) - 1))
_STATE = st.integers(1, 4)
_ITEM = {"by_seqno": _SEQNO}
_DELETED = {"by_seqno": _SEQNO, "value": st.just(b"")}
_STREAM_FLAGS = st.sampled_from([0, 0x01, 0x02, 0x24, 0xF7, 0x100, 0x111])
_EVENT = st.sampled_from(
    [(0, 0, 16), (0, 1, 20), (0, 2, 9), (1, 0, 16), (3, 0, 12), (4, 0, 12), (5, 2, 30), (77, 9, 3)]
)
"""Event, version and size of the value."""


@st.composite
def _system_event(draw: st.DrawFn) -> dict[str, Any]:
    event, version, size = draw(_EVENT)
    value = draw(st.binary(min_size=size, max_size=size))
    return {"event": event, "version": version, "by_seqno": draw(_SEQNO), "value": value}


@st.composite
def _marker(draw: st.DrawFn) -> dict[str, Any]:
    start, end = sorted((draw(_number(64)), draw(_number(64))))
    made: dict[str, Any] = {"start": start, "end": end, "flags": draw(_number(32)), "value": b""}
    made["version"] = draw(st.sampled_from([None, 0, 2]))
    if made["version"] is not None:
        made |= {"max_visible_seqno": draw(_number(64)), "high_completed_seqno": draw(_number(64))}
    if made["version"] == 2:
        made |= {"purge_seqno": draw(_number(64)), "high_prepared_seqno": draw(_number(64))}
    return made


@st.composite
def _open(draw: st.DrawFn) -> dict[str, Any]:
    flags = draw(st.sampled_from([0, 1, 0x05, 0x2D, 0x65, 0x104, 0x305]))
    if flags & 1 or draw(st.booleans()):
        return {"flags": flags, "value": b"", "datatype": 0}
    return {"flags": flags, "value": b'{"consumer_name":"n1"}', "datatype": 1}


@st.composite
def _tap_connect(draw: st.DrawFn) -> dict[str, Any]:
    options = tap.TapConnectOptions(
        draw(_number(64)),
        draw(st.lists(_number(16), max_size=3)),
        draw(st.lists(st.tuples(_number(16), _number(64)), max_size=3)),
        draw(st.booleans()),
        draw(st.binary(max_size=3)),
    )
    made = tap.TapConnect.with_options(b"", draw(_number(32)), options)
    return {"flags": made.flags, "value": made.value}


@st.composite
def _tap_checkpoint(draw: st.DrawFn, key: bytes) -> dict[str, Any]:
    made: dict[str, Any] = {"checkpoint_id": draw(_number(64)), "value": b"", "key": b""}
    if draw(st.booleans()):
        made |= {"key": key, "item_flags": draw(_number(32)), "item_expiry": draw(_number(32))}
        made["private"] = draw(st.sampled_from([b"", bytes(8)]))
    else:
        made |= {"item_flags": None, "item_expiry": None}
    return made


@st.composite
def _cache_records(draw: st.DrawFn) -> bytes:
    record = st.builds(
        dcp_replication.CacheTransferRecord,
        *(_number(bits) for bits in (64, 64, 64, 32, 32, 8, 8)),
        st.binary(min_size=2, max_size=5),
        st.binary(max_size=5),
    )
    return b"".join(record_.encode() for record_ in draw(st.lists(record, min_size=1, max_size=3)))


def _keyed(tail: str) -> st.SearchStrategy[bytes]:
    """Records of u16 vbucket, u16 key length, key and a fixed tail."""
    element = st.tuples(_number(16), st.binary(max_size=5), st.tuples(*map(_of_code, tail))).map(
        lambda made: struct.pack(">HH", made[0], len(made[1])) + made[1] + struct.pack(">" + tail, *made[2])
    )
    return st.lists(element, min_size=1, max_size=3).map(b"".join)


def _specs(code: str) -> st.SearchStrategy[bytes]:
    def pack(made: tuple[int, int, bytes, bytes]) -> bytes:
        opcode, flags, path, value = made
        if code == "BBH":
            return struct.pack(">BBH", opcode, flags, len(path)) + path
        return struct.pack(">BBHI", opcode, flags, len(path), len(value)) + path + value

    element = st.tuples(_number(8), _number(8), st.binary(max_size=4), st.binary(max_size=4)).map(pack)
    return st.lists(element, min_size=1, max_size=3).map(b"".join)


def _sized(*sizes: int) -> st.SearchStrategy[bytes]:
    return st.one_of(*(st.binary(min_size=size, max_size=size) for size in sizes))


_FILTER = st.lists(st.tuples(_number(16), _number(64)), min_size=1, max_size=3).map(
    lambda made: struct.pack(">H", len(made)) + b"".join(struct.pack(">HQ", *pair) for pair in made)
)
_OBSERVED = st.one_of(_sized(26).map(b"\0".__add__), _sized(42).map(b"\1".__add__))
_PATH = {"path_length": st.integers(0, 3), "value": st.binary(min_size=3, max_size=9)}

RULES: Mapping[type[Message], Mapping[str, Any]] = {
    dcp.DcpFailoverLogResponse: {"value": _log()},
    dcp.DcpStreamRequest: {"flags": _STREAM_FLAGS},
    dcp.DcpAddStream: {"flags": _STREAM_FLAGS},
    dcp.DcpMutation: {**_ITEM, "nmeta": st.just(0)},
    dcp.DcpDeletion: _DELETED,
    dcp.DcpExpiration: _DELETED,
    dcp.DcpSetVBucketState: {"state": _STATE},
    dcp_replication.DcpPrepare: {**_ITEM, "durability": st.integers(1, 3)},
    dcp.DcpOsoSnapshot: {"flags": st.integers(1, 2)},
    dcp_replication.DcpCacheTransfer: {"value": _cache_records()},
    tap._TapItem: {"private": _sized(0, 8, 9)},
    tap.TapOpaqueMessage: {"code": _number(32)},
    tap.TapVBucketSet: {"state": _STATE},
    upr.UprAFailoverLog: {"value": _log()},
    upr.UprARollback: {"value": _sized(8)},
    upr.UprBSetVBucketState: {"state": _STATE},
    kv.CounterResponse: {"value": _sized(8)},
    kv.RangeScanIdResponse: {"value": _sized(16)},
    kv.GetMeta: {"version": st.sampled_from([None, 1, 2])},
    kv.SetWithMeta: {"nmeta": st.sampled_from([None, 0, 3]), "value": st.binary(min_size=3, max_size=9)},
    admin.HelloResponse: {"value": _records("H")},
    admin.Hello: {"value": _records("H")},
    admin.VBucketStateResponse: {"value": _sized(4)},
    admin.AllVbSeqnosResponse: {"value": _records("HQ")},
    admin.ObserveSeqnoResponse: {"value": _OBSERVED},
    admin.ObserveResponse: {"value": _keyed("BQ")},
    admin.Observe: {"value": _keyed("")},
    admin.ObserveSeqno: {"value": _sized(8)},
    admin.Flush: {"expiry": st.sampled_from([None, 0])},
    admin.GetClusterConfig: {"epoch": _EPOCH, "revision": st.integers(1, (1 << 63) - 1)},
    admin.SetClusterConfig: {"epoch": _EPOCH, "revision": st.integers(1, (1 << 63) - 1)},
    admin.GetErrorMap: {"value": _sized(2), "vbucket": st.just(0)},
    admin.SetVBucket: {"state": _STATE, "datatype": st.just(1)},
    admin.DelVBucket: {"value": st.sampled_from([b"", b"async=0"])},
    admin.GetAllVbSeqnos: {"state": st.integers(0, 4)},
    admin.Compact: {"drop_deletes": st.integers(0, 1)},
    admin.Rewind: {"mode": st.integers(0, 1), "value": _records("H")},
    admin.ChangeVbFilter: {"value": _FILTER},
    admin._CollectionsCommand: {"vbucket": st.just(0)},
    subdoc.SubdocGet: _PATH,
    subdoc.SubdocDictUpsert: _PATH,
    subdoc.SubdocMultiLookup: {"value": _specs("BBH")},
    subdoc.SubdocMultiMutation: {"value": _specs("BBHI")},
}
"""What a field may be, if its width alone does not say so."""

_WHOLE: Mapping[type[Message], st.SearchStrategy[dict[str, Any]]] = {
    dcp.DcpSystemEvent: _system_event(),
    dcp.DcpSnapshotMarker: _marker(),
    dcp.DcpOpen: _open(),
    tap.TapConnect: _tap_connect(),
    tap.TapCheckpointStart: _tap_checkpoint(b"checkpoint_start"),
    tap.TapCheckpointEnd: _tap_checkpoint(b"checkpoint_end"),
}
"""Fields that depend on each other, drawn together."""


def _part(rule: Part, present: st.SearchStrategy[Any], absent: Any) -> st.SearchStrategy[Any]:
    if rule is Part.FORBIDDEN:
        return st.just(absent)
    return present if rule is Part.REQUIRED else st.one_of(st.just(absent), present)


def frame_infos() -> st.SearchStrategy[bytes]:
    """Framing extras, the escapes for long ids and data included."""
    element = st.builds(FrameInfo, st.integers(0, 60), st.binary(max_size=40))
    return st.lists(element, max_size=3).map(encode_frame_infos)


@st.composite
def frames(draw: st.DrawFn, magic: int | None = None, opcode: int | None = None) -> Frame:
    """Any frame, known or unknown."""
    magic = draw(st.sampled_from(Magic)) if magic is None else magic
    extras, key = draw(st.binary(max_size=60)), draw(st.binary(max_size=60))
    return Frame(  # type: ignore[misc]
        magic,
        draw(_number(8)) if opcode is None else opcode,
        len(key),
        len(extras),
        *(draw(_number(bits)) for bits in (8, 16, 32, 64)),  # type: ignore[arg-type]
        framing=draw(frame_infos()) if Magic(magic).is_flexible else b"",
        body=extras + key + draw(st.binary(max_size=60)),
    )


@st.composite
def messages(draw: st.DrawFn, cls: type[Message], opcode: int = 0) -> Message:
    """Any message of a class; an answer needs the opcode of its request."""
    made: dict[str, Any] = draw(_WHOLE[cls] if cls in _WHOLE else _by_declaration(cls))
    made["opaque"] = draw(_number(32))
    made["cas"] = draw(_part(cls.CAS, _number(64, low=1), 0))
    made.setdefault("key", draw(_part(cls.KEY, st.binary(min_size=1, max_size=MAX_KEY), b"")))
    made.setdefault("value", draw(_part(cls.VALUE, st.binary(min_size=1, max_size=100), b"")))
    if issubclass(cls, Response):
        made |= {"opcode": opcode, "status": min(cls.OK)}
    else:
        made.setdefault("vbucket", draw(_number(16)))
    if not issubclass(cls, upr._UprA):
        made.setdefault("datatype", draw(st.integers(0, 7)) & cls.DATATYPES)
        if cls.MAGIC in (Magic.REQUEST, Magic.RESPONSE) and draw(st.booleans()):
            made |= {"framing": draw(frame_infos()), "flexible": True}
    message = cls(**made)
    try:
        message.check()
    except MalformedMessage:
        assume(False)
    return message


@st.composite
def _by_declaration(draw: st.DrawFn, cls: type[Message]) -> dict[str, Any]:
    """The fields of one of the class's layouts, and those that are elsewhere and have a rule."""
    rules: dict[str, st.SearchStrategy[Any]] = {}
    for base in reversed(cls.__mro__):
        rules |= RULES.get(base, {})
    layout = draw(st.sampled_from(cls.LAYOUTS))
    elsewhere = rules.keys() - {name for shape in cls.LAYOUTS for name in shape.names}
    made = {field.name: draw(rules.get(field.name, _of_code(field.code))) for field in layout.fields}
    return made | {name: draw(rules[name]) for name in sorted(elsewhere)}
