"""One snapshot of the node's state: the STAT command, the CLI and the web all read it from here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from .. import __version__
from ..wire.codes import Status, VBucketState
from .call import Refused

if TYPE_CHECKING:
    from ..store.base import VBucket
    from .bucket import ServedBucket
    from .node import Node

__all__ = ["GROUPS", "Counters", "Histogram", "group", "snapshot"]

Stats: TypeAlias = Iterator[tuple[str, object]]


@dataclass(slots=True)
class Counters:
    """What the node has done since it started."""

    cmd_total: int = 0
    cmd_get: int = 0
    get_hits: int = 0
    cmd_set: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    total_connections: int = 0
    rejected_connections: int = 0
    auth_cmds: int = 0
    auth_errors: int = 0


@dataclass(slots=True)
class Histogram:
    """Durations in classes that double, from a microsecond up."""

    count: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0
    classes: list[int] = field(default_factory=lambda: [0] * 40)

    def add(self, duration_s: float) -> None:
        """Count a duration."""
        self.count += 1
        self.total_s += duration_s
        self.longest_s = max(self.longest_s, duration_s)
        self.classes[min(int(duration_s * 1e6).bit_length(), len(self.classes) - 1)] += 1

    def rows(self) -> Iterator[tuple[str, int]]:
        """The classes that hold something: ``16,32`` (microseconds from, to) and how many."""
        for at, count in enumerate(self.classes):
            if count:
                yield f"{(1 << at) >> 1},{1 << at}", count


def snapshot(node: Node) -> Iterator[dict[str, Any]]:
    """Everything as one JSON object, step by step; it is complete after the last step."""
    buckets: dict[str, Any] = {}
    connections: list[dict[str, Any]] = []
    everything = {"node": dict(_general(node)), "buckets": buckets, "connections": connections}
    for bucket in list(node.buckets.values()):
        vbuckets: dict[str, Any] = {}
        buckets[bucket.name] = {**dict(_bucket(bucket)), "vbuckets": vbuckets}
        for vbucket in list(bucket.store):
            vbuckets[str(vbucket.id)] = _vbucket(vbucket)
            yield everything
    for session in list(node.sessions):
        stream = None if session.handler is None else session.handler.stats()
        connections.append({**dict(_connection(session)), "stream": stream})
        yield everything
    yield everything


def group(node: Node, bucket: ServedBucket | None, text: str) -> Stats:
    """The statistics of a group by its name in STAT; the words after it narrow it down."""
    name, *words = text.split(" ") if text else [""]
    figures_of = GROUPS.get(name)
    if figures_of is None:
        raise Refused(Status.KEY_ENOENT, "there is no such group of statistics")
    if bucket is None and name not in _WITHOUT_BUCKET:
        raise Refused(Status.NO_BUCKET, "select a bucket first")
    return figures_of(node, bucket, words)


# groups


def _general_group(node: Node, bucket: ServedBucket | None, words: list[str]) -> Stats:
    yield from _general(node)
    if bucket is not None:
        yield from _bucket(bucket)


def _vbucket_group(node: Node, bucket: ServedBucket, words: list[str]) -> Stats:
    for vbucket in _chosen(bucket, words):
        yield f"vb_{vbucket.id}", VBucketState(vbucket.state).name.lower()


def _vbucket_details_group(node: Node, bucket: ServedBucket, words: list[str]) -> Stats:
    for vbucket in _chosen(bucket, words):
        yield f"vb_{vbucket.id}", VBucketState(vbucket.state).name.lower()
        for name, value in _vbucket(vbucket).items():
            yield f"vb_{vbucket.id}:{name}", value


def _seqno_group(node: Node, bucket: ServedBucket, words: list[str]) -> Stats:
    for vbucket in _chosen(bucket, words):
        persisted, (start, end) = vbucket.persisted_seqno, vbucket.persisted_snapshot
        yield f"vb_{vbucket.id}:high_seqno", vbucket.high_seqno
        yield f"vb_{vbucket.id}:abs_high_seqno", vbucket.high_seqno
        yield f"vb_{vbucket.id}:last_persisted_seqno", persisted
        yield f"vb_{vbucket.id}:uuid", vbucket.uuid
        yield f"vb_{vbucket.id}:purge_seqno", vbucket.purge_seqno
        yield f"vb_{vbucket.id}:last_persisted_snap_start", start
        yield f"vb_{vbucket.id}:last_persisted_snap_end", end
        yield f"vb_{vbucket.id}:max_visible_seqno", vbucket.visible_seqno
        complete = vbucket.complete_seqno
        on_disk = complete if persisted >= complete else 0
        yield f"vb_{vbucket.id}:high_prepared_seqno", vbucket.prepared_up_to(complete, on_disk)


def _failovers_group(node: Node, bucket: ServedBucket, words: list[str]) -> Stats:
    for vbucket in _chosen(bucket, words):
        entries = vbucket.failover_log.entries
        yield f"vb_{vbucket.id}:num_entries", len(entries)
        for at, entry in enumerate(entries):
            yield f"vb_{vbucket.id}:{at}:id", entry.vb_uuid
            yield f"vb_{vbucket.id}:{at}:seq", entry.seqno


def _checkpoint_group(node: Node, bucket: ServedBucket, words: list[str]) -> Stats:
    for vbucket in _chosen(bucket, words):
        yield f"vb_{vbucket.id}:open_checkpoint_id", vbucket.checkpoint_id
        yield f"vb_{vbucket.id}:last_closed_checkpoint_id", vbucket.checkpoint_id - 1
        yield f"vb_{vbucket.id}:persisted_seqno", vbucket.persisted_seqno


def _dcp_group(node: Node, bucket: ServedBucket, words: list[str]) -> Stats:
    yield from _handlers(node, bucket, "ep_dcp_count", "eq_dcpq", ("dcp", "upr-a", "upr-b"))


def _tap_group(node: Node, bucket: ServedBucket, words: list[str]) -> Stats:
    yield from _handlers(node, bucket, "ep_tap_count", "eq_tapq", ("tap",))
    for client in bucket.tap:
        if client.producer is None:  # away, and kept until it comes back
            for name, value in client.stats().items():
                yield f"eq_tapq:{client.name}:{name}", value


def _takeover_group(node: Node, bucket: ServedBucket, words: list[str]) -> Stats:
    if not words:
        raise Refused(Status.EINVAL, "which vbucket?")
    (vbucket,) = _chosen(bucket, words[:1])
    yield "name", words[1] if len(words) > 1 else ""
    yield "status", "completed" if vbucket.state == VBucketState.DEAD else "does_not_exist"
    yield "estimate", vbucket.item_count
    yield "chk_items", max(0, vbucket.high_seqno - vbucket.persisted_seqno)
    yield "vb_items", vbucket.item_count
    yield "on_disk_deletes", vbucket.tombstone_count
    yield "backfillRemaining", 0


def _timings_group(node: Node, bucket: ServedBucket, words: list[str]) -> Stats:
    for label, count in bucket.work.flush_times.rows():
        yield f"disk_commit_{label}", count
    times = bucket.work.flush_times
    yield "disk_commit_mean", int(times.total_s * 1e6 / max(1, times.count))
    yield "disk_commit_count", bucket.work.flush_times.count
    yield "disk_commit_total_us", int(bucket.work.flush_times.total_s * 1e6)
    yield "disk_commit_longest_us", int(bucket.work.flush_times.longest_s * 1e6)


def _settings_group(node: Node, bucket: ServedBucket | None, words: list[str]) -> Stats:
    yield from asdict(node.settings).items()


def _connections_group(node: Node, bucket: ServedBucket | None, words: list[str]) -> Stats:
    for at, session in enumerate(node.sessions):
        for name, value in _connection(session):
            yield f"{at}:{name}", value


GROUPS: Mapping[str, Callable[[Any, Any, list[str]], Stats]] = {
    "": _general_group,
    "vbucket": _vbucket_group,
    "vbucket-details": _vbucket_details_group,
    "vbucket-seqno": _seqno_group,
    "failovers": _failovers_group,
    "checkpoint": _checkpoint_group,
    "dcp": _dcp_group,
    "dcp-vbtakeover": _takeover_group,
    "tap": _tap_group,
    "timings": _timings_group,
    "settings": _settings_group,
    "connections": _connections_group,
}
_WITHOUT_BUCKET = frozenset({"", "settings", "connections"})


# what the groups are made of


def _general(node: Node) -> Stats:
    counters = node.counters
    yield "pid", node.pid
    yield "uptime", int(node.clock.monotonic() - node.started_at)
    yield "time", node.clock.time_ns() // 1_000_000_000
    yield "version", __version__
    yield "curr_connections", len(node.sessions)
    yield "cmd_get", counters.cmd_get
    yield "get_hits", counters.get_hits
    yield "get_misses", counters.cmd_get - counters.get_hits
    yield "cmd_set", counters.cmd_set
    yield "cmd_total_ops", counters.cmd_total + counters.cmd_get + counters.cmd_set
    yield "bytes_read", counters.bytes_read
    yield "bytes_written", counters.bytes_written
    yield "total_connections", counters.total_connections
    yield "rejected_conns", counters.rejected_connections
    yield "auth_cmds", counters.auth_cmds
    yield "auth_errors", counters.auth_errors


def _bucket(bucket: ServedBucket) -> Stats:
    store = bucket.store
    states, items = dict.fromkeys(VBucketState, 0), dict.fromkeys(VBucketState, 0)
    tombstones = unpersisted = 0
    for vbucket in store:
        state = VBucketState(vbucket.state)
        states[state] += 1
        items[state] += vbucket.item_count
        unpersisted += max(0, vbucket.high_seqno - vbucket.persisted_seqno)
        if state == VBucketState.ACTIVE:
            tombstones += vbucket.tombstone_count
    yield "bucket", bucket.name
    yield "curr_items", items[VBucketState.ACTIVE]
    yield "curr_items_tot", sum(items.values())
    yield "curr_tombstones", tombstones
    yield "mem_used", store.memory_bytes
    yield "bytes", store.memory_bytes
    yield "ep_max_size", store.settings.memory_quota
    # tools wait for "paused" after STOP_PERSISTENCE, and for 0 in both queues: everything is on disk
    yield "ep_flusher_state", "running" if store.persistence else "paused"
    yield "ep_queue_size", unpersisted
    yield "ep_flusher_todo", 0
    yield "ep_num_vbuckets", store.vbucket_count
    for state, count in states.items():
        yield f"vb_{state.name.lower()}_num", count
        yield f"vb_{state.name.lower()}_curr_items", items[state]
    yield "vb_active_expired", store.stats()["expirations"]  # only there: replicas receive expirations
    yield "vb_replica_expired", 0
    yield "vb_pending_expired", 0
    yield "ep_commit_num", bucket.work.flush_times.count
    yield "ep_commit_failed", bucket.work.flush_failures
    yield "ep_collections_manifest_uid", f"{bucket.collections.manifest.uid:x}"
    for name, value in store.stats().items():
        yield f"ep_{name}", value


def _vbucket(vbucket: VBucket) -> dict[str, object]:
    return {
        "state": VBucketState(vbucket.state).name.lower(),
        "num_items": vbucket.item_count,
        "num_tombstones": vbucket.tombstone_count,
        "high_seqno": vbucket.high_seqno,
        "undecided_prepares": len(vbucket.undecided),
        "persisted_seqno": vbucket.persisted_seqno,
        "purge_seqno": vbucket.purge_seqno,
        "rollback_floor": vbucket.rollback_floor,
        "history_start_seqno": vbucket.history_start,
        "uuid": str(vbucket.uuid),
        "disk_bytes": vbucket.disk_bytes,
    }


def _connection(session: Any) -> Stats:
    yield "peer", session.peer
    yield "name", session.name
    yield "user", session.login.sasl.username or ""
    yield "tls", str(session.tls).lower()
    yield "bucket", session.bucket.name if session.bucket is not None else ""
    yield "dialect", session.dialect.name if session.dialect is not None else "kv"
    yield "unfinished", session.unfinished


def _handlers(
    node: Node, bucket: ServedBucket, count_name: str, prefix: str, dialects: tuple[str, ...]
) -> Stats:
    sessions = [
        session
        for session in node.sessions
        if session.handler is not None
        and session.bucket is bucket
        and session.dialect is not None
        and session.dialect.name in dialects
    ]
    yield count_name, len(sessions)
    for session in sessions:
        assert session.handler is not None
        label = session.stream_name or session.peer
        yield f"{prefix}:{label}:created", int(session.opened_at - node.started_at)
        for name, value in session.handler.stats().items():
            yield f"{prefix}:{label}:{name}", value


def _chosen(bucket: ServedBucket, words: list[str]) -> list[VBucket]:
    """All vbuckets, or the one that the words name."""
    if not words:
        return list(bucket.store)
    text = words[0]
    vbuckets = bucket.store.vbuckets
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise Refused(Status.EINVAL, "a vbucket must be a number")
    at = int(text)
    vbucket = vbuckets[at] if at < len(vbuckets) else None
    if vbucket is None:
        raise Refused(Status.NOT_MY_VBUCKET)
    return [vbucket]
