"""The coordinator's process, its commands and its end, without nodes."""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.processes import until
from tailrace.cluster.coordinator import Coordinator
from tailrace.cluster.service import DOOR_FILE, Service, call
from tailrace.errors import TailraceError


class _Unmoved(Coordinator):
    """A coordinator whose rebalance takes for ever."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.story: list[str] = []

    def rebalance(self, *, leaving: str | None = None) -> Generator[str, None, None]:
        try:
            while True:
                yield "nothing moves"
        finally:
            self.story.append("the rebalance is given up")

    def stop(self) -> None:
        self.story.append("the nodes are stopped")
        super().stop()


@pytest.fixture
def signals() -> Iterator[None]:
    """Restore the signals that the service handles."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_stop_ends_a_rebalance_first_and_tells_who_asked_for_it(tmp_path: Path, signals: None) -> None:
    coordinator = _Unmoved(tmp_path)

    def rebalance() -> None:
        until((tmp_path / DOOR_FILE).exists, "the service does not start")
        call(tmp_path, "rebalance")

    def stop() -> None:
        until((tmp_path / DOOR_FILE).exists, "the service does not start")
        until(lambda: call(tmp_path, "status")["rebalancing"], "the rebalance does not begin")
        call(tmp_path, "stop")

    with ThreadPoolExecutor() as threads:
        rebalanced, stopped = threads.submit(rebalance), threads.submit(stop)
        Service(coordinator).run()
        with pytest.raises(TailraceError, match=r"^the cluster was stopped in the middle of it$"):
            rebalanced.result()
        stopped.result()
    assert coordinator.story == ["the rebalance is given up", "the nodes are stopped"]
