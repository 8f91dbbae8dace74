"""One chunk, checked and delivered in both ways: stretch by stretch, and sorted by stream."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tailrace.columns.scanner import scan
from tailrace.errors import TailraceError
from tailrace.history import FailoverLog
from tailrace.model import Position
from tailrace.protocol.dcp import delivery
from tailrace.protocol.dcp.reader_stream import ReaderStream
from tailrace.protocol.dcp.receive_buffer import ReceiveBlock
from tailrace.protocol.states import ReaderStreamInput
from tailrace.wire.codes import Magic
from tailrace.wire.dcp import DcpMutation, DcpSnapshotMarker, DcpStreamEnd

_FIRST_OPAQUE = 0x8000_0000
_SEEDS = 60


def _streams(count: int) -> dict[int, ReaderStream]:
    streams = {}
    for vbucket in range(count):
        stream = ReaderStream(vbucket, Position.at(7, 10), log=FailoverLog.of([(7, 0)]))
        stream.machine.feed(ReaderStreamInput.ASKED)
        stream.machine.feed(ReaderStreamInput.ACCEPTED)
        streams[_FIRST_OPAQUE + vbucket] = stream
    return streams


def _wire(rng: random.Random, count: int) -> bytes:
    """Backfills in pieces with others in between, sometimes with a fault."""
    fault = rng.choice([None, None, None, "fall", "vbucket", "no marker", "beyond", "behind the end"])
    at = dict.fromkeys(range(count), 10)
    left = {vbucket: rng.randrange(1, 80) for vbucket in at}
    ends: set[int] = set()
    out: list[bytes] = []
    announced: set[int] = set()
    while left:
        vbucket = rng.choice(list(left)[:3])
        common: dict[str, Any] = {"opaque": _FIRST_OPAQUE + vbucket, "vbucket": vbucket}
        if vbucket not in announced and not (fault == "no marker" and vbucket == 1):
            announced.add(vbucket)
            out.append(DcpSnapshotMarker(start=11, end=10 + left[vbucket], flags=2, **common).encode())
        for _ in range(min(left[vbucket], rng.choice([1, 20, 100]))):
            left[vbucket] -= 1
            at[vbucket] += 1
            seqno = at[vbucket]
            if fault == "fall" and vbucket == 2 and seqno == 15:
                seqno -= 1
            if fault == "beyond" and vbucket == 3:
                seqno += 1000
            named = 5 if fault == "vbucket" and seqno == 30 else vbucket
            change = DcpMutation(
                key=b"k%d" % seqno,
                value=b"v",
                by_seqno=seqno,
                rev_seqno=1,
                cas=5,
                opaque=common["opaque"],
                vbucket=named,
            )
            out.append(change.encode())
        if not left[vbucket]:
            del left[vbucket]
            if rng.random() < 0.5 and vbucket not in ends:
                ends.add(vbucket)
                out.append(DcpStreamEnd(**common).encode())
                if fault == "behind the end":
                    out.append(out[-2])
    return b"".join(out)


def _delivered(wire: bytes, count: int, retired: set[int], *, in_stretches: bool) -> Any:
    block = ReceiveBlock(len(wire))
    block.view[:] = wire
    frames = scan(block.view)
    assert frames.error is None and frames.used == len(wire)
    headers = delivery.control_headers(frames)
    ordered = headers["magic"] == int(Magic.REQUEST)
    chunk = delivery.ReceivedChunk(frames, block, headers, ordered, len(wire))
    streams = _streams(count)
    for opaque in retired:
        del streams[opaque]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delivery, "_ROWS_IN_A_STRETCH", 0 if in_stretches else 1 << 30)
        try:
            got = delivery.deliver(chunk, streams, retired)
        except TailraceError as error:
            return (
                type(error),
                str(error),
                [(s.position, s.marker, s.machine.state) for s in streams.values()],
            )
    seqnos = frames.seqno[got.rows].tolist()
    runs = [
        (run.stream.vbucket, run.base, run.snapshot, run.log, run.is_oso)
        for run in (got.runs[number] for number in got.run_of.tolist())
    ]
    told = [(place.row, type(place.event), place.event.stream.vbucket) for place in got.controls]
    ends = [(s.vbucket, s.position, s.marker, s.machine.state) for s in streams.values()]
    return seqnos, runs, told, ends, sorted(got.finished), got.acknowledged


@pytest.mark.parametrize("seed", range(_SEEDS))
def test_stretch_by_stretch_is_the_same_as_sorted(seed: int) -> None:
    rng = random.Random(seed)
    wire = _wire(rng, 8)
    retired = {_FIRST_OPAQUE + 4} if seed % 5 == 0 else set()
    stretched = _delivered(wire, 8, set(retired), in_stretches=True)
    in_order = _delivered(wire, 8, set(retired), in_stretches=False)
    if isinstance(stretched[0], type):
        assert isinstance(in_order[0], type)
        assert stretched[2] == in_order[2]  # nothing has moved
    else:
        assert stretched == in_order
