"""Positions: what may be built, how they move, how they are written."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import MalformedMessage, UsageError
from tailrace.model import (
    MAX_SEQNO,
    MAX_U64,
    BehindSince,
    Position,
    SnapshotRange,
    parse_positions,
    parse_u64,
)

u64 = st.integers(0, MAX_U64)
seqnos = st.integers(0, MAX_SEQNO)


@st.composite
def positions(draw: st.DrawFn) -> Position:
    start, seqno, end = sorted(draw(st.tuples(seqnos, seqnos, seqnos)))
    return Position(draw(u64), seqno, start, end)


# What may be built


@pytest.mark.parametrize(
    "numbers",
    [(1, 5, 6, 9), (1, 10, 6, 9), (1, 7, 9, 6), (-1, 7, 6, 9), (1 << 64, 7, 6, 9), (1, 7, 6, 1 << 64)],
)
def test_nonsense_cannot_be_built(numbers: tuple[int, int, int, int]) -> None:
    with pytest.raises(UsageError):
        Position(*numbers)


@pytest.mark.parametrize("value", [True, 7.0, "7", None])
def test_only_integers_are_numbers(value: object) -> None:
    with pytest.raises(UsageError):
        Position.at(1, value)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        SnapshotRange(0, value)  # type: ignore[arg-type]


def test_range_that_ends_before_it_starts() -> None:
    with pytest.raises(UsageError):
        SnapshotRange(5, 4)


@pytest.mark.parametrize(
    ("position", "partial", "at_end", "exact_at", "reach"),
    [
        (Position.BEGINNING, False, True, 0, 0),
        (Position.at(1, 7), False, True, 7, 7),
        (Position(1, 7, 4, 7), False, True, 7, 7),
        (Position(1, 4, 4, 7), False, False, 4, 4),
        (Position(1, 5, 4, 7), True, False, 4, 7),
    ],
)
def test_what_a_position_says(
    position: Position, partial: bool, at_end: bool, exact_at: int, reach: int
) -> None:
    assert position.is_partial == partial
    assert position.at_snapshot_end == at_end
    assert position.exact_at == exact_at
    assert position.reach == reach


# How it moves


def test_marker_alone_moves_nothing() -> None:
    position = Position.at(1, 4)
    marker = position.received_marker(5, 9)
    assert position.request_range(marker) == SnapshotRange(4, 4)
    interrupted = Position(1, 6, 4, 8)
    marker = interrupted.received_marker(6, 12)
    assert interrupted.request_range(marker) == SnapshotRange(4, 8)


@pytest.mark.parametrize(
    ("start", "end", "status"),
    [(9, 8, 0x04), (3, 5, 0x22), (4, 5, 0x22), (6, 6, None), (5, 5, None), (1, 6, None), (1, 1 << 55, 0x22)],
)
def test_marker_behind_the_reader_is_refused(start: int, end: int, status: int | None) -> None:
    position = Position.at(1, 5)
    if status is None:
        assert position.received_marker(start, end) == SnapshotRange(start, end)
    else:
        with pytest.raises(MalformedMessage) as caught:
            position.received_marker(start, end)
        assert caught.value.status == status


@pytest.mark.parametrize(("seqno", "status"), [(0, 0x04), (4, 0x22), (5, 0x22), (6, 0x22), (10, 0x22)])
def test_item_out_of_place_is_refused(seqno: int, status: int) -> None:
    with pytest.raises(MalformedMessage) as caught:
        Position.at(1, 5).received(SnapshotRange(7, 9), seqno)
    assert caught.value.status == status


def test_reader_goes_through_a_snapshot() -> None:
    position = Position.at(1, 4)
    marker = position.received_marker(5, 9)
    position = position.received(marker, 5)
    assert (position, position.is_partial) == (Position(1, 5, 4, 9), True)
    assert position.request_range(marker) == marker
    assert position.request_range() == SnapshotRange(4, 9)
    position = position.received(marker, 9)
    assert (position, position.at_snapshot_end) == (Position(1, 9, 4, 9), True)
    assert position.received(SnapshotRange(10, 12), 11) == Position(1, 11, 9, 12)


def test_marker_that_starts_above_something_folded_away() -> None:
    """Change 5 may be folded away; with the marker's own start, item 6 would look like nothing received."""
    marker = SnapshotRange(6, 9)
    position = Position.at(1, 4).received(marker, 6)
    assert position == Position(1, 6, 4, 9)
    assert position.request_range(marker) == SnapshotRange(4, 9)


def test_marker_that_starts_below_the_reader() -> None:
    assert Position(1, 12, 1, 12).received(SnapshotRange(1, 20), 13) == Position(1, 13, 12, 20)


def test_interrupted_snapshot_is_complete_only_at_its_first_end() -> None:
    position = Position(1, 6, 4, 9).received(SnapshotRange(4, 7), 7)
    assert (position, position.is_partial) == (Position(1, 7, 4, 9), True)
    position = position.received(SnapshotRange(8, 12), 10)
    assert (position, position.is_partial) == (Position(1, 10, 4, 12), True)
    assert position.received(SnapshotRange(8, 12), 12).at_snapshot_end


def test_name_changes_place_stays() -> None:
    assert Position(1, 6, 4, 9).on_branch(2) == Position(2, 6, 4, 9)


# How it is written


def test_written_form_is_the_promised_one() -> None:
    assert Position(187349, 12, 1, 12).to_json() == {"vb_uuid": "187349", "seqno": 12, "snapshot": [1, 12]}
    assert Position.BEGINNING.to_json() == {"vb_uuid": "0", "seqno": 0, "snapshot": [0, 0]}


@given(st.dictionaries(st.integers(0, 0xFFFF), positions(), max_size=5))
def test_written_form_goes_round(vector: dict[int, Position]) -> None:
    text = json.dumps({str(vbucket): position.to_json() for vbucket, position in vector.items()})
    assert parse_positions(text) == vector
    assert pickle.loads(pickle.dumps(vector)) == vector


GOOD = {"vb_uuid": "187349", "seqno": 12, "snapshot": [1, 12]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vb_uuid": 187349}, "vb_uuid is 187349, but must be a string of decimal digits"),
        ({"vb_uuid": "1_000"}, "decimal digits"),
        ({"vb_uuid": "+1"}, "decimal digits"),
        ({"vb_uuid": " 1"}, "decimal digits"),
        ({"vb_uuid": ""}, "decimal digits"),
        ({"vb_uuid": "١٢"}, "decimal digits"),
        ({"vb_uuid": "²"}, "decimal digits"),
        ({"vb_uuid": "007"}, "must not start with 0"),
        ({"vb_uuid": "18446744073709551616"}, "2\\^64-1"),
        ({"vb_uuid": "1" * 5000}, "decimal digits"),
        ({"seqno": "12"}, "seqno is '12', but must be an integer"),
        ({"seqno": 12.0}, "seqno is 12.0"),
        ({"seqno": True}, "seqno is True"),
        ({"seqno": -1}, "seqno is -1"),
        ({"seqno": None}, "seqno is None"),
        ({"seqno": 1 << 70}, "more than 64 bits"),
        ({"seqno": 13}, r"seqno 13 is outside its snapshot \[1, 12\]"),
        ({"snapshot": [1]}, "list of two"),
        ({"snapshot": {"start": 1}}, "snapshot is a JSON object"),
        ({"snapshot": [1, "12"]}, "snapshot end is '12'"),
        ({"sequence": 1}, "no member called 'sequence'; it has vb_uuid, seqno, snapshot"),
    ],
)
def test_bad_position_says_what_is_wrong(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=f"^vbucket 7: .*{message}"):
        parse_positions(json.dumps({"7": {**GOOD, **change}}))


@pytest.mark.parametrize("name", GOOD)
def test_every_member_is_needed(name: str) -> None:
    with pytest.raises(UsageError, match=f"no member '{name}'"):
        Position.from_json({key: value for key, value in GOOD.items() if key != name})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("[]", "must be an object"),
        ("12", "must be an object"),
        ('{"7":[]}', "vbucket 7: a position is a JSON array"),
        ('{"x":{}}', "a vbucket is 'x'"),
        ('{"07":{}}', "must not start with 0"),
        ('{"65536":{}}', "vbucket 65536 is above 65535"),
        ('{"7":{},"7":{}}', "member '7' comes twice"),
        ('{"7":{"vb_uuid":"1","seqno":1,"seqno":2,"snapshot":[1,2]}}', "member 'seqno' comes twice"),
        ('{"7":{"vb_uuid":"1","seqno":NaN,"snapshot":[1,2]}}', "seqno is nan"),
        ('{"7":{"vb_uuid":"1","seqno":' + "9" * 5000 + ',"snapshot":[1,2]}}', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_bad_text_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_positions(text)


@given(st.text(alphabet="0123456789+-_ .eE\n\u0661\u00b2", max_size=24))
def test_numbers_are_only_what_we_would_write(text: str) -> None:
    try:
        number = parse_u64(text, "it")
    except UsageError:
        return
    assert str(number) == text


def test_since_when_somebody_is_behind() -> None:
    since = BehindSince(100.0)
    assert since.seconds(101.0, {0: 5}, {0: 5, 1: 0}) == 0
    assert since.seconds(105.0, {0: 5}, {0: 9}) == 4, "since it had all"
    assert since.seconds(110.0, {0: 9}, {0: 20}) == 5, "it has what there was at 105"
    assert since.seconds(112.0, {0: 12}, {0: 30}) == 7, "... and not yet what there was at 110"
    assert since.seconds(113.0, {0: 8}, {0: 8}) == 0, "what was to be reached was taken back"
    assert since.seconds(114.0, {0: 8}, {0: 9}) == 1
