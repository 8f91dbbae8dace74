"""The handle of a running mirror, with the methods of a streaming query."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from html import escape
from typing import Any

from ...clock import SYSTEM
from ...errors import TailraceError
from ...rng import unique_name
from ...units import shown_ranges
from .progress import RoundProgress, RoundUnderway, Standing

__all__ = ["MirrorHandle"]

_KEPT_PROGRESS = 100
_STOP_S = 60.0


class MirrorHandle:
    """A mirror that runs in a thread of its own until it is stopped, has caught up, or fails."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.id = unique_name()
        self.runId = self.id
        self.stopping = threading.Event()
        self.standing: Standing | None = None
        """How far its tables are behind; None until the bucket has been asked."""
        self._doing: str | RoundUnderway = "starting"
        self._since = SYSTEM.monotonic()
        self._recent: deque[RoundProgress] = deque(maxlen=_KEPT_PROGRESS)
        self._rounds = self._changes = 0
        self._last_rollback: RoundProgress | None = None
        self._error: BaseException | None = None
        self._cancel: Callable[[], None] = lambda: None
        self._thread: threading.Thread | None = None

    # what people call

    @property
    def isActive(self) -> bool:
        """Whether it still runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def status(self) -> dict[str, Any]:
        """What it is doing, and for how many seconds; ``round`` says how much is done of a round that is not
        committed yet.
        """
        doing = self._doing if self.isActive else "stopped"
        underway = doing if isinstance(doing, RoundUnderway) else None
        return {
            "message": str(doing),
            "isDataAvailable": underway is not None,
            "isTriggerActive": underway is not None,
            "seconds": round(SYSTEM.monotonic() - self._since, 3),
            **({} if underway is None else {"round": underway.to_json()}),
        }

    @property
    def lastProgress(self) -> dict[str, Any] | None:
        """The last commit, as `--json` shows it; None before the first."""
        return self._recent[-1].to_json() if self._recent else None

    @property
    def recentProgress(self) -> list[dict[str, Any]]:
        """The last commits, oldest first."""
        return [progress.to_json() for progress in self._recent]

    def exception(self) -> BaseException | None:
        """What ended it, if it failed."""
        return None if self.isActive else self._error

    def awaitTermination(self, timeout: float | None = None) -> bool | None:
        """Wait for its end; raises what ended it if it failed. With ``timeout``: whether it has ended."""
        thread = self._thread
        assert thread is not None
        thread.join(timeout)
        if thread.is_alive():
            return False
        if isinstance(self._error, TailraceError):
            raise self._error.bare()
        if self._error is not None:
            raise self._error
        return None if timeout is None else True

    def stop(self) -> None:
        """End it; what is not committed is read again when a mirror of the table is started."""
        self.stopping.set()
        self._cancel()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_STOP_S)

    def __repr__(self) -> str:
        return f"<{self.name}: {self.status['message']}>"

    def _repr_html_(self) -> str:
        """The text for notebooks: changes so far, lag, and the last rollback."""
        rows = [(name, text) for name, text in self._shown() if text]
        cells = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th>"
            f"<td style='text-align:left'>{escape(text)}</td></tr>"
            for name, text in rows
        )
        return f"<table><caption>{escape(self.name)}</caption>{cells}</table>"

    def _shown(self) -> list[tuple[str, str]]:
        last = self._recent[-1] if self._recent else None
        state = self.status["message"] if self.isActive else "ended"
        if self._error is not None and not self.isActive:
            state = "failed"
        back = self._last_rollback
        vbuckets = shown_ranges(back.rolled_back).replace(",", ", ") if back else ""
        return [
            ("state", state),
            ("error", str(self._error) if state == "failed" else ""),
            ("changes", f"{self._changes:,} in {self._rounds:,} commits" if last else "none yet"),
            ("rate", f"{last.rate:,.0f} changes a second" if last else ""),
            ("lag", f"{last.lag_changes:,} changes, {last.lag_s:.1f} s" if last else ""),
            ("table version", ", ".join(map(str, last.versions)) if last else ""),
            (
                "last rollback",
                f"commit {back.batch}: {len(back.rolled_back)} vbuckets ({vbuckets})" if back else "none",
            ),
        ]

    # what the mirror does

    def run(self, work: Callable[[], None], cancel: Callable[[], None]) -> None:
        """Run ``work`` in a thread; ``cancel`` ends what it waits for."""
        self._cancel = cancel

        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - it is what `awaitTermination` raises
                if not self.stopping.is_set():
                    self._error = error

        self._thread = threading.Thread(target=guarded, name=self.name, daemon=True)
        self._thread.start()

    def say(self, doing: str | RoundUnderway) -> None:
        """Note what it is doing now."""
        if doing != self._doing:
            self._doing, self._since = doing, SYSTEM.monotonic()

    def report(self, progress: RoundProgress) -> None:
        """A round is done."""
        self._recent.append(progress)
        self._rounds += 1
        self._changes += progress.changes
        if progress.rolled_back:
            self._last_rollback = progress
