"""The two interfaces between a server's connection and the change-stream machine on it.

A connection begins as a key-value session. The packet that binds it to a dialect makes a `Handler`, which
from then on gets every frame of that dialect; the session goes on answering the key-value commands. The
session pulls: it asks the handler for bytes while the transport has room for them, so nothing piles up for a
reader that does not read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..clock import Clock
from ..wire.header import Frame

if TYPE_CHECKING:
    # Only for the contract: the protocol loads nothing of the store.
    from ..store.base import Bucket, VBucket
    from .tap.clients import TapClients

__all__ = ["Handler", "HandlerBase", "HandlerSummary", "Host"]


class HandlerSummary(NamedTuple):
    """A connection's streams in a few figures, cheap enough to compute every second."""

    role: str
    """``producer`` or ``replica``."""
    streams: int = 0
    lag_changes: int = 0
    """Changes that have not been sent, over all streams."""
    unacknowledged_bytes: int = 0
    window_bytes: int = 0
    """0: there is no flow control."""
    backfills: int = 0
    """Streams that are being read from disk."""
    sent_bytes: int = 0
    held_up: str = ""
    """Why nothing is sent for now, if the reader is the cause."""


class Handler(Protocol):
    """A producer or replica of one dialect on one connection; sans-IO."""

    close_requested: str | None
    """Not None: send what `data_to_send` still has, then close the connection for this reason."""

    @property
    def is_busy(self) -> bool:
        """Whether the last request is not done yet: no further one is handed over until `wake` is called."""
        ...

    @property
    def is_open(self) -> bool:
        """Whether the first packet was accepted; if it is refused, the connection stays unbound."""
        ...

    def receive_frame(self, frame: Frame, now: float) -> None:
        """Take a frame of the dialect; the first is the one that bound the connection.

        Answers come from `data_to_send`, in order.
        """
        ...

    def data_to_send(self, max_bytes: int) -> list[bytes | memoryview]:
        """What to send now; if it is empty, `wake` is called when that changes.

        First all answers that are due, whatever their size, then messages of streams up to about
        ``max_bytes``. With 0 only the answers come: the session asks for them before it answers a command
        itself, because there is a client that needs all answers in the order of its requests.
        """
        ...

    def next_timer(self) -> float | None:
        """When `handle_timer` wants to be called, on the clock that ``now`` comes from."""
        ...

    def handle_timer(self, now: float) -> None:
        """That time has come, or has passed."""
        ...

    def stats(self) -> Mapping[str, int | str]:
        """Its figures for the statistics, by name; ``eq_dcpq:<name>:`` is put in front."""
        ...

    def summary(self) -> HandlerSummary:
        """A few figures for all streams together."""
        ...

    def close(self, reason: str) -> None:
        """The connection is gone: release everything. Nothing can be sent any more."""
        ...


class HandlerBase:
    """What all handlers have in common: how one asks for the end of its connection."""

    def __init__(self, host: Host) -> None:
        self.close_requested: str | None = None
        self._host = host

    def _disconnect(self, reason: str) -> None:
        """Close the connection; the first reason counts."""
        if self.close_requested is None:
            self._host.record("disconnecting", level=logging.WARNING, reason=reason)
            self.close_requested = reason
            self._disconnecting()

    def _disconnecting(self) -> None:
        """What else is to be done then."""


class Host(Protocol):
    """What a connection gives its handler, apart from the callback ``wake`` at construction."""

    @property
    def bucket(self) -> Bucket:
        """The bucket that the connection is bound to; it no longer changes."""
        ...

    @property
    def features(self) -> frozenset[int]:
        """What HELLO granted (wire.codes.Feature)."""
        ...

    @property
    def peer(self) -> str:
        """Who is on the other side, for logs and statistics: ``127.0.0.1:40112``."""
        ...

    @property
    def clock(self) -> Clock: ...

    def record(self, event: str, *, level: int, **facts: int | str) -> None:
        """Record something on this connection that an operator wants to know of.

        It goes to the log, the metrics and the page (docs/logs.md).
        """
        ...

    @property
    def settings(self) -> Any:
        """The node's settings as attributes (`tailrace.server.settings.Settings`)."""
        ...

    def watch(self, vbucket: int, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back (cheap, no argument) whenever the history, state or existence of the vbucket changed.

        Any number of readers may watch one; calling the result ends it. `VBucket.on_change` has room for one
        callback, and that is the node's.
        """
        ...

    def await_append(self, vbucket: int, callback: Callable[[], None]) -> None:
        """Call a watcher of the vbucket once, after its next change.

        A watcher that still has work to do does not ask, so a write costs the same however many readers lag.
        """
        ...

    def claim_name(self, name: bytes) -> None:
        """This connection goes by that name now; an older one of the same bucket and name is closed."""
        ...

    def not_my_vbucket(self) -> tuple[bytes, int]:
        """Value and datatype of a 0x07 answer: the cluster map, or nothing if the peer has it already."""
        ...

    def hold_writes(self, vbucket: int, *, hold: bool) -> None:
        """A takeover takes too long: answer writes to this vbucket with 0x86 until it is over."""
        ...

    @property
    def tap(self) -> TapClients:
        """What the bucket remembers of its TAP readers."""
        ...

    @property
    def datatypes(self) -> int:
        """The datatype bits that the peer may send."""
        ...

    def checked_value(self, value: bytes, datatype: int) -> tuple[bytes, int]:
        """A value received for the default collection, and its true datatype.

        `MalformedMessage` if it is not what its datatype says, or if there is no default collection.
        """
        ...

    def rewrite(self, act: Callable[[Bucket], Collection[int]], done: Callable[[str | None], None]) -> None:
        """Change the history or state of vbuckets once no background work is in the way.

        ``act`` does it and returns the vbuckets whose readers must look again; ``done`` is called when it is
        on disk, with what went wrong or None. Both may be called before this returns.
        """
        ...

    @property
    def own_name(self) -> str:
        """What the cluster calls this node: host and port."""
        ...

    def replica_reached(self, vbucket: int, name: str, seqno: int) -> None:
        """A replica of that name has every prepare up to a seqno as safe as its level requires."""
        ...

    def replica_gone(self, name: str) -> None:
        """The connection of a replica is over: what it reported no longer counts."""
        ...

    def claim_vbucket(self, vbucket: int, by: object) -> bool:
        """A replica's stream of the vbucket begins; False if another connection has one."""
        ...

    def release_vbucket(self, vbucket: int, by: object) -> None:
        """That stream is over."""
        ...

    def receive_change(self, vbucket: VBucket, frame: Frame, *, collections: bool) -> None:
        """Store a change of the snapshot that the vbucket is receiving, as it is.

        `DocumentRefused` or `MalformedMessage` if it can't be stored. ``collections``: its key has a
        collection prefix.
        """
        ...

    def memory_is_short(self) -> bool:
        """Whether memory is short: nothing more that has to be stored should come."""
        ...

    def backfills_wait(self) -> bool:
        """Whether no new backfill should begin: stream requests are answered with 0x82."""
        ...

    def is_former_active(self, vbucket: int) -> bool:
        """Whether it is a replica that was active a moment ago: readers are told to look for the new one."""
        ...

    def disk_used_share(self) -> float:
        """How full the disk is, 0 to 1: files that a stalled backfill holds on to can't be removed."""
        ...
