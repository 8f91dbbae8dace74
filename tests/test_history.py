"""Failover logs, the rollback decisions and what a reader does about them, case by case."""

from __future__ import annotations

import pickle
from bisect import bisect_left
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import LocalProtocolError, MalformedMessage, UsageError
from tailrace.history import (
    MAX_ENTRIES,
    MAX_RECEIVED_ENTRIES,
    Branch,
    FailoverEntry,
    FailoverLog,
    RestartAction,
    claims,
    plan,
    retreat,
    rollback_seqno,
    upr_rollback_seqno,
)
from tailrace.model import MAX_U64, Position

TWO = FailoverLog.of([(2222, 3), (1111, 0)])
ONE = FailoverLog.of([(1111, 0)])

u64 = st.integers(0, MAX_U64)
small = st.integers(0, 12)
pairs = st.lists(st.tuples(st.integers(0, 5), small), min_size=1, max_size=8)


@st.composite
def positions(draw: st.DrawFn, *, lowest_vb_uuid: int = 0) -> Position:
    start, seqno, end = sorted(draw(st.tuples(small, small, small)))
    return Position(draw(st.integers(lowest_vb_uuid, 5)), seqno, start, end)


# The log


def test_new_vbucket_has_one_entry_at_0() -> None:
    assert FailoverLog.new(7).entries == (FailoverEntry(7, 0),)


def test_branching_drops_what_began_above_and_trims_the_oldest() -> None:
    log = FailoverLog.of([(4, 9), (3, 5), (2, 5), (1, 0)])
    assert log.branched_at(5, 6) == FailoverLog.of([(6, 5), (3, 5), (2, 5), (1, 0)])
    assert log.branched_at(4, 6) == FailoverLog.of([(6, 4), (1, 0)])
    assert log.branched_at(9, 6, max_entries=2) == FailoverLog.of([(6, 9), (4, 9)])
    for vb_uuid in range(10, 40):
        log = log.branched_at(vb_uuid, vb_uuid)
    assert [entry.vb_uuid for entry in log.entries] == list(range(39, 39 - MAX_ENTRIES, -1))


def test_branch_is_named_once_and_never_0() -> None:
    with pytest.raises(LocalProtocolError, match="already"):
        TWO.branched_at(9, 1111)
    with pytest.raises(LocalProtocolError, match="no history"):
        TWO.branched_at(9, 0)
    with pytest.raises(LocalProtocolError, match="no history"):
        FailoverLog.new(0)


def test_local_rollback_keeps_the_branches_that_are_left() -> None:
    assert TWO.rolled_back_to(3, 9) == TWO
    assert TWO.rolled_back_to(2, 9) == ONE
    assert FailoverLog.of([(2222, 3)]).rolled_back_to(2, 9) == FailoverLog.of([(9, 2)])
    assert TWO.rolled_back_to(0, 9) == FailoverLog.new(9)


def test_cleaning_drops_uuid_0_and_entries_above_the_newer_one() -> None:
    log = FailoverLog.of([(0, 50), (5, 9), (4, 12), (3, 9), (0, 1), (2, 8), (1, 9)])
    assert log.cleaned() == FailoverLog.of([(5, 9), (3, 9), (2, 8)])
    assert TWO.cleaned() == TWO
    assert FailoverLog.of([(0, 3)]).cleaned() is None


@given(pairs)
def test_cleaned_log_is_in_order_and_clean(entries: list[tuple[int, int]]) -> None:
    cleaned = FailoverLog.of(entries).cleaned()
    if cleaned is not None:
        seqnos = [entry.seqno for entry in cleaned.entries]
        assert seqnos == sorted(seqnos, reverse=True)
        assert 0 not in cleaned
        assert cleaned.cleaned() == cleaned
    else:
        assert all(vb_uuid == 0 for vb_uuid, _ in entries)


def test_change_belongs_to_the_newest_branch_below_it() -> None:
    log = FailoverLog.of([(4, 8), (3, 5), (2, 5), (1, 2)])
    assert [log.branch_of(seqno) for seqno in (1, 2, 3, 5, 6, 8, 9, MAX_U64)] == [0, 0, 1, 1, 3, 3, 4, 4]


@given(pairs, st.integers(1, 14))
def test_boundaries_say_the_same_as_branch_of(entries: list[tuple[int, int]], seqno: int) -> None:
    log = FailoverLog.of(entries)
    starts, vb_uuids = log.boundaries()
    assert list(starts) == sorted(set(starts))
    index = bisect_left(starts, seqno) - 1
    assert (vb_uuids[index] if index >= 0 else 0) == log.branch_of(seqno)


def test_range_of_a_branch() -> None:
    assert TWO.range_of(2222, 10) == Branch(3, 10)
    assert TWO.range_of(1111, 10) == Branch(0, 3)
    assert TWO.range_of(9999, 10) is None
    assert FailoverLog.of([(0, 5), (1, 0)]).range_of(0, 10) is None
    assert FailoverLog.of([(1, 5), (2, 4), (1, 0)]).range_of(1, 10) == Branch(0, 4)


def test_wire_form_is_16_bytes_an_entry_newest_first() -> None:
    log = FailoverLog.of([(0xFEEDDECA, 0x5432), (0x1122, 0x10)])
    assert log.to_bytes() == bytes.fromhex(
        "00000000feeddeca0000000000005432 00000000000011220000000000000010"
    )
    assert FailoverLog.from_bytes(log.to_bytes()) == log


@given(st.lists(st.tuples(u64, u64), min_size=1, max_size=40))
def test_forms_go_round_in_any_order(entries: list[tuple[int, int]]) -> None:
    log = FailoverLog.of(entries)
    assert FailoverLog.from_bytes(log.to_bytes()) == log
    assert FailoverLog.from_json(log.to_json()) == log
    assert pickle.loads(pickle.dumps(log)) == log


@pytest.mark.parametrize("size", [0, 1, 15, 17, 16 * (MAX_RECEIVED_ENTRIES + 1)])
def test_peer_cannot_send_half_a_log_or_an_endless_one(size: int) -> None:
    with pytest.raises(MalformedMessage):
        FailoverLog.from_bytes(bytes(size))


def test_largest_log_of_a_peer_is_taken() -> None:
    assert len(FailoverLog.from_bytes(bytes(16 * MAX_RECEIVED_ENTRIES)).entries) == MAX_RECEIVED_ENTRIES


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        [7],
        [{"id": 1}],
        [{"id": 1, "seq": 2, "more": 3}],
        [{"id": "1", "seq": 2}],
        [{"id": True, "seq": 2}],
        [{"id": 1, "seq": 2.0}],
        [{"id": 1, "seq": -1}],
        [{"id": 1 << 64, "seq": 1}],
    ],
)
def test_stored_log_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(UsageError):
        FailoverLog.from_json(value)


def test_json_form_is_the_servers() -> None:
    assert TWO.to_json() == [{"id": 2222, "seq": 3}, {"id": 1111, "seq": 0}]


# The producer's decision

WORKED_CASES = [
    # (log newest first), (vb_uuid, snapshot start, snapshot end, start), purge, client's purge, rollback to
    (TWO, (1111, 1, 4, 3), 0, 0, 1),
    (TWO, (1111, 3, 3, 3), 0, 0, None),
    (TWO, (1111, 5, 8, 6), 0, 0, 3),
    (TWO, (2222, 4, 9, 9), 0, 0, None),
    (TWO, (9999, 2, 2, 2), 0, 0, 0),
    (TWO, (2222, 4, 4, 4), 5, 0, 0),
    (TWO, (2222, 4, 4, 4), 5, 5, None),
    (ONE, (1111, 11, 20, 11), 0, 0, 10),
    (ONE, (1111, 8, 20, 8), 0, 0, None),
    (TWO, (0, 5, 5, 5), 0, 0, 0),
    (ONE, (0, 5, 5, 5), 0, 0, 0),
]


@pytest.mark.parametrize(("log", "request_", "purge", "client_purge", "expected"), WORKED_CASES)
def test_worked_cases(
    log: FailoverLog, request_: tuple[int, int, int, int], purge: int, client_purge: int, expected: int | None
) -> None:
    vb_uuid, start, end, seqno = request_
    position = Position(vb_uuid, seqno, start, end)
    answer = rollback_seqno(position, log, high_seqno=10, purge_seqno=purge, client_purge_seqno=client_purge)
    assert answer == expected


def test_beginning_is_accepted_unless_a_strict_reader_names_an_unknown_branch() -> None:
    assert rollback_seqno(Position.BEGINNING, TWO, high_seqno=10, purge_seqno=9, strict_vb_uuid=True) is None
    assert rollback_seqno(Position.at(9999, 0), TWO, high_seqno=10) is None
    assert rollback_seqno(Position.at(9999, 0), TWO, high_seqno=10, strict_vb_uuid=True) == 0
    assert rollback_seqno(Position.at(1111, 0), TWO, high_seqno=10, strict_vb_uuid=True) is None


@pytest.mark.parametrize(
    ("seqno", "filtered_high", "expected"),
    [(4, None, 0), (4, 4, None), (4, 5, 0), (4, 3, None), (5, None, None)],
)
def test_purge_matters_only_below_it_and_where_the_filter_has_changes(
    seqno: int, filtered_high: int | None, expected: int | None
) -> None:
    answer = rollback_seqno(
        Position.at(2222, seqno), TWO, high_seqno=10, purge_seqno=5, filtered_high_seqno=filtered_high
    )
    assert answer == expected


def as_written(
    *,
    log: list[tuple[int, int]],
    vb_uuid: int,
    a: int,
    b: int,
    s: int,
    h: int,
    p: int,
    q: int,
    m: int | None,
    strict: bool,
) -> int | None:
    """docs/spec/dcp.md#rollback-decision, rule by rule, as it is written there."""
    if s == 0 and (not strict or vb_uuid == 0):
        return None
    if s < p and s != 0 and q != p and not (m is not None and s >= m and m <= p):
        return 0
    for index in reversed(range(len(log))):
        if log[index][0] == vb_uuid != 0:
            upper = h if index == 0 else log[index - 1][1]
            break
    else:
        return 0
    if s == a:
        b = s
    if b <= upper:
        return None
    if s == b:
        a = s
    return upper if upper < a else a


@given(entries=pairs, asked=positions(), h=small, p=small, q=small, m=st.none() | small, strict=st.booleans())
def test_decision_is_the_written_one(
    *, entries: list[tuple[int, int]], asked: Position, h: int, p: int, q: int, m: int | None, strict: bool
) -> None:
    expected = as_written(
        log=entries,
        vb_uuid=asked.vb_uuid,
        a=asked.snapshot_start,
        b=asked.snapshot_end,
        s=asked.seqno,
        h=h,
        p=p,
        q=q,
        m=m,
        strict=strict,
    )
    answer = rollback_seqno(
        asked,
        FailoverLog.of(entries),
        high_seqno=h,
        purge_seqno=p,
        client_purge_seqno=q,
        filtered_high_seqno=m,
        strict_vb_uuid=strict,
    )
    assert answer == expected
    assert answer is None or answer <= asked.seqno


@pytest.mark.parametrize(
    ("start", "vb_uuid", "expected"),
    [
        (0, 0, None),
        (0, 9999, None),
        (10, 2222, None),
        (11, 2222, 10),  # the recommended check that old servers lacked
        (2, 1111, None),
        (3, 1111, None),  # old servers answered a rollback to the very seqno asked for
        (4, 1111, 3),
        (4, 9999, 0),
        (4, 0, 0),
    ],
)
def test_upr_rule(start: int, vb_uuid: int, expected: int | None) -> None:
    assert upr_rollback_seqno(start, vb_uuid, TWO, high_seqno=10) == expected


def test_upr_reader_below_the_purge_seqno_starts_over() -> None:
    assert upr_rollback_seqno(4, 2222, TWO, high_seqno=10, purge_seqno=5) == 0


# Two logs


def test_claims_are_the_names_that_are_true() -> None:
    log = FailoverLog.of([(3333, 8), (2222, 3), (1111, 0)])
    assert [claim.vb_uuid for claim in claims(Position.at(3333, 9), log)] == [3333]
    assert [claim.vb_uuid for claim in claims(Position.at(3333, 8), log)] == [3333, 2222]
    assert [claim.vb_uuid for claim in claims(Position.at(3333, 2), log)] == [3333, 2222, 1111]
    # The snapshot goes beyond the branch point: what folded something away was made on 3333.
    assert [claim.vb_uuid for claim in claims(Position(3333, 8, 2, 9), log)] == [3333]
    # An ancestor may be called by what came after it; a stranger and a dead end may not.
    assert [claim.vb_uuid for claim in claims(Position.at(1111, 3), log)] == [1111, 3333, 2222]
    assert [claim.vb_uuid for claim in claims(Position.at(1111, 4), log)] == [1111]
    assert [claim.vb_uuid for claim in claims(Position.at(9999, 1), log)] == [9999]


# The reader's side


def test_retreat_goes_to_an_exact_point_never_to_the_named_seqno_itself() -> None:
    step = retreat(Position.at(1111, 20), 15, log=ONE, exact_points=[4, 9, 16, 20])
    assert (step.position, step.log, step.undo_to) == (Position.at(1111, 9), ONE, 9)


def test_retreat_inside_a_snapshot_goes_to_where_it_began() -> None:
    step = retreat(Position(1111, 6, 4, 9), 4, log=ONE)
    assert (step.position, step.undo_to) == (Position.at(1111, 4), 4)
    step = retreat(Position(1111, 6, 4, 9), 3, log=ONE)
    assert (step.position, step.log, step.undo_to) == (Position.BEGINNING, None, 0)


def test_retreat_drops_the_branches_that_began_above() -> None:
    step = retreat(Position(2222, 6, 1, 9), 1, log=TWO)
    assert (step.position, step.log) == (Position.at(1111, 1), ONE)
    only = FailoverLog.of([(2222, 3)])
    assert retreat(Position(2222, 6, 1, 9), 1, log=only).position == Position.at(2222, 1)
    assert retreat(Position(2222, 6, 1, 9), 1).position == Position.at(2222, 1)


def test_rollback_to_0_may_mean_that_only_the_newest_branch_is_unknown() -> None:
    for seqno in (2, 3):
        step = retreat(Position.at(2222, seqno), 0, log=TWO)
        assert (step.position, step.log, step.undo_to) == (Position.at(1111, seqno), ONE, None)
    again = retreat(step.position, 0, log=step.log)
    assert (again.position, again.undo_to) == (Position.BEGINNING, 0)


def test_older_branch_is_not_tried_for_what_the_newer_one_gave() -> None:
    assert retreat(Position.at(2222, 4), 0, log=TWO).position == Position.BEGINNING
    # start == branch point, which is enough in the documents, but the snapshot was folded by changes of 2222:
    # docs/spec/dcp.md#rollback-at-the-receiver-1
    assert retreat(Position(2222, 3, 1, 6), 0, log=TWO).position == Position.BEGINNING


def test_producer_that_asks_for_the_same_seqno_does_not_make_a_loop() -> None:
    step = retreat(Position.at(1111, 9), 9, log=ONE, exact_points=[4, 9])
    assert step.position == Position.at(1111, 4)


@pytest.mark.parametrize(("sent", "answer"), [(Position.at(1111, 5), 6), (Position.BEGINNING, 0)])
def test_rollback_that_leads_nowhere_is_the_producers_error(sent: Position, answer: int) -> None:
    with pytest.raises(MalformedMessage):
        retreat(sent, answer, log=ONE)


def test_strict_reader_of_nothing_drops_its_branch() -> None:
    assert retreat(Position.at(9999, 0), 0).position == Position.BEGINNING


@given(positions(lowest_vb_uuid=1), pairs, st.lists(small), st.lists(small, min_size=1))
def test_any_series_of_answers_ends(
    sent: Position, entries: list[tuple[int, int]], points: list[int], answers: list[int]
) -> None:
    log: FailoverLog | None = FailoverLog.of(entries)
    steps = 0
    while sent != Position.BEGINNING:
        answer = min(answers[steps % len(answers)], sent.seqno)
        step = retreat(sent, answer, log=log, exact_points=points)
        assert step.undo_to is None or step.undo_to <= answer
        assert not step.position.is_partial or step.undo_to is None
        sent, log, steps = step.position, step.log, steps + 1
        assert steps <= len(entries) + 13


# Both sides


HELD = Position.at(2222, 9)


def test_earlier_positions_are_looked_at_one_by_one() -> None:
    """There may be many, and each has to be read from somewhere."""
    asked = []

    def earlier() -> Iterator[Position]:
        for seqno in (8, 7, 6, 5):
            asked.append(seqno)
            yield Position.at(1111, seqno)

    log = FailoverLog.of([(3333, 7), (1111, 0)])
    decision = plan(Position.at(2222, 9), None, producer_log=log, high_seqno=20, earlier=earlier())
    assert (decision.action, decision.base) == (RestartAction.ROLL_BACK, Position.at(1111, 7))
    assert asked == [8, 7]


@pytest.mark.parametrize(
    ("held", "producer", "high", "purge", "earlier", "expected", "request_"),
    [
        (HELD, TWO, 12, 0, [], "resume", HELD),
        (HELD, TWO, 9, 9, [], "resume", HELD),
        (Position.at(2222, 3), ONE, 9, 0, [], "resume", Position.at(1111, 3)),
        (Position(2222, 6, 4, 9), TWO, 12, 0, [], "resume", Position(2222, 6, 4, 9)),
        (Position.BEGINNING, TWO, 12, 5, [], "backfill", Position.BEGINNING),
        (Position.at(2222, 0), TWO, 12, 5, [], "backfill", Position.BEGINNING),
        (Position.BEGINNING, ONE, 0, 0, [], "resume", Position.BEGINNING),
        (HELD, TWO, 8, 0, [(2222, 9), (2222, 8), (1111, 2)], "roll back to 8", Position.at(2222, 8)),
        (HELD, ONE, 12, 0, [(2222, 7), (1111, 2)], "roll back to 2", Position.at(1111, 2)),
        (HELD, ONE, 12, 0, [(2222, 7), (2222, 3)], "roll back to 3", Position.at(1111, 3)),
        (
            HELD,
            FailoverLog.of([(3333, 3), (1111, 0)]),
            12,
            0,
            [(3333, 8)],
            "roll back to 8",
            Position.at(3333, 8),
        ),
        (HELD, ONE, 12, 3, [(2222, 7), (1111, 2)], "start over", Position.BEGINNING),
        (HELD, TWO, 12, 10, [(2222, 7)], "start over", Position.BEGINNING),
        (HELD, FailoverLog.of([(4444, 0)]), 12, 0, [(2222, 7)], "start over", Position.BEGINNING),
        (HELD, ONE, 12, 0, [], "start over", Position.BEGINNING),
    ],
)
def test_plan(
    *,
    held: Position,
    producer: FailoverLog,
    high: int,
    purge: int,
    earlier: list[tuple[int, int]],
    expected: str,
    request_: Position,
) -> None:
    versions = [Position.at(*pair) for pair in earlier]
    decision = plan(held, TWO, producer_log=producer, high_seqno=high, purge_seqno=purge, earlier=versions)
    assert str(decision) == expected
    assert decision.request == request_
    assert decision.base in (held, *versions, Position.BEGINNING)


def test_plan_without_a_log_knows_only_the_names_it_was_given() -> None:
    decision = plan(Position.at(2222, 3), None, producer_log=ONE, high_seqno=9)
    assert decision.action is RestartAction.START_OVER
