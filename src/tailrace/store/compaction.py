"""Sealing what is in memory, merging segments, and what is forgotten on the way.

Both are jobs that only read what never changes (frames, sealed files) and write new files, which count from
the moment that the manifest is replaced. Writers are never stopped.

What may go: versions that were superseded before the promised history (`history_changes`, and `retention` if
every version is kept for a while, except in collections without history), documents of collections that were
dropped before it, and tombstones that are old enough or that a compaction was asked to drop.
Every loss of a version raises the vbucket's rollback floor, every loss of a tombstone its purge seqno. The
frame with a vbucket's highest seqno always stays: a snapshot must end with it.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..errors import MergeCancelled, MergeProcessLost
from ..files import DiskFile, DiskFiles, File
from ..large_bytes import gather_large
from .base import Compaction
from .checkpoint import Tail
from .deduplication import Deduplicated
from .format import NOTE_SHIFT, NOTE_TRAITS
from .generations import Generation
from .journal import BaseJob
from .log import LoggedColumns
from .manifest_file import Base, Clips, SegmentTable, clips_of, spliced, with_clips
from .merge_process import merge_in_a_process
from .merging import GROUP_BYTES, Losses, PiecePlan, merge
from .retention import Retention
from .segment import Frames, Segment, pieces_of
from .segment_writer import Pieces, SegmentWriter

if TYPE_CHECKING:
    from .sealing import SealedStore

__all__ = ["MergeJob", "SealJob", "choose_merge", "plan_compaction"]

OWN_PROCESS_BYTES = 64 << 20
"""A larger merge runs in a process of its own."""

_log = logging.getLogger(__name__)


class SealJob(BaseJob):
    """Writes a generation as a segment; then its logs are no longer needed."""

    def __init__(self, bucket: SealedStore, generation: Generation) -> None:
        super().__init__()
        self._bucket = bucket
        self._generation = generation
        self._tails = sorted(generation.tails, key=lambda pair: pair[0])
        self._vbuckets = list(bucket)
        self._clips = clips_of(bucket.segments)
        self._number = bucket.sealed.take_number()
        self._segment: Segment | None = None

    def __str__(self) -> str:
        return f"a segment of bucket {self._bucket.name} could not be written; its logs are kept"

    def _work(self) -> None:
        if any(len(tail) for _, tail in self._tails):
            self._segment = self._bucket.sealed.write(self._number, self._write)
        self._bucket.sealed.manifest_file.change(self._edit)

    def _edit(self, _: Base, table: SegmentTable) -> tuple[Base, SegmentTable]:
        generation = self._generation
        # Losses since the generation's end are facts of the segments, not of the log. Those that a merge has
        # written but not yet passed on to the vbuckets are read first: read second, they might be missed.
        untaken = self._bucket.sealed.untaken_losses
        states = dict(generation.state["vbuckets"])
        for vbucket in self._vbuckets:
            if vbucket.id in states:
                forgotten = replace(vbucket.forgotten)
                forgotten.take(untaken.get(vbucket.id, Losses()))
                states[vbucket.id] = {
                    **states[vbucket.id],
                    "purge_seqno": forgotten.purge_seqno,
                    "rollback_floor": forgotten.rollback_floor,
                    "history_floor": forgotten.history_floor,
                    "rev_floor": forgotten.rev_floor,
                }
        base = {
            **generation.state,
            "vbuckets": states,
            "sealed_log": generation.last_log,
            "next_batch": generation.next_batch,
        }
        table = with_clips(table, self._clips)
        return base, table if self._segment is None else [*table, (self._segment.name, {})]

    def _write(self, file: File) -> None:
        """Write some vbuckets at a time: more would hold up other threads, fewer would take more steps."""
        tails = [(vbucket, tail) for vbucket, tail in self._tails if len(tail)]
        stops = np.cumsum([len(tail) for _, tail in tails])
        columns = _logged_columns(tails, self._generation.logged) or _tail_columns(tails)
        ends = np.cumsum(columns.lengths, dtype=np.int64)[stops - 1].tolist()
        writer = SegmentWriter(file, self._number)
        first = start = begin = 0
        for last, (stop, end) in enumerate(zip(stops.tolist(), ends, strict=True), 1):
            if end - begin >= GROUP_BYTES or last == len(tails):
                part = LoggedColumns._make(column[start:stop] for column in columns)
                writer.add(_sealed(tails[first:last], part))
                first, start, begin = last, stop, end
        writer.finish()

    def _take_over(self) -> None:
        bucket = self._bucket
        self._generation.sealed = True
        self._generation.logged = []
        self._tails = []
        bucket.sealed.replace([], self._segment, drop=False)
        bucket.sealed.remove_logs(self._generation.last_log)
        bucket.maintained(self)

    def _undo(self) -> None:
        self._bucket.sealed.remove(self._number)
        self._bucket.maintained(self, failed=True)


def _logged_columns(tails: list[tuple[int, Tail]], logged: list[LoggedColumns]) -> LoggedColumns | None:
    """What the log knows of the changes in memory, in their order; None if it has others than these."""
    if not logged:
        return None
    vbuckets = np.concatenate([columns.vbuckets for columns in logged])
    order = vbuckets.argsort(kind="stable")
    counts = [len(tail) for _, tail in tails]
    if not np.array_equal(vbuckets[order], np.repeat([vbucket for vbucket, _ in tails], counts)):
        return None
    return LoggedColumns._make(np.concatenate(column)[order] for column in zip(*logged, strict=True))


def _tail_columns(tails: list[tuple[int, Tail]]) -> LoggedColumns:
    """The same, worked out from the changes themselves."""
    frames = list(chain.from_iterable(tail.frames() for _, tail in tails))
    count = len(frames)
    return LoggedColumns(
        np.repeat(np.array([vbucket for vbucket, _ in tails], np.uint16), [len(tail) for _, tail in tails]),
        np.fromiter(chain.from_iterable(tail.numbers() for _, tail in tails), np.uint64, count),
        np.fromiter(map(len, frames), np.uint32, count),
        np.fromiter(map(zlib.crc32, frames), np.uint32, count),
        np.fromiter(chain.from_iterable(tail.notes() for _, tail in tails), np.uint64, count),
    )


def _sealed(tails: list[tuple[int, Tail]], columns: LoggedColumns) -> Pieces:
    """Changes in memory, in the form that a segment takes."""
    _, seqnos, lengths, crcs, notes = columns
    whole = Frames(
        gather_large(
            chain.from_iterable(tail.frames() for _, tail in tails), int(lengths.sum(dtype=np.int64))
        ),
        seqnos,
        lengths,
        crcs,
        (notes & np.uint64(NOTE_TRAITS)).astype(np.uint8),
    )
    replaced = notes >> np.uint64(NOTE_SHIFT)
    has_old = replaced != 0
    stops = np.cumsum([len(tail) for _, tail in tails])
    news, olds, pair_stops = seqnos[has_old], replaced[has_old], np.cumsum(has_old)[stops - 1]
    for place, (_, tail) in enumerate(tails):
        if tail.decisions:
            pairs = sorted(tail.decisions.items())
            news = np.insert(news, pair_stops[place], np.array([new for new, _ in pairs], np.uint64))
            olds = np.insert(olds, pair_stops[place], np.array([old for _, old in pairs], np.uint64))
            pair_stops[place:] += len(pairs)
    return Pieces([vbucket for vbucket, _ in tails], whole, stops.tolist(), news, olds, pair_stops.tolist())


class _Standing(NamedTuple):
    """Where a vbucket stood when a merge was planned."""

    vbucket: int
    floor: int
    complete_seqno: int
    drops: list[tuple[int, int]]
    deduplicated: Deduplicated


@dataclass(slots=True)
class MergePlan:
    """Which segments are merged, and how.

    It is made on the owner's thread, from only what writers may change meanwhile. The rest never changes and
    takes long to read, for a thousand vbuckets with a piece in each of many segments: the thread or process
    that merges does it, with `piece_plans`.
    """

    segments: list[Segment]
    all_segments: list[Segment]
    standings: list[_Standing]
    whole: bool  # the segments are used up; otherwise only some vbuckets leave them
    asked: Compaction | None
    purge_time_s: int
    retention: Retention | None = None  # of the change history

    def piece_plans(self) -> Iterator[PiecePlan]:
        """What to do with the pieces of each vbucket, one vbucket at a time because there are many."""
        for number, promised, complete, drops, deduplicated in self.standings:
            pieces = pieces_of(number, self.all_segments)
            merged = tuple(piece for piece in pieces if piece.segment in self.segments)
            if merged:
                retention = self.retention
                floor = promised if retention is None else min(promised, retention.floor(pieces))
                others = tuple(piece for piece in pieces if piece.segment not in self.segments)
                sealed = max(piece.last for piece in pieces)
                yield PiecePlan(
                    number,
                    merged,
                    others,
                    floor,
                    promised,
                    deduplicated,
                    sealed,
                    complete,
                    drops,
                    self.asked,
                    self.purge_time_s,
                )

    @property
    def vbuckets(self) -> list[int]:
        """The vbuckets whose pieces are merged, where there are any."""
        return [standing.vbucket for standing in self.standings]

    @property
    def frame_bytes(self) -> int:
        """Of all that is merged, including what rollbacks have clipped."""
        chosen = self.vbuckets
        tables = (segment.directory for segment in self.segments)
        return sum(int(table["frame_bytes"][np.isin(table["vbucket"], chosen)].sum()) for table in tables)


def choose_merge(bucket: SealedStore) -> MergePlan | None:
    """The merge that is due, if any.

    Segments of about the same size are merged, `segment_fanout` at a time, so that their number grows with
    the logarithm of the data. All are merged when too much of them is superseded.
    """
    segments = bucket.segments
    if not segments:
        return None
    droppable = bucket.sealed.droppable(bucket.vbucket_count, bucket.settings.history_changes)
    if bucket.settings.keeps_history:
        # What the last merge of everything left is retained; about as much of it may go as has come since.
        droppable -= bucket.sealed.retained
    if droppable > bucket.settings.garbage_share * bucket.sealed.frames:
        return _plan(bucket, segments)
    if bucket.clock.monotonic() - bucket.last_change >= bucket.settings.quiet_time:
        # Nobody writes: merge neighbours while the older one is not much larger.
        start, size = len(segments) - 1, segments[-1].size
        while start and segments[start - 1].size <= 2 * size:
            start -= 1
            size += segments[start].size
        if start < len(segments) - 1:
            return _plan(bucket, segments[start:])
    fanout = bucket.settings.segment_fanout
    unit = max(bucket.generations.full_bytes, 1)
    tiers = [_tier(segment.size, unit, fanout) for segment in segments]
    for tier in sorted(set(tiers)):
        start = len(segments)
        while start and tiers[start - 1] <= tier:
            start -= 1
        if len(segments) - start >= fanout:
            return _plan(bucket, segments[start:])
    return None


def _tier(size: int, unit: int, fanout: int) -> int:
    tier = 0
    while size >= 2 * unit:
        size //= fanout
        tier += 1
    return tier


def plan_compaction(bucket: SealedStore, compaction: Compaction) -> MergePlan:
    """The merge for a compaction that somebody asked for."""
    return _plan(bucket, bucket.segments, compaction)


def _plan(bucket: SealedStore, segments: list[Segment], asked: Compaction | None = None) -> MergePlan:
    only = None if asked is None or asked.vbuckets is None else set(asked.vbuckets)
    purge_time_s = bucket.clock.now_s() - int(bucket.settings.tombstone_age)
    kept = bucket.settings.history_changes
    standings = []
    for vbucket in bucket:
        if only is None or vbucket.id in only:
            # A replica must be able to go back to the end of its last complete snapshot.
            complete = vbucket.complete_seqno
            floor = max(min(vbucket.high_seqno - kept, complete), 0)
            standings.append(_Standing(vbucket.id, floor, complete, vbucket.drops, vbucket.deduplicated))
    return MergePlan(
        list(segments),
        list(bucket.segments),
        standings,
        only is None,
        asked,
        purge_time_s,
        _retention(bucket),
    )


def _retention(bucket: SealedStore) -> Retention | None:
    settings = bucket.settings
    if not settings.keeps_history:
        return None
    age_s = settings.history_retention_seconds
    return Retention(
        -(-settings.history_retention_bytes // bucket.vbucket_count),  # rounded up: 0 would mean any size
        int((bucket.clock.now_s() - age_s) * 1_000_000_000) if age_s else 0,
    )


class MergeJob(BaseJob):
    """Writes one segment in place of several, without what may be forgotten."""

    def __init__(
        self, bucket: SealedStore, plan: MergePlan, *, asked: bool = False, alone: bool = False
    ) -> None:
        super().__init__()
        self._bucket = bucket
        self._plan = plan
        self._asked = asked
        # Not if nothing else runs meanwhile. Another process can only open plain files on disk.
        self._may_have_process = not alone and type(bucket.sealed.files) is DiskFiles
        self._cancelled = False
        self._number = bucket.sealed.take_number()
        self._losses: dict[int, Losses] = {}
        self._segment: Segment | None = None
        self._clips = clips_of(bucket.segments)

    def __str__(self) -> str:
        return f"a compaction of bucket {self._bucket.name} failed; nothing is changed"

    def cancel(self) -> None:
        """Stop at the next opportunity, unless somebody waits for the result."""
        self._cancelled = not self._asked

    def _work(self) -> None:
        if not self._plan.segments:
            return
        # A process takes a while to start: not worth it for a small merge.
        is_large = self._may_have_process and self._plan.frame_bytes >= OWN_PROCESS_BYTES
        try:
            write = self._write_in_a_process if is_large else self._write
            segment = self._bucket.sealed.write(self._number, write)
        except MergeProcessLost as error:
            _log.warning("%s; the merge runs in this process", error)
            self._bucket.sealed.remove(self._number)
            segment = self._bucket.sealed.write(self._number, self._write)
        if segment.frames or segment.pairs:
            self._segment = segment
        self._bucket.sealed.manifest_file.change(self._edit, self._pass_on_losses)

    def _pass_on_losses(self) -> None:
        self._bucket.sealed.untaken_losses = self._losses

    def _edit(self, base: Base, table: SegmentTable) -> tuple[Base, SegmentTable]:
        self._go_on()
        states = dict(base["vbuckets"])
        for number, losses in self._losses.items():
            stored = states[number]
            states[number] = {
                **stored,
                "rollback_floor": max(stored["rollback_floor"], losses.floor),
                "history_floor": max(
                    stored.get("history_floor", stored["rollback_floor"]), losses.history_floor
                ),
                "purge_seqno": max(stored["purge_seqno"], losses.purge_seqno),
                "rev_floor": max(stored["rev_floor"], losses.rev),
            }
        names = [segment.name for segment in self._plan.segments]
        table = with_clips(table, self._clips)
        if not self._plan.whole:
            moved = dict.fromkeys(self._plan.vbuckets, 0)
            table = [(name, clips | moved if name in names else clips) for name, clips in table]
        known = [entry for entry in table if entry[0] in names]
        new: tuple[str, Clips] | None = None if self._segment is None else (self._segment.name, {})
        return {**base, "vbuckets": states}, spliced(table, known, new, drop=self._plan.whole)

    def _write(self, file: File) -> None:
        writer = SegmentWriter(file, self._number)
        self._losses = merge(self._plan.piece_plans(), writer, self._go_on)
        writer.finish()

    def _write_in_a_process(self, file: File) -> None:
        files = self._bucket.sealed.files
        assert isinstance(files, DiskFiles)
        assert isinstance(file, DiskFile)
        self._losses = merge_in_a_process(self._plan, files, file, self._number, self._go_on)

    def _go_on(self) -> None:
        if self._cancelled:
            raise MergeCancelled("broken off")

    def _take_over(self) -> None:
        bucket, plan = self._bucket, self._plan
        for number, losses in self._losses.items():
            vbucket = bucket.vbuckets[number]
            if vbucket is not None:
                vbucket.forgotten.take(losses)
                vbucket.forget_purged(losses.purged)
        bucket.sealed.untaken_losses = {}
        if not plan.whole:
            for segment in plan.segments:
                for number in plan.vbuckets:
                    segment.clip(number, 0)
        bucket.sealed.replace(plan.segments, self._segment, drop=plan.whole)
        if plan.whole:
            for vbucket in bucket:
                vbucket.let_go(plan.segments)
        if plan.whole and len(plan.segments) == len(plan.all_segments):
            bucket.sealed.note_retained(bucket.vbucket_count, bucket.settings.history_changes)
        if self._segment is None:
            bucket.sealed.remove(self._number)
        if any(losses.purged for losses in self._losses.values()):
            # What streams read from memory must not be older than what is on disk: a key whose tombstone is
            # forgotten starts over, and a snapshot across both would have it twice.
            bucket.forget_memory()
        bucket.maintained(self)

    def _undo(self) -> None:
        self._bucket.sealed.remove(self._number)
        if isinstance(self._error, MergeCancelled):
            self._error = None
        self._bucket.maintained(self)
