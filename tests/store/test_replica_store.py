"""A replica's store against the history of the active that feeds it: whatever it hands out, and wherever it
goes back to, is a state that the active really had.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace import rng
from tailrace.clock import ManualClock
from tailrace.files import MemoryFiles
from tailrace.store.base import Compaction, StoreSettings
from tailrace.store.bucket import EngineBucket
from tailrace.store.engine import Engine
from tailrace.store.format import StoredDocument
from tailrace.store.vbucket import EngineVBucket
from tailrace.store.vbucket_history import History
from tailrace.wire.codes import VBucketState

State = dict[bytes, tuple[int, bool]]

_WRITE = st.tuples(st.just("write"), st.integers(0, 4))
_DELETE = st.tuples(st.just("delete"), st.integers(0, 4))
_STEP = st.one_of(
    _WRITE,
    _WRITE,
    _WRITE,
    _DELETE,
    st.tuples(st.just("replicate"), st.integers(0, 12)),  # a whole snapshot, or all but this many frames
    st.tuples(st.just("replicate"), st.just(0)),
    st.tuples(st.just("checkpoint"), st.just(0)),
    st.tuples(st.just("seal"), st.just(0)),
    st.tuples(st.just("compact"), st.just(0)),
    st.tuples(st.just("restart"), st.just(0)),
)


_STEP_OR_KILL = st.one_of(_STEP, st.tuples(st.sampled_from(["flush", "kill"]), st.just(0)))


def frames_after(vbucket: History, seqno: int) -> tuple[list[bytes], int]:
    """The next snapshot's frames, and its end."""
    snapshot = vbucket.snapshot_after(seqno)
    if snapshot is None:
        return [], seqno
    frames: list[bytes] = []
    while (chunk := snapshot.read()) is not None:
        data = chunk.data.tobytes()
        ends = [*chunk.offsets[1:].tolist(), len(data)]
        frames += [data[a:b] for a, b in zip(chunk.offsets.tolist(), ends, strict=True)]
    return frames, snapshot.end


def applied(state: State, frames: list[bytes]) -> State:
    documents = dict(state)
    for frame in frames:
        document = StoredDocument.of(frame)
        documents[document.key] = document.seqno, document.deleted
    return documents


class Pair:
    """An active vbucket with all its states, and a replica on files of its own."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        settings = StoreSettings(checkpoint_items=5, history_changes=6, quiet_time=0.0)
        self.settings = settings
        source = Engine(None, settings=StoreSettings(), clock=self.clock, rng=rng.source(1))
        self.active = source.create_bucket("a", 1).vbuckets[0]
        self.files = MemoryFiles()
        self.engine = Engine(files=self.files, settings=settings, clock=self.clock, rng=rng.source(2))
        self.engine.create_bucket("r", 1).set_state(0, VBucketState.REPLICA)
        self.bucket.flush()
        self.states: list[State] = [{}]  # by seqno

    @property
    def bucket(self) -> EngineBucket:
        return self.engine.buckets["r"]

    @property
    def replica(self) -> EngineVBucket:
        vbucket = self.bucket.vbuckets[0]
        assert vbucket is not None
        return vbucket

    def run(self, action: str, number: int) -> None:
        key = b"\0%d" % number
        if action == "write":
            self._wrote(self.active.set(key, b"v%d" % len(self.states)).seqno)
        elif action == "delete":
            if self.active.get(key) is not None:
                self._wrote(self.active.delete(key).seqno)
        elif action == "replicate":
            self._replicate(number)
        elif action == "checkpoint":
            self.active.close_checkpoint()
        elif action == "seal":
            self.bucket.seal()
            self.bucket.forget_memory()
        elif action == "compact":
            self.bucket.compact()
        elif action == "flush":
            self.bucket.flush()
        else:
            if action == "kill":
                self.engine.crash()
            else:
                self.engine.close()
            self.engine = Engine(
                files=self.files, settings=self.settings, clock=self.clock, rng=rng.source(3)
            )

    def _wrote(self, seqno: int) -> None:
        frame = self.active.frame_at(seqno)
        assert frame is not None and seqno == len(self.states)
        self.states.append(applied(self.states[-1], [frame]))

    def _replicate(self, withheld: int) -> None:
        replica = self.replica
        frames, end = frames_after(self.active, replica.high_seqno)  # type: ignore[arg-type]
        if not frames:
            return
        replica.begin_snapshot(replica.high_seqno + 1, end)
        for frame in frames[: len(frames) - withheld] if withheld else frames:
            replica.receive(frame)


@given(st.lists(_STEP, min_size=10, max_size=60), st.integers(0, 100))
def test_what_a_replica_shows_and_goes_back_to_are_states_of_its_active(
    steps: list[tuple[str, int]], back_to_percent: int
) -> None:
    pair = Pair()
    for action, number in steps:
        pair.run(action, number)
    replica = pair.replica

    # a reader from the beginning, up to the last complete snapshot
    state, at = State(), 0
    while at < replica.complete_seqno:
        frames, end = frames_after(replica, at)
        assert frames and end > at
        state, at = applied(state, frames), end
        if at <= replica.complete_seqno:
            assert state == live(pair.states[at], state), f"no state of the active at {at}"

    back_to = replica.high_seqno * back_to_percent // 100
    target = replica.exact_seqno(back_to)
    assert target <= min(back_to, replica.high_seqno)
    if target < replica.high_seqno:
        pair.bucket.rollback({0: target}, branch=False)
    else:
        target = replica.complete_seqno
        if target < replica.high_seqno:
            return
    by_key = {key: replica.get_any(key) for key in pair.states[target]}
    for key, (seqno, deleted) in pair.states[target].items():
        frame = by_key[key]
        if frame is None:
            assert deleted, "a live document is missing"
        else:
            document = StoredDocument.of(frame)
            assert (document.seqno, document.deleted) == (seqno, deleted)
    assert replica.item_count == sum(not deleted for _, deleted in pair.states[target].values())


def live(expected: State, shown: State) -> State:
    """What must be shown: tombstones that compaction has purged need not be."""
    return {key: entry for key, entry in expected.items() if key in shown or not entry[1]}


@given(st.lists(_STEP_OR_KILL, min_size=10, max_size=60))
def test_what_a_replica_tells_as_persisted_is_there_after_a_kill(steps: list[tuple[str, int]]) -> None:
    pair = Pair()
    for action, number in steps:
        pair.run(action, number)
        told = pair.replica.persisted_snapshot.start
        assert told <= pair.replica.complete_seqno, "a promotion would take it back"
    pair.run("kill", 0)
    assert pair.replica.complete_seqno == told, "a promotion after the kill would take it back"


def test_a_part_of_an_older_snapshot_is_not_told_as_persisted() -> None:
    """The snapshot is whole in memory and the next one has begun; what is on disk ends inside it."""
    pair = Pair()
    for action, number in [("write", 0), ("replicate", 0), ("flush", 0)]:
        pair.run(action, number)
    for number in (1, 2, 3):
        pair.run("write", number)
    pair.run("replicate", 1)
    pair.run("flush", 0)
    pair.run("replicate", 0)
    pair.run("write", 0)
    pair.run("write", 1)
    pair.run("replicate", 1)
    replica = pair.replica
    assert (replica.received, replica.high_seqno, replica.persisted_seqno) == ((4, 6), 5, 3)
    assert replica.persisted_snapshot == (1, 4)
    pair.run("kill", 0)
    assert (pair.replica.high_seqno, pair.replica.complete_seqno) == (3, 1)
    pair.bucket.set_state(0, VBucketState.ACTIVE)
    assert pair.replica.high_seqno == 1


def test_an_active_has_no_part_in_a_snapshot_that_it_was_announced_as_a_replica() -> None:
    """Its own changes get the seqnos of those that never came, and count like any others."""
    pair = Pair()
    pair.replica.begin_snapshot(0, 4)
    pair.run("flush", 0)
    pair.bucket.set_state(0, VBucketState.ACTIVE)
    for number in range(2):
        pair.replica.set(b"\0%d" % number, b"v")
    pair.run("flush", 0)
    assert pair.replica.persisted_snapshot == (2, 2)
    pair.bucket.set_state(0, VBucketState.REPLICA)
    assert (pair.replica.complete_seqno, pair.replica.received) == (2, (0, 0))


def test_a_seqno_inside_a_folded_snapshot_is_no_place_to_go_back_to() -> None:
    pair = Pair()
    for action, number in [("write", 0), ("write", 1), ("replicate", 0)]:
        pair.run(action, number)
    for number in (0, 0, 1, 1):
        pair.run("write", number)
    pair.run("replicate", 0)
    replica = pair.replica
    assert replica.high_seqno == 6
    assert [replica.exact_seqno(at) for at in range(8)] == [0, 1, 2, 2, 2, 2, 6, 6]
    pair.run("restart", 0)
    assert [pair.replica.exact_seqno(at) for at in range(8)] == [0, 1, 2, 2, 2, 2, 6, 6]


def test_a_purge_leaves_the_way_back_to_the_last_complete_snapshot() -> None:
    pair = Pair()
    for number in range(3):
        pair.run("write", number)
    pair.run("replicate", 0)
    pair.run("checkpoint", 0)
    pair.run("delete", 0)
    pair.run("write", 3)
    pair.run("write", 4)
    pair.run("replicate", 1)
    replica = pair.replica
    assert (replica.complete_seqno, replica.high_seqno) == (3, 5)
    pair.run("seal", 0)
    pair.bucket.compact(Compaction(drop_tombstones=True))
    assert replica.rollback_floor <= 3, "a promotion could not go back"
    pair.bucket.set_state(0, VBucketState.ACTIVE)
    assert replica.high_seqno == 3
    assert replica.get(b"\x000") is not None
