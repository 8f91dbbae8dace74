"""What a node loads and holds, and gives back."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from server.serverkit import Bench, ask
from tailrace.wire import dcp, kv
bench = Bench()
session = bench.session()
ask(bench, session, *[kv.Set(key=b"k%d" % n, value=b"v" * 100) for n in range(100)])
reader = bench.session()
requests = dcp.DcpOpen(key=b"r", flags=1), dcp.DcpStreamRequest(end_seqno=2**64 - 1)
frames = ask(bench, reader, *requests)
keys = [frame.key for frame in frames if frame.opcode == dcp.DcpMutation.OPCODE]
assert keys == [b"k%d" % n for n in range(100)], keys
heavy = [name for name in ("pyarrow", "pandas", "cryptography", "pyspark") if name in sys.modules]
assert not heavy, heavy
"""


def test_streams_load_nothing_heavy_even_for_readers_without_collections(pytestconfig: pytest.Config) -> None:
    """Loading it would hold everybody up for a third of a second, and take 73 MiB."""
    tests = str(pytestconfig.rootpath / "tests")
    subprocess.run([sys.executable, "-c", SCRIPT.format(tests=tests)], check=True)
