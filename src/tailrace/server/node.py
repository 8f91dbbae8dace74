"""The node without sockets: buckets, users, sessions and the work in the background, driven by ``now``.

    session = node.accept(peer, now)         one connection, see `session.Session`
    node.next_timer(), node.handle_timer(now)
    node.close()                             a clean stop

`aio.Server` runs one on asyncio; a simulation runs many in one process, on one clock and one seed.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .. import rng as rng_
from ..clock import SYSTEM, Clock
from ..errors import UsageError
from ..protocol.sasl import Users
from ..units import shown_ranges
from ..wire.admin import ClustermapChangeNotification
from ..wire.codes import Feature, VBucketState
from ..wire.dialect import Role
from .bucket import RunJob, ServedBucket, run_inline
from .events import EventLog
from .replication import Dial, Replication
from .served_map import NodeAddress, ServedMap, bucket_map, global_map
from .session import Session
from .settings import Settings
from .stats import Counters

if TYPE_CHECKING:
    from ..store.engine import Engine

__all__ = ["DEFAULT_USER", "Node"]

log = logging.getLogger("tailrace.server")

DEFAULT_USER = ("Administrator", "password")
"""Accepted on a node without users, because SDKs insist on logging in."""


class Node:
    """A server's state; everything happens on the owner's thread."""

    def __init__(
        self,
        engine: Engine,
        *,
        users: dict[str, str] | None = None,
        settings: Settings | None = None,
        clock: Clock = SYSTEM,
        rng: random.Random | None = None,
        run_job: RunJob = run_inline,
        fenced: bool = False,
    ) -> None:
        self.fenced = fenced
        """A member of a cluster that has no map yet. Others may have taken over what it still holds as
        active, so it serves no documents and no streams before it has one.
        """
        self.engine = engine
        self.settings = Settings() if settings is None else settings
        self.clock = clock
        self.rng = rng_.source() if rng is None else rng
        self.needs_login = bool(users)
        self.users = Users(users or dict([DEFAULT_USER]), self.rng)
        if self.needs_login:
            self.users.derive()  # here, so that no login holds up the loop for it
        self.counters = Counters()
        self.events = EventLog(clock)
        self.sessions: dict[Session, None] = {}  # in the order in which they came
        self.address = NodeAddress(port=0)
        self.started_at = clock.monotonic()
        self.disk_used_share: Callable[[], float] = lambda: 0.0
        """How full the disk of the data directory is; set by whoever runs the node."""
        self._run_job = run_job
        self._names: dict[tuple[str, str, Role | None, bytes], Session] = {}  # by bucket, dialect, role, name
        self._rev = max(1, clock.time_ns() // 1_000_000_000)
        self._own_maps: dict[str, ServedMap] = {}
        self.global_map: ServedMap | None = None
        """As the coordinator set it; None: the node makes its own."""
        self.dial: Dial = lambda upstream: upstream.close("this node can't connect to others")
        """How to reach other nodes; set by whoever runs the node."""
        self.buckets: dict[str, ServedBucket] = {}
        self.replication: dict[str, Replication] = {}
        for store in engine.buckets.values():
            self.buckets[store.name] = ServedBucket(store, self.settings, clock, run_job, self.events)
            self.replication[store.name] = Replication(self, self.buckets[store.name])
            self.buckets[store.name].durability.begin(fenced=fenced)

    @property
    def pid(self) -> int:
        """The id of its process."""
        return os.getpid()

    # connections

    def replace_users(self, users: Users) -> int:
        """Replace the users. Connections whose user is gone, or has another password, are closed; returns how
        many. Whether a login is needed stays as it was.
        """
        outdated = self.users.become(users)
        closed = [session for session in self.sessions if session.login.sasl.username in outdated]
        for session in closed:
            session.close("its user was removed or has a new password")
        return len(closed)

    def accept(self, peer: str, now: float, *, tls: bool = False) -> Session | None:
        """A connection came in; None if there are too many."""
        if len(self.sessions) >= self.settings.max_connections:
            self.counters.rejected_connections += 1
            self.events.record("connection_refused", peer=peer, connections=len(self.sessions))
            return None
        session = Session(self, peer, now, tls=tls)
        self.sessions[session] = None
        self.counters.total_connections += 1
        return session

    def forget(self, session: Session) -> None:
        """A connection is gone."""
        self.sessions.pop(session, None)
        for bucket in self.buckets.values():
            bucket.range_scans.forget(session)
        for claim in [claim for claim, owner in self._names.items() if owner is session]:
            del self._names[claim]

    def claim_name(self, bucket: str, name: bytes, session: Session) -> None:
        """A change stream goes by this name now; an older connection of that name, on which the node has
        the same role, is closed.
        """
        dialect = "" if session.dialect is None else session.dialect.name
        claim = bucket, dialect, session.role, name
        older = self._names.get(claim)
        if older is not None and older is not session:
            older.close("another connection took its name")
        self._names[claim] = session
        session.stream_name = name.decode("utf-8", "backslashreplace")

    # the cluster map

    def map_of(self, bucket: ServedBucket) -> ServedMap:
        """The map of a bucket: as it was set, or made from the states of the vbuckets here."""
        if bucket.map is not None:
            return bucket.map
        own_map = self._own_maps.get(bucket.name)
        if own_map is None:
            owners = [
                [0 if vbucket is not None and vbucket.state == VBucketState.ACTIVE else -1]
                for vbucket in bucket.store.vbuckets
            ]
            own_map = bucket_map(
                bucket.name,
                [self.address],
                owners,
                rev=self._rev,
                this_node=0,
                uuid=bucket.store.uuid,
                keeps_history=bucket.store.settings.keeps_history,
            )
            self._own_maps[bucket.name] = own_map
        return own_map

    def map_without_bucket(self) -> ServedMap:
        """The map for a connection that has selected no bucket: as it was set, or the nodes of the newest
        map of a bucket, or this node alone.
        """
        if self.global_map is not None:
            return self.global_map
        maps = [bucket.map for bucket in self.buckets.values() if bucket.map is not None]
        if not maps:
            return global_map([self.address], rev=self._rev, this_node=0)
        return max(maps, key=lambda served: served.version).without_bucket()

    def set_map(self, name: str, new: ServedMap) -> None:
        """Take a map from the coordinator; an empty name is the global one."""
        if not name:
            self.global_map = new
            return
        bucket = self.buckets.get(name)
        if bucket is None:
            raise UsageError(f"there is no bucket {name!r}")
        is_newer = bucket.map is None or new.version > bucket.map.version
        bucket.map = new
        bucket.durability.set_map(new)
        self.fenced = self.fenced and any(other.map is None for other in self.buckets.values())
        if is_newer:
            self._notify(bucket)

    def vbucket_changed(self, bucket: ServedBucket, vbucket: int) -> None:
        """A vbucket came, went or changed its state."""
        bucket.vbucket_changed(vbucket)
        if bucket.map is None:
            self._rev += 1
            self._own_maps.pop(bucket.name, None)
            self._notify(bucket)

    @contextmanager
    def watching_history(
        self, bucket: ServedBucket, numbers: Iterable[int], event: str, **facts: Any
    ) -> Iterator[None]:
        """Count and report the branches that begin and the changes that are lost in the block, once for all
        of these vbuckets.
        """
        vbuckets = bucket.store.vbuckets
        before = {
            number: (vbucket.uuid, vbucket.high_seqno)
            for number in numbers
            if number < len(vbuckets) and (vbucket := vbuckets[number]) is not None
        }
        yield
        branched: dict[int, int] = {}
        lost = 0
        for number, (uuid, high_seqno) in before.items():
            vbucket = vbuckets[number]
            if vbucket is not None and (vbucket.uuid != uuid or vbucket.high_seqno < high_seqno):
                branched[number] = vbucket.high_seqno
                if vbucket.uuid != uuid:  # what follows is new, such as collections created again
                    branched[number] = min(vbucket.high_seqno, vbucket.failover_log.entries[0].seqno)
                lost += max(0, high_seqno - branched[number])
        if not branched:
            return
        bucket.failovers += len(branched)
        bucket.lost_changes += lost
        if len(branched) == 1:
            ((number, to_seqno),) = branched.items()
            facts = {**facts, "from_seqno": before[number][1], "to_seqno": to_seqno}
        self.events.record(
            event, bucket=bucket.name, vbuckets=shown_ranges(branched), lost_changes=lost, **facts
        )

    def _notify(self, bucket: ServedBucket) -> None:
        """Tell the clients that asked for it."""
        current = self.map_of(bucket)
        for session in self.sessions:
            if session.bucket is not bucket or not session.bucket_selected:
                continue
            if current.is_known(session.known_map):
                continue
            brief = Feature.CLUSTERMAP_CHANGE_NOTIFICATION_BRIEF in session.features
            if not brief and Feature.CLUSTERMAP_CHANGE_NOTIFICATION not in session.features:
                continue
            value, datatype = (b"", 0) if brief else current.shown_to(session.granted)
            message = ClustermapChangeNotification(
                epoch=current.epoch,
                revision=current.rev,
                key=bucket.name.encode(),
                value=value,
                datatype=datatype,
            )
            if not brief:
                session.known_map = current.version
            session.push(message.encode())

    # time

    def next_timer(self) -> float | None:
        """When `handle_timer` wants to be called; sessions have their own."""
        timers = [bucket.work.next_timer() for bucket in self.buckets.values()]
        others: list[float | None] = [bucket.durability.next_timer() for bucket in self.buckets.values()]
        others += [orders.next_timer() for orders in self.replication.values()]
        timers += [timer for timer in others if timer is not None]
        return min(timers, default=None)

    def handle_timer(self, now: float) -> None:
        """Begin the work that is due."""
        for bucket in self.buckets.values():
            bucket.durability.handle_timer(now)
            if bucket.work.next_timer() <= now:
                bucket.work.handle_timer(now)
        for orders in self.replication.values():
            timer = orders.next_timer()
            if timer is not None and timer <= now:
                orders.handle_timer(now)

    # the end

    @property
    def busy(self) -> bool:
        """Whether a job is under way, which must be finished before `close`."""
        return any(bucket.work.has_jobs for bucket in self.buckets.values())

    def stop_sessions(self, reason: str) -> Iterable[Session]:
        """Take no more requests and receive nothing more; returns the sessions that are not finished."""
        for orders in self.replication.values():
            orders.close()
        for session in list(self.sessions):
            if session.unfinished:
                session.finish(reason)
            else:
                session.close(reason)
        return [session for session in self.sessions if not session.closed]

    def close(self) -> None:
        """A clean stop: everything on disk, and a note that it was one."""
        for orders in self.replication.values():
            orders.close()
        for session in list(self.sessions):
            session.close("the node stops")
        self.engine.close()
