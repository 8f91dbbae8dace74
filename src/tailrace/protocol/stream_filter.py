"""Which changes of a vbucket are for a stream: a stream request's JSON value and the filter made from it.

Four kinds of streams: of the whole bucket, of some collections, of a scope (with the collections added to it
later), and the *legacy* stream of a connection without collections, which sees the default collection only
and no system events. The filter follows the system events that pass by: it knows when it has nothing left.

Rules: docs/spec/dcp.md#stream-request-message, docs/spec/dcp.md#collections.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from ..errors import MalformedMessage
from ..frames import OPCODE_AT, Bytes, Chunk, Mask, Trait, collections_at
from ..model import MAX_U64
from ..wire.codes import SCOPE_EVENTS, DcpOpcode, Status, SystemEventId
from ..wire.dcp import DcpSystemEvent
from ..wire.fields import parse_json
from ..wire.header import Frame

__all__ = ["MAX_COLLECTIONS", "StreamFilter", "StreamValue", "parse_stream_value"]

MAX_COLLECTIONS = 10_000
"""What a stream request may list: more than a bucket of any server holds."""

_HEX_32 = re.compile(r"[0-9a-fA-F]{1,8}")
_HEX_64 = re.compile(r"[0-9a-fA-F]{1,16}")
_DECIMAL_64 = re.compile(r"[0-9]{1,20}")
_DEFAULT = frozenset({0})
_SYSTEM_EVENT = int(Trait.SYSTEM_EVENT)  # a plain int: an operator of an IntFlag costs a call or two
_NOT_PLAIN = int(Trait.COLLECTION | Trait.SYSTEM_EVENT)


@dataclass(frozen=True, slots=True)
class StreamValue:
    """What the value of a stream request says; None where it says nothing."""

    uid: int | None = None
    stream_id: int | None = None
    collections: frozenset[int] | None = None
    scope: int | None = None
    purge_seqno: int = 0


def _refuse(what: str) -> NoReturn:
    raise MalformedMessage(f"dcp stream request: {what}")


def parse_stream_value(value: bytes) -> StreamValue:
    """Read the JSON of a stream request; `MalformedMessage` says what to answer.

    Unknown members are ignored, but at least one known member must be there.
    """
    try:
        members = parse_json(value)
    except ValueError:
        _refuse("the value is not JSON")
    if not isinstance(members, dict):
        _refuse("the value is not a JSON object")
    if not members.keys() & {"uid", "sid", "collections", "scope", "purge_seqno", "cts"}:
        _refuse("the value has no member that is known")
    if "collections" in members and "scope" in members:
        _refuse("collections and scope exclude each other")
    _check_cache_transfer(members.get("cts", {}))
    return StreamValue(
        uid=_number(members, "uid", _HEX_64, 16),
        stream_id=_stream_id(members),
        collections=_collections(members),
        scope=_number(members, "scope", _HEX_32, 16),
        purge_seqno=_number(members, "purge_seqno", _DECIMAL_64, 10) or 0,
    )


def _check_cache_transfer(wishes: object) -> None:
    """Check how a cache is to be transferred: it has no effect, but must make sense."""
    if not isinstance(wishes, dict):
        _refuse("cts is not a JSON object")
    free_memory, all_keys = wishes.get("free_memory", 0), wishes.get("all_keys", False)
    if type(free_memory) is not int or free_memory < 0 or type(all_keys) is not bool:
        _refuse("cts has free_memory, a number, and all_keys, true or false")


def _number(members: Mapping[str, Any], name: str, shape: re.Pattern[str], base: int) -> int | None:
    if name not in members:
        return None
    return _parse_number(members[name], name, shape, base)


def _parse_number(text: object, name: str, shape: re.Pattern[str], base: int) -> int:
    if not isinstance(text, str) or shape.fullmatch(text) is None or (number := int(text, base)) > MAX_U64:
        _refuse(f"{name} is not a number in the required form")
    return number


def _collections(members: Mapping[str, Any]) -> frozenset[int] | None:
    if "collections" not in members:
        return None
    listed = members["collections"]
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_COLLECTIONS:
        _refuse(f"collections must be an array of 1 to {MAX_COLLECTIONS} ids")
    return frozenset(_parse_number(text, "a collection", _HEX_32, 16) for text in listed)


def _stream_id(members: Mapping[str, Any]) -> int | None:
    if "sid" not in members:
        return None
    number = members["sid"]
    if type(number) is not int:
        _refuse("sid is not an integer")
    if not 1 <= number <= 0xFFFF:
        raise MalformedMessage("dcp stream request: sid must be 1 to 65535", Status.DCP_STREAMID_INVALID)
    return number


class StreamFilter:
    """Decides frame by frame, in bulk, which pass; keeps up with collections that come and go."""

    __slots__ = ("_collections", "_scope", "is_empty", "is_legacy", "shows_unseen")

    def __init__(
        self, collections: frozenset[int] | None = None, *, scope: int | None = None, legacy: bool = False
    ) -> None:
        self._collections: set[int] | None = None if collections is None else set(collections)
        self._scope = scope
        self.is_legacy = legacy
        self.shows_unseen = False
        """Whether prepares and aborts pass too."""
        self.is_empty = False
        """All that was asked for has been dropped: the stream has nothing to wait for."""

    @classmethod
    def of_old_clients(cls) -> StreamFilter:
        """The filter of a connection without collections."""
        return cls(_DEFAULT, legacy=True)

    @classmethod
    def make(cls, value: StreamValue, manifest: Mapping[str, Any], *, collections: bool) -> StreamFilter:
        """The filter of a stream request; `MalformedMessage` if it asks for what the bucket does not have."""
        if collections and value.scope is None and value.collections is None:
            return cls()
        by_scope = _collections_by_scope(manifest)
        known = frozenset().union(*by_scope.values())
        if not collections:
            if 0 not in known:
                raise MalformedMessage("the default collection was dropped", Status.UNKNOWN_COLLECTION)
            return cls.of_old_clients()
        if value.scope is not None:
            if value.scope not in by_scope:
                raise MalformedMessage(f"there is no scope {value.scope:x}", Status.UNKNOWN_SCOPE)
            return cls(by_scope[value.scope], scope=value.scope)
        if value.collections is not None and not value.collections <= known:
            raise MalformedMessage("a collection is not there", Status.UNKNOWN_COLLECTION)
        return cls(value.collections)

    @property
    def collections(self) -> frozenset[int] | None:
        """Which collections pass now; None: all."""
        return None if self._collections is None else frozenset(self._collections)

    @property
    def is_one_collection(self) -> bool:
        """Whether exactly one collection was asked for by name."""
        return self._scope is None and not self.is_legacy and len(self._collections or ()) == 1

    def wanted(self, chunk: Chunk) -> Mask | None:
        """Which frames of a chunk pass; None: all of them."""
        wanted = self._wanted(chunk)
        if self.shows_unseen or not chunk.traits & _SYSTEM_EVENT:
            return wanted
        opcodes = chunk.data[chunk.offsets + OPCODE_AT]
        seen: Mask = (opcodes != DcpOpcode.PREPARE) & (opcodes != DcpOpcode.ABORT)
        if seen.all():
            return wanted
        return seen if wanted is None else wanted & seen

    def _wanted(self, chunk: Chunk) -> Mask | None:
        """Like `wanted`, by collections alone."""
        if self._collections is None:
            return None
        if self._collections == _DEFAULT and not chunk.traits & _NOT_PLAIN:
            return None
        data, offsets = chunk.data, chunk.offsets
        if not chunk.traits & _SYSTEM_EVENT:
            return self._pass(data, offsets)
        # The events split the chunk: each may change what passes after it.
        passed = np.zeros(len(offsets), np.bool_)
        begin = 0
        ends = np.append(offsets[1:], len(data))
        for place in np.flatnonzero(data[offsets + OPCODE_AT] == DcpOpcode.SYSTEM_EVENT).tolist():
            passed[begin:place] = self._pass(data, offsets[begin:place])
            frame = data[offsets[place] : ends[place]].tobytes()
            passed[place] = self._follow(DcpSystemEvent.decode(Frame.parse(frame)))
            begin = place + 1
            if self.is_empty:
                return passed
        passed[begin:] = self._pass(data, offsets[begin:])
        return passed

    def _pass(self, data: Bytes, offsets: Any) -> Mask:
        assert self._collections is not None
        return np.isin(collections_at(data, offsets), np.fromiter(self._collections, np.int64))

    def _follow(self, event: DcpSystemEvent) -> bool:
        """Whether a system event passes; it may change the filter."""
        assert self._collections is not None
        if event.event in SCOPE_EVENTS:
            passes = self._scope == event.scope_id
            self.is_empty |= passes and event.event == SystemEventId.SCOPE_DROPPED
            return passes
        collection = event.collection_id
        assert collection is not None
        in_scope = self._scope is not None and self._scope == event.scope_id
        passes = in_scope or collection in self._collections
        if event.event == SystemEventId.COLLECTION_END:
            self._collections.discard(collection)
            self.is_empty |= passes and self._scope is None and not self._collections
        elif in_scope:
            self._collections.add(collection)
        return passes and not self.is_legacy


def _collections_by_scope(manifest: Mapping[str, Any]) -> dict[int, frozenset[int]]:
    return {
        int(scope["uid"], 16): frozenset(
            int(collection["uid"], 16) for collection in scope.get("collections", ())
        )
        for scope in manifest["scopes"]
    }
