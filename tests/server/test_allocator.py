"""A node's process reuses large buffers, and gives them back when there are too many."""

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
    """200 buffers of 300 KB are 15,000 pages; once touched, they stay."""
    assert faults("kept") < 1_000


HOLES = """
import resource
from tailrace.server.allocator import LOOKS, FreeMemory, keep_buffers
keep_buffers()
def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() >> 20
def fill(count):
    buffers, between = [], []
    for _ in range(count):
        buffers.append(bytearray(b"x") * 300_000)
        between.append(bytearray(b"x") * 2_000)
    return between
before = rss()
between = fill(500)
held = rss()
free = FreeMemory()
for _ in range(LOOKS):
    free.give_back()
print(held - before, rss() - before)
"""


SMALL_HOLES = HOLES.replace("fill(500)", "fill(60)").replace("give_back()", "give_back(everything=True)")
USED_AGAIN = HOLES.replace(
    """
for _ in range(LOOKS):
    free.give_back()
""",
    """
for number in range(2 * LOOKS + 1):
    again = [bytearray(b"x") * 300_000 for _ in range(number % 2 * 500)]
    free.give_back()
    del again
""",
)


def test_all_that_is_free_is_given_back_where_nothing_is_going_on() -> None:
    """18 MB are too little to look for while a node is busy."""
    done = subprocess.run([sys.executable, "-c", SMALL_HOLES], check=True, capture_output=True, text=True)
    held, left = map(int, done.stdout.split())
    assert held >= 15
    assert left <= 4


def test_free_memory_between_things_in_use_is_given_back() -> None:
    """150 MB are free, and behind each piece is something that stays."""
    done = subprocess.run([sys.executable, "-c", HOLES], check=True, capture_output=True, text=True)
    held, left = map(int, done.stdout.split())
    assert held > 100
    assert left < 40


def test_memory_that_is_needed_again_and_again_is_kept() -> None:
    """Given back every five seconds and taken again page by page, it would hold everybody up."""
    done = subprocess.run([sys.executable, "-c", USED_AGAIN], check=True, capture_output=True, text=True)
    held, left = map(int, done.stdout.split())
    assert held > 100
    assert left > 100
