"""What the charts of a page draw: some figures every few seconds, for an hour.

They are taken whether or not somebody looks, so a page also shows the time before it was opened.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from ..clock import SYSTEM, Clock
from ..server.http import HttpContent, HttpRequest, http_error

__all__ = ["EVERY_S", "ChartSample", "ChartSamples"]

EVERY_S = 5.0
_KEPT = 720
"""Samples: an hour of them."""

ChartSample: TypeAlias = Mapping[str, float | None]
"""Figures by name, always the same ones; None where one is not known. Empty before anything is known."""


class ChartSamples:
    """The last samples, in a ring; used on one thread."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._began = self._now()
        self._names: tuple[str, ...] = ()
        self._samples: deque[tuple[float | None, ...]] = deque(maxlen=_KEPT)
        """The time of each sample, and its figures."""

    def _now(self) -> float:
        return round(self._clock.time_ns() / 1e9, 3)

    def add(self, sample: ChartSample) -> None:
        """Add a sample of this moment."""
        if sample:
            self._names = ("time", *sample)
            self._samples.append((self._now(), *sample.values()))

    def since(self, moment: float) -> dict[str, Any]:
        """The samples after a moment, as a list for each figure and one of their times."""
        samples = [sample for sample in self._samples if (sample[0] or 0.0) > moment]
        columns = zip(*samples, strict=True) if samples else ((),) * len(self._names)
        return {
            "every_s": EVERY_S,
            "began": self._began,
            "now": self._now(),
            "samples": dict(zip(self._names, map(list, columns), strict=True)),
        }

    def serve(self, request: HttpRequest) -> HttpContent:
        """Answer ``/api/past?since=MOMENT``; without a moment with all samples."""
        try:
            moment = float(request.query.get("since", "0"))
        except ValueError:
            return http_error(400, "since= takes seconds since 1970")
        return HttpContent.of_json(self.since(moment))

    async def keep(self, sample: Callable[[], Awaitable[ChartSample]]) -> None:
        """Take samples until it is cancelled."""
        while True:
            self.add(await sample())
            await asyncio.sleep(EVERY_S)
