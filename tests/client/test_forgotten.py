"""A program that ends without closing its source ends all the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tailrace.testing

BEGIN = """
import os, sys, threading
import tailrace

source = tailrace.connect_sync(sys.argv[1]).__enter__()
changes = source.changes(start="beginning")
print(next(one for one in changes if isinstance(one, tailrace.Mutation)).key.decode(), flush=True)
"""

ENDS = {
    "the end of the script": "",
    "an error": "raise SystemExit(7)",
    "a thread that waits": "threading.Thread(target=lambda: list(changes), daemon=True).start()",
    "a child": """
if pid := os.fork():
    assert os.waitpid(pid, 0)[1] == 0
    next(changes)
else:
    source.close()
    sys.exit()
""",
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_source_that_nobody_closes(end: str) -> None:
    with tailrace.testing.node(vbuckets=1) as node:
        node.set("first", {})
        node.set("second", {})
        command = [sys.executable, "-W", "ignore", "-c", BEGIN + end, node.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7 if "7" in end else 0, "first\n", "")
