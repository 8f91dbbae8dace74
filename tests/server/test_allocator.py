"""Large buffers are used again by a node's process."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import resource, sys
from tailrace.server.allocator import keep_buffers
if sys.argv[1] == "kept":
    keep_buffers()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def read_blocks():
    for _ in range(50):
        held = [bytearray(b"x") * 300_000 for _ in range(4)]
read_blocks()
before = faults()
read_blocks()
print(faults() - before)
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], check=True, capture_output=True, text=True)
    return int(done.stdout)


def test_memory_of_blocks_is_used_again() -> None:
    """200 buffers of 300 KB are 15,000 pages; touched once, they are there the next time."""
    assert faults("kept") < 1_000
