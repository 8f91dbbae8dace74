"""The hot path: plain gets and sets, many at a time, without an object per request.

`run` takes the requests at the front of what was received for as long as they are of the simplest kind, and
stops at the first that is not: that one goes the long way through the table of commands, which knows
everything, this included. So nothing here has to be complete; it only has to be right where it answers.

Answers to gets are kept ready made in `VBucket.cache`, in two parts with the request's opaque between them.
The store takes an answer out when its document changes.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, TypeAlias

from ..errors import DocumentRefused
from ..wire.codes import Datatype, Op, Status, VBucketState
from ..wire.fields import is_json
from ..wire.header import HEADER_SIZE

if TYPE_CHECKING:
    from .bucket import ServedBucket
    from .session import Session

__all__ = ["run"]

# the header with what always goes together in one number: magic, opcode and key length; extras length and
# datatype; vbucket; total body length; the opaque is copied, not read; CAS
_REQUEST = struct.Struct(">IHHI4xQ")
assert _REQUEST.size == HEADER_SIZE
_KEY_LENGTH, _START = 0x0000_FFFF, 0xFFFF_0000
_GET, _GETQ, _SET, _SETQ = (0x80 << 24 | op << 16 for op in (Op.GET, Op.GETQ, Op.SET, Op.SETQ))
_SET_EXTRAS = (8 << 8,), (8 << 8, 8 << 8 | int(Datatype.JSON))  # without and with the JSON feature

_ANSWER_HEAD = struct.Struct(">BBHBBHI")  # up to the opaque
_MISS_HEAD = _ANSWER_HEAD.pack(0x81, Op.GET, 0, 0, 0, Status.KEY_ENOENT, 0)
_STORED_HEAD = _ANSWER_HEAD.pack(0x81, Op.SET, 0, 0, 0, Status.SUCCESS, 0)
_STORED_AT_HEAD = _ANSWER_HEAD.pack(0x81, Op.SET, 0, 16, 0, Status.SUCCESS, 16)
_GETQ_START = bytes([0x81, Op.GETQ])
_NO_CAS = bytes(8)
_POSITION = struct.Struct(">QQ")  # the mutation extras

_FLAGS_AND_EXPIRY = struct.Struct(">II")
_NO_EXPIRY = bytes(4)
_VALUE_AT = HEADER_SIZE + 31  # behind header and extras of a stored mutation; the key comes before it
_MAX_KEY = 250
_ACTIVE = int(VBucketState.ACTIVE)
_JSON, _XATTR = int(Datatype.JSON), int(Datatype.XATTR)
_NOT_PLAIN = int(Datatype.SNAPPY | Datatype.XATTR)
assert _JSON == 1  # it chooses the form of an answer

Answer: TypeAlias = tuple[bytes, bytes, bytes]
"""Head for a peer without JSON, head for one with it, and what comes behind the opaque."""


def run(session: Session, bucket: ServedBucket, data: bytes, at: int) -> tuple[int, bytes]:
    """Answer requests from ``at`` on; where the first begins that was not answered, and the answers."""
    if not bucket.plain:
        return at, b""
    unpack, get, set_, start_bits = _REQUEST.unpack_from, _GET, _SET, _START
    vbuckets, caches = bucket.store.vbuckets, bucket.caches
    count = len(vbuckets)
    prefixed, form = session.prefixed_keys, session.datatypes & _JSON
    room = session.room
    out: list[bytes] = []
    gets = misses = sets = 0
    end = len(data)
    last = end - HEADER_SIZE
    while at <= last and room > 0:
        start, extras, vbucket_id, total, cas = unpack(data, at)
        body_at = at + 24
        next_at = body_at + total
        if next_at > end or vbucket_id >= count:
            break
        # What is left of a get when its key is its whole body. Other requests that come out the same have a
        # body of at least 64 KiB, and no such key is ever found.
        opcode = start - total
        if opcode == get or opcode == _GETQ:  # noqa: PLR1714, SIM109 - it would make a tuple each time
            if extras or cas:
                break
            key = data[body_at:next_at] if prefixed else b"\0" + data[body_at:next_at]
            answer = caches[vbucket_id].get(key)
            if answer is None:
                vbucket = vbuckets[vbucket_id]
                if vbucket is None or vbucket.state != _ACTIVE:
                    break
                if not 1 < len(key) <= _MAX_KEY + 1 or key[0] or vbucket.is_locked(key):
                    break
                frame = vbucket.get(key)
                if frame is None:
                    misses += 1
                    if opcode == get:
                        out += (_MISS_HEAD, data[at + 12 : at + 16], _NO_CAS)
                        room -= 24
                    at = next_at
                    continue
                if frame[5] & _NOT_PLAIN:
                    break
                answer = _prepare(bucket, vbucket.cache, key, frame)
            tail = answer[2]
            if opcode == get:
                out += (answer[form], data[at + 12 : at + 16], tail)
            else:
                out += (_GETQ_START, answer[form][2:], data[at + 12 : at + 16], tail)
            room -= len(tail) + 16
            gets += 1
        else:
            opcode = start & start_bits
            vbucket = vbuckets[vbucket_id]
            value_at = body_at + 8 + (start & _KEY_LENGTH)
            if opcode not in (set_, _SETQ) or extras not in _SET_EXTRAS[form] or value_at > next_at:
                break
            key = data[body_at + 8 : value_at] if prefixed else b"\0" + data[body_at + 8 : value_at]
            value = data[value_at:next_at]
            flags, expiry = _FLAGS_AND_EXPIRY.unpack_from(data, body_at)
            if (
                vbucket is None
                or expiry
                or vbucket.state != _ACTIVE
                or not 1 < len(key) <= _MAX_KEY + 1
                or key[0]
                or len(value) > bucket.max_json_check
                or vbucket_id in bucket.held_vbuckets
                or (bucket.xattrs_seen and (old := vbucket.get(key)) is not None and old[5] & _XATTR)
            ):
                break
            datatype = _JSON if is_json(value) else 0
            cache = vbucket.cache
            answer = cache.get(key)
            try:
                new_cas, seqno = vbucket.set(key, value, flags, 0, datatype, cas)
            except DocumentRefused:
                break  # the long way is refused too, and says why
            cas_bytes = new_cas.to_bytes(8, "big")
            if answer is not None:  # somebody reads this document: keep the new answer in place of the old
                tail = cas_bytes + data[body_at : body_at + 4] + value
                if len(tail) == len(answer[2]) and answer[1][5] == datatype:
                    cache[key] = answer[0], answer[1], tail
            sets += 1
            if opcode == set_:
                if session.mutation_seqno:
                    position = _POSITION.pack(vbucket.uuid, seqno)
                    out += (_STORED_AT_HEAD, data[at + 12 : at + 16], cas_bytes, position)
                    room -= 40
                else:
                    out += (_STORED_HEAD, data[at + 12 : at + 16], cas_bytes)
                    room -= 24
        at = next_at
    counters = session.node.counters
    if gets or misses:
        counters.cmd_get += gets + misses
        counters.get_hits += gets
    if sets:
        counters.cmd_set += sets
    return at, b"".join(out)


def _prepare(bucket: ServedBucket, cache: dict[bytes, Answer], key: bytes, frame: bytes) -> Answer:
    """The answer to a get, for a peer without and with the JSON datatype; kept if the document stays."""
    tail = frame[16:24] + frame[40:44] + frame[_VALUE_AT + len(key) :]  # CAS, flags, value
    size = len(tail) - 8
    raw, json = (
        _ANSWER_HEAD.pack(0x81, Op.GET, 0, 4, datatype, 0, size) for datatype in (0, frame[5] & _JSON)
    )
    answer = raw, json, tail
    if frame[44:48] == _NO_EXPIRY and bucket.may_cache(len(tail)):
        cache[key] = answer
    return answer
