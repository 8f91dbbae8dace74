"""The roster of a reading gives what looking at every vbucket would give."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from tailrace.client.progress import Progress, Roster
from tailrace.client.retry import Backoff
from tailrace.protocol.dcp.reader_stream import ReaderStream
from tailrace.protocol.states import READING_TRANSITIONS, ReadingInput, ReadingState

RESTING = {ReadingState.PAUSED, ReadingState.DONE}


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(ReadingInput))))
def test_the_roster_knows_every_state(happenings: list[tuple[int, ReadingInput]]) -> None:
    roster = Roster()
    vbuckets = [Progress(ReaderStream(number), Backoff(random.Random(0)), roster) for number in range(4)]
    for progress in vbuckets:
        progress.make_ready()
    for number, happened in happenings:
        progress = vbuckets[number]
        before, changes = progress.state, roster.resting_changes
        if (before, happened) not in READING_TRANSITIONS:
            continue
        progress.feed(happened)
        assert (roster.resting_changes != changes) == (
            before != progress.state and bool({before, progress.state} & RESTING)
        )
        assert roster.done == sum(other.state is ReadingState.DONE for other in vbuckets)
        assert not roster.unsettled.keys() & roster.requested.keys()
        assert {*roster.unsettled.values(), *roster.requested.values()} == {
            other for other in vbuckets if other.state is not ReadingState.OPEN and other.state not in RESTING
        }
