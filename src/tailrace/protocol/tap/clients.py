"""What a bucket remembers of its TAP readers, and of what came to it by TAP.

A reader that goes away may come back under its name and resume where it was: for a while (``tap_keepalive``),
or as long as it is registered. All that is kept is a position per vbucket, packed into some 25 bytes. The
changes themselves are read from the store again, so a reader that never comes back costs no more memory than
that; if meanwhile the store forgets a deletion that the reader has not seen, that vbucket is sent to it from
the beginning, and counted.

Changes that came by TAP are passed on with a lower TTL. The TTL is remembered for runs of seqnos, in memory
and up to a limit: a change whose TTL is forgotten is sent like one made here, and is then stopped by the next
node that has the very same version. So a ring falls silent in any case; the TTL also stops what has no
version.

Rules: docs/spec/tap.md#registered-client, docs/spec/tap.md#reconnect, docs/spec/tap.md#ttl.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...frames import Seqnos
from ...wire.codes import TapConnectFlag
from ...wire.tap import TAP_TTL

if TYPE_CHECKING:
    from ...store.base import Bucket
    from .producer import TapProducer

__all__ = ["MAX_KEEPALIVE_S", "TapClient", "TapClients", "TapControl", "TapCursor", "TapHops"]

MAX_KEEPALIVE_S = 3_600.0
_MAX_RUNS = 1_000
"""How many runs of received changes are remembered for a vbucket."""


class TapControl(NamedTuple):
    """A message that is not a change: its kind and the number that it carries; it is made when sent."""

    kind: str  # opaque, state, start, end, flush
    number: int = 0
    vbucket: int = 0


@dataclass(slots=True, eq=False)
class TapCursor:
    """Where a reader is in a vbucket."""

    vbucket: int
    vb_uuid: int
    position: int = 0
    """Everything up to here has been sent, or is not for this reader."""
    acked: int = 0
    """Everything up to here has arrived."""
    backfill_end: int | None = None
    """The high seqno when the stream began; None after the backfill."""
    checkpoint_id: int = 0
    """The checkpoint that the reader was told to open; 0: none."""
    flushes: int = 0
    """How often the bucket had been flushed when the cursor began here."""
    controls: list[TapControl] = field(default_factory=list)
    """What to send before the next item; few."""
    outstanding: int = 0
    """Messages that were sent and not acknowledged."""
    gate: int = 0
    """No item is sent before the message with this number is acknowledged."""
    epoch: int = 0
    """Rises with each new beginning: acknowledgements of what was sent before no longer count."""

    @property
    def resume_at(self) -> int:
        """Where the next connection has to resume."""
        return self.acked if self.outstanding else self.position

    def go_back(self) -> None:
        """Have what was not acknowledged sent again."""
        self.position = self.acked = self.resume_at
        self.outstanding = 0

    def restart(self, vb_uuid: int, *, position: int = 0, backfill_end: int | None = None) -> None:
        """Begin at another place; nothing that was sent before counts."""
        self.vb_uuid = vb_uuid
        self.position = self.acked = position
        self.backfill_end = backfill_end
        self.checkpoint_id = 0
        self.controls.clear()
        self.outstanding = self.gate = 0
        self.epoch += 1


@dataclass(slots=True, eq=False)
class TapClient:
    """A reader, connected or not."""

    name: str
    flags: int = 0
    date: int = 0
    """Its backfill date, as last given."""
    cursors: dict[int, TapCursor] = field(default_factory=dict)
    sent: int = 0
    """Number of the last message; on the wire it wraps."""
    is_complete: bool = False
    """Whether it was a dump or takeover that is finished: the next connection begins a new one."""
    producer: TapProducer | None = None
    """Who serves it now."""
    expires_at: float | None = None
    """When it is forgotten; None while it is connected or registered."""
    owes_flush: bool = False
    """Whether a flush was not sent before the connection was gone."""
    kept: bytes | None = None
    """The packed cursors of a reader that is not connected; those of a registered one are in the store."""
    kept_count: int = 0
    is_of_earlier_run: bool = False
    reconnects: int = 0
    dropped_cursors: int = 0
    """Vbuckets that had to be sent from the beginning again."""

    @property
    def is_registered(self) -> bool:
        return bool(self.flags & TapConnectFlag.REGISTERED_CLIENT)

    def pack(self) -> bytes:
        """What the next connection needs of the cursors."""
        rows = [
            [
                cursor.vbucket,
                cursor.vb_uuid,
                cursor.resume_at,
                cursor.backfill_end,
                cursor.checkpoint_id,
                cursor.flushes,
            ]
            + [[control.kind, control.number] for control in cursor.controls]
            for cursor in self.cursors.values()
        ]
        return zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), 1)

    def unpack(self, packed: bytes) -> None:
        """The reverse of `pack`."""
        for number, vb_uuid, seqno, backfill_end, checkpoint_id, flushes, *controls in json.loads(
            zlib.decompress(packed)
        ):
            cursor = TapCursor(number, vb_uuid, seqno, seqno, backfill_end, checkpoint_id, flushes)
            cursor.controls = [TapControl(kind, what, number) for kind, what in controls]
            if self.is_of_earlier_run:
                cursor.flushes = 0  # flushes are counted from each start
            self.cursors[number] = cursor

    def positions(self) -> dict[str, Any]:
        """What is stored for a registered reader."""
        packed = b64encode(self.pack()).decode()
        return {"date": self.date, "count": len(self.cursors), "packed": packed}

    @classmethod
    def restored(cls, name: str, stored: Mapping[str, Any]) -> TapClient:
        """A registered reader of an earlier run; its cursors stay where they are stored."""
        client = cls(name, TapConnectFlag.REGISTERED_CLIENT, stored["date"], is_of_earlier_run=True)
        client.kept_count = stored["count"]
        return client

    def stats(self) -> dict[str, int | str]:
        """Figures of a reader, connected or not."""
        return {
            "type": "producer",
            "connected": str(self.producer is not None).lower(),
            "registered": str(self.is_registered).lower(),
            "flags": self.flags,
            "vb_filters": len(self.cursors) or self.kept_count,
            "reconnects": self.reconnects,
            "dropped_cursors": self.dropped_cursors,
            "sent_seqno": self.sent,
        }


class TapHops:
    """The TTLs of changes that came by TAP: runs of seqnos of each vbucket's branch, the newest of them."""

    __slots__ = ("_bucket", "_flush", "_runs")

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        # by vbucket: its branch, and first seqno, last seqno and TTL of each run
        self._runs: dict[int, tuple[int, list[tuple[int, int, int]]]] = {}
        self._flush = (0, TAP_TTL)

    def _of(self, vbucket: int) -> list[tuple[int, int, int]]:
        """The runs of a vbucket; a new branch has other changes under the same seqnos."""
        served = self._bucket.vbuckets[vbucket]
        vb_uuid = 0 if served is None else served.uuid
        branch_runs = self._runs.get(vbucket)
        if branch_runs is None or branch_runs[0] != vb_uuid:
            branch_runs = self._runs[vbucket] = vb_uuid, []
        return branch_runs[1]

    def received(self, vbucket: int, seqno: int, ttl: int) -> None:
        """A change was made from a message with this TTL."""
        runs = self._of(vbucket)
        if runs and runs[-1][1] == seqno - 1 and runs[-1][2] == ttl:
            runs[-1] = runs[-1][0], seqno, ttl
        else:
            runs.append((seqno, seqno, ttl))
            if len(runs) > _MAX_RUNS:
                del runs[: _MAX_RUNS // 2]

    def ttls(self, vbucket: int, seqnos: Seqnos) -> npt.NDArray[np.uint8] | None:
        """The TTLs to send changes with: one less than they came with; None if all were made here."""
        runs = self._of(vbucket)
        if not runs or seqnos[-1] < runs[0][0] or seqnos[0] > runs[-1][1]:
            return None
        lowered = np.full(len(seqnos), TAP_TTL, np.uint8)
        begin = max(bisect_right(runs, (int(seqnos[0]), TAP_TTL)) - 1, 0)
        for first, last, ttl in runs[begin:]:
            if first > seqnos[-1]:
                break
            lowered[(seqnos >= first) & (seqnos <= last)] = ttl - 1
        return lowered

    def flushed(self, flushes: int, ttl: int) -> None:
        """The bucket's flush of this number came by TAP."""
        self._flush = flushes, ttl

    def flush_ttl(self, flushes: int) -> int:
        """The TTL to send the flush of this number with."""
        number, ttl = self._flush
        return ttl - 1 if number == flushes else TAP_TTL


class TapClients:
    """The TAP readers of one bucket, by name."""

    def __init__(self, bucket: Bucket, max_clients: int) -> None:
        self.hops = TapHops(bucket)
        self._bucket = bucket
        self._max_clients = max_clients
        self._clients: dict[str, TapClient] = {}
        self._anonymous = 0
        for name, stored in bucket.cursors.items():
            if "packed" in stored:  # else another version wrote it, and the reader begins again
                self._clients[name] = TapClient.restored(name, stored)

    def __iter__(self) -> Iterator[TapClient]:
        return iter(self._clients.values())

    def get(self, name: str) -> TapClient | None:
        return self._clients.get(name)

    def new_name(self) -> str:
        """A name for a reader that gives none."""
        self._anonymous += 1
        return f"anon_{self._anonymous}"

    def find_or_make(self, name: str, now: float) -> TapClient | None:
        """The state of a reader that connects, or a new one; None if there are too many."""
        for gone in [known for known in self if known.expires_at is not None and known.expires_at <= now]:
            self._forget(gone)
        client = self._clients.get(name)
        if client is not None and client.is_complete:
            self._forget(client)
            client = None
        if client is None:
            if len(self._clients) >= self._max_clients:
                return None
            client = self._clients[name] = TapClient(name)
        client.expires_at = None
        self._take_up(client)
        return client

    def _take_up(self, client: TapClient) -> None:
        """Restore the cursors of a reader that was away."""
        if client.kept is not None:
            client.unpack(client.kept)
        elif client.kept_count and not client.cursors:
            client.unpack(b64decode(self._bucket.cursors[client.name]["packed"]))
        client.kept, client.is_of_earlier_run = None, False

    def save(self, client: TapClient) -> None:
        """Put a registered reader's positions on disk with the next flush."""
        if client.is_registered and self._clients.get(client.name) is client:
            self._bucket.set_cursor(client.name, client.positions())

    def disconnected(self, client: TapClient, now: float, keepalive_s: float) -> None:
        """A reader's connection is gone."""
        client.producer = None
        if self._clients.get(client.name) is not client:
            return
        if client.is_registered:
            self.save(client)
        elif keepalive_s > 0 and not client.is_complete:
            client.expires_at = now + min(keepalive_s, MAX_KEEPALIVE_S)
            client.kept = client.pack()
        else:
            self._forget(client)
        client.kept_count = len(client.cursors)
        client.cursors = {}

    def deregister(self, name: str) -> None:
        """Forget a reader as soon as it is not connected; an unknown one is forgotten already."""
        client = self._clients.get(name)
        if client is None:
            return
        client.flags &= ~TapConnectFlag.REGISTERED_CLIENT
        if name in self._bucket.cursors:
            self._bucket.set_cursor(name, None)
        if client.producer is None:
            self._forget(client)

    def _forget(self, client: TapClient) -> None:
        self._clients.pop(client.name, None)
        if client.is_registered and client.name in self._bucket.cursors:
            self._bucket.set_cursor(client.name, None)
