"""A node's figures for Prometheus.

They are gathered in steps: 200 connections of 1,024 streams have 200,000 lags to look at, and the node's loop
must not stand still for that.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .. import __version__
from ..wire.codes import VBucketState
from .figures import NODE, VBUCKETS, FigureSheet

if TYPE_CHECKING:
    from ..server.bucket import ServedBucket
    from ..server.node import Node
    from ..server.stats import Histogram

__all__ = ["gather_node_figures"]

_FIRST_CLASS, _CLASSES = 7, 18
"""The classes of durations to show, from 64 µs to 16 s; each is twice as long as the one before."""


def gather_node_figures(node: Node, unread: tuple[int, int], *, vbuckets: bool) -> Iterator[FigureSheet]:
    """The same sheet after every step, whole after the last. ``unread`` are the bytes of answers and of
    requests that wait, ``vbuckets`` adds figures of every vbucket.
    """
    sheet = FigureSheet((*NODE, *VBUCKETS) if vbuckets else NODE)
    _add_node(sheet, node, unread)
    yield sheet
    for bucket in list(node.buckets.values()):
        yield from _add_bucket(sheet, bucket)
        if vbuckets:
            for vbucket in bucket.store:
                place = bucket.name, vbucket.id
                sheet.add("vbucket_high_seqno", vbucket.high_seqno, *place)
                sheet.add("vbucket_persisted_seqno", vbucket.persisted_seqno, *place)
                sheet.add("vbucket_purge_seqno", vbucket.purge_seqno, *place)
            yield sheet
    seen: set[tuple[str, ...]] = set()
    for session in list(node.sessions):
        handler = session.handler
        if handler is None or session.bucket is None or session.dialect is None:
            continue
        summary = handler.summary()
        name, rest = session.stream_name, (session.dialect.name, summary.role)
        for count in itertools.count(1):
            # names need not be unique, but series must be: otherwise Prometheus can't read any of them
            labels = (session.bucket.name, name if count == 1 else f"{name}#{count}", *rest)
            if labels not in seen:
                break
        seen.add(labels)
        sheet.add("stream_vbuckets", summary.streams, *labels)
        sheet.add("stream_lag_changes", summary.lag_changes, *labels)
        sheet.add("stream_unacknowledged_bytes", summary.unacknowledged_bytes, *labels)
        sheet.add("stream_window_bytes", summary.window_bytes, *labels)
        sheet.add("stream_backfills", summary.backfills, *labels)
        sheet.add("stream_sent_bytes_total", summary.sent_bytes, *labels)
        yield sheet


def _add_node(sheet: FigureSheet, node: Node, unread: tuple[int, int]) -> None:
    counters, now_s = node.counters, node.clock.time_ns() / 1e9
    sheet.add("node_info", 1, __version__)
    sheet.add("node_start_time_seconds", now_s - (node.clock.monotonic() - node.started_at))
    sheet.add("node_ready", int(not node.fenced))
    sheet.add("node_connections", len(node.sessions))
    sheet.add("node_connections_limit", node.settings.max_connections)
    sheet.add("node_connections_accepted_total", counters.total_connections)
    sheet.add("node_connections_refused_total", counters.rejected_connections)
    sheet.add("node_login_attempts_total", counters.auth_cmds)
    sheet.add("node_logins_refused_total", counters.auth_errors)
    sheet.add("node_commands_total", counters.cmd_get, "get")
    sheet.add("node_commands_total", counters.cmd_set, "set")
    sheet.add("node_commands_total", counters.cmd_total, "other")
    sheet.add("node_get_hits_total", counters.get_hits)
    sheet.add("node_received_bytes_total", counters.bytes_read)
    sheet.add("node_sent_bytes_total", counters.bytes_written)
    sheet.add("node_unread_bytes", unread[0])
    sheet.add("node_unprocessed_bytes", unread[1])
    sheet.add("node_disk_used_ratio", node.disk_used_share())
    for event, count in sorted(node.events.counts.items()):
        sheet.add("node_events_total", count, event)


def _add_bucket(sheet: FigureSheet, bucket: ServedBucket) -> Iterator[FigureSheet]:
    store, name = bucket.store, bucket.name
    states, documents = Counter[VBucketState](), Counter[VBucketState]()
    tombstones = queued = entries = 0
    for vbucket in store:
        state = VBucketState(vbucket.state)
        states[state] += 1
        documents[state] += vbucket.item_count
        queued += max(0, vbucket.high_seqno - vbucket.persisted_seqno)
        entries += len(vbucket.failover_log.entries)
        if state == VBucketState.ACTIVE:
            tombstones += vbucket.tombstones_in_memory
        yield sheet
    for state in VBucketState:
        sheet.add("bucket_vbuckets", states[state], name, state.name.lower())
        sheet.add("bucket_documents", documents[state], name, state.name.lower())
    figures = store.stats()
    sheet.add("bucket_tombstones", tombstones, name)
    sheet.add("bucket_memory_bytes", store.memory_bytes, name)
    sheet.add("bucket_memory_quota_bytes", store.settings.memory_quota, name)
    sheet.add("bucket_writes_refused_total", store.writes_refused, name)
    sheet.add("bucket_back_pressure", int(bucket.work.back_pressure.is_on), name)
    sheet.add("bucket_flush_queue_changes", queued, name)
    _add_durations(sheet, "bucket_flush_duration_seconds", bucket.work.flush_times, name)
    sheet.add("bucket_flush_failures_total", bucket.work.flush_failures, name)
    sheet.add("bucket_persistence", int(store.persistence), name)
    sheet.add("bucket_disk_bytes", float(figures["disk_bytes"]), name)
    sheet.add("bucket_segments", float(figures["segments"]), name)
    sheet.add("bucket_compaction_debt_changes", float(figures["superseded_changes"]), name)
    sheet.add("bucket_expirations_total", float(figures["expirations"]), name)
    sheet.add("bucket_failover_log_entries", entries, name)
    sheet.add("bucket_failovers_total", bucket.failovers, name)
    sheet.add("bucket_lost_changes_total", bucket.lost_changes, name)
    yield sheet


def _add_durations(sheet: FigureSheet, name: str, durations: Histogram, *labels: str) -> None:
    below = list(itertools.accumulate(durations.classes))
    bounds = [((1 << at) / 1e6, below[at]) for at in range(_FIRST_CLASS - 1, _FIRST_CLASS + _CLASSES)]
    sheet.add_histogram(name, bounds, durations.count, durations.total_s, *labels)
