"""The report of the demo: one file that needs nothing else, and shows what happened."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from tailrace.spark.report import LostChange, Moment, Sample, render

VOID = {"meta", "line", "rect", "polyline"}


class Page(HTMLParser):
    """What is in a page; raises if its elements are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def samples(*tables: int) -> list[Sample]:
    return [Sample(at / 2, 100, rows, 100 - rows, 10 * at, at) for at, rows in enumerate(tables)]


def page(samples: list[Sample], moments: list[Moment]) -> Page:
    return Page(render(samples, moments, title="a <b> & c", summary="equal: 100 documents"))


def test_four_plots_and_the_story() -> None:
    moments = [Moment(0.5, "it begins"), Moment(1.0, "failover! <5> lost", is_rollback=True)]
    made = page(samples(0, 60, 100, 80, 100), moments)
    assert len(made.all("svg")) == 4
    assert len(made.all("polyline")) == 5, "the first plot has two lines"
    dashed = [line for line in made.all("line") if "stroke-dasharray" in line]
    assert len(dashed) == 4, "the rollback is marked in each"
    assert "a <b> & c" in made.text
    assert "failover! <5> lost" in made.text
    assert "equal: 100 documents" in made.text
    assert [row["class"] for row in made.all("tr")] == ["", "back"]


def test_lost_changes_are_named_with_what_was_before_and_after() -> None:
    lost = [LostChange(f"new::{number}", 3, 90 + number, '{"new":1}', None) for number in range(50)]
    lost.append(LostChange("old<1>", 2, 7, '{"v":"' + "x" * 99, '{"v":"was"}'))
    made = Page(render(samples(1, 2), [], title="t", summary="s", lost=lost))
    assert "51 changes" in made.text
    assert "50 documents never existed, 1 are back to what they were" in made.text
    assert "old<1>" in made.text and '{"v":"was"}' in made.text
    assert "And 30 more." in made.text and made.text.count("gone") == 20
    assert str(lost[0]) == 'new::0 was {"new":1} and is gone'


def test_the_dip_is_to_be_seen() -> None:
    lines = page(samples(0, 60, 100, 80, 100), []).all("polyline")
    table = [float(point.split(",")[1]) for point in (lines[1]["points"] or "").split()]
    highest = min(table)  # upwards is less
    assert table[2] == table[4] == highest < table[3] < table[1] < table[0]


def test_a_phone_shows_it_as_wide_as_it_is() -> None:
    made = Page(render(samples(1, 2), [], title="t", summary="s", lost=[LostChange("k", 0, 1, "a", "b")]))
    named = [attributes.get("name") for tag, attributes in made.elements if tag == "meta"]
    assert "viewport" in named
    assert ("div", {"class": "wide"}) in made.elements, "the table of what was lost moves in itself"


def test_nothing_is_loaded_from_elsewhere() -> None:
    text = render(samples(1, 2, 3), [Moment(0.1, "x")], title="t", summary="s")
    assert not re.search(r"https?:|//|src=|href=|@import|url\(|<script|<link", text)


@pytest.mark.parametrize("count", [0, 1])
def test_a_run_that_was_too_short_has_a_report_too(count: int) -> None:
    assert len(page(samples(*[5] * count), []).all("svg")) == 4
