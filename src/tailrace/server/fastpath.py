"""The hot path: plain gets and sets, many at a time, without an object per request.

`run` takes the requests at the front of what was received for as long as they are of the simplest kind, and
stops at the first that is not: that one goes the long way through the table of commands, which has every
command, these included. So nothing here has to be complete; it only has to be right where it answers.

Answers to gets are kept ready made in the store's `Bucket.cache`, by key. The store takes an answer out when
its document changes. An answer knows the request that it is for, from the first byte to the opaque: where
these twelve bytes and the key are the same and there is no CAS, nothing of the request has to be understood.
Consecutive gets whose keys have the same length are like the rows of a table, and are read together.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ..errors import DocumentRefused
from ..large_bytes import LARGE_BYTES, join_large
from ..wire.codes import Datatype, Magic, Op, Status, VBucketState
from ..wire.dcp import DcpMutation
from ..wire.fields import JSON_STARTS, is_json
from ..wire.header import HEADER_LAYOUT, HEADER_SIZE
from ..wire.kv import MutationResponse, Set

if TYPE_CHECKING:
    from ..store.base import VBucket
    from .bucket import ServedBucket
    from .session import Session

__all__ = ["run"]

_REQUEST, _RESPONSE = int(Magic.REQUEST), int(Magic.RESPONSE)
_GET, _GETQ, _SET, _SETQ = map(int, (Op.GET, Op.GETQ, Op.SET, Op.SETQ))
_GETS, _SETS = (_GET, _GETQ), (_SET, _SETQ)
_FIELDS = ("magic", "key_length", "extras_length+datatype", "vbucket", "body_length", "opaque:4s", "cas")
_unpack_header = HEADER_LAYOUT.only(*_FIELDS).struct.unpack_from
_SET_LAYOUT = HEADER_LAYOUT + Set.LAYOUTS[0]
_unpack_set = _SET_LAYOUT.only(*_FIELDS, "flags", "expiry").struct.unpack_from
_SET_SIZE = _SET_LAYOUT.size  # without key and value
_FLAGS_END = _SET_LAYOUT.at("expiry")
_OPCODE_AT = HEADER_LAYOUT.at("opcode")
_BODY_LENGTH_AT = HEADER_LAYOUT.at("opaque") - 1  # its last byte, which is all of it in a get

_HEAD = HEADER_LAYOUT.until("opaque").struct  # of requests and of answers
_MISS_HEAD = _HEAD.pack(_RESPONSE, Op.GET, 0, 0, 0, Status.KEY_ENOENT, 0)
_STORED_HEAD = _HEAD.pack(_RESPONSE, Op.SET, 0, 0, 0, Status.SUCCESS, 0)
_POSITION = MutationResponse.LAYOUTS[1].struct
_STORED_AT_HEAD = _HEAD.pack(_RESPONSE, Op.SET, 0, _POSITION.size, 0, Status.SUCCESS, _POSITION.size)
_GETQ_START = bytes([_RESPONSE, Op.GETQ])
_NO_CAS = bytes(HEADER_LAYOUT.field("cas").size)

# where fields are in a stored mutation, which is a DCP one
_STORED = HEADER_LAYOUT + DcpMutation.LAYOUTS[0]
_DATATYPE_AT = _STORED.at("datatype")
_CAS = _STORED.field("cas").place
_FLAGS = _STORED.field("flags").place
_FLAGS_SIZE = _STORED.field("flags").size
_EXPIRY = _STORED.field("expiry").place
_NO_EXPIRY = bytes(_STORED.field("expiry").size)
_VALUE_AT = _STORED.size  # the key comes before it
_MAX_KEY = 250
_ROWS = 64
"""So many gets are read together: copying them for that is cheaper than looking at each in place."""
_TURN_BYTES = 32 << 10
"""Of requests, before the caller looks at the clock: small ones take about a millisecond."""
_ACTIVE = int(VBucketState.ACTIVE)
_JSON, _XATTR = int(Datatype.JSON), int(Datatype.XATTR)
_NOT_PLAIN = int(Datatype.SNAPPY | Datatype.XATTR)
assert _JSON == 1  # it chooses the form of an answer


Answer: TypeAlias = tuple[Any, ...]
"""To a get of one document: the head of the request by a peer without collections, and by one with them; the
head of the answer for a peer without the JSON datatype, and for one with it; what comes behind the opaque
(CAS, flags, value); the vbucket.
"""


class _Mode(NamedTuple):
    """What depends on the features of a peer."""

    rows: list[Callable[[bytes | memoryview], Iterator[tuple[bytes, bytes, bytes, bytes]]]]
    """By body length, what reads consecutive gets: head, opaque, CAS, key of each."""
    no_cas: bytes
    """The bytes of a CAS of 0, as the rows have them."""
    request_at: int
    """The index in an answer of the head of the request."""
    answer_at: int
    """The index in it of its own head."""
    key_at: int
    """Where the key of a set begins."""
    set_extras: tuple[int, ...]
    """Extras length and datatype that a set may have."""


def _mode(*, prefixed: bool, json: bool) -> _Mode:
    # The key as the store has it begins with a 0. A peer without collections does not send that, but there is
    # one in front of its keys: the last byte of no CAS in a get, and of no expiry in a set.
    cas = 7 + prefixed
    return _Mode(
        rows=[struct.Struct(f">{_HEAD.size}s4s{cas}s{8 - cas + size}s").iter_unpack for size in range(256)],
        no_cas=bytes(cas),
        request_at=int(prefixed),
        answer_at=2 + json,
        key_at=_SET_SIZE - 1 + prefixed,
        set_extras=(8 << 8, 8 << 8 | _JSON) if json else (8 << 8,),
    )


_MODES = [[_mode(prefixed=prefixed, json=json) for json in (False, True)] for prefixed in (False, True)]


def run(session: Session, bucket: ServedBucket, data: bytes, at: int) -> tuple[int, bytes]:
    """Answer requests from ``at`` on; where the first begins that was not answered, and the answers."""
    if not bucket.collections.is_plain:
        return at, b""
    granted = session.granted
    prefixed = granted.prefixed_keys
    rows, no_cas, request_at, answer_at, key_at, set_extras = _MODES[prefixed][granted.datatypes & _JSON]
    store = bucket.store
    vbuckets: Sequence[Any] = store.vbuckets
    answers = store.cache
    find = answers.get
    room = session.room
    out: list[bytes] = []
    large: memoryview | None = None
    gets = misses = sets = 0
    end = len(data)
    stop_at = at + _TURN_BYTES
    while end - at >= HEADER_SIZE and at < stop_at:
        if room <= 0:  # counted as low as it can be: find out what it is
            room = session.room - sum(map(len, out))
            if room <= 0:
                break
        opcode = data[at + _OPCODE_AT]
        if not opcode:
            body = data[at + _BODY_LENGTH_AT]
            size = HEADER_SIZE + body
            many = (end - at) // size
            if many > _ROWS:  # noqa: PLR1730 (a call takes as long as a get)
                many = _ROWS
            largest = bucket.answers.largest
            if many * largest > room:
                many = room // largest + 1
            before = len(out)
            for head, opaque, no, key in rows[body](data[at : at + many * size]):
                answer = find(key)
                if answer is None or answer[request_at] != head or no != no_cas:
                    break
                out += (answer[answer_at], opaque, answer[4])
            hits = (len(out) - before) // 3
            if hits:
                gets += hits
                room -= hits * largest
                at += hits * size
                continue
        if opcode in _SETS:
            if end - at < _SET_SIZE:
                break
            magic, key_length, extras, vbucket_id, total, opaque, cas, flags, expiry = _unpack_set(data, at)
            value_at = at + _SET_SIZE + key_length
            next_at = at + HEADER_SIZE + total
            if (
                next_at > end
                or value_at > next_at
                or extras not in set_extras
                or expiry
                or magic != _REQUEST
                or total > bucket.max_json_check
                or vbucket_id in bucket.held_vbuckets
            ):
                break
            key = data[at + key_at : value_at]
            value = data[value_at:next_at]
            answer = find(key)
            if answer is not None and answer[5] == vbucket_id:
                vbucket = vbuckets[vbucket_id]
            else:
                answer = None
                vbucket = _owner(vbuckets, vbucket_id, key)
                try:
                    if vbucket is None or (bucket.xattrs_seen and _has_xattrs(vbucket.get(key))):
                        break
                except DocumentRefused:
                    break
            datatype = _JSON if value[:1] in JSON_STARTS and is_json(value) else 0
            try:
                new_cas, seqno = vbucket.put(key, value, flags, datatype, cas)
            except DocumentRefused:
                break  # the long way is refused too, and says why
            except BaseException:
                answers.pop(key, None)  # whether it is stored is not known
                raise
            cas_bytes = new_cas.to_bytes(8, "big")
            if answer is not None:  # somebody reads this document: keep the new answer in place of the old
                plain, with_prefix, raw, json, old, owner = answer
                tail = cas_bytes + data[at + HEADER_SIZE : at + _FLAGS_END] + value
                if len(tail) == len(old) and json[_DATATYPE_AT] == datatype:
                    answers[key] = plain, with_prefix, raw, json, tail, owner
                else:
                    answers.pop(key, None)
                    _keep(bucket, key, _answer(vbucket_id, key, datatype, tail))
            sets += 1
            if opcode == _SET:
                if granted.mutation_seqno:
                    out += (_STORED_AT_HEAD, opaque, cas_bytes, _POSITION.pack(vbucket.uuid, seqno))
                    room -= 40
                else:
                    out += (_STORED_HEAD, opaque, cas_bytes)
                    room -= 24
        elif opcode in _GETS:
            magic, key_length, extras, vbucket_id, total, opaque, cas = _unpack_header(data, at)
            next_at = at + HEADER_SIZE + total
            if next_at > end or magic != _REQUEST or extras or cas or key_length != total:
                break
            key = data[at + HEADER_SIZE : next_at]
            if not prefixed:
                key = b"\0" + key
            answer = find(key)
            if answer is None or answer[5] != vbucket_id:
                vbucket = _owner(vbuckets, vbucket_id, key)
                if vbucket is None or vbucket.is_locked(key):
                    break
                try:
                    frame = vbucket.get(key)
                except DocumentRefused:
                    break
                if frame is None:
                    misses += 1
                    if opcode == _GET:
                        out += (_MISS_HEAD, opaque, _NO_CAS)
                        room -= 24
                    at = next_at
                    continue
                if frame[_DATATYPE_AT] & _NOT_PLAIN:
                    break
                if len(frame) >= LARGE_BYTES:  # too large to keep: copied only into what is sent
                    large = memoryview(frame)[_VALUE_AT + len(key) :]
                    datatype = frame[_DATATYPE_AT] & _JSON & granted.datatypes
                    size = _FLAGS_SIZE + len(large)
                    head = _HEAD.pack(_RESPONSE, opcode, 0, _FLAGS_SIZE, datatype, 0, size)
                    out += (head, opaque, frame[_CAS], frame[_FLAGS])
                    gets += 1
                    at = next_at
                    break  # to read one of these may take a turn
                tail = frame[_CAS] + frame[_FLAGS] + frame[_VALUE_AT + len(key) :]
                answer = _answer(vbucket_id, key, frame[_DATATYPE_AT], tail)
                if frame[_EXPIRY] == _NO_EXPIRY:
                    _keep(bucket, key, answer)
            head, tail = answer[answer_at], answer[4]
            out += (head if opcode == _GET else _GETQ_START + head[2:], opaque, tail)
            room -= len(tail) + 16
            gets += 1
        else:
            break
        at = next_at
    counters = session.node.counters
    if gets or misses:
        counters.cmd_get += gets + misses
        counters.get_hits += gets
    if sets:
        counters.cmd_set += sets
        bucket.work.settle()
    made = b"".join(out)
    return at, made if large is None else join_large(made, large)


def _has_xattrs(frame: bytes | None) -> bool:
    return frame is not None and bool(frame[_DATATYPE_AT] & _XATTR)


@lru_cache(16 << 10)
def _head(*fields: int) -> bytes:
    """Many documents have the same; one object for all of them stays in the processor's cache."""
    return _HEAD.pack(*fields)


def _owner(vbuckets: Sequence[VBucket | None], number: int, key: bytes) -> VBucket | None:
    """The vbucket of a plain key, if it is served here."""
    if number >= len(vbuckets) or not 1 < len(key) <= _MAX_KEY + 1 or key[0]:
        return None
    vbucket = vbuckets[number]
    return vbucket if vbucket is not None and vbucket.state == _ACTIVE else None


def _answer(vbucket: int, key: bytes, datatype: int, tail: bytes) -> Answer:
    size, rest = len(key), len(tail) - 8
    return (
        _head(_REQUEST, Op.GET, size - 1, 0, 0, vbucket, size - 1),
        _head(_REQUEST, Op.GET, size, 0, 0, vbucket, size),
        _head(_RESPONSE, Op.GET, 0, 4, 0, 0, rest),
        _head(_RESPONSE, Op.GET, 0, 4, datatype & _JSON, 0, rest),
        tail,
        vbucket,
    )


def _keep(bucket: ServedBucket, key: bytes, answer: Answer) -> None:
    """Keep an answer, if there is room for it, until its document changes."""
    if bucket.answers.may_keep(len(answer[4]) + 16):
        bucket.store.cache[key] = answer
