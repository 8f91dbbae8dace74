"""A member and what it reads, with a store whose answers come late or never."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from client.groups.memory_store import MemoryGroupStore
from tailrace.client.groups import reader as reader_module
from tailrace.client.groups.member import GroupMember
from tailrace.client.groups.reader import GroupReader
from tailrace.client.groups.record import GroupRecord
from tailrace.client.progress import SavedPosition
from tailrace.clock import ManualClock
from tailrace.errors import ConnectError, GroupFenced, StoreError, UsageError
from tailrace.model import Position

VBUCKETS = 4


class PlayedReading:
    """The reading of a member: which vbuckets it has, and where they start."""

    def __init__(self) -> None:
        self.read: set[int] = set()
        self.starts: dict[int, SavedPosition] = {}

    def admit(self, positions: Mapping[int, SavedPosition | None]) -> None:
        self.read |= positions.keys()

    def known_starts(self, vbuckets: Iterable[int]) -> dict[int, SavedPosition]:
        return {vbucket: self.starts[vbucket] for vbucket in vbuckets if vbucket in self.starts}

    def can_leave(self, vbucket: int, *, is_urgent: bool) -> bool:
        return True

    def dismiss(self, vbuckets: Iterable[int]) -> None:
        self.read -= set(vbuckets)

    def to_save(self) -> dict[int, SavedPosition]:
        return {vbucket: SavedPosition(Position.at(1, 5)) for vbucket in self.read}


def owned(store: MemoryGroupStore) -> dict[str, set[int]]:
    record = GroupRecord.from_bytes(store.record)
    return {name: record.owned_by(name) for name in record.members}


def other_member(store: MemoryGroupStore) -> GroupMember:
    return GroupMember(store, bucket="b", vbucket_count=VBUCKETS, name="other")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryGroupStore:
    store = MemoryGroupStore(random.Random(1))
    monkeypatch.setattr(reader_module, "open_group_store", lambda *_: store)
    return store


def group_reader(errors: asyncio.Queue[Exception] | None = None, **options: Any) -> GroupReader:
    """``errors`` are those that end its reading."""
    wanted: dict[str, Any] = {"slot": None, "timeout_s": 60.0, "retry_for_s": 60.0, **options}
    on_error = (asyncio.Queue() if errors is None else errors).put_nowait
    return GroupReader("g", "", "b", on_change=lambda: None, on_error=on_error, **wanted)


def is_away(*_: object) -> Any:
    raise StoreError("the store is away")


def test_vbuckets_whose_release_was_not_answered_are_read_no_more(store: MemoryGroupStore) -> None:
    """The release is done but its answer lost: a member that went on would read what another reads too."""

    async def play() -> None:
        group, reading = group_reader(), PlayedReading()
        await group.begin(reading, VBUCKETS, is_from_now=False)
        assert await group.between_portions()
        other = other_member(store)
        other.turn()
        await group._turn()

        replace = store.replace

        def answer_is_lost(version: int, data: bytes) -> bool:
            assert replace(version, data)
            raise ConnectError("the store is away")

        store.replace = answer_is_lost  # type: ignore[method-assign]
        assert not await group.between_portions(), "nothing is handed out before it is known"
        store.replace = replace  # type: ignore[method-assign]
        await group._turn()  # as a sign of life does
        other.turn()
        while not await group.between_portions():
            pass
        mine = owned(store)[group.stats()["member"]]
        assert reading.read == group.owned == mine
        assert not mine & owned(store)["other"]
        await group.leave()

    asyncio.run(play())


def test_a_sign_of_life_under_way_does_not_outlive_the_member(store: MemoryGroupStore) -> None:
    """A member that leaves while the store is slow must not join again by a turn still under way: its
    vbuckets would not be read until the others give it up."""

    async def play() -> None:
        group, reading = group_reader(timeout_s=0.04), PlayedReading()
        await group.begin(reading, VBUCKETS, is_from_now=False)
        entered, goes_on = threading.Event(), threading.Event()

        def wait() -> None:
            store.between = lambda: None
            entered.set()
            assert goes_on.wait(60)

        store.between = wait
        await asyncio.to_thread(entered.wait, 60)
        leaving = asyncio.create_task(group.leave())
        await asyncio.sleep(0.05)
        assert not leaving.done(), "one call at a time"
        goes_on.set()
        await leaving
        assert owned(store) == {}

    asyncio.run(play())


def test_starts_that_get_known_while_others_are_saved(store: MemoryGroupStore) -> None:
    """What begins "now" is handed out only when the group knows where that was."""

    async def play() -> None:
        group, reading = group_reader(), PlayedReading()
        await group.begin(reading, VBUCKETS, is_from_now=True)
        reading.starts[0] = SavedPosition(Position.at(1, 7))

        def meanwhile() -> None:
            store.between = lambda: None
            reading.starts[1] = SavedPosition(Position.at(1, 8))

        store.between = meanwhile
        while not await group.between_portions():
            pass
        assert other_member(store).load(range(VBUCKETS)).keys() == reading.starts.keys() == {0, 1}
        await group.leave()

    asyncio.run(play())


def test_starts_that_can_not_be_saved_yet(store: MemoryGroupStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What begins "now" has to wait, even if where that is was known long ago."""

    async def play() -> None:
        group, reading = group_reader(), PlayedReading()
        await group.begin(reading, VBUCKETS, is_from_now=True)
        reading.starts[0] = SavedPosition(Position.at(1, 7))
        with monkeypatch.context() as patched:
            patched.setattr(store, "put", is_away)
            for _ in range(3):
                assert not await group.between_portions()
        while not await group.between_portions():
            pass
        assert other_member(store).load(range(VBUCKETS)).keys() == {0}
        await group.leave()

    monkeypatch.setattr(reader_module, "_AGAIN_S", 0.001)
    asyncio.run(play())


def test_who_can_not_show_that_it_lives_hands_nothing_out(
    store: MemoryGroupStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others may have given it up; when it can, it goes on with all that it has."""

    async def play() -> None:
        errors: asyncio.Queue[Exception] = asyncio.Queue()
        group, reading = group_reader(errors, timeout_s=0.1), PlayedReading()
        await group.begin(reading, VBUCKETS, is_from_now=False)
        with monkeypatch.context() as patched:
            patched.setattr(store, "read", is_away)
            await asyncio.sleep(0.1)
            for _ in range(3):
                assert not await group.between_portions()
        while not await group.between_portions():
            pass
        assert reading.read == group.owned == set(range(VBUCKETS)) and errors.empty()
        await group.leave()

    monkeypatch.setattr(reader_module, "_AGAIN_S", 0.001)
    asyncio.run(play())


def test_a_store_that_stays_away_ends_the_reading(
    store: MemoryGroupStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        errors: asyncio.Queue[Exception] = asyncio.Queue()
        group, reading = group_reader(errors, timeout_s=0.04, retry_for_s=0.05), PlayedReading()
        await group.begin(reading, VBUCKETS, is_from_now=False)
        assert await group.between_portions()
        monkeypatch.setattr(store, "read", is_away)
        assert str(await errors.get()) == "the store is away"
        await group.leave()

    asyncio.run(play())


def test_who_was_given_up_is_told_so(store: MemoryGroupStore) -> None:
    """At its next sign of life, and when it saves: it is too late for that."""

    async def play() -> None:
        errors: asyncio.Queue[Exception] = asyncio.Queue()
        group, reading = group_reader(errors, timeout_s=0.04), PlayedReading()
        await group.begin(reading, VBUCKETS, is_from_now=False)
        record = GroupRecord.from_bytes(store.record)
        store.version, store.record = store.version + 1, record.without(record.members).to_bytes()
        with pytest.raises(GroupFenced):
            await group.save(reading.to_save())
        assert isinstance(await errors.get(), GroupFenced)
        assert other_member(store).load(range(VBUCKETS)) == {}
        await group.leave()
        for too_late in (group.save(reading.to_save()), group.between_portions()):
            with pytest.raises(UsageError, match="the reading has ended"):
                await too_late

    asyncio.run(play())


@pytest.mark.parametrize("is_late", [False, True])
def test_who_joins_slowly_removes_nothing_of_who_joined_meanwhile(
    store: MemoryGroupStore, is_late: bool
) -> None:
    """It has read the record from before the other one joined."""
    other, slow = other_member(store), GroupMember(store, bucket="b", vbucket_count=VBUCKETS, name="slow")
    listed = store.names

    def names() -> list[str]:
        store.names = listed  # type: ignore[method-assign]
        before = store.names()
        other.turn()
        other.save({1: SavedPosition(Position.at(1, 7))})
        return before if is_late else store.names()

    store.names = names  # type: ignore[method-assign]
    slow.turn()
    assert other.load([1])[1].position.seqno == 7


def test_each_member_is_given_up_by_its_own_time(store: MemoryGroupStore) -> None:
    """Its own timeout says when it must doubt, so others with a shorter one must not take what it may still
    hand out.
    """
    clock = ManualClock()
    patient, hasty = (
        GroupMember(store, bucket="b", vbucket_count=VBUCKETS, name=name, timeout_s=timeout_s, clock=clock)
        for name, timeout_s in (("patient", 60.0), ("hasty", 5.0))
    )
    had = patient.turn().owned
    for _ in range(12):
        assert patient.is_in_doubt or not hasty.turn().owned & had
        clock.advance(6.0)
    hasty.turn()
    assert patient.is_in_doubt and hasty.turn().owned == had


def test_a_position_of_a_vbucket_that_it_does_not_have_is_not_saved(store: MemoryGroupStore) -> None:
    """Neither one that it handed over, nor one that it never had; nor does it release them."""
    first, other = GroupMember(store, bucket="b", vbucket_count=VBUCKETS, name="first"), other_member(store)
    first.turn()
    other.turn()
    first.save({v: SavedPosition(Position.at(1, 3)) for v in range(VBUCKETS)}, release=first.turn().surplus)
    taken = other.turn().owned
    assert len(taken) == VBUCKETS // 2
    other.save({v: SavedPosition(Position.at(1, 9)) for v in taken})
    first.save({v: SavedPosition(Position.at(1, 5)) for v in range(VBUCKETS)}, release=taken)
    seqnos = {v: saved.position.seqno for v, saved in other.load(range(VBUCKETS)).items()}
    assert seqnos == {v: 9 if v in taken else 5 for v in range(VBUCKETS)}
    assert other.turn().owned == taken
    with pytest.raises(GroupFenced):
        GroupMember(store, bucket="b", vbucket_count=VBUCKETS, name="none").save(
            {1: SavedPosition(Position.at(1, 99))}
        )
    assert first.load([1])[1].position.seqno in (5, 9)
