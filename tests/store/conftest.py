"""Stores for the tests: every test that takes `home` runs on disk and in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tailrace.clock import ManualClock
from tailrace.files import DiskFiles, Files, MemoryFiles
from tailrace.rng import source
from tailrace.store.base import StoreSettings
from tailrace.store.bucket import EngineBucket
from tailrace.store.engine import Engine
from tailrace.store.format import StoredDocument


class Home:
    """A place for a store that can be stopped, killed and opened again."""

    def __init__(self, files: Callable[[], Files], settings: StoreSettings) -> None:
        self._files = files
        self.settings = settings
        self.clock = ManualClock()
        self.rng = source(7)
        self.engine: Engine | None = None

    def open(self) -> Engine:
        self.engine = Engine(files=self._files(), settings=self.settings, clock=self.clock, rng=self.rng)
        return self.engine

    def bucket(self, vbuckets: int = 4, **kwargs: Any) -> EngineBucket:
        """The bucket of this home, created if it is not there; opens the store if it is closed."""
        engine = self.engine or self.open()
        if "default" in engine.buckets:
            return engine.buckets["default"]
        return engine.create_bucket("default", vbuckets, **kwargs)

    def restart(self) -> EngineBucket:
        """A clean stop and a start."""
        assert self.engine is not None
        self.engine.close()
        self.engine = None
        return self.bucket()

    def crash(self) -> EngineBucket:
        """A kill and a start."""
        assert self.engine is not None
        self.engine.crash()
        self.engine = None
        return self.bucket()


def stored(frame: bytes | None) -> StoredDocument:
    """Take apart a frame that must be there."""
    assert frame is not None
    return StoredDocument.of(frame)


@pytest.fixture(params=["memory", "disk"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Home:
    if request.param == "memory":
        memory = MemoryFiles()
        return Home(lambda: memory, StoreSettings())
    return Home(lambda: DiskFiles(tmp_path), StoreSettings())
