"""An application that stops reading holds up the server, and has no more than its window in memory."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tailrace.testing
from tailrace.testing.running import RunningNode

WINDOW_BYTES = 4 << 20
LIMIT_BYTES = WINDOW_BYTES + (32 << 20)
DOCUMENTS, SIZE = 4_000, 20_000  # twice as much as the limit

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="a process does not say what it holds"
)


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    values = random.Random(3)
    with tailrace.testing.node(vbuckets=4) as running:
        for first in range(0, DOCUMENTS, 500):
            running.set_many(
                {f"doc-{number}": values.randbytes(SIZE) for number in range(first, first + 500)}
            )
        yield running


@pytest.mark.parametrize("how", ["changes", "batches"])
def test_what_a_paused_application_holds(node: RunningNode, how: str) -> None:
    reader = Path(__file__).with_name("paused_reader.py")
    command = [sys.executable, str(reader), node.url, how, str(WINDOW_BYTES)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    paused, rest = done.stdout.splitlines()
    queued, held = (int(word) for word in paused.split())
    print(f"{queued >> 10} KiB wait, {held >> 10} KiB are held")
    assert 0 < queued <= 2 * WINDOW_BYTES
    assert held <= LIMIT_BYTES
    assert int(rest) > 0.8 * DOCUMENTS, "it was read to the end afterwards"
