"""Changes as objects: the fast path gives what the slow one does; a snapshot's end is a state to keep."""

from __future__ import annotations

import random
from collections.abc import Collection

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.client import changes as making
from tailrace.client.catalog import Catalog
from tailrace.client.changes import MadeChanges
from tailrace.client.events import Deletion, Mutation, Rollback, SeqnoAdvanced
from tailrace.client.portion import EventBetween, Portion
from tailrace.client.progress import Progress
from tailrace.client.retry import Backoff
from tailrace.columns.scanner import scan
from tailrace.errors import TailraceError
from tailrace.history import FailoverLog
from tailrace.model import Position
from tailrace.protocol.dcp.delivery import ChangeDelivery, ReceivedChunk, control_headers, deliver
from tailrace.protocol.dcp.reader_stream import ReaderStream
from tailrace.protocol.dcp.receive_buffer import ReceiveBlock
from tailrace.protocol.states import ReaderStreamInput
from tailrace.wire.codes import Datatype
from tailrace.wire.dcp import DcpDeletion, DcpMutation, DcpSnapshotMarker

DOCUMENTS = st.lists(
    st.tuples(st.integers(0, 2), st.binary(min_size=1, max_size=9), st.binary(max_size=5000), st.booleans()),
    min_size=1,
    max_size=20,
)


def delivery_of(
    messages: list[bytes], streams: dict[int, ReaderStream], retired: Collection[int] = ()
) -> ChangeDelivery:
    frames = scan(b"".join(messages))
    assert frames.error is None
    headers = control_headers(frames)
    chunk = ReceivedChunk(frames, ReceiveBlock(0), headers, np.ones(len(headers), dtype=bool), frames.used)
    return deliver(chunk, streams, set(retired))


def mutations_of(delivery: ChangeDelivery) -> list[Mutation]:
    return [change for change in MadeChanges(delivery) if isinstance(change, Mutation)]


def open_streams(count: int) -> dict[int, ReaderStream]:
    streams = {
        vbucket: ReaderStream(vbucket, log=FailoverLog.of([(70 + vbucket, 0)])) for vbucket in range(count)
    }
    for stream in streams.values():
        stream.machine.feed(ReaderStreamInput.ASKED)
        stream.machine.feed(ReaderStreamInput.ACCEPTED)
    return streams


def marker(vbucket: int, start: int, end: int) -> bytes:
    return DcpSnapshotMarker(opaque=vbucket, vbucket=vbucket, start=start, end=end, flags=1).encode()


def mutation(vbucket: int, seqno: int, key: bytes = b"k", value: bytes = b"v", datatype: int = 0) -> bytes:
    return DcpMutation(
        opaque=vbucket,
        vbucket=vbucket,
        key=key,
        value=value,
        by_seqno=seqno,
        rev_seqno=seqno + 1,
        flags=seqno + 2,
        expiry=seqno + 3,
        cas=seqno + 4,
        datatype=datatype,
    ).encode()


@given(DOCUMENTS)
def test_both_ways_give_the_same_changes(documents: list[tuple[int, bytes, bytes, bool]]) -> None:
    messages = [marker(vbucket, 0, 100) for vbucket in range(3)]
    messages += [
        mutation(vbucket, seqno, key, value, int(is_json))
        for seqno, (vbucket, key, value, is_json) in enumerate(documents, 1)
    ]
    delivery = delivery_of(messages, open_streams(3))
    changes = list(MadeChanges(delivery))
    place_of, places = delivery.places()
    one_by_one = making.any_changes(delivery.chunk.frames, delivery.rows, (places[of] for of in place_of))
    assert list(one_by_one) == changes
    assert [(change.vbucket, change.key, change.value, change.is_json) for change in changes] == documents
    assert {change.vb_uuid - change.vbucket for change in changes} == {70}
    assert {type(part) for change in changes for part in (change.key, change.value)} == {bytes}


@pytest.mark.parametrize("values", [[b"v"] * 5, [b""] * 5, [b"v" * 10 * size for size in range(5)]])
@pytest.mark.parametrize("step_bytes", [1, 100, 1 << 20])
def test_documents_are_cut_where_they_are(
    values: list[bytes], step_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "_STEP_BYTES", step_bytes)
    documents = [(b"key-%d" % seqno, value) for seqno, value in enumerate(values, 1)]
    messages = [mutation(0, seqno, *document) for seqno, document in enumerate(documents, 1)]
    # a marker of another stream between them, and changes of a stream that was closed
    messages[2:2] = [marker(1, 0, 9), mutation(2, 1, b"nobody's")]
    delivery = delivery_of([marker(0, 0, 9), *messages], open_streams(2), {2})
    assert [(change.key, change.value) for change in mutations_of(delivery)] == documents


def test_there_are_fewer_pieces_of_formats_than_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "_MOST_PIECES", 3)
    making._BODIES.clear()
    values = [b"v" * size for size in range(20)]
    messages = [mutation(0, seqno, value=value) for seqno, value in enumerate(values, 1)]
    delivery = delivery_of([marker(0, 0, 99), *messages], open_streams(1))
    assert [change.value for change in mutations_of(delivery)] == values
    assert len(making._BODIES) <= 3


def test_every_change_has_the_branch_that_it_was_made_on() -> None:
    streams = open_streams(2)
    streams[0].log = FailoverLog.of([(72, 4), (71, 2), (70, 1)])
    messages = [
        marker(0, 0, 9),
        *(mutation(0, seqno) for seqno in range(1, 7)),
        marker(1, 0, 9),
        mutation(1, 1),
    ]
    delivery = delivery_of(messages, streams)
    branches = [0, 70, 71, 71, 72, 72, 71]
    assert [change.vb_uuid for change in mutations_of(delivery)] == branches
    assert [change.vbucket for change in mutations_of(delivery)] == [0] * 6 + [1]
    vb_uuids, starts, ends = map(np.asarray, delivery.histories())
    assert vb_uuids.tolist() == branches
    snapshots = list(zip(starts.tolist(), ends.tolist(), strict=True))
    assert [change.snapshot for change in mutations_of(delivery)] == snapshots


def test_one_history_is_three_numbers() -> None:
    delivery = delivery_of([marker(0, 0, 9), mutation(0, 1), mutation(0, 2)], open_streams(1))
    assert delivery.histories() == (70, 0, 9)


def test_a_deletion_takes_the_long_way() -> None:
    deletion = DcpDeletion(opaque=0, vbucket=0, key=b"gone", by_seqno=2, rev_seqno=3).encode()
    delivery = delivery_of([marker(0, 0, 9), mutation(0, 1), deletion], open_streams(1))
    assert [type(change) for change in MadeChanges(delivery)] == [Mutation, Deletion]


@pytest.mark.parametrize("steps", [1, 2, 3, 100])
def test_how_many_were_taken_follows_from_what_is_left(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "_STEP_ROWS", steps)
    delivery = delivery_of([marker(0, 0, 9), *(mutation(0, seqno) for seqno in range(1, 6))], open_streams(1))
    made = MadeChanges(delivery)
    changes = iter(made)
    seen = [(made.taken, change.seqno) for change in changes]
    assert seen == [(seqno, seqno) for seqno in range(1, 6)]
    assert made.taken == 5


@pytest.mark.parametrize("steps", [1, 2, 100])
@pytest.mark.parametrize("told_at", [0, 2, 3, 4])
def test_a_change_that_cannot_be_made_is_not_taken_nor_what_follows(
    steps: int, told_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its position would be saved, and a reader that goes on from there would never see it."""
    monkeypatch.setattr(making, "_STEP_ROWS", steps)
    streams = open_streams(1)
    bad = mutation(0, 3, value=b"not compressed", datatype=Datatype.SNAPPY)
    messages = [mutation(0, 1), mutation(0, 2), bad, mutation(0, 4), mutation(0, 5)]
    delivery = delivery_of([marker(0, 0, 9), *messages], streams)
    progress = {0: Progress(streams[0], Backoff(random.Random(0)))}
    portion = Portion(None, delivery, progress, Catalog("default"))  # type: ignore[arg-type]
    portion.between.append(EventBetween(told_at, SeqnoAdvanced(0, 70, 0, (0, 0))))
    events, handed = portion.events(), []
    with pytest.raises(TailraceError):
        handed.extend(events)
    portion.settle()
    assert progress[0].delivered.seqno == 2
    assert list(events) == []
    portion.settle()
    assert progress[0].delivered.seqno == 2


@pytest.mark.parametrize("taken", range(6))
def test_a_portion_knows_what_the_application_has(taken: int) -> None:
    streams = open_streams(2)
    messages = [marker(0, 0, 2), mutation(0, 1), marker(1, 0, 9), mutation(1, 5), mutation(0, 2)]
    messages += [marker(0, 3, 8), mutation(0, 3)]
    delivery = delivery_of(messages, streams)
    progress = {vb: Progress(stream, Backoff(random.Random(0))) for vb, stream in streams.items()}
    portion = Portion(None, delivery, progress, Catalog("default"))  # type: ignore[arg-type]
    portion.between.append(EventBetween(3, Rollback(1, 71, 0), Position.BEGINNING))
    events = portion.events()
    handed = [next(events) for _ in range(taken)]
    portion.settle()
    seqnos = dict.fromkeys(progress, 0)
    for event in handed:
        assert isinstance(event, Mutation | Rollback)
        seqnos[event.vbucket] = event.seqno
    assert {vb: vbucket.delivered.seqno for vb, vbucket in progress.items()} == seqnos
    # the end of the first snapshot is a state to return to as soon as the next one has begun
    assert list(progress[0].points) == ([2] if taken >= 3 else [])
