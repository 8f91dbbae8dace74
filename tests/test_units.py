"""Numbers as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace import units
from tailrace.errors import UsageError


@pytest.mark.parametrize("text", ["", "1_000", "١٢", "+1", " 1", "1 ", "0x10", "1e3", "1.0", "--1", "9" * 21])
def test_what_int_takes_and_we_dont(text: str) -> None:
    with pytest.raises(UsageError, match="not a whole number"):
        units.parse_integer(text, minimum=-5)


def test_integers_have_bounds() -> None:
    assert units.parse_integer("-5", minimum=-5) == -5
    assert units.parse_integer("0065535", maximum=65535) == 65535
    for text in ("-1", "65536"):
        with pytest.raises(UsageError, match="between 0 and 65535"):
            units.parse_integer(text, maximum=65535)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("64k", 65536),
        ("256m", 256 << 20),
        ("1G", 1 << 30),
        ("2 MiB", 2 << 20),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert units.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "m", "-1", "1.5g", "1p", "1_0k", "1kk", "٣k", "1i", "99999999999999t"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(UsageError, match="size"):
        units.parse_size(text)


@given(st.integers(0, 1 << 62))
def test_a_size_in_bytes_is_itself(size: int) -> None:
    assert units.parse_size(str(size)) == size


@pytest.mark.parametrize(
    ("text", "seconds"), [("0", 0.0), ("60", 60.0), ("250ms", 0.25), ("1.5s", 1.5), ("5m", 300.0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert units.parse_duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "nan", "inf", "-1s", "1e3", ".5", "5.", "1w", "1_0s"])
def test_no_durations(text: str) -> None:
    with pytest.raises(UsageError, match="duration"):
        units.parse_duration_s(text)


def test_shares() -> None:
    assert units.parse_share("0.25") == 0.25
    assert units.parse_share("25%") == 0.25
    assert units.parse_share("1") == 1.0
    for text in ("1.01", "101%", "-0.1", "nan", "", "%"):
        with pytest.raises(UsageError, match="share"):
            units.parse_share(text)


@given(st.sets(st.integers(0, 1023), min_size=1))
def test_vbucket_lists_come_back_in_order(ids: set[int]) -> None:
    assert units.parse_vbuckets(",".join(map(str, ids))) == sorted(ids)


def test_vbucket_ranges() -> None:
    assert units.parse_vbuckets("0,6-8,7-9") == [0, 6, 7, 8, 9]
    assert units.parse_vbuckets("all") is None
    for text in ("", "1,", "8-7", "-3", "1-", "0-1024", "1-2-3", "ALL"):
        with pytest.raises(UsageError):
            units.parse_vbuckets(text)


def test_sizes_for_people() -> None:
    assert [units.format_size(size) for size in (0, 1023, 1024, 3 << 20, 5 << 30, 7 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "3.0 MiB",
        "5.0 GiB",
        "7.0 TiB",
    ]


def test_a_message_stays_short_and_on_one_line() -> None:
    with pytest.raises(UsageError) as caught:
        units.parse_size("x\n" * 10_000)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_numbers_are_shown_in_few_words() -> None:
    assert units.shown_ranges([7, 2, 1, 0, 3]) == "0-3,7"
    assert units.shown_ranges(range(0, 20, 2)) == "0,2,4,6,8,10,12,14,…"
