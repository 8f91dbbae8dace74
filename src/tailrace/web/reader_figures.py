"""The figures of a command that reads a bucket; all are read on a thread of the HTTP server."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..clock import SYSTEM, Clock
from ..errors import TailraceError
from ..model import BehindSince
from .chart_samples import ChartSample
from .figures import READER, READER_VBUCKETS, FigureSheet

if TYPE_CHECKING:
    from ..client.aio import Source

__all__ = ["ReaderFigures"]

_PATIENCE_S = 5.0
"""How long to wait for a busy application, before its last known figures are shown."""
_SAMPLE_PATIENCE_S = 1.0
"""The same for samples: no user waits for these, but other requests may wait behind them."""


class ReaderFigures:
    """The figures of the reader of a bucket."""

    def __init__(self, command: str, bucket: str, clock: Clock = SYSTEM) -> None:
        self._command = command
        self._bucket = bucket
        self._clock = clock
        self._source: Source | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._last: dict[str, Any] = {}
        self._behind = BehindSince(clock.monotonic())
        self._stands: tuple[Mapping[int, int], Mapping[int, int]] = ({}, {})
        """By vbucket, the seqno that was read and the high seqno."""

    def watch(self, source: Source) -> None:
        """Set the source when it is connected; called on its loop."""
        self._source, self._loop = source, asyncio.get_running_loop()

    def why_not_ready(self) -> str:
        """Why it does not read; empty if it does."""
        figures = self.stats()
        if not figures:
            return "it is not connected yet"
        nodes = figures["nodes"].values()
        return "" if any(node["state"] == "open" for node in nodes) else "no node is connected"

    def sample(self) -> ChartSample:
        """What the charts draw."""
        figures = self.stats(_SAMPLE_PATIENCE_S)
        if not figures:
            return {}
        return {"changes": figures["changes"], "lag_changes": figures.get("lag_changes")}

    def stats(self, patience_s: float = _PATIENCE_S) -> dict[str, Any]:
        """The figures as one object; the last known one if the application does not answer in time."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return self._last
        work = self._gather()
        try:
            future = asyncio.run_coroutine_threadsafe(work, loop)
        except RuntimeError:  # it has ended meanwhile
            work.close()
            return self._last
        try:
            self._last = future.result(patience_s)
        except (TailraceError, OSError, TimeoutError, concurrent.futures.CancelledError):
            future.cancel()
        return self._last

    async def _gather(self) -> dict[str, Any]:
        source = self._source
        assert source is not None
        asked_at = self._clock.monotonic()
        high_seqnos = await source.high_seqnos(reachable_only=True)
        reached = source.reached_seqnos()
        self._stands = reached, high_seqnos
        figures = {"command": self._command, **source.stats()}
        if reached or not high_seqnos:
            figures["lag_changes"] = _behind(reached, high_seqnos)
            figures["lag_s"] = self._behind.seconds(asked_at, reached, high_seqnos)
        return figures

    def metrics(self, vbuckets: bool) -> FigureSheet:
        """For Prometheus."""
        sheet = FigureSheet((*READER, *READER_VBUCKETS) if vbuckets else READER)
        sheet.add("reader_info", 1, self._command, __version__)
        figures, bucket = self.stats(), self._bucket
        if not figures:
            return sheet
        sheet.add("reader_changes_total", figures["changes"], bucket)
        sheet.add("reader_rollbacks_total", figures["rollbacks"], bucket)
        sheet.add("reader_rolled_back_changes_total", figures["rolled_back_changes"], bucket)
        sheet.add("reader_lost_connections_total", figures["lost_connections"], bucket)
        sheet.add("reader_received_bytes_total", figures["received_bytes"], bucket)
        sheet.add("reader_unacknowledged_bytes", figures["unacknowledged_bytes"], bucket)
        sheet.add("reader_queued_bytes", figures["queued_bytes"], bucket)
        if "lag_changes" in figures:
            sheet.add("reader_lag_changes", figures["lag_changes"], bucket)
            sheet.add("reader_lag_seconds", figures["lag_s"], bucket)
        for state, count in figures["vbuckets"].items():
            sheet.add("reader_vbuckets", count, bucket, state)
        reached, high_seqnos = self._stands if vbuckets else ({}, {})
        for vbucket, seqno in sorted(high_seqnos.items()):
            sheet.add("reader_vbucket_seqno", reached.get(vbucket, 0), bucket, vbucket)
            sheet.add("reader_vbucket_lag_changes", max(0, seqno - reached.get(vbucket, 0)), bucket, vbucket)
        is_open = [node["state"] == "open" for node in figures["nodes"].values()]
        sheet.add("reader_nodes", is_open.count(True), bucket, "open")
        sheet.add("reader_nodes", is_open.count(False), bucket, "away")
        return sheet


def _behind(reached: Mapping[int, int], high_seqnos: Mapping[int, int]) -> int:
    return sum(max(0, seqno - reached.get(vbucket, 0)) for vbucket, seqno in high_seqnos.items())
