"""The command really measures; what it measures is up to the benches."""

from __future__ import annotations

import subprocess
import sys

from tailrace.cli.bench import BENCHES, script


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tailrace", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_decode_is_measured() -> None:
    done = run("decode")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("tailrace: decode:")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["value", "64", "256", "1024"]
    assert "times memcpy" in done.stdout


def test_every_measurement_has_a_script_and_is_listed() -> None:
    assert all(script(name).exists() for name in BENCHES)
    assert [line.split()[0] for line in run("--list").stdout.splitlines()] == list(BENCHES)


def test_a_measurement_that_there_is_not() -> None:
    done = run("nonsense")
    assert done.returncode == 2 and "nonsense" in done.stderr
