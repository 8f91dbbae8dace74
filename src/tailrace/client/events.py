"""What a reader reports to its application, in the order in which it happened.

A change is identified by (vbucket, vb_uuid, seqno): after a failover the same seqno names another change. Its
``vb_uuid`` is the branch that it was made on. ``snapshot`` is the range of its snapshot: the state is
consistent when the change with the last seqno of the range is there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ..wire.codes import Datatype

__all__ = [
    "Aborted",
    "Change",
    "Committed",
    "Deletion",
    "DurableWrite",
    "Event",
    "Expiration",
    "Flush",
    "Mutation",
    "Prepared",
    "Rollback",
    "SeqnoAdvanced",
    "Snapshot",
    "StreamEnd",
    "SystemEvent",
]


@dataclass(slots=True)
class Mutation:
    """A document was created or changed."""

    vbucket: int
    vb_uuid: int
    seqno: int
    rev: int
    cas: int
    key: bytes
    value: bytes = field(repr=False)
    """The body, inflated and without xattrs."""
    flags: int
    expiry: int
    datatype: int
    """`Datatype.JSON` or 0."""
    snapshot: tuple[int, int]
    collection_id: int = 0
    xattrs: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def is_json(self) -> bool:
        """Whether the value is a JSON document."""
        return bool(self.datatype & Datatype.JSON)

    def json(self) -> Any:
        """The value, parsed; ValueError if it is not JSON."""
        return json.loads(self.value)


@dataclass(slots=True)
class Deletion:
    """A document was deleted."""

    vbucket: int
    vb_uuid: int
    seqno: int
    rev: int
    cas: int
    key: bytes
    delete_time: int
    """Unix seconds; 0 if the server doesn't say."""
    snapshot: tuple[int, int]
    collection_id: int = 0
    xattrs: dict[str, Any] | None = field(default=None, repr=False)


@dataclass(slots=True)
class Expiration:
    """A document's time was up."""

    vbucket: int
    vb_uuid: int
    seqno: int
    rev: int
    cas: int
    key: bytes
    delete_time: int
    snapshot: tuple[int, int]
    collection_id: int = 0
    xattrs: dict[str, Any] | None = field(default=None, repr=False)


@dataclass(slots=True)
class Snapshot:
    """A snapshot begins: its changes follow, and the state is consistent after the last of them."""

    vbucket: int
    vb_uuid: int
    start: int
    end: int
    source: str
    """``disk`` or ``memory``."""
    history: bool = False
    """It has every version, and so a key more than once. If it is announced twice, with the same ends, the
    bucket no longer has all versions of the part before."""


@dataclass(slots=True)
class Rollback:
    """The server lost changes: undo everything of the vbucket above ``seqno``, then go on.

    ``seqno`` is 0 or a point at which a whole snapshot had been delivered: the application must return to
    what it had then. ``vb_uuid`` is the branch on which the vbucket goes on.
    """

    vbucket: int
    vb_uuid: int
    seqno: int


@dataclass(slots=True)
class Flush:
    """All documents of the vbucket are gone (TAP and UPR only; in DCP this is a rollback to 0)."""

    vbucket: int


@dataclass(slots=True)
class SystemEvent:
    """A collection or scope came, went or changed."""

    vbucket: int
    vb_uuid: int
    seqno: int
    event: str
    """``collection_created``, ``collection_dropped``, ``collection_modified``, ``scope_created``,
    ``scope_dropped``, or ``event_N`` for one of a later server.
    """
    name: str
    manifest_uid: int
    scope_id: int
    collection_id: int | None
    max_ttl: int | None
    snapshot: tuple[int, int]
    history: bool | None = None
    """Whether every version of the collection's documents is kept; None if the server does not say."""


@dataclass(slots=True)
class Prepared:
    """A durable write has begun (``sync_replication=True``).

    It can't be read before it is committed: by a `Committed`, or by any other change of the document if the
    server no longer tells them apart.
    """

    vbucket: int
    vb_uuid: int
    seqno: int
    rev: int
    cas: int
    key: bytes
    value: bytes = field(repr=False)
    flags: int
    expiry: int
    """Of a deletion, its time."""
    datatype: int
    deleted: bool
    level: str
    """``majority``, ``majority_and_persist_on_active`` or ``persist_to_majority``."""
    snapshot: tuple[int, int]
    collection_id: int = 0
    xattrs: dict[str, Any] | None = field(default=None, repr=False)


@dataclass(slots=True)
class Committed:
    """A prepared write took effect: the document is as its `Prepared` says, with this seqno."""

    vbucket: int
    vb_uuid: int
    seqno: int
    prepared_seqno: int
    key: bytes
    snapshot: tuple[int, int]
    collection_id: int = 0


@dataclass(slots=True)
class Aborted:
    """A prepared write was given up; its `Prepared` may not have come."""

    vbucket: int
    vb_uuid: int
    seqno: int
    prepared_seqno: int
    key: bytes
    snapshot: tuple[int, int]
    collection_id: int = 0


@dataclass(slots=True)
class SeqnoAdvanced:
    """The position moved past changes that are not for this stream."""

    vbucket: int
    vb_uuid: int
    seqno: int
    snapshot: tuple[int, int]


@dataclass(slots=True)
class StreamEnd:
    """Nothing more comes from this vbucket."""

    vbucket: int
    reason: str
    """``ok`` when the end that was asked for is reached, ``filter_empty`` when all collections are gone, …"""


Change: TypeAlias = Mutation | Deletion | Expiration
"""What happened to a document."""

DurableWrite: TypeAlias = Prepared | Committed | Aborted
"""What becomes of a durable write."""

Event: TypeAlias = (
    Change | DurableWrite | Snapshot | Rollback | Flush | SystemEvent | SeqnoAdvanced | StreamEnd
)
"""Anything that `changes()` gives."""
