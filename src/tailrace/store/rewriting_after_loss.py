"""Making a bucket whole again after a segment was lost and the loss accepted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..files import File
from .index import newest_seqno
from .manifest_file import Base, SegmentTable
from .segment_writer import Pieces, SegmentWriter
from .snapshot import in_sorted

if TYPE_CHECKING:
    from .bucket import EngineBucket

__all__ = ["rewrite_what_is_left"]

_NO_SEQNOS = np.empty(0, np.uint64)


def rewrite_what_is_left(bucket: EngineBucket) -> None:
    """Put the newest version of each document into one new segment, after a segment was lost.

    The lost one also knew which changes superseded which, so the others together would show some documents
    in two versions. Everything must be sealed. Older versions go: no earlier state is complete.
    """
    number = bucket.sealed.take_number()

    def write(file: File) -> None:
        writer = SegmentWriter(file, number)
        for vbucket in bucket:
            index = vbucket.load_index()
            newest = np.sort(np.fromiter(map(newest_seqno, index.values()), np.uint64, len(index)))
            for piece in vbucket.pieces:
                for frames in piece.blocks():
                    kept = frames.keep(in_sorted(frames.seqnos, newest))
                    if len(kept.seqnos):
                        count = len(kept.seqnos)
                        writer.add(Pieces([vbucket.id], kept, [count], _NO_SEQNOS, _NO_SEQNOS, [0]))
        writer.finish()

    segment = bucket.sealed.write(number, write)
    for vbucket in bucket:
        vbucket.forgotten.rollback_floor = vbucket.forgotten.history_floor = vbucket.high_seqno
    floors = {vbucket.id: vbucket.high_seqno for vbucket in bucket}

    def edit(base: Base, _: SegmentTable) -> tuple[Base, SegmentTable]:
        states = {
            vbucket: {
                **state,
                "rollback_floor": floors.get(vbucket, 0),
                "history_floor": floors.get(vbucket, 0),
                "items": None,
            }
            for vbucket, state in base["vbuckets"].items()
        }
        return {**base, "vbuckets": states}, [(segment.name, {})]

    bucket.sealed.manifest_file.change(edit)
    bucket.sealed.replace(bucket.segments, segment, drop=True)
    bucket.forget_memory()
