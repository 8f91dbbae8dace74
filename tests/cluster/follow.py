"""Followers of a cluster of real processes: a mirror with its table in memory, the Spark source's feed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from cluster.processes import KEYS, PATIENCE_S, url
from spark.local_jobs import LocalJobs
from table.memory_table import MemoryTable
from tailrace.client.kv import KvClient
from tailrace.cluster.coordinator import Coordinator
from tailrace.errors import UsageError
from tailrace.spark.rounds.assignment import Assignment, MirrorSettings
from tailrace.spark.rounds.handle import MirrorHandle
from tailrace.spark.rounds.idle_sources import close_idle_sources
from tailrace.spark.rounds.mirror import Mirror
from tailrace.spark.rounds.progress import RoundProgress
from tailrace.spark.source.feed import Feed
from tailrace.spark.source.options import parse_options

State = dict[bytes, bytes]


@dataclass
class Mirrored:
    """A table that a mirror keeps."""

    table: MemoryTable
    rounds: list[RoundProgress] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def rows(self) -> State:
        shown = self.table.rows().select(["key", "value"]).to_pylist()
        return {row["key"].encode(): row["value"].encode() for row in shown}

    def values(self, keys: set[bytes]) -> set[bytes]:
        shown = self.rows()
        return {shown[key] for key in keys}

    def has_said(self, *words: str) -> bool:
        """Whether one line has all of these."""
        return any(all(word in text for word in words) for text in self.said)


def given(where: str, **options: str) -> dict[str, str]:
    """Options of the source."""
    return {"connectionString": where, "bucket": "default", "retryFor": "600", **options}


@contextmanager
def mirroring(
    where: str, directory: Path, *, once: bool = False, **options: str
) -> Iterator[tuple[Mirrored, MirrorHandle]]:
    """A table in step with the bucket while the context lasts."""
    mirrored = Mirrored(MemoryTable(directory))
    mirror = Mirror(
        Assignment(
            LocalJobs(),
            given(where, **options),
            [mirrored.table],
            "default",
            MirrorSettings(once=once),
            on_progress=mirrored.rounds.append,
            on_trouble=mirrored.said.append,
            in_background=False,
        )
    )
    handle = mirror.start()
    try:
        yield mirrored, handle
    finally:
        handle.stop()
        close_idle_sources()


class FeedReader(threading.Thread):
    """What the Spark source was given of a bucket, and what it was told to take back."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(daemon=True)
        self.state: State = {}
        self.rolled_back: list[int] = []
        self.feed = Feed(parse_options(options))

    def run(self) -> None:
        start = self.feed.starting_positions("earliest")
        with suppress(UsageError):  # it is closed
            for delivery in self.feed.deliveries(start, end="forever"):
                self.rolled_back += delivery.rollbacks
                for row in delivery.rows.to_pylist():
                    if row["op"] == "mutation":
                        self.state[_bytes(row["key"])] = _bytes(row["value"])


def _bytes(shown: str | bytes) -> bytes:
    return shown.encode() if isinstance(shown, str) else shown


def write(made: Coordinator, value: bytes, keys: list[str] = KEYS) -> None:
    with KvClient(url(made), timeout_s=PATIENCE_S) as client:
        for key in keys:
            client.set(key, value)


def chains(made: Coordinator) -> dict[str, tuple[str, ...]]:
    """The nodes with a copy of each key, the active first."""
    with KvClient(url(made), timeout_s=PATIENCE_S) as client:
        return {key: tuple(name for name in made.chains[client.vbucket_of(key)] if name) for key in KEYS}
