"""The figures of a mirror, made of what it reports after each round."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..clock import SYSTEM, Clock
from .chart_samples import EVERY_S, ChartSample
from .figures import MIRROR, MIRROR_VBUCKETS, FigureSheet

if TYPE_CHECKING:
    from ..spark.rounds.progress import RoundProgress, Standing, TableCounts, TableFigures

__all__ = ["MirrorFigures"]

_KEPT_ROUNDS = 50
_KEPT_EVENTS = 500
_PHASES = ("plan", "read", "write", "schedule", "commit", "maintain")
_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_SHOWN_VBUCKETS = 20
_DEFAULT_COLLECTION = "_default._default"


def _few(went_back: Mapping[int, tuple[int, int]]) -> dict[str, list[int]]:
    """The first vbuckets, with the seqnos from and to which each went."""
    return {str(number): list(ends) for number, ends in sorted(went_back.items())[:_SHOWN_VBUCKETS]}


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


class _Durations:
    """Counts durations, by bounds."""

    def __init__(self) -> None:
        self.count = 0
        self.total_s = 0.0
        self.below = [0] * len(_BOUNDS_S)

    def add(self, duration_s: float) -> None:
        self.count += 1
        self.total_s += duration_s
        for at, bound in enumerate(_BOUNDS_S):
            self.below[at] += duration_s <= bound


class _Sums:
    """What the rounds of a run did, to a table or to all of them."""

    def __init__(self) -> None:
        self.changes = self.rollbacks = self.rows_rolled_back = self.rescued = 0
        self.rows_written = self.rows_masked = self.bytes_written = self.version = 0
        self.last: TableFigures | None = None
        """The last figures of the table, if this is for one table."""

    def add(self, counts: TableCounts | RoundProgress, rolled_back: int, version: int) -> None:
        """A round is done."""
        self.version = version
        self.changes += counts.changes
        self.rollbacks += rolled_back
        self.rows_rolled_back += counts.rows_rolled_back
        self.rescued += counts.rescued
        self.rows_written += counts.rows_written
        self.rows_masked += counts.rows_masked
        self.bytes_written += counts.bytes_written


class MirrorFigures:
    """Counts what the rounds of a run did; one thread writes, another reads."""

    def __init__(
        self, bucket: str, table: str, paths: Mapping[str, str] | None = None, clock: Clock = SYSTEM
    ) -> None:
        """``paths`` are the tables by collection, in the order of the reports."""
        self.bucket = bucket
        self.table = table
        self._tables = {place: _Sums() for place in (paths or {_DEFAULT_COLLECTION: table}).items()}
        self.standing: Callable[[], Standing | None] = lambda: None
        """How far the tables are behind now; None until that is known."""
        self.total = _Sums()
        self.compactions = self.troubles = 0
        self.last_verdict: Callable[[], dict[str, Any] | None] = lambda: None
        """The result of the last `tailrace verify`, if known."""
        self.status: Mapping[str, Any] = {"message": "starting"}
        """The status of the mirror's handle."""
        self._trouble = ""
        self._clock = clock
        self._lock = threading.Lock()
        self._phases: dict[str, _Durations] = {}
        self._last: RoundProgress | None = None
        self._began = clock.monotonic()
        self._rounds: deque[dict[str, Any]] = deque(maxlen=_KEPT_ROUNDS)
        self._events: list[dict[str, Any]] = []

    def add(self, progress: RoundProgress) -> None:
        """A round is done."""
        with self._lock:
            self._last = progress
            rolled_back, version_before = len(progress.rolled_back), self.total.version
            for of_table, figures in zip(self._tables.values(), progress.tables, strict=False):
                of_table.add(figures.counts, rolled_back, figures.version)
                of_table.last = figures
            self.total.add(progress, rolled_back, progress.versions[0])
            self.compactions += bool(progress.compacted)
            for phase, spent_s in progress.seconds.items():
                if phase != "compaction" or progress.compacted:
                    self._phases.setdefault(phase, _Durations()).add(spent_s)
            now_s = self._clock.time_ns() / 1e9
            self._rounds.append({"time": now_s, **progress.to_json()})
            if progress.rolled_back:
                self._remember(
                    {
                        "time": now_s,
                        "event": "rollback",
                        "vbuckets": list(progress.rolled_back),
                        "rows": progress.rows_rolled_back,
                        "changes": sum(max(0, stood - to) for stood, to in progress.went_back.values()),
                        "from_to": _few(progress.went_back),
                        "version_before": version_before,
                        "version": progress.versions[0],
                        "text": f"{_many(rolled_back, 'vbucket')}, {_many(progress.rows_rolled_back, 'row')}",
                    }
                )
            if progress.compacted:
                self._remember({"time": now_s, "event": "compaction", "text": progress.compacted})

    def _remember(self, event: dict[str, Any]) -> None:
        """Keep an event. If there are too many, drop the oldest of the most frequent kind: compactions and
        failed attempts to reach a bucket must not push out a rollback that nobody has seen.
        """
        if len(self._events) >= _KEPT_EVENTS:
            ((most, _),) = Counter(kept["event"] for kept in self._events).most_common(1)
            del self._events[next(at for at, kept in enumerate(self._events) if kept["event"] == most)]
        self._events.append(event)

    def note_versions(self, versions: Iterable[int]) -> None:
        """Set the versions of the tables before a round has reported them."""
        with self._lock:
            for of_table, version in zip(self._tables.values(), versions, strict=True):
                of_table.version = version
            self.total.version = next(iter(self._tables.values())).version

    def trouble(self, text: str) -> None:
        """Something went wrong, and is tried again."""
        with self._lock:
            self.troubles += 1
            self._trouble = text
            self._remember({"time": self._clock.time_ns() / 1e9, "event": "trouble", "text": text})

    def why_not_ready(self) -> str:
        """Why it is not ready; empty once it has committed a round, or found that there is nothing to do."""
        with self._lock:
            is_ready = self._last is not None or self.status["message"] == "waiting for changes"
        return "" if is_ready else f"no round is committed yet: {self.status['message']}"

    def _is_in_trouble(self) -> bool:
        """Whether some of the bucket can't be read now, or a round has just failed."""
        message = str(self.status["message"])
        return message == self._trouble or message.startswith("waiting for nodes")

    def stats(self) -> dict[str, Any]:
        """The figures as one object, for the page."""
        verdict = self.last_verdict()
        with self._lock:
            return {
                "verify": verdict,
                "mirror": {
                    "bucket": self.bucket,
                    "table": self.table,
                    "message": self.status["message"],
                    "trouble": self._is_in_trouble(),
                    "round": self.status.get("round", {}),
                    "changes": self.total.changes,
                    "rollbacks": self.total.rollbacks,
                    "rows_rolled_back": self.total.rows_rolled_back,
                    "rows_written": self.total.rows_written,
                    "rows_masked": self.total.rows_masked,
                    "bytes_written": self.total.bytes_written,
                    "rescued": self.total.rescued,
                    "compactions": self.compactions,
                    "troubles": self.troubles,
                    "version": self.total.version,
                    "lag_changes": self._lag_changes(),
                    "lag_s": self._lag_s(),
                },
                "rounds": list(self._rounds),
                "events": list(self._events),
            }

    def sample(self) -> ChartSample:
        """What the charts draw: the worst lag since the last sample, and the phases of the longest round."""
        with self._lock:
            last = self._last
            if last is None:
                return {}
            began = self._clock.time_ns() / 1e9 - EVERY_S
            rounds = [done for done in self._rounds if done["time"] > began]
            longest: Mapping[str, float] = max(
                (done["seconds"] for done in rounds),
                key=lambda spent: sum(spent[phase] for phase in _PHASES if phase in spent),
                default={},
            )
            return {
                "lag_s": round(max([self._lag_s(), *(done["lag_s"] for done in rounds)]), 3),
                "lag_changes": max([self._lag_changes() or 0, *(done["lag_changes"] for done in rounds)]),
                "undo_s": min((figures.undo_s for figures in last.tables), default=None),
                **{phase: longest.get(phase, 0.0) for phase in _PHASES},
            }

    def _lag_changes(self) -> int | None:
        """The lag of the table that is furthest behind; None if it is not known yet."""
        standing = self.standing()
        return None if standing is None else max(standing.behind, default=0)

    def _lag_s(self) -> float:
        """The lag in time, which grows while nothing is committed: in a long round, or without the bucket."""
        standing = self.standing()
        return self._clock.monotonic() - (self._began if standing is None else standing.as_of)

    def metrics(self, vbuckets: bool = False) -> FigureSheet:
        """For Prometheus."""
        sheet = FigureSheet((*MIRROR, *MIRROR_VBUCKETS) if vbuckets else MIRROR)
        with self._lock:
            self._fill(sheet, vbuckets=vbuckets)
        return sheet

    def _fill(self, sheet: FigureSheet, *, vbuckets: bool) -> None:
        labels, last = (self.bucket, self.table), self._last
        sheet.add("mirror_changes_per_second", 0.0 if last is None else last.rate, *labels)
        sheet.add("mirror_batch", 0 if last is None else last.batch, *labels)
        underway = self.status.get("round", {})
        sheet.add("mirror_round_planned_changes", underway.get("changes_planned", 0), *labels)
        sheet.add("mirror_round_read_changes", underway.get("changes", 0), *labels)
        sheet.add("mirror_reported_timestamp_seconds", self._clock.time_ns() / 1e9, *labels)
        sheet.add("mirror_compactions_total", self.compactions, *labels)
        sheet.add("mirror_troubles_total", self.troubles, *labels)
        for phase, durations in self._phases.items():
            bounds = zip(_BOUNDS_S, durations.below, strict=True)
            sheet.add_histogram(
                "mirror_round_duration_seconds", bounds, durations.count, durations.total_s, *labels, phase
            )
        self._fill_tables(sheet)
        if vbuckets and last is not None:
            for vbucket, position in sorted(last.positions.items()):
                sheet.add("mirror_vbucket_seqno", position.seqno, *labels, vbucket)
            for vbucket, changes in sorted({**dict.fromkeys(last.positions, 0), **last.behind}.items()):
                sheet.add("mirror_vbucket_lag_changes", changes, *labels, vbucket)

    def _fill_tables(self, sheet: FigureSheet) -> None:
        standing, lag_s = self.standing(), self._lag_s()
        for at, ((collection, table), figures) in enumerate(self._tables.items()):
            place = self.bucket, table, collection
            sheet.add("mirror_changes_total", figures.changes, *place)
            sheet.add("mirror_rollbacks_total", figures.rollbacks, *place)
            sheet.add("mirror_rolled_back_rows_total", figures.rows_rolled_back, *place)
            sheet.add("mirror_rows_written_total", figures.rows_written, *place)
            sheet.add("mirror_rows_masked_total", figures.rows_masked, *place)
            sheet.add("mirror_written_bytes_total", figures.bytes_written, *place)
            sheet.add("mirror_rescued_total", figures.rescued, *place)
            sheet.add("mirror_version", figures.version, *place)
            sheet.add("mirror_lag_seconds", lag_s, *place)
            if standing is not None:
                sheet.add("mirror_lag_changes", standing.behind[at], *place)
            if figures.last is not None:
                sheet.add("mirror_files", figures.last.files, *place)
                sheet.add("mirror_compaction_debt_rows", figures.last.masked_rows, *place)
                sheet.add("mirror_undo_depth_versions", figures.last.undo_versions, *place)
                sheet.add("mirror_undo_depth_seconds", figures.last.undo_s, *place)
