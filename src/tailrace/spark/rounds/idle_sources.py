"""Sources of changes that stay open in a Python worker between the tasks of a mirror.

A worker process lives for many rounds, and a connection costs more than a round of a few changes. The
connections' own thread answers the nodes while no task runs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ...client.blocking import BlockingSource
from ...clock import SYSTEM
from ...errors import TailraceError
from ..source.feed import open_source
from ..source.options import parse_options

__all__ = ["borrowed_source", "close_idle_sources"]

_KEPT = 4
"""The most sources that wait in a worker."""
_KEPT_S = 300.0
_PERSISTED_S = 10.0
"""How long a task waits for changes to be on the disks of all copies; its other vbuckets wait, too."""


@dataclass
class _IdleSource:
    key: tuple[object, ...]
    source: BlockingSource
    since: float


_idle: list[_IdleSource] = []
_using = threading.Lock()


@contextmanager
def borrowed_source(given: Mapping[str, str]) -> Iterator[BlockingSource]:
    """A source with these options, for one task; it is kept for the next if nothing went wrong."""
    key = (os.getpid(), *sorted(given.items()))
    source = _waiting(key)
    if source is None:
        options = parse_options(given)
        source = open_source(
            options,
            "spark-mirror",
            backfill_order="sequential",
            rollback_points=_no_points,
            persisted_timeout_s=_PERSISTED_S,
        )
        source.__enter__()
    try:
        yield source
    except BaseException:
        _close(source)
        raise
    with _using:
        _idle.append(_IdleSource(key, source, SYSTEM.monotonic()))
        old = [idle for idle in _idle if idle.since < SYSTEM.monotonic() - _KEPT_S]
        spare = [*old, *(idle for idle in _idle[:-_KEPT] if idle not in old)]
        for idle in spare:
            _idle.remove(idle)
    for idle in spare:
        _close(idle.source)


def close_idle_sources() -> None:
    """Close the sources that wait. Only tests need it, where a node outlives its mirrors in one process: the
    process of an executor closes its connections when it ends.
    """
    with _using:
        spare = list(_idle)
        _idle.clear()
    for idle in spare:
        _close(idle.source)


def _waiting(key: tuple[object, ...]) -> BlockingSource | None:
    """A source that waits, if it still works."""
    while True:
        with _using:
            index = next((number for number, idle in enumerate(_idle) if idle.key == key), None)
            if index is None:
                return None
            source = _idle.pop(index).source
        try:
            source.vbucket_count  # noqa: B018 - raises what went wrong while nobody looked
        except TailraceError:
            _close(source)
        else:
            return source


def _close(source: BlockingSource) -> None:
    with suppress(Exception):
        source.close()


def _no_points(_vbucket: int) -> tuple[int, ...]:
    """No points: a task never rolls back itself, but reports that the bucket asked it to."""
    return ()
