"""A script of operations on a bucket, the same for the same seed, and what the bucket looked like after
each.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

from store.helpers_store import maintain
from tailrace.clock import ManualClock
from tailrace.errors import RollbackImpossible, StoreError
from tailrace.files import Files, MemoryFiles
from tailrace.rng import source
from tailrace.store.base import Compaction, StoreSettings
from tailrace.store.bucket import EngineBucket
from tailrace.store.engine import Engine
from tailrace.wire.codes import VBucketState

VBUCKETS = 4
KEYS = [b"\0k%d" % i for i in range(12)] + [b"\x08c%d" % i for i in range(4)]


def settings() -> StoreSettings:
    """Everything happens early."""
    return StoreSettings(
        memory_quota=120_000, checkpoint_items=50, history_changes=40, segment_fanout=3, max_value=40_000
    )


def open_store(files: Files, seed: int) -> Engine:
    return Engine(files=files, settings=settings(), clock=ManualClock(), rng=source(seed))


def look(bucket: EngineBucket) -> dict[str, Any]:
    """All that must survive: every key's newest version, tombstones too, and each vbucket's place in
    history.
    """
    return {
        "manifest": bucket.manifest,
        "vbuckets": {
            vb.id: (vb.state, vb.high_seqno, vb.item_count, {key: vb.get_any(key) for key in KEYS})
            for vb in bucket
        },
        "purged": {vb.id: vb.purge_seqno for vb in bucket},
    }


def logs(bucket: EngineBucket) -> dict[int, list[dict[str, int]]]:
    return {vb.id: vb.failover_log.to_json() for vb in bucket}


class Script:
    """Runs on a bucket and remembers."""

    def __init__(self, bucket: EngineBucket, clock: ManualClock, seed: int, *, looking: bool = True) -> None:
        self.bucket = bucket
        self.clock = clock
        self.seed = seed
        self.rng = random.Random(seed)
        self.look = look if looking else (lambda _bucket: {"vbuckets": None})
        self.looks = [self.look(bucket)]
        self.logs = [logs(bucket)]
        self.durable = 0  # the look that is on disk for certain
        self.failures = 0
        self.doubtful: dict[str, Any] | None = None
        """What a crash may bring: a rollback that failed when the disk did not even take the next log."""
        self._doubtful_log = 0
        self._rolled_back: dict[str, Any] | None = None

    def run(self, operations: int, on_durable: Callable[[int], None] = lambda _: None) -> None:
        for _ in range(operations):
            self.step()
            if self.durable == len(self.looks) - 1:
                on_durable(self.durable)

    def step(self) -> None:
        before = self.looks[-1]
        self._rolled_back = None
        try:
            durable = self._operate()
        except StoreError as error:
            if isinstance(error, RollbackImpossible):
                raise
            self.failures += 1
            durable = False
            # What could not be written is not lost, and what was to be undone is not half undone.
            assert self.look(self.bucket)["vbuckets"] == before["vbuckets"] or self.bucket.queue
            if self._rolled_back is not None and self.bucket.journal._writer is None:
                self.doubtful, self._doubtful_log = self._rolled_back, self.bucket.journal.number
        if self.bucket.journal.number != self._doubtful_log:
            self.doubtful = None
        self.looks.append(self.look(self.bucket))
        self.logs.append(logs(self.bucket))
        if durable and not self.bucket.queue:
            self.durable = len(self.looks) - 1

    def _operate(self) -> bool:
        """Do one operation; return whether everything is on disk after it."""
        rng, bucket = self.rng, self.bucket
        vb = bucket.vbuckets[rng.randrange(VBUCKETS)]
        choice = rng.randrange(100)
        if choice < 72 and vb.state != VBucketState.ACTIVE:
            return False
        if choice < 10:
            active = [vbucket.id for vbucket in bucket if vbucket.state == VBucketState.ACTIVE]
            for number in rng.choices(active, k=rng.randrange(8)):
                bucket.vbuckets[number].set(rng.choice(KEYS[:12]), rng.randbytes(rng.choice((1, 300))))
        elif choice < 60:
            size = rng.choice((1, 30, 300, 3_000))
            vb.set(rng.choice(KEYS if bucket.collections.collection(8) else KEYS[:12]), rng.randbytes(size))
        elif choice < 72:
            key = rng.choice(KEYS)
            if vb.get(key) is not None:
                vb.delete(key)
        elif choice < 88:
            bucket.flush()
            return True
        elif choice < 92:
            bucket.flush()
            maintain(bucket)
            return True
        elif choice < 94:
            bucket.compact(
                Compaction(vbuckets=rng.choice((None, [vb.id])), drop_tombstones=rng.random() < 0.3)
            )
            return True
        elif choice < 97:
            seqno = rng.choice((0, rng.randint(vb.rollback_floor, vb.high_seqno)))
            self._roll_back(vb.id, seqno)
            return True
        elif choice < 98:
            bucket.set_state(vb.id, rng.choice((VBucketState.REPLICA, VBucketState.ACTIVE)))
        elif choice < 99:
            self._change_manifest()
        else:
            self.clock.advance(rng.random() * 100)
        return False

    def _roll_back(self, vbucket: int, seqno: int) -> None:
        commit = self.bucket._commit_now

        def look_and_commit(meta: dict[str, Any], *, take_changes: bool) -> None:
            self._rolled_back = self.look(self.bucket)
            commit(meta, take_changes=take_changes)

        with mock.patch.object(self.bucket, "_commit_now", look_and_commit):
            self.bucket.rollback({vbucket: seqno}, branch=True)

    def _change_manifest(self) -> None:
        manifest = json.loads(json.dumps(self.bucket.manifest))
        manifest["uid"] = f"{int(manifest['uid'], 16) + 1:x}"
        collections = manifest["scopes"][0]["collections"]
        if len(collections) == 1:
            collections.append({"name": "c", "uid": "8"})
        else:
            collections.pop()
        self.bucket.set_manifest(json.dumps(manifest).encode())


def begin(files: Files, seed: int, *, looking: bool = True) -> tuple[Engine, Script]:
    engine = open_store(files, seed)
    bucket = engine.create_bucket("default", VBUCKETS)
    return engine, Script(bucket, engine._clock, seed, looking=looking)  # type: ignore[arg-type]


def rehearse(seed: int, operations: int) -> Script:
    """What the script does when nothing goes wrong."""
    _, script = begin(MemoryFiles(), seed)
    script.run(operations)
    return script


def check_recovered(bucket: EngineBucket, script: Script, *, durable: int, newest: int | None = None) -> int:
    """The bucket is as it was after some operation, not before the last durable one, on new branches."""
    recovered = look(bucket)
    stop = len(script.looks) if newest is None else newest + 1
    for place in range(stop - 1, durable - 1, -1):
        if same(recovered, script.looks[place]):
            break
    else:
        if script.doubtful is None or not same(recovered, script.doubtful):
            raise AssertionError(f"what was recovered is none of the states {durable} to {stop - 1}")
    known = {entry["id"] for every in script.logs for log in every.values() for entry in log}
    for vb in bucket:
        if vb.state == VBucketState.ACTIVE:
            assert vb.uuid not in known, "an unclean stop must begin a new branch"
            assert vb.failover_log.newest.seqno == vb.high_seqno
    return place


def same(recovered: dict[str, Any], wanted: dict[str, Any]) -> bool:
    if (
        recovered["manifest"] != wanted["manifest"]
        or recovered["vbuckets"].keys() != wanted["vbuckets"].keys()
    ):
        return False
    for number, (state, high, items, frames) in wanted["vbuckets"].items():
        if (state, high, items) != recovered["vbuckets"][number][:3]:
            return False
        for key, frame in frames.items():
            other = recovered["vbuckets"][number][3][key]
            if frame == other:
                continue
            # A compaction that was under way may have purged tombstones durably before it was reported.
            purged = recovered["purged"][number]
            gone = frame is not None and other is None and frame[1] != 0x57
            if not (gone and int.from_bytes(frame[24:32], "big") <= purged):
                return False
    return True
