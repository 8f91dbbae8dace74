"""The hot path: plain gets and sets, many at a time, without an object per request.

`run` takes the requests at the front of what was received for as long as they are of the simplest kind, and
stops at the first that is not: that one goes the long way through the table of commands, which knows
everything, this included. So nothing here has to be complete; it only has to be right where it answers.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from ..errors import DocumentRefused
from ..wire.codes import Datatype, Op, Status, VBucketState
from ..wire.header import HEADER, HEADER_SIZE
from .values import JSON_STARTS, is_json

if TYPE_CHECKING:
    from .session import Session

__all__ = ["run"]

_RESPONSE = 0x81
_GET, _GETQ = int(Op.GET), int(Op.GETQ)
_SET, _SETQ = int(Op.SET), int(Op.SETQ)
_ACTIVE = int(VBucketState.ACTIVE)
_MISS = int(Status.KEY_ENOENT)
_JSON = int(Datatype.JSON)
_XATTR = int(Datatype.XATTR)
_NOT_PLAIN = int(Datatype.SNAPPY | Datatype.XATTR)

_FOUND = struct.Struct(">BBHBBHII8s4s")  # a header, with CAS and flags as they stand in the stored frame
_STORED = struct.Struct(">BBHBBHIIQQQ")  # a header with the mutation extras
_SET_EXTRAS = struct.Struct(">II")
_VALUE_AT = HEADER_SIZE + 31  # behind header, extras and key of a stored mutation
_MAX_KEY = 250


def run(session: Session, data: bytes, at: int, end: int) -> int:
    """Answer requests from ``at`` on; where the first begins that was not answered."""
    bucket = session.bucket
    if bucket is None or not bucket.plain:
        return at
    unpack, header, found, stored = HEADER.unpack_from, HEADER.pack, _FOUND.pack, _STORED.pack
    vbuckets = bucket.store.vbuckets
    count = len(vbuckets)
    prefixed, with_seqno = session.prefixed_keys, session.mutation_seqno
    visible, json_limit = session.datatypes, session.node.settings.max_json_check
    xattrs_seen, held = bucket.xattrs_seen, bucket.held_vbuckets
    max_key = _MAX_KEY + prefixed
    room = session.room
    out: list[bytes] = []
    append = out.append
    gets = hits = sets = 0
    while room > 0 and end - at >= HEADER_SIZE:
        magic, opcode, key_length, extras, datatype, vbucket_id, total, opaque, cas = unpack(data, at)
        next_at = at + HEADER_SIZE + total
        if magic != 0x80 or next_at > end or vbucket_id >= count:
            break
        vbucket = vbuckets[vbucket_id]
        if vbucket is None or vbucket.state != _ACTIVE:
            break
        if opcode in (_GET, _GETQ):
            if extras or datatype or cas or key_length != total or not prefixed < key_length <= max_key:
                break
            key = data[at + HEADER_SIZE : next_at]
            if not prefixed:
                key = b"\0" + key
            elif key[0]:
                break
            frame = vbucket.get(key)
            gets += 1
            if frame is None:
                if opcode == _GET:
                    append(header(_RESPONSE, opcode, 0, 0, 0, _MISS, 0, opaque, 0))
                    room -= HEADER_SIZE
            else:
                kind = frame[5]
                if kind & _NOT_PLAIN:
                    gets -= 1
                    break
                value_at = _VALUE_AT + len(key)
                size = len(frame) - value_at + 4
                append(
                    found(
                        _RESPONSE, opcode, 0, 4, kind & visible, 0, size, opaque, frame[16:24], frame[40:44]
                    )
                )
                append(frame[value_at:])
                hits += 1
                room -= HEADER_SIZE + size
        elif opcode in (_SET, _SETQ):
            key_at = at + HEADER_SIZE + 8
            value_at = key_at + key_length
            if vbucket_id in held:
                break
            if (
                extras != 8
                or value_at > next_at
                or not prefixed < key_length <= max_key
                or datatype & ~_JSON & visible
            ):
                break
            flags, expiry = _SET_EXTRAS.unpack_from(data, at + HEADER_SIZE)
            key = data[key_at:value_at]
            if not prefixed:
                key = b"\0" + key
            elif key[0]:
                break
            value = data[value_at:next_at]
            if expiry or datatype & ~visible or len(value) > json_limit:
                break
            kind = _JSON if value[:1] in JSON_STARTS and is_json(value) else 0
            if xattrs_seen and (frame := vbucket.get(key)) is not None and frame[5] & _XATTR:
                break
            try:
                written = vbucket.set(key, value, flags, 0, kind, cas)
            except DocumentRefused:
                break  # the long way is refused too, and says why
            sets += 1
            if opcode == _SET:
                if with_seqno:
                    append(
                        stored(
                            _RESPONSE, _SET, 0, 16, 0, 0, 16, opaque, written.cas, vbucket.uuid, written.seqno
                        )
                    )
                    room -= 40
                else:
                    append(header(_RESPONSE, _SET, 0, 0, 0, 0, 0, opaque, written.cas))
                    room -= HEADER_SIZE
        else:
            break
        at = next_at
    if gets or sets:
        counters = session.node.counters
        counters.cmd_get += gets
        counters.get_hits += hits
        counters.cmd_set += sets
    if out:
        session.send_answers(out, session.room - room)
    return at
