"""When a connection looks for backfills that nobody reads."""

from __future__ import annotations

from tailrace.protocol.dcp.backfill_slots import BackfillSlots


class Stream:
    def __init__(self) -> None:
        self.sent_bytes = 0
        self.made_ready = 0

    def set_ready(self) -> None:
        self.made_ready += 1


def test_it_looks_at_a_new_backfill_at_once_and_at_others_when_the_first_may_be_stalled() -> None:
    slots, first, two = BackfillSlots(2), Stream(), Stream()
    assert slots.next_timer(10.0, 5.0) is None
    assert slots.take(first)
    assert slots.next_timer(10.0, 5.0) == 10.0
    assert slots.stalled(10.0, 5.0) == []
    assert slots.next_timer(11.0, 5.0) == 15.0
    assert slots.take(two)
    assert slots.next_timer(12.0, 5.0) == 12.0
    assert slots.stalled(12.0, 5.0) == []
    assert slots.next_timer(13.0, 5.0) == 15.0  # of the first
    assert slots.stalled(15.0, 5.0) == [first]
    assert slots.next_timer(15.0, 5.0) == 17.0  # of the second
    two.sent_bytes = 1
    assert slots.stalled(17.0, 5.0) == []
    slots.release(first)
    assert slots.next_timer(18.0, 5.0) <= 22.0  # type: ignore[operator]  # too early is only a look
    assert slots.stalled(20.0, 5.0) == []
    assert slots.next_timer(20.0, 5.0) == 22.0
    assert slots.stalled(22.0, 5.0) == [two]
    slots.release(two)
    assert slots.next_timer(22.0, 5.0) is None


def test_a_free_slot_goes_to_the_one_that_waits_longest_and_to_nobody_else() -> None:
    slots = BackfillSlots(2)
    first, two, three, four = (Stream() for _ in range(4))
    assert slots.take(first) and slots.take(two)
    assert not slots.take(three)
    assert not slots.take(four)
    slots.release(first)
    assert (three.made_ready, four.made_ready) == (1, 0)
    assert not slots.take(first)  # it is three's before three has looked
    assert slots.take(three)
    slots.limit = 1
    slots.release(two)
    assert four.made_ready == 0
    slots.release(three)
    assert (four.made_ready, first.made_ready) == (1, 0)
    assert len(slots) == 1
    slots.release(four)
    assert first.made_ready == 1


def test_one_that_waits_no_more_gets_no_slot() -> None:
    slots = BackfillSlots(1)
    first, two, three = (Stream() for _ in range(3))
    assert slots.take(first)
    assert not slots.take(two) and not slots.take(three)
    slots.release(two)
    slots.release(first)
    assert (two.made_ready, three.made_ready) == (0, 1)


def test_backfills_that_come_and_go_are_looked_at_once_a_second() -> None:
    slots, first, two = BackfillSlots(2), Stream(), Stream()
    assert slots.take(first)
    assert slots.stalled(10.0, 5.0) == []
    slots.release(first)
    assert slots.take(two)
    assert slots.next_timer(10.25, 5.0) == 11.0
    assert slots.stalled(11.0, 5.0) == []
    assert slots.next_timer(11.0, 5.0) == 16.0
    assert slots.stalled(16.0, 5.0) == [two]
