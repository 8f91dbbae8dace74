"""The figures of a mirror, made of what it reports after each round."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..clock import SYSTEM, Clock
from .catalog import MIRROR, MIRROR_VBUCKETS, FigureSheet
from .past import EVERY_S, Sample

if TYPE_CHECKING:
    from ..spark.rounds.progress import RoundProgress

__all__ = ["MirrorFigures"]

_KEPT_ROUNDS = 50
_KEPT_EVENTS = 500
_PHASES = ("plan", "read", "write", "schedule", "commit", "maintain")
_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


_SHOWN_VBUCKETS = 20


def _few(went_back: Mapping[int, tuple[int, int]]) -> dict[str, list[int]]:
    """The first of them, from where to where."""
    return {str(number): list(ends) for number, ends in sorted(went_back.items())[:_SHOWN_VBUCKETS]}


class _Durations:
    """How often something took how long."""

    def __init__(self) -> None:
        self.count = 0
        self.total_s = 0.0
        self.below = [0] * len(_BOUNDS_S)

    def add(self, duration_s: float) -> None:
        self.count += 1
        self.total_s += duration_s
        for at, bound in enumerate(_BOUNDS_S):
            self.below[at] += duration_s <= bound


class MirrorFigures:
    """Counts what the rounds of a run did; read from another thread than it is written."""

    def __init__(self, bucket: str, table: str, clock: Clock = SYSTEM) -> None:
        self.bucket = bucket
        self.table = table
        self.changes = self.rollbacks = self.rows_rolled_back = self.rescued = 0
        self.rows_written = self.rows_masked = self.bytes_written = self.compactions = self.troubles = 0
        self.version = 0
        self.last_verdict: Callable[[], dict[str, Any] | None] = lambda: None
        """What `tailrace verify` found last, if anybody knows."""
        self.status: Mapping[str, Any] = {"message": "starting"}
        """What it does now, as its handle says it."""
        self._clock = clock
        self._lock = threading.Lock()
        self._phases: dict[str, _Durations] = {}
        self._last: RoundProgress | None = None
        self._last_at = clock.monotonic()
        self._rounds: deque[dict[str, Any]] = deque(maxlen=_KEPT_ROUNDS)
        self._events: deque[dict[str, Any]] = deque(maxlen=_KEPT_EVENTS)

    def add(self, progress: RoundProgress) -> None:
        """A round is done."""
        with self._lock:
            self._last, self._last_at = progress, self._clock.monotonic()
            self.changes += progress.changes
            self.rollbacks += len(progress.rolled_back)
            self.rows_rolled_back += progress.rows_rolled_back
            self.rescued += progress.rescued
            self.rows_written += progress.rows_written
            self.rows_masked += progress.rows_masked
            self.bytes_written += progress.bytes_written
            self.compactions += bool(progress.compacted)
            version_before, self.version = self.version, progress.versions[0]
            for phase, spent_s in progress.seconds.items():
                if phase != "compaction" or progress.compacted:
                    self._phases.setdefault(phase, _Durations()).add(spent_s)
            now_s = self._clock.time_ns() / 1e9
            self._rounds.append({"time": now_s, **progress.to_json()})
            if progress.rolled_back:
                self._events.append(
                    {
                        "time": now_s,
                        "event": "rollback",
                        "vbuckets": list(progress.rolled_back),
                        "rows": progress.rows_rolled_back,
                        "changes": sum(max(0, stood - to) for stood, to in progress.went_back.values()),
                        "from_to": _few(progress.went_back),
                        "version_before": version_before,
                        "version": progress.versions[0],
                        "text": f"{len(progress.rolled_back)} vbuckets, {progress.rows_rolled_back} rows",
                    }
                )
            if progress.compacted:
                self._events.append({"time": now_s, "event": "compaction", "text": progress.compacted})

    def trouble(self, text: str) -> None:
        """Something went wrong, and is tried again."""
        with self._lock:
            self.troubles += 1
            self._events.append({"time": self._clock.time_ns() / 1e9, "event": "trouble", "text": text})

    def why_not_ready(self) -> str:
        """Empty: it has committed a round, or found that there is nothing to do."""
        with self._lock:
            is_ready = self._last is not None or self.status["message"] == "waiting for changes"
        return "" if is_ready else f"no round is committed yet: {self.status['message']}"

    def stats(self) -> dict[str, Any]:
        """As one object, for the page."""
        verdict = self.last_verdict()
        with self._lock:
            return {
                "verify": verdict,
                "mirror": {
                    "bucket": self.bucket,
                    "table": self.table,
                    "message": self.status["message"],
                    "round": self.status.get("round", {}),
                    "changes": self.changes,
                    "rollbacks": self.rollbacks,
                    "rows_rolled_back": self.rows_rolled_back,
                    "rows_written": self.rows_written,
                    "rows_masked": self.rows_masked,
                    "bytes_written": self.bytes_written,
                    "rescued": self.rescued,
                    "compactions": self.compactions,
                    "troubles": self.troubles,
                    "version": self.version,
                    "lag_changes": 0 if self._last is None else self._last.lag_changes,
                    "lag_s": self._lag_s(),
                },
                "rounds": list(self._rounds),
                "events": list(self._events),
            }

    def sample(self) -> Sample:
        """What the charts draw: the worst since the sample before, and the phases of the longest round."""
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
                "lag_changes": max([last.lag_changes, *(done["lag_changes"] for done in rounds)]),
                "undo_s": min((figures.undo_s for figures in last.tables), default=None),
                **{phase: longest.get(phase, 0.0) for phase in _PHASES},
            }

    def _lag_s(self) -> float:
        """An idle mirror is as new as the bucket; one that was behind and has not reported since is later."""
        last = self._last
        if last is None:
            return 0.0
        waited_s = self._clock.monotonic() - self._last_at if last.lag_changes else 0.0
        return last.lag_s + waited_s

    def metrics(self, vbuckets: bool = False) -> FigureSheet:
        """For Prometheus."""
        sheet = FigureSheet((*MIRROR, *MIRROR_VBUCKETS) if vbuckets else MIRROR)
        with self._lock:
            self._fill(sheet, vbuckets=vbuckets)
        return sheet

    def _fill(self, sheet: FigureSheet, *, vbuckets: bool) -> None:
        labels, last = (self.bucket, self.table), self._last
        sheet.add("mirror_changes_total", self.changes, *labels)
        sheet.add("mirror_rollbacks_total", self.rollbacks, *labels)
        sheet.add("mirror_rolled_back_rows_total", self.rows_rolled_back, *labels)
        sheet.add("mirror_rows_written_total", self.rows_written, *labels)
        sheet.add("mirror_rows_masked_total", self.rows_masked, *labels)
        sheet.add("mirror_written_bytes_total", self.bytes_written, *labels)
        sheet.add("mirror_rescued_total", self.rescued, *labels)
        sheet.add("mirror_lag_changes", 0 if last is None else last.lag_changes, *labels)
        sheet.add("mirror_lag_seconds", self._lag_s(), *labels)
        sheet.add("mirror_rate", 0.0 if last is None else last.rate, *labels)
        sheet.add("mirror_batch", 0 if last is None else last.batch, *labels)
        underway = self.status.get("round", {})
        sheet.add("mirror_round_planned_changes", underway.get("changes_planned", 0), *labels)
        sheet.add("mirror_round_read_changes", underway.get("changes", 0), *labels)
        sheet.add("mirror_version", self.version, *labels)
        sheet.add("mirror_reported_seconds", self._clock.time_ns() / 1e9, *labels)
        sheet.add("mirror_compactions_total", self.compactions, *labels)
        sheet.add("mirror_troubles_total", self.troubles, *labels)
        for phase, durations in self._phases.items():
            bounds = zip(_BOUNDS_S, durations.below, strict=True)
            sheet.add_histogram(
                "mirror_round_duration_seconds", bounds, durations.count, durations.total_s, *labels, phase
            )
        tables = () if last is None else last.tables
        for figures in tables:
            place = self.bucket, self.table if len(tables) == 1 else figures.table
            sheet.add("mirror_files", figures.files, *place)
            sheet.add("mirror_compaction_debt_rows", figures.masked_rows, *place)
            sheet.add("mirror_undo_depth_versions", figures.undo_versions, *place)
            sheet.add("mirror_undo_depth_seconds", figures.undo_s, *place)
        if vbuckets and last is not None:
            for vbucket, position in sorted(last.positions.items()):
                sheet.add("mirror_vbucket_seqno", position.seqno, *labels, vbucket)
            for vbucket, changes in sorted({**dict.fromkeys(last.positions, 0), **last.behind}.items()):
                sheet.add("mirror_vbucket_lag_changes", changes, *labels, vbucket)
