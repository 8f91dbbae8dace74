"""From a node on disk to a Parquet file: `tailrace dump` as a user runs it, against its two halves.

    python bench/dump.py [--docs N] [--size BYTES] [--vbuckets N] [--rounds N] [--json]

A `tailrace serve` process is loaded with distinct documents. In every round four contenders process all of
them, one after the other, each in a process of its own, whose start counts for all but the last:

- parquet: ``tailrace dump URL --out FILE.parquet``, 18 columns, zstd;
- jsonl: ``tailrace dump URL --out FILE.jsonl``;
- read: the same documents into Arrow tables that are dropped: the part of the node and the client;
- write: the file of the first contender, read back beforehand, written again by Arrow alone: Parquet's part.

The share is the time of *read* and *write* together relative to that of *parquet*, the median over the
rounds: at 1 a dump costs what its halves cost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from stream import load, node

READ = """
import asyncio, sys
import tailrace
from tailrace.client.export import documents

async def main(url):
    async with tailrace.connect(url) as source:
        return sum([table.num_rows async for table in documents(source, lambda _: None)])

print(asyncio.run(main(sys.argv[1])))
"""
WRITE = """
import sys, time
import pyarrow.parquet as pq

tables = list(pq.ParquetFile(sys.argv[1]).iter_batches(65_536))
began = time.perf_counter()
with pq.ParquetWriter(sys.argv[2], tables[0].schema, compression="zstd") as writer:
    for one in tables:
        writer.write_batch(one)
print(time.perf_counter() - began)
"""


def timed(command: list[str]) -> tuple[float, str]:
    """Run a command: seconds, and what it printed."""
    began = time.perf_counter()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return time.perf_counter() - began, done.stdout


def rounds(url: str, directory: Path, docs: int, count: int) -> list[dict[str, float]]:
    """Seconds of each contender, in every round."""
    rounds_taken = []
    parquet, again = directory / "documents.parquet", directory / "again.parquet"
    for _ in range(count):
        times: dict[str, float] = {}
        for kind in ("parquet", "jsonl"):
            out = str(directory / f"documents.{kind}")
            times[kind], _text = timed([sys.executable, "-m", "tailrace", "dump", url, "--out", out])
        times["read"], rows = timed([sys.executable, "-c", READ, url])
        assert int(rows) == docs, f"{rows} of {docs} documents came"
        _seconds, text = timed([sys.executable, "-c", WRITE, str(parquet), str(again)])
        times["write"] = float(text)
        rounds_taken.append(times)
    return rounds_taken


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--docs", type=int, default=1_000_000)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--vbuckets", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as name:
        directory = Path(name)
        with node(directory, given.vbuckets) as port:
            load(port, given.docs, given.size)
            url = f"couchbase://127.0.0.1:{port}"
            taken = rounds(url, directory, given.docs, given.rounds)
        file_bytes = (directory / "documents.parquet").stat().st_size
    share = statistics.median((times["read"] + times["write"]) / times["parquet"] for times in taken)
    rates = {name: given.docs / statistics.median(times[name] for times in taken) for name in taken[0]}
    if given.json:
        print(
            json.dumps({"docs": given.docs, "share": share, "documents_a_second": rates, "bytes": file_bytes})
        )
        return
    print(f"{given.docs:,} documents with values of {given.size} B, {given.vbuckets} vbuckets")
    for name, rate in rates.items():
        print(f"{name:<8} {rate:>12,.0f} documents/s")
    print(f"the file has {file_bytes / 1e6:.0f} MB; a dump takes {1 / share:.2f} times its halves")


if __name__ == "__main__":
    main()
