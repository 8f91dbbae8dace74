"""What the page of a node shows, gathered in steps like the metrics."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..wire.codes import VBucketState

if TYPE_CHECKING:
    from ..protocol.handler import HandlerSummary
    from ..server.bucket import ServedBucket
    from ..server.node import Node

__all__ = ["gather_node_sample", "gather_node_view", "vbucket_view"]

_LETTERS = {
    VBucketState.ACTIVE: "a",
    VBucketState.REPLICA: "r",
    VBucketState.PENDING: "p",
    VBucketState.DEAD: "d",
}
_MAX_STREAMS = 500


def gather_node_view(node: Node, *, has_faults: bool, full: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """The same object after every step, whole after the last. ``full`` are the peers whose connections take
    nothing for now.
    """
    counters = node.counters
    view: dict[str, Any] = {
        "node": {
            "version": __version__,
            "time": node.clock.time_ns() / 1e9,
            "uptime_s": node.clock.monotonic() - node.started_at,
            "ready": not node.fenced,
            "connections": len(node.sessions),
            "reads": counters.cmd_get,
            "writes": counters.cmd_set,
            "commands": counters.cmd_total,
            "received_bytes": counters.bytes_read,
            "sent_bytes": counters.bytes_written,
            "logins_refused": counters.auth_errors,
            "disk_used": node.disk_used_share(),
            "has_faults": has_faults,
        },
        "buckets": {},
        "streams": [],
        "events": list(node.events.recent),
    }
    yield view
    for bucket in list(node.buckets.values()):
        view["buckets"][bucket.name] = _bucket(bucket)
        yield view
    for session in list(node.sessions):
        handler = session.handler
        if handler is None or session.bucket is None or session.dialect is None:
            continue
        if len(view["streams"]) >= _MAX_STREAMS:
            break
        summary = handler.summary()
        view["streams"].append(
            {
                "bucket": session.bucket.name,
                "name": session.stream_name,
                "dialect": session.dialect.name,
                "peer": session.peer,
                "user": session.login.sasl.username or "",
                "why": _why(summary, is_full=session.peer in full),
                **summary._asdict(),
            }
        )
        yield view


def gather_node_sample(node: Node) -> Iterator[dict[str, float]]:
    """What the charts draw: counters, shown as rates, and how much waits for the disk.

    Lags of streams are not among them: there may be 200,000, too many to go through while nobody is looking.
    """
    counters = node.counters
    sample: dict[str, float] = {
        "writes": counters.cmd_set,
        "reads": counters.cmd_get,
        "sent_bytes": counters.bytes_written,
        "queued": 0,
    }
    yield sample
    for bucket in list(node.buckets.values()):
        sample["queued"] += sum(
            max(0, vbucket.high_seqno - vbucket.persisted_seqno) for vbucket in bucket.store
        )
        yield sample


def _why(summary: HandlerSummary, *, is_full: bool) -> str:
    """How a stream is doing, and why it is slow if it is."""
    if summary.role == "replica":
        return "receives"
    held_up = summary.held_up or ("its connection is full" if is_full else "")
    if held_up:
        return f"{held_up}: the reader is slow"
    if summary.backfills:
        return "reads from disk"
    return "behind" if summary.lag_changes else "in step"


def _bucket(bucket: ServedBucket) -> dict[str, Any]:
    store = bucket.store
    letters = ["-"] * store.vbucket_count
    unpersisted: list[int] = []
    documents = queued = 0
    for vbucket in store:
        state = VBucketState(vbucket.state)
        letters[vbucket.id] = _LETTERS[state]
        waiting = max(0, vbucket.high_seqno - vbucket.persisted_seqno)
        if waiting:
            queued += waiting
            unpersisted.append(vbucket.id)
        if state == VBucketState.ACTIVE:
            documents += vbucket.item_count
    return {
        "states": "".join(letters),
        "unpersisted": unpersisted,
        "documents": documents,
        "queued": queued,
        "memory_bytes": store.memory_bytes,
        "quota_bytes": store.settings.memory_quota,
        "disk_bytes": store.stats()["disk_bytes"],
        "back_pressure": bucket.work.back_pressure.is_on,
        "flush_fails": bucket.work.flush_fails,
        "maintenance_fails": bucket.work.maintenance_fails,
        "failovers": bucket.failovers,
        "lost_changes": bucket.lost_changes,
    }


def vbucket_view(bucket: ServedBucket, number: int) -> dict[str, Any] | None:
    """A vbucket with the branches of its history, the newest first; None if it is not here."""
    vbuckets = bucket.store.vbuckets
    vbucket = vbuckets[number] if 0 <= number < len(vbuckets) else None
    if vbucket is None:
        return None
    entries = vbucket.failover_log.entries
    ends = [vbucket.high_seqno, *(entry.seqno for entry in entries)]
    return {
        "vbucket": number,
        "state": VBucketState(vbucket.state).name.lower(),
        "documents": vbucket.item_count,
        "high_seqno": vbucket.high_seqno,
        "persisted_seqno": vbucket.persisted_seqno,
        "purge_seqno": vbucket.purge_seqno,
        "rollback_floor": vbucket.rollback_floor,
        "branches": [
            {"vb_uuid": str(entry.vb_uuid), "begins": entry.seqno, "ends": end}
            for entry, end in zip(entries, ends, strict=False)
        ],
    }
