"""Rows of many streams: placed and checked at once as they would be one by one."""

from __future__ import annotations

import random

import message_by_message as plain
import numpy as np
import pytest

from tailrace.columns import Frames, RowContext, Streams, scan
from tailrace.columns.streams import MAX_OPAQUE
from tailrace.errors import LocalProtocolError, MalformedMessage
from tailrace.history import FailoverLog
from tailrace.wire.codes import Status

LOG = FailoverLog.of([(0xCCC, 8), (0xBBB, 3), (0xAAA, 0)])
MAX = (1 << 64) - 1


def rows(*changes: tuple[int, int], vbucket: int | None = None) -> Frames:
    """Mutations of (opaque, seqno); the vbucket is that of the opaque unless given."""
    return scan(
        b"".join(
            plain.mutation(seqno, opaque=opaque, vbucket=opaque & 0xFFFF if vbucket is None else vbucket)
            for opaque, seqno in changes
        )
    )


def place(streams: Streams, frames: Frames) -> RowContext:
    context = RowContext.for_rows(len(frames))
    streams.place(frames, slice(0, len(frames)), context)
    return context


def opened(
    *opaques: int, seqno: int = 0, snapshot: tuple[int, int] = (0, MAX), log: FailoverLog = LOG
) -> Streams:
    streams = Streams()
    for opaque in opaques:
        streams.open(opaque, vbucket=opaque, log=log, seqno=seqno, snapshot=snapshot)
    return streams


def test_every_row_has_the_branch_it_was_made_on() -> None:
    context = place(opened(5), rows(*((5, seqno) for seqno in range(1, 12))))
    assert context.vb_uuid.tolist() == [LOG.branch_of(seqno) for seqno in range(1, 12)]
    assert context.vb_uuid.tolist() == [0xAAA] * 3 + [0xBBB] * 5 + [0xCCC] * 3


def test_changes_older_than_the_log_have_no_branch() -> None:
    log = FailoverLog.of([(7, 100), (6, 50)])
    context = place(opened(1, log=log), rows((1, 50), (1, 51), (1, 101)))
    assert context.vb_uuid.tolist() == [0, 6, 7]


def test_a_marker_counts_from_where_it_stands() -> None:
    streams = opened(1, 2, snapshot=(0, 10))
    frames = rows((1, 1), (2, 5), (1, 11), (2, 6))
    context = RowContext.for_rows(4)
    streams.place(frames, slice(0, 2), context)
    streams.marker(1, 11, 20)
    streams.place(frames, slice(2, 4), context)
    assert context.snapshot_start.tolist() == [0, 0, 11, 0]
    assert context.snapshot_end.tolist() == [10, 10, 20, 10]
    assert (streams.seqno(1), streams.seqno(2)) == (11, 6)
    assert context.wanted.all()


@pytest.mark.parametrize(
    ("changes", "what", "status"),
    [
        ([(1, 4), (2, 1), (1, 4)], "vbucket 1: the change with seqno 4 is not above", Status.ERANGE),
        ([(2, 9), (1, 4), (2, 7)], "vbucket 2: the change with seqno 7 is not above", Status.ERANGE),
        ([(1, 2)], "seqno 2 is not above", Status.ERANGE),
        ([(1, 3), (2, 11)], "vbucket 2: the change with seqno 11 lies outside", Status.ERANGE),
        (
            [(1, 3), (9, 3)],
            "vbucket 9: the change with seqno 3 belongs to no stream",
            Status.DCP_STREAM_NOT_FOUND,
        ),
        ([(1, 3), (70_000, 3)], "belongs to no stream", Status.DCP_STREAM_NOT_FOUND),
    ],
)
def test_rows_that_do_not_fit(changes: list[tuple[int, int]], what: str, status: int) -> None:
    streams = opened(1, seqno=2, snapshot=(2, 10))
    streams.open(2, vbucket=2, log=LOG, seqno=0, snapshot=(0, 10))
    with pytest.raises(MalformedMessage, match=what) as caught:
        place(streams, rows(*changes))
    assert caught.value.status == status
    assert (streams.seqno(1), streams.seqno(2)) == (2, 0), "nothing has changed"


def test_a_row_below_its_snapshot() -> None:
    streams = opened(1)
    streams.marker(1, 5, 9)
    with pytest.raises(MalformedMessage, match="outside"):
        place(streams, rows((1, 4)))


def test_the_vbucket_must_be_that_of_the_stream() -> None:
    with pytest.raises(MalformedMessage, match=r"vbucket 3: .* belongs to no stream"):
        place(opened(1), rows((1, 1), vbucket=3))


def test_seqnos_are_unsigned() -> None:
    streams = opened(1, seqno=(1 << 63) - 1)
    place(streams, rows((1, 1 << 63), (1, MAX)))
    assert streams.seqno(1) == MAX


def test_rows_of_a_closed_stream_are_not_wanted() -> None:
    streams = opened(1, 2)
    streams.close(1)
    context = place(streams, rows((1, 9), (2, 1), (1, 3)))
    assert context.wanted.tolist() == [False, True, False]
    streams.open(1, vbucket=1, log=LOG, seqno=2, snapshot=(2, 9))
    assert place(streams, rows((1, 3))).wanted.all()


def test_an_oso_snapshot_has_no_order() -> None:
    streams = opened(1, snapshot=(0, 0))
    streams.unordered(1, on=True)
    place(streams, rows((1, 9), (1, 3), (1, 7)))
    assert streams.seqno(1) == 9
    streams.unordered(1, on=False)
    streams.marker(1, 9, 20)
    with pytest.raises(MalformedMessage, match="not above"):
        place(streams, rows((1, 9)))


def test_other_messages_move_a_stream_on() -> None:
    streams = opened(1)
    streams.advance(1, 30)
    with pytest.raises(MalformedMessage, match="not above"):
        place(streams, rows((1, 30)))
    place(streams, rows((1, 31)))


def test_streams_that_are_not_there() -> None:
    streams = Streams()
    for ask in (streams.seqno, streams.close, lambda opaque: streams.marker(opaque, 1, 2)):
        for opaque in (3, MAX_OPAQUE + 1):
            with pytest.raises(MalformedMessage, match="no stream"):
                ask(opaque)
    with pytest.raises(MalformedMessage, match="no stream"):
        place(streams, rows((0, 1)))
    with pytest.raises(LocalProtocolError):
        streams.open(MAX_OPAQUE + 1, vbucket=0, log=LOG, seqno=0, snapshot=(0, 0))
    place(streams, rows())


@pytest.mark.parametrize("seed", range(30))
def test_as_one_by_one(seed: int) -> None:
    """Mixed streams with markers in between, against a loop over the rows."""
    rng = random.Random(seed)
    opaques = rng.sample(range(MAX_OPAQUE), rng.choice((1, 3, 40)))
    streams = opened(*opaques)
    seqno = dict.fromkeys(opaques, 0)
    snapshot = dict.fromkeys(opaques, (0, MAX))
    changes, expected, cuts = [], [], []
    for _ in range(300):
        opaque = rng.choice(opaques)
        seqno[opaque] += rng.randint(1, 3)
        if rng.random() < 0.1:
            snapshot[opaque] = (seqno[opaque], seqno[opaque] + 1000)
            cuts.append((len(changes), opaque))
        changes.append((opaque, seqno[opaque]))
        expected.append((LOG.branch_of(seqno[opaque]), *snapshot[opaque]))
    frames = rows(*changes)
    context, done = RowContext.for_rows(len(frames)), 0
    for row, opaque in cuts:
        streams.place(frames, slice(done, row), context)
        done = row
        streams.marker(opaque, expected[row][1], expected[row][2])
    streams.place(frames, slice(done, len(frames)), context)
    found = np.stack((context.vb_uuid, context.snapshot_start, context.snapshot_end), axis=1)
    assert found.tolist() == [list(one) for one in expected]
    assert {opaque: streams.seqno(opaque) for opaque in opaques} == seqno
