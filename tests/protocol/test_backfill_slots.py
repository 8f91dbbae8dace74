"""When a connection looks for backfills that nobody reads."""

from __future__ import annotations

from tailrace.protocol.backfill_slots import BackfillSlots


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
