"""Strings of megabytes are the same strings, and take fewer page faults where the system has huge pages."""

from __future__ import annotations

import random

import pytest

from tailrace import large_bytes
from tailrace.large_bytes import LARGE_BYTES, join_large


@pytest.mark.parametrize("size", [0, 1, LARGE_BYTES - 4, LARGE_BYTES - 3, LARGE_BYTES, 5 * LARGE_BYTES + 17])
@pytest.mark.parametrize("advised", [True, False])
def test_parts_in_their_order(size: int, advised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not advised:
        monkeypatch.setattr(large_bytes, "_advise", None)
    value = random.Random(size).randbytes(size)
    for given in (value, memoryview(value)):
        made = join_large(b"a", b"", given, memoryview(b"bc"))
        assert made == b"a" + value + b"bc"
        assert hash(made) == hash(b"a" + value + b"bc")
