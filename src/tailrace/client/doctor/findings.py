"""What an examination finds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

__all__ = ["Finding", "Severity", "error", "numbers", "ok", "warning"]


class Severity(StrEnum):
    """How bad something is."""

    OK = "ok"
    WARNING = "warning"
    """It works, but perhaps not for much longer, or not as well as it could."""
    ERROR = "error"
    """Something does not work, or will lose what was read."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    """Which check it belongs to, as docs/doctor.md names them."""
    severity: Severity
    text: str
    way_out: str = ""
    """What to do about it; empty only if all is well."""

    def to_json(self) -> dict[str, Any]:
        """For scripts."""
        fields = {"check": self.check, "severity": str(self.severity), "text": self.text}
        return {**fields, "way_out": self.way_out} if self.way_out else fields


def ok(check: str, text: str) -> Finding:
    """All is well."""
    return Finding(check, Severity.OK, text)


def warning(check: str, text: str, way_out: str) -> Finding:
    """It works, with a reservation."""
    return Finding(check, Severity.WARNING, text, way_out)


def error(check: str, text: str, way_out: str) -> Finding:
    """It does not work."""
    return Finding(check, Severity.ERROR, text, way_out)


def numbers(vbuckets: Iterable[int], most: int = 8) -> str:
    """VBuckets for people, as a few ranges: ``2 vbuckets (3, 7)``."""
    ordered = sorted(vbuckets)
    ranges: list[list[int]] = []
    for vbucket in ordered:
        if ranges and vbucket == ranges[-1][1] + 1:
            ranges[-1][1] = vbucket
        else:
            ranges.append([vbucket, vbucket])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in ranges[:most]]
    more = ", …" if len(ranges) > most else ""
    count = f"{len(ordered):,} vbucket{'s' if len(ordered) != 1 else ''}"
    return f"{count} ({', '.join(texts)}{more})"
