"""Numbers, sizes, durations, shares and vbucket lists as people write them: in options, URLs and settings.

The rules are spelled out here, because `int` and `float` also accept ``1_000``, Arabic digits and ``nan``.
Every parser raises `UsageError` with a text that shows what would have been right.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .errors import UsageError

__all__ = [
    "KAFKA_PLACES",
    "MAX_VBUCKETS",
    "format_size",
    "host_and_port",
    "parse_duration_s",
    "parse_integer",
    "parse_share",
    "parse_size",
    "parse_vbuckets",
    "shown_ranges",
]

MAX_VBUCKETS = 1024
"""A bucket has at most this many vbuckets, so ids end at 1023."""

KAFKA_PLACES = {"earliest": "beginning", "latest": "now"}
"""Kafka's words for where reading begins, and ours for the same."""

_SHOWN_RANGES = 8

_DIGITS = 20  # what a 64-bit number needs; more would only be work for int()
_INTEGER = re.compile(rf"-?[0-9]{{1,{_DIGITS}}}")
_DECIMAL = r"[0-9]{1,20}(?:\.[0-9]{1,9})?"
_SIZE = re.compile(r"([0-9]{1,20})\s?(?:([kmgt])(?:i?b)?|b)?", re.IGNORECASE)
_DURATION = re.compile(rf"({_DECIMAL})\s?(ms|s|m|h|d)?")
_SHARE = re.compile(rf"({_DECIMAL})(%)?")

_SIZE_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_DURATION_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MAX_SIZE = 1 << 62


def parse_integer(text: str, *, minimum: int = 0, maximum: int = (1 << 63) - 1) -> int:
    """A decimal number in ASCII digits, within bounds."""
    if _INTEGER.fullmatch(text) is None:
        raise UsageError(f"{_quoted(text)} is not a whole number, write it in decimal digits")
    number = int(text)
    if not minimum <= number <= maximum:
        raise UsageError(f"{number} is out of range, it must lie between {minimum} and {maximum}")
    return number


def parse_size(text: str) -> int:
    """Bytes from ``4096``, ``64k``, ``256m``, ``1GiB``; every unit is a power of 1024."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"{_quoted(text)} is not a size, write bytes or a unit such as 64k, 256m or 1g")
    size = int(match[1]) * _SIZE_UNITS[(match[2] or "").lower()]
    if size > _MAX_SIZE:
        raise UsageError(f"a size of {_quoted(text)} is more than any machine has, write a smaller one")
    return size


def parse_duration_s(text: str) -> float:
    """Seconds from ``60``, ``250ms``, ``1.5s``, ``5m``, ``2h``, ``1d``."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise UsageError(
            f"{_quoted(text)} is not a duration, write seconds or a unit such as 250ms, 60s or 5m"
        )
    return float(match[1]) * _DURATION_UNITS_S[match[2] or "s"]


def parse_share(text: str) -> float:
    """A part of the whole, 0 to 1, from ``0.2`` or ``20%``."""
    match = _SHARE.fullmatch(text)
    share = float(match[1]) / (100.0 if match[2] else 1.0) if match else -1.0
    if not 0.0 <= share <= 1.0:
        raise UsageError(f"{_quoted(text)} is not a share, write a number from 0 to 1 such as 0.2, or 20%")
    return share


def parse_vbuckets(text: str, *, count: int = MAX_VBUCKETS) -> list[int] | None:
    """VBucket ids from ``7``, ``0-7`` or ``0,3,8-15``, in order and each once; None from ``all``."""
    if text == "all":
        return None
    vbuckets: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        low = parse_integer(first, maximum=count - 1)
        high = parse_integer(last, maximum=count - 1) if dash else low
        if low > high:
            raise UsageError(f"{_quoted(part)} runs backwards, write {high}-{low}")
        vbuckets.update(range(low, high + 1))
    return sorted(vbuckets)


def format_size(size: int) -> str:
    """Bytes for people: ``4.0 KiB``; exact below 1024."""
    if size < 1024:
        return f"{size} B"
    amount = float(size)
    for unit in ("KiB", "MiB", "GiB"):
        amount /= 1024
        if amount < 1024:
            return f"{amount:.1f} {unit}"
    return f"{amount / 1024:.1f} TiB"


def host_and_port(host: str, port: int) -> str:
    """An address as people and URLs write it: an IPv6 address has brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _quoted(text: str) -> str:
    """The text as it came, but short and on one line."""
    return repr(text if len(text) <= 40 else text[:40] + "…")


def shown_ranges(numbers: Iterable[int]) -> str:
    """Numbers in a short form: ``0-3,7``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in parts]
    return ",".join(shown[:_SHOWN_RANGES]) + (",…" if len(shown) > _SHOWN_RANGES else "")
