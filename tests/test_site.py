"""The documentation as a site: it builds without a warning, so every link works, and needs no network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
_SVG = "{http://www.w3.org/2000/svg}"
_FETCHED = re.compile(
    r"<(?:script|img|iframe|source)[^>]* src=[\"']?(?:https?:)?//|<link(?![^>]*canonical)[^>]*//"
)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    page = (tmp_path / "site" / "mirror.html").read_text()
    assert "norun" not in page and re.search(r"<code[^>]*>", page)
    assert "connect_sync" in (tmp_path / "site" / "api.html").read_text()
    assert [
        str(path.relative_to(tmp_path))
        for path in (tmp_path / "site").rglob("*.html")
        if 'class="mermaid"' in (text := path.read_text()) or _FETCHED.search(text)
    ] == [], "these pages fetch something from the network"
    states = (tmp_path / "site" / "protocol" / "states.html").read_text()
    assert states.count('<svg class="drawing"') == (ROOT / "docs/protocol/states.md").read_text().count(
        "```mermaid"
    )


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import drawing  # type: ignore[import-not-found]

    made: Callable[[str], str] = drawing.draw
    return made


def diagrams() -> list[Any]:
    pages = sorted((ROOT / "docs").rglob("*.md"))
    return [
        pytest.param(text, id=f"{page.stem}-{number}")
        for page in pages
        for number, text in enumerate(re.findall(r"^```mermaid\n(.*?)^```$", page.read_text(), re.M | re.S))
    ]


@pytest.mark.parametrize("text", diagrams())
def test_every_diagram_is_drawn(text: str, draw: Callable[[str], str]) -> None:
    """With every box, label and arrow, and no box over another."""
    svg = ElementTree.fromstring(draw(text))
    boxes = [
        tuple(float(shape.attrib[side]) for side in ("x", "y", "width", "height"))
        for shape in svg.iter(f"{_SVG}rect")
    ]
    names = set(re.findall(r'^    state "(.*)" as', text, re.M)) | set(re.findall(r'\["<b>(.*?)</b>', text))
    shown = {"".join(shape.itertext()) for shape in svg.iter(f"{_SVG}text")}
    assert names <= shown and len(boxes) == len(names) > 1
    assert set(re.findall(r"--> \w+: (.*)$", text, re.M)) <= shown
    arrows = {tuple(ends) for ends in re.findall(r"^    (\S+) --> (\w+)", text, re.M)}
    assert len(list(svg.iter(f"{_SVG}path"))) == 2 * len(arrows), "a line and its tip"
    wide, high = map(float, svg.attrib["viewBox"].split()[2:])
    for at, (x, y, width, height) in enumerate(boxes):
        assert x >= 0 and x + width <= wide and y >= 0 and y + height <= high
        for other_x, other_y, other_width, other_height in boxes[at + 1 :]:
            apart = x + width < other_x or other_x + other_width < x
            assert apart or y + height < other_y or other_y + other_height < y


@pytest.mark.parametrize("text", ["pie\n  a", "flowchart TD\n  a -.-> b"])
def test_what_cannot_be_drawn_fails_the_build(text: str, draw: Callable[[str], str]) -> None:
    with pytest.raises(ValueError, match="can't be drawn"):
        draw(text)
