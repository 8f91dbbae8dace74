"""Every figure that is exported, declared once: name, kind, labels and what it says.

Names follow Prometheus: seconds and bytes, ``_total`` for what only grows. docs/metrics.md is made from this
table, and nothing that is not in it can be exported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

__all__ = [
    "MIRROR",
    "MIRROR_VBUCKETS",
    "NODE",
    "READER",
    "READER_VBUCKETS",
    "VBUCKETS",
    "FigureSheet",
    "MetricDeclaration",
]


@dataclass(frozen=True, slots=True)
class MetricDeclaration:
    """The declaration of a figure."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    about: str
    labels: tuple[str, ...] = ()


def _counter(name: str, about: str, *labels: str) -> MetricDeclaration:
    return MetricDeclaration(f"tailrace_{name}_total", "counter", about, labels)


def _gauge(name: str, about: str, *labels: str) -> MetricDeclaration:
    return MetricDeclaration(f"tailrace_{name}", "gauge", about, labels)


def _histogram(name: str, about: str, *labels: str) -> MetricDeclaration:
    return MetricDeclaration(f"tailrace_{name}", "histogram", about, labels)


_STREAM = ("bucket", "stream", "dialect", "role")
_RUN = ("bucket", "table")
_TABLE = ("bucket", "table", "collection")

NODE = (
    _gauge("node_info", "Always 1; the version is its label.", "version"),
    _gauge("node_start_time_seconds", "When the node started, in Unix time."),
    _gauge("node_ready", "1 if the node serves documents and streams, 0 while it waits for its cluster map."),
    _gauge("node_connections", "Connections of clients."),
    _gauge("node_connections_limit", "The most connections that are accepted (max_connections)."),
    _counter("node_connections_accepted", "Connections that were accepted."),
    _counter("node_connections_refused", "Connections that were refused because there were too many."),
    _counter("node_login_attempts", "Login requests; a SCRAM login takes several."),
    _counter("node_logins_refused", "Logins with a wrong name or password, over HTTP too."),
    _counter("node_commands", "Commands of the key-value front end; 'other' includes streams.", "command"),
    _counter("node_get_hits", "Gets that found their document."),
    _counter("node_received_bytes", "Bytes that came from clients."),
    _counter("node_sent_bytes", "Bytes that went to clients."),
    _gauge("node_unread_bytes", "Bytes of answers to peers that don't read them."),
    _gauge("node_unprocessed_bytes", "Bytes of requests that are not complete yet."),
    _gauge("node_disk_used_ratio", "How full the disk of the data directory is, 0 to 1."),
    _counter("node_events", "Events in the log, by kind: failover, login_refused, …", "event"),
    _gauge("bucket_vbuckets", "VBuckets by their state.", "bucket", "state"),
    _gauge("bucket_documents", "Live documents by the state of their vbucket.", "bucket", "state"),
    _gauge(
        "bucket_tombstones",
        "Tombstones in memory: deleted documents of active vbuckets that were used since the start.",
        "bucket",
    ),
    _gauge("bucket_memory_bytes", "Bytes of changes in memory, whether or not they are on disk.", "bucket"),
    _gauge("bucket_memory_quota_bytes", "The memory_quota, at which writes begin to wait.", "bucket"),
    _counter("bucket_writes_refused", "Writes refused because the quota was used up.", "bucket"),
    _gauge("bucket_back_pressure", "1 while writes are refused because the disk is behind.", "bucket"),
    _gauge("bucket_flush_queue_changes", "Changes that are not on disk yet.", "bucket"),
    _histogram("bucket_flush_duration_seconds", "How long commits to disk took.", "bucket"),
    _counter("bucket_flush_failures", "Commits to disk that failed; their changes stay in memory.", "bucket"),
    _gauge("bucket_persistence", "1 if changes are written to disk, 0 after STOP_PERSISTENCE.", "bucket"),
    _gauge("bucket_disk_bytes", "Bytes on disk: the log and the sealed segments.", "bucket"),
    _gauge("bucket_segments", "Sealed segments; merging keeps them few.", "bucket"),
    _gauge(
        "bucket_compaction_debt_changes",
        "Changes in segments that later changes in segments have superseded.",
        "bucket",
    ),
    _counter("bucket_expirations", "Documents that expired.", "bucket"),
    _gauge("bucket_failover_log_entries", "Branches of history, summed over the vbuckets.", "bucket"),
    _counter("bucket_failovers", "VBuckets that began a new branch of history since the start.", "bucket"),
    _counter("bucket_lost_changes", "Changes that these failovers took back.", "bucket"),
    _gauge("stream_vbuckets", "VBucket streams that are open on a connection.", *_STREAM),
    _gauge("stream_lag_changes", "Changes not sent yet on a connection's streams.", *_STREAM),
    _gauge("stream_unacknowledged_bytes", "Bytes that the reader has not acknowledged.", *_STREAM),
    _gauge("stream_window_bytes", "The connection's flow-control window; 0 if it has none.", *_STREAM),
    _gauge("stream_backfills", "Streams that are being read from disk.", *_STREAM),
    _counter("stream_sent_bytes", "Bytes of changes that were sent on a connection.", *_STREAM),
)
"""The figures of `tailrace serve`."""

VBUCKETS = (
    _gauge("vbucket_high_seqno", "The newest seqno of a vbucket.", "bucket", "vbucket"),
    _gauge("vbucket_persisted_seqno", "The newest seqno of a vbucket on disk.", "bucket", "vbucket"),
    _gauge("vbucket_purge_seqno", "The seqno of a vbucket's newest purged tombstone.", "bucket", "vbucket"),
)
"""More of `tailrace serve`, with ``/metrics?vbuckets=1``."""

READER = (
    _gauge("reader_info", "Always 1; command and version are its labels.", "command", "version"),
    _counter("reader_changes", "Changes that were read.", "bucket"),
    _counter("reader_rollbacks", "Rollbacks of vbuckets.", "bucket"),
    _counter("reader_rolled_back_changes", "Seqnos that these rollbacks took back.", "bucket"),
    _gauge(
        "reader_lag_changes",
        "Changes that the reader lacks, of those in the bucket when it was last asked.",
        "bucket",
    ),
    _gauge("reader_lag_seconds", "How long the reader has been behind; 0 if it has caught up.", "bucket"),
    _counter("reader_received_bytes", "Bytes that came from nodes.", "bucket"),
    _gauge(
        "reader_unacknowledged_bytes",
        "Bytes received on the open connections and not acknowledged yet.",
        "bucket",
    ),
    _gauge("reader_queued_bytes", "Bytes that wait for the application.", "bucket"),
    _counter("reader_lost_connections", "Connections that broke.", "bucket"),
    _gauge("reader_vbuckets", "VBuckets by the state of their stream.", "bucket", "state"),
    _gauge("reader_nodes", "Nodes by the state of the connection to them.", "bucket", "state"),
)
"""The figures of commands that read a bucket: `tail`, `replicate`, `invalidate`, `index`."""

READER_VBUCKETS = (
    _gauge("reader_vbucket_seqno", "The seqno up to which a vbucket was read.", "bucket", "vbucket"),
    _gauge("reader_vbucket_lag_changes", "Changes of a vbucket that were not read.", "bucket", "vbucket"),
)
"""More of these commands, with ``/metrics?vbuckets=1``."""

MIRROR = (
    _counter("mirror_changes", "Changes applied in this run.", *_TABLE),
    _counter("mirror_rollbacks", "VBuckets that went back.", *_TABLE),
    _counter("mirror_rolled_back_rows", "Rows that rollbacks removed or restored.", *_TABLE),
    _counter("mirror_rows_written", "Rows in new files.", *_TABLE),
    _counter("mirror_rows_masked", "Rows that were masked: replaced or deleted.", *_TABLE),
    _counter("mirror_written_bytes", "Bytes of new files.", *_TABLE),
    _counter("mirror_rescued", "Rows of typed tables with something that does not fit.", *_TABLE),
    _gauge("mirror_lag_changes", "Changes behind the bucket; missing until it has been asked.", *_TABLE),
    _gauge(
        "mirror_lag_seconds",
        "Age of what the table shows: how long ago the bucket was last known to have nothing newer. About a "
        "second, or --trigger, while nothing changes.",
        *_TABLE,
    ),
    _gauge("mirror_changes_per_second", "Changes per second in the last round.", *_RUN),
    _gauge("mirror_batch", "Number of the last round.", *_RUN),
    _gauge("mirror_round_planned_changes", "Changes that the round under way reads.", *_RUN),
    _gauge("mirror_round_read_changes", "How many of them are read and written.", *_RUN),
    _gauge("mirror_version", "Version of the table.", *_TABLE),
    _gauge("mirror_reported_timestamp_seconds", "When these figures were made, in Unix time.", *_RUN),
    _histogram("mirror_round_duration_seconds", "How long rounds took, by phase.", *_RUN, "phase"),
    _counter("mirror_compactions", "Compactions that were committed.", *_RUN),
    _gauge("mirror_compaction_debt_rows", "Masked rows that are still in files.", *_TABLE),
    _gauge("mirror_files", "Data files of the table.", *_TABLE),
    _gauge("mirror_undo_depth_versions", "Versions that a rollback can return to.", *_TABLE),
    _gauge("mirror_undo_depth_seconds", "Age of the oldest of these versions.", *_TABLE),
    _counter("mirror_troubles", "Problems: rounds that failed and were repeated, and others.", *_RUN),
)
"""The figures of `tailrace mirror`; those that make sense for a single table are given for each table."""

MIRROR_VBUCKETS = (
    _gauge("mirror_vbucket_seqno", "The seqno of a vbucket in the table.", *_RUN, "vbucket"),
    _gauge("mirror_vbucket_lag_changes", "Changes of a vbucket that the table lacks.", *_RUN, "vbucket"),
)
"""More of `tailrace mirror`, with ``/metrics?vbuckets=1``."""

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


@dataclass(eq=False)
class FigureSheet:
    """The figures of one answer."""

    declared: Sequence[MetricDeclaration]
    _families: dict[str, Family] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds = {
            "counter": CounterMetricFamily,
            "gauge": GaugeMetricFamily,
            "histogram": HistogramMetricFamily,
        }
        for metric in self.declared:
            made = kinds[metric.kind](metric.name, metric.about, labels=metric.labels)
            self._families[metric.name] = made

    def add(self, name: str, value: float, *labels: object) -> None:
        """Add a figure, by its name without ``tailrace_``."""
        family = self._families[f"tailrace_{name}"]
        assert not isinstance(family, HistogramMetricFamily)
        family.add_metric([str(label) for label in labels], value)

    def add_histogram(
        self, name: str, bounds: Iterable[tuple[float, int]], count: int, total: float, *labels: object
    ) -> None:
        """Add durations: how many were within each bound, for growing bounds; the total number and sum."""
        family = self._families[f"tailrace_{name}"]
        assert isinstance(family, HistogramMetricFamily)
        buckets = [(f"{bound:g}", float(below)) for bound, below in bounds]
        family.add_metric([str(label) for label in labels], [*buckets, ("+Inf", float(count))], total)

    def collect(self) -> Iterator[Metric]:
        """The figures for a registry of Prometheus."""
        yield from self._families.values()
