"""The protocol of a group, played with a manual clock: nothing is lost, nothing comes twice unless it was not
saved, and a member that was given up can neither hand out nor save.
"""

from __future__ import annotations

import random

import pytest

from client.groups.memory_store import MemoryGroupStore
from tailrace.client.groups.member import GroupMember
from tailrace.client.groups.record import GroupRecord, Slot, format_vbuckets, parse_slot
from tailrace.client.progress import SavedPosition
from tailrace.clock import ManualClock
from tailrace.errors import GroupFenced, StoreError, UsageError
from tailrace.model import Position
from tailrace.units import parse_vbuckets

VBUCKETS = 16
TIMEOUT_S = 10.0


class Player:
    """A process of the group, and what it has handed out of each vbucket."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.member = GroupMember(
            world.store,
            bucket="b",
            vbucket_count=VBUCKETS,
            name=name,
            timeout_s=TIMEOUT_S,
            clock=world.clock,
        )
        self.at: dict[int, int] = {}
        self.surplus: frozenset[int] = frozenset()
        self.sleeps_until = 0.0

    def turn(self) -> None:
        held = self.member.turn()
        new = held.owned - self.at.keys()
        saved = self.member.load(new)
        for vbucket in new:
            start = saved[vbucket].position.seqno if vbucket in saved else 0
            known = {self.world.saved.get(vbucket, 0), *self.world.unknown.get(vbucket, ())}
            assert start in known, "it goes on at what was saved, and nowhere else"
            assert start >= self.world.saved.get(vbucket, 0), "a position never goes back"
            self.world.saved[vbucket] = start
            self.at[vbucket] = start
        self.surplus = held.surplus

    def hand_out(self) -> None:
        if self.member.is_in_doubt or not self.at:
            return
        vbucket = self.world.rng.choice(sorted(self.at))
        assert self.world.owner(vbucket) == self.member.name, "only who has a vbucket hands it out"
        to = min(self.at[vbucket] + self.world.rng.randrange(1, 6), self.world.high[vbucket])
        self.world.seen[vbucket].update(range(self.at[vbucket] + 1, to + 1))
        self.at[vbucket] = to

    def save(self, release: frozenset[int] = frozenset()) -> None:
        if not self.at:
            return
        at = dict(self.at)
        positions = {v: SavedPosition(Position.at(1, seqno)) for v, seqno in at.items() if seqno}
        for vbucket in release:
            del self.at[vbucket]
        for vbucket, seqno in at.items():  # it may be done before the answer says so
            self.world.unknown.setdefault(vbucket, set()).add(seqno)
        try:
            self.member.save(positions, release=release)
        except GroupFenced:
            named = set(GroupRecord.from_bytes(self.world.store.record).files.values())
            if not any(file.startswith(self.member.name) for file in named):
                for vbucket, seqno in at.items():
                    self.world.unknown[vbucket].discard(seqno)
            raise
        for vbucket, seqno in at.items():
            self.world.saved[vbucket] = max(seqno, self.world.saved.get(vbucket, 0))


class World:
    """Processes that come, sleep, die and go, and a bucket that is written to."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.store = MemoryGroupStore(self.rng, lost=0.02)
        self.store.between = self.interrupt
        self.players: dict[str, Player] = {}
        self.high = dict.fromkeys(range(VBUCKETS), 0)
        self.seen: dict[int, set[int]] = {vbucket: set() for vbucket in range(VBUCKETS)}
        self.saved: dict[int, int] = {}
        self.unknown: dict[int, set[int]] = {}
        self.busy: set[str] = set()
        self.fenced = 0

    def owner(self, vbucket: int) -> str | None:
        return GroupRecord.from_bytes(self.store.record).owners.get(vbucket)

    def interrupt(self) -> None:
        """Another process comes between."""
        if len(self.busy) < 3 and self.rng.random() < 0.1:
            self.step()

    def step(self) -> None:
        if self.rng.random() < 0.2:
            self.clock.advance(self.rng.random() * TIMEOUT_S / 4)
        if self.rng.random() < 0.3:
            self.high[self.rng.randrange(VBUCKETS)] += self.rng.randrange(1, 4)
        if len(self.players) < 3 or (len(self.players) < 6 and self.rng.random() < 0.01):
            name = f"p{self.rng.randrange(1 << 40)}"
            self.players[name] = Player(self, name)
        awake = [
            name
            for name, player in self.players.items()
            if player.sleeps_until <= self.clock.monotonic() and name not in self.busy
        ]
        if awake:
            self.play(self.rng.choice(sorted(awake)))

    def play(self, name: str) -> None:
        player = self.players[name]
        self.busy.add(name)
        try:
            chance = self.rng.random()
            if chance < 0.01:
                del self.players[name]  # kill -9
            elif chance < 0.02:
                player.sleeps_until = self.clock.monotonic() + self.rng.random() * 3 * TIMEOUT_S
            elif chance < 0.03:
                del self.players[name]
                player.member.leave()
            elif chance < 0.3:
                player.turn()
            elif chance < 0.75:
                player.hand_out()
            elif chance < 0.9 or not player.surplus & player.at.keys():
                player.save()
            else:
                player.save(release=player.surplus & player.at.keys())
        except GroupFenced:
            self.fenced += 1
            self.players.pop(name, None)
        except StoreError:
            # whether it was saved is not known: a process that does not ask again ends
            self.players.pop(name, None)
        finally:
            self.busy.discard(name)

    def end(self) -> None:
        """Sleepers stay asleep; the others reach an agreement."""
        self.store.between, self.store._lost = lambda: None, 0.0
        now = self.clock.monotonic()
        left = [player for player in self.players.values() if player.sleeps_until <= now]
        left = left or [Player(self, "last")]
        for _ in range(40):
            self.clock.advance(TIMEOUT_S / 4)
            for player in list(left):
                try:
                    player.turn()
                    if player.surplus:
                        player.save(release=player.surplus)
                except GroupFenced:
                    left.remove(player)
                    left = left or [Player(self, f"last{self.rng.random()}")]
        shares = [len(player.at) for player in left]
        assert sum(shares) == VBUCKETS and max(shares) - min(shares) <= 1
        for player in left:
            for vbucket, seqno in player.at.items():
                self.seen[vbucket].update(range(seqno + 1, self.high[vbucket] + 1))
        for vbucket, high in self.high.items():
            assert self.seen[vbucket] == set(range(1, high + 1)), "nothing is lost"
        assert len(self.store.files) <= len(left) + VBUCKETS


def test_members_that_come_sleep_die_and_go() -> None:
    fenced = 0
    for seed in range(25):
        world = World(seed)
        for _ in range(300):
            world.step()
        world.end()
        fenced += world.fenced
    assert fenced > 5, "sleepers were given up"


def member(store: MemoryGroupStore, name: str, clock: ManualClock, slot: Slot | None = None) -> GroupMember:
    return GroupMember(
        store, bucket="b", vbucket_count=8, name=name, slot=slot, timeout_s=TIMEOUT_S, clock=clock
    )


def test_a_slot_has_one_reader() -> None:
    """A pod that comes back takes its slot at once; the one before it is fenced, whatever it still does."""
    store, clock = MemoryGroupStore(random.Random(1)), ManualClock()
    first, other = member(store, "first", clock, Slot(0, 2)), member(store, "other", clock, Slot(1, 2))
    assert (sorted(first.turn().owned), sorted(other.turn().owned)) == ([0, 1, 2, 3], [4, 5, 6, 7])
    first.save({1: SavedPosition(Position.at(1, 7))})
    again = member(store, "again", clock, Slot(0, 2))
    assert again.turn().owned == {0, 1, 2, 3}
    with pytest.raises(GroupFenced, match="given up this reader"):
        first.save({1: SavedPosition(Position.at(1, 9))})
    assert again.load([1])[1].position.seqno == 7
    assert len(store.files) == 1
    # another number of slots: what is no longer a member's share is handed over
    larger = [member(store, f"l{number}", clock, Slot(number, 4)) for number in range(4)]
    assert [sorted(newcomer.turn().owned) for newcomer in larger] == [[], [], [], []]
    again.leave()
    other.leave()
    assert [sorted(newcomer.turn().owned) for newcomer in larger] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(UsageError, match="all members of a group have slots, or none"):
        member(store, "free", clock).turn()


def test_a_save_whose_answer_was_lost_stands() -> None:
    """The member is given up before it asks again: the others go on from what it wrote."""
    store, clock = MemoryGroupStore(random.Random(1)), ManualClock()
    saver, other = member(store, "saver", clock), member(store, "other", clock)
    saver.turn()
    other.turn()
    store._lost = 1.0
    store._fail = lambda: None  # type: ignore[method-assign]

    def given_up() -> None:
        store._lost, store.between = 0.0, lambda: None
        other.turn()  # it has seen the sign of life that came with the save
        clock.advance(TIMEOUT_S)
        other.turn()

    def wrote() -> None:
        store.between = given_up

    store.between = wrote
    with pytest.raises(GroupFenced):
        saver.save({1: SavedPosition(Position.at(1, 7))})
    assert other.load([1])[1].position.seqno == 7


def test_another_bucket_under_the_same_name() -> None:
    store, clock = MemoryGroupStore(random.Random(1)), ManualClock()
    member(store, "one", clock).turn()
    with pytest.raises(UsageError, match="reads bucket 'b' with 8 vbuckets, not 'b' with 16"):
        GroupMember(store, bucket="b", vbucket_count=16, name="two", clock=clock).turn()


def test_a_bucket_that_was_deleted_and_made_again() -> None:
    store, clock = MemoryGroupStore(random.Random(1)), ManualClock()

    def joining(name: str, uuid: str) -> GroupMember:
        return GroupMember(
            store, bucket="b", bucket_uuid=uuid, vbucket_count=8, name=name, timeout_s=30.0, clock=clock
        )

    joining("old", "").turn()  # of a server that gives none
    first = joining("one", "aa")
    first.turn()
    first.save({vbucket: SavedPosition(Position.at(1, 7)) for vbucket in range(8)})
    joining("two", "aa").turn()
    joining("three", "").turn()
    with pytest.raises(UsageError, match=r"deleted and created again .*was aa and is bb.*another name"):
        joining("four", "bb").turn()
    assert GroupRecord.from_bytes(store.read()[1] or b"").bucket_uuid == "aa"


def test_texts_of_slots_and_vbuckets() -> None:
    assert parse_slot("1/3", "host") == Slot(1, 3) == parse_slot("statefulset/3", "reader-1")
    shares = [Slot(number, 3).vbuckets(1024) for number in range(3)]
    assert [vbucket for share in shares for vbucket in share] == list(range(1024))
    for text, host in (("3/3", "h"), ("x/3", "h"), ("1", "h"), ("statefulset/3", "reader"), ("0/0", "h")):
        with pytest.raises(UsageError):
            parse_slot(text, host)
    assert format_vbuckets([9, 0, 1, 2]) == "0-2,9"
    assert parse_vbuckets("0-2,9") == [0, 1, 2, 9]
    with pytest.raises(UsageError, match="not the record of a group"):
        GroupRecord.from_bytes(b"[]")
