"""Opening a bucket: the manifest, the segments' footers, and the logs behind them.

Only what is not sealed is read in full, so opening costs the same for a thousand documents and for a million.
A log's last batch may be torn by a crash, if it is the newest log and the SYNCED file does not say that the
batch was durable; anything else that does not fit is StoreCorrupt, or an accepted loss.
Nothing is changed on disk before everything has been read.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import StoreCorrupt
from ..files import File
from ..history import FailoverLog
from .accepted_losses import LossPolicy, lost, set_aside
from .format import LOG, vbucket_of
from .log import LogBatch, LogHeader, log_header, log_name, log_number, read_log
from .manifest_file import MANIFEST
from .segment import Segment, segment_name, segment_number
from .synced_file import SYNCED

if TYPE_CHECKING:
    from .bucket import EngineBucket

__all__ = ["recover"]

MAX_LOGS = 16


def recover(bucket: EngineBucket, policy: LossPolicy, *, has_marks: bool) -> bool:
    """Bring a bucket to where its files say it was; return whether it was stopped cleanly and nothing is
    lost.

    What is missing or damaged is reported to the policy. With ``has_marks`` there must be a SYNCED file:
    stores of older formats have none.
    """
    table = bucket.sealed.manifest_file.read()
    base = bucket.sealed.manifest_file.base
    bucket.make_room(base["vbucket_count"])
    bucket.metadata.take_json(base)
    for name, clips in table:
        segment = _open_segment(bucket, name, policy)
        if segment is not None:
            for clipped, seqno in clips.items():
                segment.clip(clipped, seqno)
            bucket.sealed.segments.append(segment)
    is_segment_lost = len(bucket.segments) < len(table)
    for number, meta in base["vbuckets"].items():
        log = FailoverLog.from_json(meta["failover_log"])
        bucket.new_vbucket(number, meta["state"], log).take_json(meta)
    bucket.clock.last = base["cas"]

    clean, end = _read_logs(bucket, policy)
    _check_mark(bucket, policy, end, has_marks=has_marks)
    for vbucket in bucket:
        vbucket.recovered()

    numbers = _log_numbers(bucket)
    unused = [number for number in numbers if number > base["sealed_log"] and number not in end.logs]
    if policy.losses:
        there = set(bucket.sealed.files.names(bucket.sealed.directory))
        unused_segments = {name for name, _ in table} - {segment.name for segment in bucket.segments}
        names = sorted({*unused_segments, *map(log_name, unused)} & there)
        set_aside(bucket.sealed.files, bucket.sealed.directory, names)
    _remove_leftovers(bucket, end.logs)
    bucket.journal.follow(end.log, end.valid_bytes, end.next_batch, max([*numbers, end.log], default=0))
    segments = (segment_number(name) or 0 for name, _ in table)
    bucket.sealed.next_number = max(segments, default=0) + 1
    bucket.rotate_soon = len(end.logs) > MAX_LOGS
    bucket.sealed.is_incomplete = is_segment_lost
    return clean and not policy.losses


@dataclass(slots=True)
class _LogsEnd:
    """Where the logs of a bucket end."""

    log: int
    valid_bytes: int
    next_batch: int
    logs: set[int] = field(default_factory=set)  # those that were read


def _open_segment(bucket: EngineBucket, name: str, policy: LossPolicy) -> Segment | None:
    path = f"{bucket.sealed.directory}/{name}"
    try:
        return Segment(bucket.sealed.files, path)
    except FileNotFoundError:
        policy.report(lost(f"{path} is missing"))
    except StoreCorrupt as error:
        policy.report(error)
    return None


def _read_logs(bucket: EngineBucket, policy: LossPolicy) -> tuple[bool, _LogsEnd]:
    """Replay the logs that are not sealed; return whether they end with a clean stop, and where."""
    base = bucket.sealed.manifest_file.base
    clean = bool(base["clean"])
    end = _LogsEnd(base["sealed_log"], 0, base["next_batch"])
    chain = _log_chain(bucket, base["sealed_log"], policy)
    try:
        for place, (file, header) in enumerate(chain):
            if header.first_batch != end.next_batch:
                raise lost(
                    f"{file.path} begins with batch {header.first_batch}, but {end.next_batch} comes next: "
                    "a log is missing or damaged"
                )
            following = chain[place + 1][1] if place + 1 < len(chain) else None
            end.log, end.valid_bytes = header.number, LOG.size
            end.logs.add(header.number)
            valid_bytes = following.previous_bytes if following else None
            if valid_bytes is not None and valid_bytes > file.size:
                policy.report(lost(f"{file.path} ends at byte {file.size}, but {valid_bytes} were synced"))
                valid_bytes = None
            for stop, batch in read_log(file, header, valid_bytes):
                _replay(bucket, batch)
                bucket.clock.last = max(bucket.clock.last, batch.cas_ceiling)
                clean = bool(batch.meta.get("clean"))
                end.valid_bytes, end.next_batch = stop, end.next_batch + 1
    except StoreCorrupt as error:
        policy.report(error)
    for file, _ in chain:
        file.close()
    return clean, end


def _check_mark(bucket: EngineBucket, policy: LossPolicy, end: _LogsEnd, *, has_marks: bool) -> None:
    """Check against the SYNCED file that everything that was durable has been read."""
    synced = bucket.journal.synced
    try:
        mark = synced.read()
    except FileNotFoundError:
        if has_marks:
            policy.report(lost(f"{synced.path} is missing"))
        return
    if mark is None:
        policy.report(lost(f"{synced.path} is damaged"))
    elif mark.next_batch > end.next_batch and not policy.losses:
        name = log_name(mark.log)
        trouble = "is missing"
        if name in bucket.sealed.files.names(bucket.sealed.directory):
            trouble = f"ends at byte {end.valid_bytes if mark.log == end.log else 0}"
        policy.report(
            lost(
                f"{bucket.sealed.directory}/{name} {trouble}, but {mark.valid_bytes} bytes of it were synced"
            )
        )


def _log_numbers(bucket: EngineBucket) -> list[int]:
    numbers = (log_number(name) for name in bucket.sealed.files.names(bucket.sealed.directory))
    return sorted(number for number in numbers if number is not None)


def _log_chain(bucket: EngineBucket, sealed_log: int, policy: LossPolicy) -> list[tuple[File, LogHeader]]:
    """The logs that are not sealed, oldest first; each names the one before it."""
    logs: dict[int, tuple[File, LogHeader]] = {}
    for number in _log_numbers(bucket):
        if number <= sealed_log:
            continue
        file = bucket.sealed.files.open(f"{bucket.sealed.directory}/{log_name(number)}")
        header = log_header(file)
        if header is not None and header.number == number:
            logs[number] = file, header
            continue
        if file.size > LOG.size or header is not None:
            # The header is synced before anything is written behind it.
            policy.report(lost(f"{file.path} has a damaged header"))
        file.close()
    chain: list[tuple[File, LogHeader]] = []
    number = max(logs, default=0)
    while number > sealed_log:
        if number not in logs:
            policy.report(lost(f"{bucket.sealed.directory}/{log_name(number)} is missing or damaged"))
            chain.clear()  # nothing can follow what is lost
            number = max((earlier for earlier in logs if earlier < number), default=0)
            continue
        chain.insert(0, logs[number])
        number = logs[number][1].previous
    return chain


def _replay(bucket: EngineBucket, batch: LogBatch) -> None:
    """Redo what was done when the batch was written: a rollback, changes, then what holds after them."""
    meta = batch.meta
    metas: dict[str, dict[str, Any]] = meta.get("vbuckets", {})
    for number, fields in metas.items():
        if bucket.vbuckets[int(number)] is None:
            bucket.new_vbucket(int(number), fields["state"], FailoverLog.from_json(fields["failover_log"]))
    for number, seqno in meta.get("rollback", {}).items():
        vbucket = bucket.vbuckets[int(number)]
        if vbucket is not None:
            # With persistence stopped, the rollback may have gone to a change that was never written.
            bucket.drop_after(vbucket, min(seqno, vbucket.high_seqno))
    for where, (frames, notes) in _by_vbucket(batch).items():
        vbucket = bucket.vbuckets[where] if where < len(bucket.vbuckets) else None
        if vbucket is None:
            raise bucket.corrupt(f"a log has changes of vbucket {where}, which does not exist")
        vbucket.replay(frames, notes)
    for number in meta.get("deleted", ()):
        vbucket = bucket.vbuckets[number]
        if vbucket is not None:
            bucket.remove_vbucket(vbucket)
    for number, fields in metas.items():
        vbucket = bucket.vbuckets[int(number)]
        if vbucket is not None:
            vbucket.take_json(fields)
    for number, log in meta.get("logs", {}).items():
        vbucket = bucket.vbuckets[int(number)]
        if vbucket is not None:
            vbucket.failover_log = FailoverLog.from_json(log)
    bucket.metadata.take_json(meta)


def _by_vbucket(batch: LogBatch) -> dict[int, tuple[list[bytes], list[int]]]:
    by_vbucket: dict[int, tuple[list[bytes], list[int]]] = {}
    for frame, note in zip(batch.frames, batch.notes, strict=True):
        where = vbucket_of(frame)
        if where not in by_vbucket:
            by_vbucket[where] = [], []
        frames, notes = by_vbucket[where]
        frames.append(frame)
        notes.append(note)
    return by_vbucket


def _remove_leftovers(bucket: EngineBucket, logs: set[int]) -> None:
    """Remove files of interrupted work, and files that were replaced but not removed; nobody else's."""
    keep = {MANIFEST, SYNCED, *map(log_name, logs), *(segment_name(s.number) for s in bucket.segments)}
    for name in bucket.sealed.files.names(bucket.sealed.directory):
        is_ours = log_number(name) is not None or segment_number(name) is not None or name.endswith(".new")
        if is_ours and name not in keep:
            with contextlib.suppress(OSError):
                bucket.sealed.files.unlink(f"{bucket.sealed.directory}/{name}")
