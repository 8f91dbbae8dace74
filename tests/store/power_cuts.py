"""Schedules of a store on a disk that loses power or fails: what was durable is there, nothing torn is
served, and what went wrong is another branch.
"""

from __future__ import annotations

import contextlib
import random
from typing import Any

from store.crash_script import Script, begin, check_recovered, look, open_store, rehearse
from store.helpers_store import state_of, stream
from tailrace.store.format import StoredDocument
from tailrace.testing.faulty_files import (
    Fault,
    FaultyFiles,
    PowerCut,
    SimulatedDisk,
    at_call,
    io_error,
    no_space,
)
from tailrace.wire.codes import VBucketState

OPERATIONS = 120


def check_whole(bucket: Any) -> None:
    """Every frame that can be read is what was written, and all ways of reading agree."""
    for vb in bucket:
        for memory in (True, False):
            documents = state_of(stream(vb, memory=memory))
            assert len(documents) == vb.item_count
            for key, document in documents.items():
                assert StoredDocument.of(vb.get(key)) == document


def cut_and_reopen(disk: SimulatedDisk, script: Script, rng: random.Random, seed: int) -> None:
    """Power goes; perhaps again while the store is opened; then everything must be there."""
    disk = disk.power_cut(rng)
    if rng.random() < 0.5:
        # A crash of the recovery itself, with another power cut on top.
        try:
            open_store(FaultyFiles(disk, at_call(rng.randint(1, 12), power_cut_at(rng))), seed + 1)
        except PowerCut:
            disk = disk.power_cut(rng)
        else:
            disk.unlock()
    engine = open_store(disk, seed + 2)
    bucket = engine.buckets.get("default")
    if bucket is None:
        assert script is None or script.durable == 0
        return
    check_recovered(bucket, script, durable=script.durable)
    check_whole(bucket)
    # ... and it goes on from there, and stops cleanly.
    bucket.vbuckets[0].set(b"\0k0", b"after")
    uuids = [vb.uuid for vb in bucket]
    after = look(bucket)
    engine.close()
    engine = open_store(disk, seed + 3)
    assert look(engine.buckets["default"]) == after
    bucket = engine.buckets["default"]
    assert [vb.uuid for vb in bucket] == uuids
    # A change that somebody may have seen is lost in the next cut: what follows is another branch, although
    # the last word on the disk may be that of a clean stop.
    bucket.vbuckets[0].set(b"\0k0", b"seen and lost")
    again = open_store(disk.power_cut(rng), seed + 4).buckets["default"]
    assert look(again)["vbuckets"] == after["vbuckets"]
    for vb, uuid in zip(again, uuids, strict=True):
        assert (vb.uuid != uuid) == (vb.state == VBucketState.ACTIVE), "an unclean stop begins a new branch"


def power_cut_at(rng: random.Random) -> Any:
    return lambda size: Fault(PowerCut(), rng.randint(0, size))


def run_until_cut(seed: int) -> None:
    rng = random.Random(seed)
    disk = SimulatedDisk()
    files = FaultyFiles(disk)
    _, script = begin(files, seed)
    files.calls = 0
    files.plan = at_call(rng.randint(1, 250), power_cut_at(rng))
    with contextlib.suppress(PowerCut):
        script.run(OPERATIONS)
    cut_and_reopen(disk, with_last_look(script), rng, seed)


def with_last_look(script: Script) -> Script:
    """The operation in which power went may have become durable, though nobody was told."""
    rehearsed = rehearse_from(script)
    script.looks += rehearsed.looks[len(script.looks) : len(script.looks) + 1]
    script.logs += rehearsed.logs[len(script.logs) : len(script.logs) + 1]
    return script


def rehearse_from(script: Script) -> Script:
    return rehearse(script.seed, len(script.looks))


def run_with_errors(seed: int) -> int:
    """Writes fail now and then; what could not be written stays queued; then power goes."""
    rng = random.Random(seed)
    disk = SimulatedDisk()
    files = FaultyFiles(disk)
    _, script = begin(files, seed)
    kind = rng.choice((no_space, io_error))
    share = rng.choice((0.02, 0.1, 0.5))

    def plan(_call: int, name: str, _path: str, size: int) -> Fault | None:
        if rng.random() < share and (kind is io_error or name in ("append", "create")):
            return Fault(kind(), rng.randint(0, size))
        return None

    files.plan = plan
    script.run(OPERATIONS)
    if rng.random() < 0.5:
        # The disk works again: everything that is in memory can be saved.
        files.plan = None
        script.bucket.flush()
        script.looks.append(look(script.bucket))
        script.logs.append(script.logs[-1])
        script.durable = len(script.looks) - 1
    cut_and_reopen(disk, script, rng, seed)
    return script.failures
