"""The handle of a mirror that runs: the calls that people know from a streaming query."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from ...rng import unique_name
from .progress import RoundProgress

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
        self._message = "starting"
        self._recent: deque[RoundProgress] = deque(maxlen=_KEPT_PROGRESS)
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
        """What it does at this moment."""
        active = self.isActive
        return {
            "message": self._message if active else "stopped",
            "isDataAvailable": active and self._message.startswith("round"),
            "isTriggerActive": active and self._message.startswith("round"),
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
        if self._error is not None:
            raise self._error
        return None if timeout is None else True

    def stop(self) -> None:
        """End it; what is not committed comes again when a mirror of the table is started."""
        self.stopping.set()
        self._cancel()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_STOP_S)

    def __repr__(self) -> str:
        return f"<{self.name}: {self.status['message']}>"

    # what the mirror does

    def run(self, work: Callable[[], None], cancel: Callable[[], None]) -> None:
        """Begin; ``cancel`` ends what ``work`` waits for."""
        self._cancel = cancel

        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - it is what `awaitTermination` raises
                if not self.stopping.is_set():
                    self._error = error

        self._thread = threading.Thread(target=guarded, name=self.name, daemon=True)
        self._thread.start()

    def say(self, message: str) -> None:
        """What it does now."""
        self._message = message

    def report(self, progress: RoundProgress) -> None:
        """A round is done."""
        self._recent.append(progress)
