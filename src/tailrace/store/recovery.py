"""Opening a bucket: the manifest, the segments' footers, and the logs behind them.

Only what is not sealed is read in full, so opening costs the same for a thousand documents and for a million.
A log's last batch may be torn by a crash, if it is the newest log; anything else that does not fit is
StoreCorrupt, and nothing is changed on disk before everything has been read.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from ..errors import StoreCorrupt
from ..files import File
from ..history import FailoverLog
from .format import LOG
from .log import Batch, LogHeader, log_header, log_name, log_number, read_log
from .segment import Segment, segment_name

if TYPE_CHECKING:
    from .bucket import Bucket

__all__ = ["recover"]

MAX_LOGS = 16


def recover(bucket: Bucket) -> bool:
    """Bring a bucket to where its files say it was; whether it was stopped cleanly."""
    table = bucket.manifest_file.read()
    base = bucket.manifest_file.base
    bucket.make_room(base["vbucket_count"])
    bucket.take_bucket_json(base)
    for name, clips in table:
        segment = _open_segment(bucket, name)
        for clipped, seqno in clips.items():
            segment.clip(clipped, seqno)
        bucket.segments.append(segment)
    for number, meta in base["vbuckets"].items():
        log = FailoverLog.from_json(meta["failover_log"])
        bucket.new_vbucket(number, meta["state"], log).take_json(meta)
    bucket.clock.last = base["cas"]

    clean = bool(base["clean"])
    chain = _log_chain(bucket, base["sealed_log"])
    number, valid_bytes, next_batch = base["sealed_log"], 0, base["next_batch"]
    for place, (file, header) in enumerate(chain):
        if header.first_batch != next_batch:
            raise StoreCorrupt(
                f"{file.path} begins with batch {header.first_batch}, but {next_batch} comes next: "
                "a log is missing or damaged, restore it from a copy"
            )
        following = chain[place + 1][1] if place + 1 < len(chain) else None
        number, valid_bytes = header.number, LOG.size
        for end, batch in read_log(file, header, following.previous_bytes if following else None):
            _replay(bucket, batch)
            bucket.clock.last = max(bucket.clock.last, batch.cas_ceiling)
            clean = bool(batch.meta.get("clean"))
            valid_bytes, next_batch = end, next_batch + 1
        file.close()
    for vbucket in bucket:
        vbucket.recovered()

    _remove_leftovers(bucket, {header.number for _, header in chain})
    highest = max([*_log_numbers(bucket), number], default=0)
    bucket.journal.follow(number, valid_bytes, next_batch, highest)
    bucket.next_segment = max((segment.number for segment in bucket.segments), default=0) + 1
    bucket.rotate_soon = len(chain) > MAX_LOGS
    return clean


def _open_segment(bucket: Bucket, name: str) -> Segment:
    path = f"{bucket.directory}/{name}"
    try:
        return Segment(bucket.files, path)
    except FileNotFoundError:
        raise StoreCorrupt(f"{path} is missing: restore it from a copy") from None


def _log_numbers(bucket: Bucket) -> list[int]:
    numbers = (log_number(name) for name in bucket.files.names(bucket.directory))
    return sorted(number for number in numbers if number is not None)


def _log_chain(bucket: Bucket, sealed_log: int) -> list[tuple[File, LogHeader]]:
    """The logs that are not sealed, oldest first; each names the one before it."""
    found: dict[int, tuple[File, LogHeader]] = {}
    for number in _log_numbers(bucket):
        if number <= sealed_log:
            continue
        file = bucket.files.open(f"{bucket.directory}/{log_name(number)}")
        header = log_header(file)
        if header is not None and header.number == number:
            found[number] = file, header
        elif file.size > LOG.size or header is not None:
            # The header is synced before anything is written behind it.
            raise StoreCorrupt(f"{file.path} has a damaged header: restore it from a copy")
        else:
            file.close()
    chain: list[tuple[File, LogHeader]] = []
    number = max(found, default=0)
    while number > sealed_log:
        if number not in found:
            raise StoreCorrupt(
                f"{bucket.directory}/{log_name(number)} is missing or damaged: restore it from a copy"
            )
        chain.insert(0, found[number])
        number = found[number][1].previous
    return chain


def _replay(bucket: Bucket, batch: Batch) -> None:
    """Do again what was done when the batch was written: a rollback, changes, then what holds after them."""
    meta = batch.meta
    metas: dict[str, dict[str, Any]] = meta.get("vbuckets", {})
    for number, fields in metas.items():
        if bucket.vbuckets[int(number)] is None:
            bucket.new_vbucket(int(number), fields["state"], FailoverLog.from_json(fields["failover_log"]))
    for number, seqno in meta.get("rollback", {}).items():
        vbucket = bucket.vbuckets[int(number)]
        if vbucket is not None:
            # With persistence stopped it may have gone back to a change that was never written.
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
    bucket.take_bucket_json(meta)


def _by_vbucket(batch: Batch) -> dict[int, tuple[list[bytes], list[int]]]:
    found: dict[int, tuple[list[bytes], list[int]]] = {}
    for frame, note in zip(batch.frames, batch.notes, strict=True):
        where = frame[6] << 8 | frame[7]
        if where not in found:
            found[where] = [], []
        frames, notes = found[where]
        frames.append(frame)
        notes.append(note)
    return found


def _remove_leftovers(bucket: Bucket, logs: set[int]) -> None:
    """Files of work that was broken off, or that were replaced and not yet removed."""
    keep = {"MANIFEST", *map(log_name, logs), *(segment_name(s.number) for s in bucket.segments)}
    for name in bucket.files.names(bucket.directory):
        if name not in keep:
            with contextlib.suppress(OSError):
                bucket.files.unlink(f"{bucket.directory}/{name}")
