"""``tailrace bench``: measures this machine, side by side with the peers that are installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from ..errors import TailraceError
from .common import command as make_command
from .common import note

BENCHES = {
    "decode": (
        "changes into Arrow columns, against memcpy and a loop over messages",
        ["--mib", "32", "--rounds", "3"],
    ),
    "client": ("a stream into Arrow, against raw loopback", ["--mib", "64", "--rounds", "3"]),
    "dump": ("a bucket into a Parquet file, against its two halves", ["--docs", "100000", "--rounds", "2"]),
    "stream": ("a node's stream from disk, against raw loopback", ["--docs", "100000", "--rounds", "3"]),
    "frontend": ("key-value requests, against memcached", ["--rounds", "3"]),
    "peers": (
        "this client against java-dcp-client, gocbcore and go-dcp; needs Maven and Go; only if named",
        ["--docs", "100000", "--sizes", "256", "--rounds", "3"],
    ),
    "growth": (
        "how costs grow with documents, vbuckets and readers; only if named",
        ["--docs", "10000,100000", "--rounds", "1", "--taken-mib", "64"],
    ),
    "store": ("updates with fsync, against RocksDB", ["--docs", "50000", "--updates", "100000"]),
}
"""What each measures, and the options that keep it well under a minute."""
ONLY_IF_NAMED = ("peers", "growth")


@make_command(
    "bench",
    example="""
tailrace bench
tailrace bench decode client
tailrace bench frontend --full
""",
)
@click.argument("names", nargs=-1, type=click.Choice(list(BENCHES)), metavar="[NAME]...")
@click.option("--full", is_flag=True, help="Run long enough for figures worth publishing.")
@click.option("--list", "only_list", is_flag=True, help="List what can be measured.")
def command(names: tuple[str, ...], full: bool, only_list: bool) -> None:
    """Measure this machine, side by side with the peers that are installed.

    Results are ratios of measurements taken in turn in one run, because machines are noisy. Run nothing else
    meanwhile. A peer that is not installed is left out.
    """
    if only_list:
        for name, (about, _) in BENCHES.items():
            click.echo(f"{name:<10}{about}")
        return
    for name in names or [name for name in BENCHES if name not in ONLY_IF_NAMED]:
        about, quick = BENCHES[name]
        note(f"{name}: {about}")
        done = subprocess.run([sys.executable, script(name), *([] if full else quick)], check=False)
        if done.returncode:
            raise TailraceError(f"the measurement {name!r} ended with {done.returncode}, see above")


def script(name: str) -> Path:
    """The program that measures it: inside an installed package, beside the sources in a checkout."""
    package = Path(__file__).parents[1]
    for place in (package / "bench", package.parents[1] / "bench"):
        for program in (place / f"{name}.py", place / name / "run.py"):
            if program.exists():
                return program
    raise TailraceError("the measurements are not part of this installation, install tailrace from a wheel")
