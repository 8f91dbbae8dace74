"""A segment is sealed while others are merged: whichever ends first, nothing is lost, nothing comes back."""

from __future__ import annotations

from itertools import permutations

import pytest

from store.conftest import Home
from store.helpers_store import maintain, values
from tailrace.store.base import Compaction
from tailrace.store.bucket import EngineBucket
from tailrace.store.compaction import MergeJob, SealJob
from tailrace.store.segment import Segment, SegmentPiece

STEPS = ("merge runs", "merge ends", "seal runs", "seal ends")
ORDERS = [
    order
    for order in permutations(STEPS)
    if order.index("merge runs") < order.index("merge ends")
    and order.index("seal runs") < order.index("seal ends")
]
ASKED = {
    "all": Compaction(drop_tombstones=True),
    "one vbucket": Compaction(vbuckets=[1], drop_tombstones=True),
    "none": None,
}


def fill(bucket: EngineBucket, start: int, count: int) -> None:
    for i in range(start, start + count):
        vb = bucket.vbuckets[i % 4]
        key = b"\0k%d" % (i * 7 % 60)
        if i % 9 == 8 and vb.get(key) is not None:
            vb.delete(key)
        else:
            vb.set(key, b"%d " % i * 20)


def known(bucket: EngineBucket) -> dict[int, object]:
    """All that a restart must bring back."""
    return {
        vb.id: (values(vb), values(vb, memory=False), vb.item_count, vb.rollback_floor, vb.purge_seqno)
        for vb in bucket
    }


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("order", ORDERS, ids=", ".join)
def test_in_any_order(home: Home, order: tuple[str, ...], asked: str) -> None:
    home.settings.segment_fanout = 3
    home.settings.history_changes = 5
    home.settings.quiet_time = 1e9
    bucket = home.bucket()
    for part in range(3):
        fill(bucket, part * 200, 200)
        bucket.seal()
    assert len(bucket.segments) == 3
    compaction = ASKED[asked]
    merge = bucket.begin_maintenance() if compaction is None else bucket.begin_compaction(compaction)
    assert isinstance(merge, MergeJob)

    fill(bucket, 600, 200)
    bucket.rotate_soon = True
    bucket.flush()
    fill(bucket, 800, 20)
    seal = bucket.begin_maintenance()
    assert isinstance(seal, SealJob)
    assert bucket.begin_maintenance() is None
    assert bucket.begin_compaction(Compaction()) is None

    steps = {
        "merge runs": merge.run,
        "merge ends": merge.finish,
        "seal runs": seal.run,
        "seal ends": seal.finish,
    }
    for step in order:
        steps[step]()
    bucket.flush()
    names = [segment.name for segment in bucket.segments]
    assert len(names) == (5 if asked == "one vbucket" else 2)
    assert names[-1] == "segment-0000000005"  # the newest changes are in the last one
    if compaction is not None:
        assert bucket.vbuckets[1].purge_seqno > 0
    before = known(bucket)

    # the manifest says the same as memory, and later merges find neighbours
    bucket = home.crash()
    assert [segment.name for segment in bucket.segments] == names
    assert known(bucket) == before
    fill(bucket, 1_000, 300)
    documents = {vb.id: values(vb) for vb in bucket}
    bucket.seal()
    maintain(bucket)
    assert {vb.id: values(vb) for vb in bucket} == documents
    bucket.compact()
    assert {vb.id: values(vb) for vb in home.crash()} == documents


def test_a_rollback_in_between_waits_for_the_seal_and_breaks_the_merge_off(home: Home) -> None:
    home.settings.segment_fanout = 3
    home.settings.quiet_time = 1e9
    bucket = home.bucket()
    for part in range(3):
        fill(bucket, part * 200, 200)
        bucket.seal()
    merge = bucket.begin_maintenance()
    fill(bucket, 600, 200)
    target = bucket.vbuckets[1].high_seqno - 3
    bucket.rotate_soon = True
    bucket.flush()
    seal = bucket.begin_maintenance()
    bucket.rollback({1: target}, branch=True)
    merge.finish()
    seal.finish()
    assert len(bucket.segments) == 4
    documents = {vb.id: values(vb) for vb in bucket}
    bucket = home.crash()
    assert bucket.vbuckets[1].high_seqno == target
    assert {vb.id: values(vb) for vb in bucket} == documents
    maintain(bucket)
    assert {vb.id: values(vb) for vb in bucket} == documents


def test_a_merge_is_planned_without_a_look_at_its_pieces(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are as many as vbuckets times segments, and the owner's thread must serve others."""
    bucket = home.bucket()
    for part in range(3):
        fill(bucket, part * 200, 200)
        bucket.seal()
    looked_at: list[int] = []
    piece = Segment.piece

    def counted(segment: Segment, vbucket: int) -> SegmentPiece | None:
        looked_at.append(vbucket)
        return piece(segment, vbucket)

    monkeypatch.setattr(Segment, "piece", counted)
    before = values(bucket.vbuckets[0])
    looked_at.clear()
    job = bucket.begin_compaction(Compaction())
    assert job is not None
    assert not looked_at
    job.run()
    assert looked_at
    job.finish()
    assert values(bucket.vbuckets[0]) == before
