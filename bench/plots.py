"""Small line plots as SVG, for the pages of docs/: no library, nothing to install.

A plot is a panel with a title, named lines, and axes that may be logarithmic; panels are side by side in one
picture. Colours are readable on white and on black, and every line has its own mark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Panel", "picture"]

WIDTH, HEIGHT, COLUMNS = 360, 250, 2
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 48, 44
COLOURS = ("#3b82c4", "#d97706", "#2f9e62", "#b0489c")
TEXT, LINE = "#7a7a7a", "#9a9a9a55"


@dataclass(frozen=True)
class Panel:
    """One plot: points by the name of their line, in order of x."""

    title: str
    x_title: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    y_is_log: bool = False


def short(number: float) -> str:
    """A number as an axis shows it."""
    for size, word in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{word}"
    return f"{number:.3g}"


def _ticks(low: float, high: float, *, is_log: bool) -> list[float]:
    if is_log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        return [10.0**power for power in range(first, max(last, first + 1) + 1)]
    step = 10.0 ** math.floor(math.log10(high or 1.0))
    step = next(part * step for part in (0.2, 0.5, 1.0, 2.0) if high / (part * step) <= 6)
    return [step * number for number in range(math.ceil(high / step - 1e-9) + 1)]


def _panel(panel: Panel, left: int, top: int) -> list[str]:
    points = [point for line in panel.lines.values() for point in line]
    xs = sorted({x for x, _ in points})
    ys = _ticks(min(y for _, y in points), max(y for _, y in points), is_log=panel.y_is_log)

    def x_at(x: float) -> float:
        share = 0.5 if len(xs) == 1 else math.log(x / xs[0]) / math.log(xs[-1] / xs[0])
        return left + LEFT + share * (WIDTH - LEFT - RIGHT)

    def y_at(y: float) -> float:
        share = math.log(y / ys[0]) / math.log(ys[-1] / ys[0]) if panel.y_is_log else y / ys[-1]
        return top + HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    out = [f'<text x="{left + LEFT}" y="{top + 18}" font-weight="bold">{escape(panel.title)}</text>']
    for y in ys:
        at = y_at(y)
        ends = f'x1="{left + LEFT}" x2="{left + WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"'
        out.append(f'<line {ends} stroke="{LINE}"/>')
        out.append(f'<text x="{left + LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{short(y)}</text>')
    for x in xs:
        out.append(
            f'<text x="{x_at(x):.1f}" y="{top + HEIGHT - BOTTOM + 16}" text-anchor="middle">{short(x)}</text>'
        )
    middle = left + (LEFT + WIDTH - RIGHT) // 2
    out.append(
        f'<text x="{middle}" y="{top + HEIGHT - 10}" text-anchor="middle">{escape(panel.x_title)}</text>'
    )
    for number, (name, line) in enumerate(panel.lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in line)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y in line:
            out.append(
                f'<circle cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="3.5" fill="{colour}">'
                f"<title>{escape(name)}: {short(x)}, {short(y)}</title></circle>"
            )
        if name:
            at = left + LEFT + 8 + 130 * number
            out.append(f'<text x="{at}" y="{top + TOP - 12}" fill="{colour}">● {escape(name)}</text>')
    return out


def picture(panels: Sequence[Panel]) -> str:
    """All panels as one SVG."""
    rows = -(-len(panels) // COLUMNS)
    width, height = WIDTH * min(COLUMNS, len(panels)), HEIGHT * rows
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        f' height="{height}" font-family="sans-serif" font-size="12" fill="{TEXT}">'
    ]
    for number, panel in enumerate(panels):
        row, column = divmod(number, COLUMNS)
        out += _panel(panel, column * WIDTH, row * HEIGHT)
    return "\n".join([*out, "</svg>", ""])
