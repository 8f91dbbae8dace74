"""Where positions are kept: what a file may hold, what it must not, and what a failed save does."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tailrace.testing
from tailrace import FileState, MemoryState, Mutation, Rollback
from tailrace.client.autosave import Autosave
from tailrace.client.progress import MAX_POINTS, Points, SavedPosition
from tailrace.client.state_store import parse_state
from tailrace.errors import StoreError, UsageError
from tailrace.history import FailoverEntry, FailoverLog
from tailrace.model import MAX_SEQNO, Position

u64 = st.integers(0, (1 << 64) - 1)
seqnos = st.integers(0, MAX_SEQNO)


@st.composite
def saved_positions(draw: st.DrawFn) -> SavedPosition:
    start, seqno, end = sorted((draw(seqnos), draw(seqnos), draw(seqnos)))
    entries = draw(st.lists(st.builds(FailoverEntry, u64, u64), min_size=1, max_size=5))
    log = draw(st.one_of(st.none(), st.just(FailoverLog(tuple(entries)))))
    points = tuple(draw(st.lists(seqnos, max_size=10)))
    return SavedPosition(Position(draw(u64), seqno, start, end), log, points, draw(seqnos), draw(u64))


@settings(deadline=None, max_examples=25)
@given(positions=st.dictionaries(st.integers(0, 1023), saved_positions(), max_size=5))
def test_what_is_saved_is_loaded(
    positions: dict[int, SavedPosition], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("state") / "positions.json"
    for store in (FileState(path, bucket="default"), MemoryState()):
        assert store.load() == {}
        store.save(positions)
        assert store.load() == positions
        store.save(positions)
    assert FileState(path).load() == positions


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b'{"x":1}',
        b'{"01":{"vb_uuid":"1","seqno":1,"snapshot":[1,1]}}',
        b'{"1":{"vb_uuid":1,"seqno":1,"snapshot":[1,1]}}',
        b'{"1":{"vb_uuid":"1","seqno":1,"snapshot":[2,1]}}',
        b'{"1":{"vb_uuid":"1","seqno":1,"snapshot":[1,36028797018963968]}}',
        b'{"1":{"vb_uuid":"1","seqno":18446744073709551615,"snapshot":[1,18446744073709551615]}}',
        b'{"1":{"vb_uuid":"1","seqno":1,"snapshot":[1,1],"points":[36028797018963968]}}',
        b'{"1":{"vb_uuid":"1","seqno":1,"snapshot":[1,1],"purge_seqno":36028797018963968}}',
        b'{"1":{"vb_uuid":"1","seqno":1,"snapshot":[1,1],"more":1}}',
        b'{"1":{"vb_uuid":"1","seqno":1,"snapshot":[1,1],"points":["1"]}}',
        b'{"1":{"vb_uuid":"1","seqno":1,"snapshot":[1,1],"failover_log":[{"id":1}]}}',
        b'{"tailrace_state":2,"bucket":"default","vbuckets":{}}',
        b'{"tailrace_state":1,"bucket":5,"vbuckets":{}}',
        b'{"tailrace_state":1,"bucket":"default"}',
        b'{"tailrace_state":1,"bucket":"default","bucket_uuid":5,"vbuckets":{}}',
        b"\xff",
        b"[" * 100_000,
    ],
)
def test_a_file_that_is_no_state_is_refused_and_left_alone(text: bytes, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        parse_state(text)
    path = tmp_path / "state.json"
    path.write_bytes(text)
    with pytest.raises(UsageError, match=r"state\.json.*move it away"):
        FileState(path).load()
    assert path.read_bytes() == text


def test_positions_in_a_bucket_that_was_deleted_and_made_again(
    tmp_path: Path, connect: Callable[..., Any]
) -> None:
    """They mean nothing in the new one: an error before anything is mixed up."""
    path = tmp_path / "state.json"
    for state in (path, FileState(path, bucket="default")):
        path.unlink(missing_ok=True)
        with tailrace.testing.node(vbuckets=2) as node:
            node.set(b"k", 1)
            list(connect(node.url, state=state).changes(end="now"))
            node.restart()
            assert not any(
                isinstance(event, Mutation | Rollback)
                for event in connect(node.url, state=state).changes(end="now")
            )
        before = path.read_bytes()
        with tailrace.testing.node(vbuckets=2) as node:
            node.set(b"k", 2)
            with pytest.raises(UsageError, match=r"state\.json.*deleted and created again .*move it away"):
                list(connect(node.url, state=state).changes(end="now"))
        assert path.read_bytes() == before
    # saved before uuids were kept, or not a state file's uuid at all
    path.write_bytes(before.replace(b'"bucket_uuid":', b'"older":'))
    with tailrace.testing.node(vbuckets=2) as node:
        node.set(b"k", 2)
        events = list(connect(node.url, state=path).changes(end="now"))
        assert any(isinstance(event, Rollback) for event in events)


def test_a_save_that_fails_is_an_error(tmp_path: Path, connect: Callable[..., Any]) -> None:
    folder = tmp_path / "gone"
    with pytest.raises(UsageError, match="no directory"):
        FileState(folder / "state.json")
    with pytest.raises(UsageError, match="is a directory"):
        FileState(tmp_path)
    folder.mkdir()
    state = FileState(folder / "state.json")
    folder.rmdir()
    with pytest.raises(StoreError, match="can't be written"):
        state.save({})
    folder.mkdir()
    with tailrace.testing.node(vbuckets=2) as node:
        node.set(b"k", 1)
        source = connect(node.url, state=folder / "state.json")
        folder.rmdir()
        with pytest.raises(StoreError):
            list(source.changes(end="now"))


def test_only_whole_snapshots_are_saved(connect: Callable[..., Any]) -> None:
    with tailrace.testing.node(vbuckets=1) as node:
        for number in range(10):
            node.set(f"k{number}", number)
        state = MemoryState()
        source = connect(node.url, state=state)
        changes = source.changes()
        seen = 0
        while seen < 9:
            seen += isinstance(next(changes), Mutation)
            source.save()
            assert state.positions == {}
        next(changes)
        source.save()
        assert state.positions[0].position.seqno == 10
        # saved without being asked, once nothing is left to do
        node.set("k0", 11)
        for event in changes:
            if isinstance(event, Mutation):
                break
        changes.close()
        rest = connect(node.url, state=state).changes(end="now")
        assert [event.seqno for event in rest if isinstance(event, Mutation)] == [11]


def test_saved_state_wins_and_survives_a_rollback(connect: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    with tailrace.testing.node(vbuckets=1) as node:
        for number in range(10):
            node.set(f"k{number}", number)
            list(connect(node.url, state=path).changes(end="now"))
        assert len(FileState(path).load()[0].points) == 10
        node.rewind(0, 4)
        node.set("new", 1)
        events = list(connect(node.url, state=path).changes(start="now", end="now"))
        # back to a point of an earlier run, not to the beginning
        assert events[0] == tailrace.Rollback(0, node.failover_log(0)[0][0], 4)
        assert [event.key for event in events if isinstance(event, Mutation)] == [b"new"]
        assert FileState(path).load()[0].points == (1, 2, 3, 4, 5)


@pytest.mark.parametrize("autosave", [True, False])
def test_where_now_was_is_saved_before_anything_comes(
    connect: Callable[..., Any], tmp_path: Path, *, autosave: bool
) -> None:
    """A reader that starts "now" and is killed before a change comes goes on there, not at a later "now"."""
    path = tmp_path / "state.json"

    async def wait_for_changes(url: str) -> None:
        async with tailrace.connect(url, state=path, autosave=autosave) as source:
            first = asyncio.ensure_future(anext(source.portions(start="now")))
            while not path.exists():
                assert not first.done()
                await asyncio.sleep(0.01)
            first.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await first

    with tailrace.testing.node(vbuckets=2) as node:
        node.set("before", 1, vbucket=0)
        asyncio.run(wait_for_changes(node.url))
        node.set("after", 2, vbucket=0)
        node.set("first of its vbucket", 3, vbucket=1)
        events = list(connect(node.url, state=path).changes(start="now", end="now"))
        keys = [event.key for event in events if isinstance(event, Mutation)]
        assert sorted(keys) == [b"after", b"first of its vbucket"]


def test_a_start_is_saved_beside_what_is_saved(connect: Callable[..., Any]) -> None:
    """One vbucket starts "now", later than the others, whose positions stay."""
    with tailrace.testing.node(vbuckets=2) as node:
        node.set("k", 1, vbucket=0)
        state = MemoryState()
        list(connect(node.url, state=state).changes(end="now", vbuckets=[0]))
        (saved,) = state.positions.values()
        node.set("k", 2, vbucket=1)
        node.set("more", 3, vbucket=0)
        events = list(connect(node.url, state=state, autosave=False).changes(start="now", end="now"))
        assert [event.key for event in events if isinstance(event, Mutation)] == [b"more"]
        # what was not saved before is not saved with the start
        assert state.positions[0] == saved and state.positions[1].position.seqno == 1


def test_who_is_cancelled_while_it_saves_waits_for_the_end_of_it() -> None:
    """The next reader would run into a save of the one before, and end with the older positions."""
    began, may_end = threading.Event(), threading.Event()
    place, saved = SavedPosition(Position.at(7, 3), None, (), 0, 0), list[Mapping[int, SavedPosition]]()

    class SlowState(MemoryState):
        def save(self, positions: Mapping[int, SavedPosition]) -> None:
            began.set()
            assert may_end.wait(60)
            saved.append(positions)

    async def work() -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(Autosave(SlowState(), is_automatic=True).save({0: place}, loop.time()))
        await loop.run_in_executor(None, began.wait)
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert saved == [{0: place}]

    asyncio.run(work())


@given(st.lists(st.integers(1, 10_000), unique=True).map(sorted))
def test_points_are_few_and_reach_far_back(seqnos: list[int]) -> None:
    points = Points()
    for seqno in seqnos:
        points.add(seqno)
    kept = list(points)
    assert kept == sorted(set(kept)) and set(kept) <= set(seqnos)
    assert len(kept) <= MAX_POINTS
    assert kept[-MAX_POINTS // 2 :] == seqnos[-MAX_POINTS // 2 :]
    if seqnos:
        assert kept[0] == seqnos[0]
    points.forget_above(5_000)
    assert list(points) == [seqno for seqno in kept if seqno <= 5_000]
