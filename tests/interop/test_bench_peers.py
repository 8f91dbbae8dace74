"""`make peers`, small: all readers of the bench see the same documents, contents and all, in every way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.cli.bench import script

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]


def test_all_readers_agree(tmp_path: Path) -> None:
    results = tmp_path / "rows.json"
    command = [sys.executable, str(script("peers")), "--docs", "2000", "--sizes", "256", "--vbuckets", "64"]
    command += ["--rounds", "1", "--over", "plain,snappy,tls", "--json", str(results)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(results.read_text())
    assert {row["over"] for row in rows} == {"plain", "snappy", "tls"}
    assert {"batches", "changes", "changes, async"} <= {row["reader"] for row in rows}
    assert all(row["documents_per_s"] > 0 for row in rows)
