"""A group's store in memory that controls what happens between a member's reading and writing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from tailrace.errors import StoreError


class MemoryGroupStore:
    """``between`` is called just before the record is replaced; answers get lost at random."""

    def __init__(self, rng: random.Random, *, lost: float = 0.0) -> None:
        self.version, self.record = 0, b""
        self.files: dict[str, bytes] = {}
        self.between: Callable[[], None] = lambda: None
        self._rng, self._lost = rng, lost

    def read(self) -> tuple[int, bytes | None]:
        self._fail()
        return self.version, self.record or None

    def replace(self, version: int, data: bytes) -> bool:
        self.between()
        self._fail()
        if version != self.version:
            return False
        self.version, self.record = version + 1, data
        return self._rng.random() >= self._lost

    def put(self, name: str, data: bytes) -> None:
        self._fail()
        assert name not in self.files
        self.files[name] = data

    def get(self, name: str) -> bytes | None:
        self._fail()
        return self.files.get(name)

    def delete(self, names: Iterable[str]) -> None:
        for name in list(names):
            self.files.pop(name, None)

    def names(self) -> list[str]:
        return list(self.files)

    def close(self) -> None:
        """Nothing is open."""

    def _fail(self) -> None:
        if self._rng.random() < self._lost / 4:
            raise StoreError("the store is away")
