"""Draws the Mermaid diagrams of the pages as SVG, so that the site needs no library from the network.

It supports the part of Mermaid that the pages use: `flowchart TD` with plain arrows, and `stateDiagram-v2`.
Anything else is a build error. Boxes are in rows: an arrow goes down unless it closes a circle, one that is
longer than a row bends around what is in between, and labels have rows of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape, unescape
from itertools import pairwise

__all__ = ["Arrow", "Box", "Drawing", "draw", "read_mermaid"]

_LINE_HEIGHT = 18.0
_BETWEEN_BOXES, _BETWEEN_ROWS = 26.0, 24.0
_PADDING = 12.0
_LOOP = 22.0
"""How far an arrow from a box to itself extends."""
_SWEEPS = 24
_NARROW, _WIDE = "iljtfr.,:;' ()|·", "mwMW⇄→"


@dataclass(eq=False)
class Box:
    """Something with a place in a row: a box with text, a label or bend of an arrow, the start."""

    kind: str
    lines: list[str] = field(default_factory=list)
    """Markup of `b` and `i` is kept."""
    loops: list[str] = field(default_factory=list)
    """Labels of the arrow to itself."""
    row: int = 0
    x: float = 0.0
    y: float = 0.0

    @property
    def half(self) -> float:
        """Half of its width."""
        if self.kind in ("bend", "start"):
            return 7.0
        return max(map(_width, self.lines), default=0.0) / 2 + (_PADDING if self.kind == "box" else 4.0)

    @property
    def right(self) -> float:
        """The space that it needs to the right of its middle, where a loop is drawn."""
        return self.half + (_LOOP + 6 + max(map(_width, self.loops)) if self.loops else 0.0)

    @property
    def height(self) -> float:
        """Height of the box itself."""
        if self.kind in ("bend", "start"):
            return 14.0 if self.kind == "start" else 0.0
        return len(self.lines) * _LINE_HEIGHT + (_PADDING if self.kind == "box" else 0.0)


@dataclass(eq=False)
class Arrow:
    """An arrow between two boxes; several between the same two are one, with several labels."""

    source: Box
    target: Box
    labels: list[str] = field(default_factory=list)
    way: list[Box] = field(default_factory=list)
    """What it passes, from the upper box to the lower one, both included."""


@dataclass
class Drawing:
    """The content of a diagram."""

    boxes: dict[str, Box] = field(default_factory=dict)
    arrows: list[Arrow] = field(default_factory=list)

    def add_arrow(self, source: str, target: str, label: str = "") -> None:
        """Add an arrow."""
        labels = [label] if label else []
        if source == target:
            self.boxes[source].loops += labels or [""]
            return
        ends = self.boxes[source], self.boxes[target]
        for arrow in self.arrows:
            if (arrow.source, arrow.target) == ends:
                arrow.labels += labels
                return
        self.arrows.append(Arrow(*ends, labels))


def draw(mermaid: str) -> str:
    """An SVG element without blank lines, in the colours of the page around it."""
    drawing = read_mermaid(mermaid)
    rows = _rows(drawing)
    _sort(drawing, rows)
    _place(drawing, rows)
    return _svg(drawing, rows)


# reading

_BOX = re.compile(r'^(\w+)\["(.*)"\]$')
_STATE = re.compile(r'^state "(.*)" as (\w+)$')
_ARROW = re.compile(r"^(\w+|\[\*\]) --> (\w+)(?:: (.+))?$")


def read_mermaid(text: str) -> Drawing:
    """Parse the lines of a diagram; ValueError for a line of an unknown kind."""
    kind, *lines = (line.strip() for line in text.strip().splitlines())
    if kind not in ("flowchart TD", "stateDiagram-v2"):
        raise ValueError(f"a diagram of this kind can't be drawn: {kind}")
    drawing = Drawing()
    for line in filter(None, lines):
        if match := _BOX.match(line):
            drawing.boxes[match[1]] = Box("box", re.split(r"<br\s*/?>", match[2]))
        elif match := _STATE.match(line):
            drawing.boxes[match[2]] = Box("box", [escape(match[1], quote=False)])
        elif match := _ARROW.match(line):
            if match[1] == "[*]":
                drawing.boxes.setdefault("[*]", Box("start"))
            drawing.add_arrow(match[1], match[2], escape(match[3] or "", quote=False))
        else:
            raise ValueError(f"this line of a diagram can't be drawn: {line}")
    return drawing


def _plain(line: str) -> str:
    return unescape(re.sub(r"<[^>]*>", "", line))


def _width(line: str) -> float:
    """The estimated width of a line, which can't be measured here."""
    per = [4.6 if sign in _NARROW else 11.8 if sign in _WIDE else 7.9 for sign in _plain(line)]
    return sum(per) * (1.06 if line.startswith("<b>") else 1.0)


# rows


def _rows(drawing: Drawing) -> list[list[Box]]:
    """All boxes in rows, with the bends and labels of the arrows between them."""
    down = _downwards(drawing)
    step = 2 if any(arrow.labels for arrow in drawing.arrows) else 1
    for _ in drawing.boxes:
        for upper, lower in down.values():
            lower.row = max(lower.row, upper.row + step)
    rows: list[list[Box]] = [[] for _ in range(1 + max(box.row for box in drawing.boxes.values()))]
    for box in drawing.boxes.values():
        rows[box.row].append(box)
    for arrow in drawing.arrows:
        upper, lower = down[arrow]
        middle = (upper.row + lower.row) // 2
        between = [
            Box("label", arrow.labels, row=row) if row == middle and arrow.labels else Box("bend", row=row)
            for row in range(upper.row + 1, lower.row)
        ]
        for bend in between:
            rows[bend.row].append(bend)
        arrow.way = [upper, *between, lower]
    return rows


def _downwards(drawing: Drawing) -> dict[Arrow, tuple[Box, Box]]:
    """The upper and the lower box of every arrow; arrows that close a circle are reversed."""
    leaving: dict[Box, list[Arrow]] = {box: [] for box in drawing.boxes.values()}
    for arrow in drawing.arrows:
        leaving[arrow.source].append(arrow)
    reached = {arrow.target for arrow in drawing.arrows}
    first = sorted(leaving, key=lambda box: (box.kind != "start", box in reached))
    down: dict[Arrow, tuple[Box, Box]] = {}
    done: set[Box] = set()

    def visit(box: Box, above: tuple[Box, ...]) -> None:
        done.add(box)
        for arrow in leaving[box]:
            closes = arrow.target in above or arrow.target is box
            down[arrow] = (arrow.target, box) if closes else (box, arrow.target)
            if arrow.target not in done:
                visit(arrow.target, (*above, box))

    for box in first:
        if box not in done:
            visit(box, ())
    return down


# order in the rows


def _neighbours(drawing: Drawing) -> tuple[dict[Box, list[Box]], dict[Box, list[Box]]]:
    """For every box, its neighbours in the row above and in the row below."""
    above: dict[Box, list[Box]] = {}
    below: dict[Box, list[Box]] = {}
    for arrow in drawing.arrows:
        for upper, lower in pairwise(arrow.way):
            above.setdefault(lower, []).append(upper)
            below.setdefault(upper, []).append(lower)
    return above, below


def _crossings(rows: Sequence[Sequence[Box]], below: dict[Box, list[Box]]) -> int:
    count = 0
    for upper, lower in pairwise(rows):
        place = {box: at for at, box in enumerate(lower)}
        ends = [sorted(place[box] for box in below.get(start, [])) for start in upper]
        for at, left in enumerate(ends):
            count += sum(a > b for right in ends[at + 1 :] for a in left for b in right)
    return count


def _sort(drawing: Drawing, rows: list[list[Box]]) -> None:
    """Order the boxes of the rows with as few crossings as some sweeps can find."""
    above, below = _neighbours(drawing)
    best, fewest = [list(row) for row in rows], _crossings(rows, below)
    for sweep in range(_SWEEPS):
        near = above if sweep % 2 == 0 else below
        place = {box: float(at) for row in rows for at, box in enumerate(row)}
        for row in rows if sweep % 2 == 0 else reversed(rows):
            middles = {box: _middle([place[other] for other in near.get(box, [])], place[box]) for box in row}
            row.sort(key=middles.__getitem__)
            place |= {box: float(at) for at, box in enumerate(row)}
        _swap(rows, above, below)
        if (count := _crossings(rows, below)) < fewest:
            best, fewest = [list(row) for row in rows], count
    for row, ordered in zip(rows, best, strict=True):
        row[:] = ordered


def _middle(places: Sequence[float], else_: float) -> float:
    return sum(places) / len(places) if places else else_


def _swap(rows: list[list[Box]], above: dict[Box, list[Box]], below: dict[Box, list[Box]]) -> None:
    """Swap neighbours where that leaves fewer crossings."""
    place = {box: at for row in rows for at, box in enumerate(row)}
    for row in rows:
        for at in range(len(row) - 1):
            left, right = row[at], row[at + 1]
            turned = 0
            for near in (above, below):
                pairs = [(place[a], place[b]) for a in near.get(left, []) for b in near.get(right, [])]
                turned += sum(a > b for a, b in pairs) - sum(a < b for a, b in pairs)
            if turned > 0:
                row[at], row[at + 1] = right, left
                place[left], place[right] = at + 1, at


# places


def _place(drawing: Drawing, rows: list[list[Box]]) -> None:
    """Place every box as near to its neighbours as the others in its row allow."""
    y = 4.0
    for row in rows:
        height = max(box.height for box in row)
        x = 0.0
        for box in row:
            box.y = y + height / 2
            box.x = x + box.half
            x = box.x + box.right + _BETWEEN_BOXES
        y += height + _BETWEEN_ROWS
    above, below = _neighbours(drawing)
    for sweep in range(2 * _SWEEPS):
        near = above if sweep % 2 == 0 else below
        for row in rows if sweep % 2 == 0 else reversed(rows):
            _align(row, [_middle([other.x for other in near.get(box, [])], box.x) for box in row])
    left = min(box.x - box.half for row in rows for box in row)
    for row in rows:
        for box in row:
            box.x += 4.0 - left


def _align(row: Sequence[Box], wanted: Sequence[float]) -> None:
    """The places nearest to the wanted ones, with room between: boxes that touch move together."""
    offsets = [0.0]
    for left, right in pairwise(row):
        offsets.append(offsets[-1] + left.right + _BETWEEN_BOXES + right.half)
    groups: list[tuple[float, int]] = []
    for place, offset in zip(wanted, offsets, strict=True):
        groups.append((place - offset, 1))
        while len(groups) > 1 and groups[-2][0] > groups[-1][0]:
            (right, many), (left, few) = groups.pop(), groups.pop()
            groups.append(((left * few + right * many) / (few + many), few + many))
    moved = iter(row)
    ahead = iter(offsets)
    for base, count in groups:
        for _ in range(count):
            next(moved).x = base + next(ahead)


# the picture


def _svg(drawing: Drawing, rows: Sequence[Sequence[Box]]) -> str:
    boxes = [box for row in rows for box in row]
    width = max(box.x + box.right for box in boxes) + 4
    height = max(box.y + box.height / 2 for box in boxes) + 4
    parts = [
        f'<svg class="drawing" role="img" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'style="max-width:100%;height:auto" font-size="13" xmlns="http://www.w3.org/2000/svg">',
        f"<title>{escape('; '.join(_said(drawing)), quote=False)}</title>",
        *_ways(drawing),
        *(part for box in boxes for part in _shape(box)),
        "</svg>",
    ]
    return "\n".join(parts)


def _said(drawing: Drawing) -> Iterator[str]:
    """The arrows in words, for readers who can't see them."""
    for box in drawing.boxes.values():
        for label in box.loops:
            yield f"{_name(box)} to itself" + (f": {_plain(label)}" if label else "")
    for arrow in drawing.arrows:
        labels = ", ".join(map(_plain, arrow.labels))
        yield f"{_name(arrow.source)} to {_name(arrow.target)}" + (f": {labels}" if labels else "")


def _name(box: Box) -> str:
    return _plain(box.lines[0]) if box.lines else "start"


def _ways(drawing: Drawing) -> Iterator[str]:
    """The lines of all arrows. Those at one side of a box are side by side, in the order of their ends."""
    ports: dict[tuple[int, Arrow], float] = {}
    for box in drawing.boxes.values():
        for end, side in ((0, 1), (-1, -2)):
            arrows = [arrow for arrow in drawing.arrows if arrow.way[end] is box]
            arrows.sort(key=lambda arrow, side=side: arrow.way[side].x)  # type: ignore[misc]
            room = min(24.0, 1.4 * box.half / max(1, len(arrows)))
            for at, arrow in enumerate(arrows):
                ports[end, arrow] = box.x + (at - (len(arrows) - 1) / 2) * room
    for arrow in drawing.arrows:
        upper, *between, lower = arrow.way
        points = [(ports[0, arrow], upper.y + upper.height / 2)]
        points += [(bend.x, bend.y) for bend in between]
        points.append((ports[-1, arrow], lower.y - lower.height / 2))
        upwards = arrow.target is upper
        points[0 if upwards else -1] = _shortened(points, upwards)
        path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
        for (x, y), (to_x, to_y) in pairwise(points):
            middle = (y + to_y) / 2
            path += f"C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {to_y:.1f}"
        yield f'<path d="{path}" fill="none" stroke="currentColor" stroke-opacity=".55"/>'
        x, y = points[0 if upwards else -1]
        tip = -7 if upwards else 7
        yield f'<path d="M{x - 4:.1f} {y:.1f}h8l-4 {tip}z" fill="currentColor" fill-opacity=".75"/>'


def _shortened(points: Sequence[tuple[float, float]], upwards: bool) -> tuple[float, float]:
    """Where the line ends and the tip begins."""
    x, y = points[0 if upwards else -1]
    return x, y + 7 if upwards else y - 7


def _shape(box: Box) -> Iterator[str]:
    if box.kind == "start":
        yield f'<circle cx="{box.x:.1f}" cy="{box.y:.1f}" r="6" fill="currentColor"/>'
        return
    left, top = box.x - box.half, box.y - box.height / 2
    if box.kind == "box":
        yield (
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{2 * box.half:.1f}" height="{box.height:.1f}" rx="6" '
            'fill="var(--md-code-bg-color, #8882)" stroke="var(--md-primary-fg-color, currentColor)"/>'
        )
        top += _PADDING / 2
    for at, line in enumerate(box.lines):
        y = top + (at + 0.5) * _LINE_HEIGHT + 4.5
        yield _text(box.x, y, line, halo=box.kind == "label")
    if box.loops:
        yield from _loop(box)


def _loop(box: Box) -> Iterator[str]:
    x, y = box.x + box.half, box.y
    out = x + 1.35 * _LOOP
    path = f"M{x:.1f} {y - 7:.1f}C{out:.1f} {y - 16:.1f} {out:.1f} {y + 16:.1f} {x + 7:.1f} {y + 7:.1f}"
    yield f'<path d="{path}" fill="none" stroke="currentColor" stroke-opacity=".55"/>'
    yield f'<path d="M{x + 7:.1f} {y + 3:.1f}v8l-7 -4z" fill="currentColor" fill-opacity=".75"/>'
    labels = [label for label in box.loops if label]
    top = y - len(labels) * _LINE_HEIGHT / 2
    for at, label in enumerate(labels):
        yield _text(x + _LOOP + 3, top + (at + 0.5) * _LINE_HEIGHT + 4.5, label, anchor="start")


def _text(x: float, y: float, line: str, *, anchor: str = "middle", halo: bool = False) -> str:
    style = ' paint-order="stroke" stroke="var(--md-default-bg-color, #fff)" stroke-width="5"' if halo else ""
    style += ' font-weight="700"' if line.startswith("<b>") else ""
    style += ' font-style="italic"' if line.startswith("<i>") else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="currentColor"{style}>{escape(_plain(line), quote=False)}</text>'
