"""A report of a mirror's run as one HTML file: plots as inline SVG, nothing loaded from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

__all__ = ["LostChange", "Moment", "Plot", "Sample", "drawing", "plots", "render"]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 860, 260, 64, 28, 34
_LEGEND = 10
_SHOWN_LOST, _SHOWN_TEXT = 40, 60
_BEFORE_S = 2.0
"""How much is shown before the first change: the start of Spark is left out."""


@dataclass(frozen=True, slots=True)
class Sample:
    """How things stood at a moment."""

    at_s: float
    bucket_documents: int
    table_documents: int
    lag: int
    """Seqnos that the table is behind, all vbuckets together."""
    changes: int
    """Applied so far."""
    version: int


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened."""

    at_s: float
    text: str
    is_rollback: bool = False


@dataclass(frozen=True, slots=True)
class LostChange:
    """A change that the bucket took back: the document as the table showed it before and after."""

    key: str
    vbucket: int
    seqno: int
    before: str
    after: str | None
    """None: there was no such document before the change."""

    def __str__(self) -> str:
        after = "is gone" if self.after is None else f"is {_shortened(self.after)} again"
        return f"{self.key} was {_shortened(self.before)} and {after}"


@dataclass
class Plot:
    """Lines over time in one frame."""

    title: str
    about: str
    lines: list[tuple[str, str, Callable[[Sample], float]]] = field(default_factory=list)
    """Name, colour, value."""


def render(
    samples: Sequence[Sample],
    moments: Sequence[Moment],
    *,
    title: str,
    summary: str,
    lost: Sequence[LostChange] = (),
) -> str:
    """The report."""
    figures = "\n".join(
        f'<h2>{html.escape(plot.title)}</h2><p class="about">{html.escape(plot.about)}</p>'
        + drawing(plot, samples, moments)
        for plot in plots()
    )
    events = "\n".join(
        f'<tr class="{"back" if moment.is_rollback else ""}"><td>{moment.at_s:.1f} s</td>'
        f"<td>{html.escape(moment.text)}</td></tr>"
        for moment in moments
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>{html.escape(title)}</title>
<style>
 body {{ font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 920px;
   margin: 2rem auto; padding: 0 1rem }}
 h1 {{ font-size: 1.5rem }} h2 {{ font-size: 1.1rem; margin: 2rem 0 0 }}
 p.about {{ color: #52606d; margin: .2rem 0 .4rem }}
 .summary {{ background: #e6fcf5; border: 1px solid #96f2d7; border-radius: 6px; padding: .7rem 1rem }}
 table {{ border-collapse: collapse; width: 100% }}
 td, th {{ padding: .25rem .6rem; border-top: 1px solid #e4e7eb; text-align: left }}
 code {{ overflow-wrap: anywhere; font-size: .85em }}
 td:first-child {{ color: #52606d; white-space: nowrap; width: 5rem }}
 tr.back td {{ background: #fff4e6 }}
 @media (prefers-color-scheme: dark) {{ body {{ background: #16191d; color: #dde2e8 }} .summary, tr.back td {{
   background: #24303a; border-color: #3b4a57 }} svg text {{ fill: #b6c0cb }}
   td, th {{ border-color: #333b44 }} }}
 svg {{ width: 100%; height: auto }} .wide {{ overflow-x: auto }}
</style></head><body>
<h1>{html.escape(title)}</h1>
<p class="summary">{html.escape(summary)}</p>
{figures}
<h2>What happened</h2>
<table>{events}</table>
{_lost_changes(lost)}
</body></html>
"""


def plots() -> list[Plot]:
    """What is drawn of a run."""
    return [
        Plot(
            "Documents",
            "What the bucket holds and what the table holds. The dip is the failover: the bucket lost "
            "changes, and the table dropped them too.",
            [
                ("bucket", "#8892a6", lambda sample: sample.bucket_documents),
                ("table", "#0b7285", lambda sample: sample.table_documents),
            ],
        ),
        Plot(
            "Lag",
            "Changes that the table did not have yet.",
            [("changes", "#e8590c", lambda sample: sample.lag)],
        ),
        Plot(
            "Changes applied",
            "Since the start; the slope is the rate.",
            [("changes", "#2b8a3e", lambda sample: sample.changes)],
        ),
        Plot(
            "Table version",
            "Each version is a state that the bucket really had, and carries its position.",
            [("version", "#5f3dc4", lambda sample: sample.version)],
        ),
    ]


def _lost_changes(lost: Sequence[LostChange]) -> str:
    """The lost changes as a table; documents that were restored come before those that are gone."""
    if not lost:
        return ""
    gone = sum(change.after is None for change in lost)
    shown = sorted(lost, key=lambda change: (change.after is None, change.vbucket, change.seqno))
    part = max(1, _SHOWN_LOST // 2)
    shown = [*shown[: len(lost) - gone][:part], *shown[len(lost) - gone :][:part]]
    rows = "\n".join(
        f"<tr><td>{html.escape(change.key)}</td><td>{change.vbucket}</td><td>{change.seqno}</td>"
        f"<td><code>{html.escape(_shortened(change.before))}</code></td>"
        f"<td>{'gone' if change.after is None else f'<code>{html.escape(_shortened(change.after))}</code>'}"
        "</td></tr>"
        for change in shown
    )
    left = len(lost) - len(shown)
    more = f'<p class="about">And {left} more.</p>' if left else ""
    about = (
        f"{len(lost)} changes that the table had taken and dropped again with the bucket: {gone} documents "
        f"never existed, {len(lost) - gone} are back to what they were."
    )
    head = "".join(
        f"<th>{name}</th>" for name in ("document", "vbucket", "seqno", "before the failover", "after it")
    )
    return (
        f'<h2>What the failover took back</h2><p class="about">{about}</p>'
        f'<div class="wide"><table><tr>{head}</tr>{rows}</table></div>{more}'
    )


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_TEXT else f"{text[: _SHOWN_TEXT - 1]}…"


def drawing(plot: Plot, samples: Sequence[Sample], moments: Sequence[Moment]) -> str:
    """A plot as SVG, with the rollbacks marked."""
    first = max(0.0, next((sample.at_s for sample in samples if sample.changes), 0.0) - _BEFORE_S)
    samples = [sample for sample in samples if sample.at_s >= first]
    last = max((sample.at_s for sample in samples), default=first + 1.0)
    span = (last - first) or 1.0
    top = max((value(sample) for sample in samples for _, _, value in plot.lines), default=1.0) or 1.0
    right, floor = _WIDTH - 16, _HEIGHT - _BOTTOM

    def x(at_s: float) -> float:
        return _LEFT + (at_s - first) / span * (right - _LEFT)

    def y(value: float) -> float:
        return floor - value / top * (floor - _TOP)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(plot.title)}">']
    for share in (0.0, 0.5, 1.0):
        at = y(top * share)
        parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e4e7eb"/>')
        parts.append(
            f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end" font-size="11" fill="#52606d">'
            f"{_short(top * share)}</text>"
        )
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(
            f'<text x="{x(first + span * share):.1f}" y="{_HEIGHT - 8}" text-anchor="middle" font-size="11" '
            f'fill="#52606d">{first + span * share:.0f} s</text>'
        )
    for moment in moments:
        if moment.is_rollback and moment.at_s >= first:
            at = x(moment.at_s)
            parts.append(
                f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{floor}" stroke="#e8590c" '
                'stroke-dasharray="4 3"/>'
            )
    for place, (name, colour, value) in enumerate(plot.lines):
        points = " ".join(f"{x(sample.at_s):.1f},{y(value(sample)):.1f}" for sample in samples)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        at = _LEFT + 12 + place * 110
        parts.append(f'<rect x="{at}" y="{_LEGEND}" width="12" height="3" fill="{colour}"/>')
        parts.append(
            f'<text x="{at + 18}" y="{_LEGEND + 5}" font-size="12" fill="#1f2933">{html.escape(name)}</text>'
        )
    parts.append("</svg>")
    return "".join(parts)


def _short(number: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"
