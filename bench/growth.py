"""What a node and its readers cost with larger buckets and more readers; as a table and as plots.

    python bench/growth.py [--docs 100000,1000000,10000000] [--vbuckets 64,1024] [--readers 1,10,100]
                           [--size 256] [--mirror 100000,1000000] [--json FILE]
                           [--markdown docs/benchmarks.md]

For each number of documents and of vbuckets:

- open: from the start of the node's process until it serves the bucket on its disk;
- memory: of the node, when it has just opened (peak: when all readers have read);
- first change: from `connect` to the first batch of our reader, the median of `--rounds`;
- rate: documents a second of our `batches()`, for the whole bucket or its first two million;
- mirror: seconds of a round of 10,000 changes (`bench/mirror.py`), for the documents of `--mirror`.

For each number of readers, on the bucket with the middle number of documents: bytes a second that the node
sends to all of them together, each over its own connection and from the beginning, and its memory then. These
readers only take bytes, so that the node is what is measured. They read until `--taken-mib` have come.

`--markdown` puts the table into a page and the plots beside it, as `growth.svg`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import selectors
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tailrace
from plots import Panel, picture
from stream import READ_BYTES, connected, load, node, requests
from tailrace.store.engine import Engine
from tailrace.wire.codes import AddStreamFlag

BEGIN, END = "<!-- begin: growth -->", "<!-- end: growth -->"
MOST_READ = 2_000_000
CHANGES_A_ROUND = 10_000


def fill(directory: Path, docs: int, size: int, vbuckets: int) -> None:
    """Make a bucket on disk, compacted, so that no work is left."""
    with node(directory, vbuckets) as port:
        load(port, docs, size)
    engine = Engine(directory / "data")
    engine.buckets["default"].compact()
    engine.close()


def memory_mib(pid: int, name: str) -> float:
    """``VmRSS`` or ``VmHWM`` of a process; 0 if the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:")), 0.0)


async def reading(port: int, wanted: int) -> tuple[float, float, int]:
    """Seconds to the first batch, seconds to the last, and documents."""
    began, first, documents = time.perf_counter(), 0.0, 0
    async with tailrace.connect(f"couchbase://127.0.0.1:{port}/default") as source:
        async for batch in source.batches():
            first = first or time.perf_counter() - began
            documents += batch.num_rows
            if documents >= wanted:
                break
    return first, time.perf_counter() - began, documents


def taken_together(port: int, vbuckets: int, readers: int, taken_bytes: int) -> float:
    """Bytes a second to a number of readers that start together, until enough have come to all of them."""
    names = [b"growth-%d" % number for number in range(readers)]
    connections = [connected(port, collections=True, name=name) for name in names]
    asked = requests(vbuckets, AddStreamFlag(0))
    buffer, taken = bytearray(READ_BYTES), 0
    with selectors.DefaultSelector() as selector:
        began = time.perf_counter()
        for connection in connections:
            connection.sendall(asked)
            selector.register(connection, selectors.EVENT_READ, connection)
        while taken < taken_bytes:
            ready = selector.select(5.0)
            if not ready:
                break  # the bucket is smaller than that
            for key, _ in ready:
                taken += key.data.recv_into(buffer)
                seconds = time.perf_counter() - began
    for connection in connections:
        connection.close()
    return taken / seconds


def pid_of(directory: Path) -> int:
    return int(json.loads((directory / "ready.json").read_text())["pid"])


def measure_bucket(directory: Path, docs: int, vbuckets: int, rounds: int) -> dict[str, Any]:
    opened: list[float] = []
    for _ in range(rounds):
        began = time.perf_counter()
        with node(directory, vbuckets) as port:
            opened.append(time.perf_counter() - began)
    with node(directory, vbuckets) as port:
        memory = memory_mib(pid_of(directory), "VmRSS")
        wanted = min(docs, MOST_READ)
        readings = [asyncio.run(reading(port, wanted)) for _ in range(rounds)]
        peak = memory_mib(pid_of(directory), "VmHWM")
    return {
        "documents": docs,
        "vbuckets": vbuckets,
        "open_s": round(statistics.median(opened), 3),
        "memory_mib": round(memory),
        "peak_mib": round(peak),
        "first_ms": round(statistics.median(first for first, _, _ in readings) * 1000, 1),
        "rate": round(statistics.median(count / seconds for _, seconds, count in readings)),
    }


def measure_readers(directory: Path, vbuckets: int, readers: int, taken_mib: int) -> dict[str, Any]:
    with node(directory, vbuckets) as port:
        before = memory_mib(pid_of(directory), "VmRSS")
        rate = taken_together(port, vbuckets, readers, taken_mib << 20)
        peak = memory_mib(pid_of(directory), "VmHWM")
    return {
        "readers": readers,
        "vbuckets": vbuckets,
        "mib_per_s": round(rate / (1 << 20)),
        "memory_mib": round(before),
        "peak_mib": round(peak),
    }


def mirror_round_s(docs: int, vbuckets: int, scratch: Path) -> float:
    """Seconds of a round, by `bench/mirror.py`."""
    figures = scratch / f"mirror-{docs}-{vbuckets}.json"
    command = [sys.executable, str(Path(__file__).parent / "mirror.py"), "--parts", "rounds"]
    command += ["--docs", str(docs), "--vbuckets", str(vbuckets), "--rounds", "5", "--firsts", "1"]
    command += ["--changes", str(CHANGES_A_ROUND), "--figures", str(figures)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return CHANGES_A_ROUND / float(json.loads(figures.read_text())[str(docs)]["changes_per_s"])


def plots(buckets: list[dict[str, Any]], many: list[dict[str, Any]]) -> str:
    def by_vbuckets(rows: list[dict[str, Any]], x: str, y: str) -> dict[str, list[tuple[float, float]]]:
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row.get(y):
                lines.setdefault(f"{row['vbuckets']:,} vbuckets", []).append((row[x], row[y]))
        return lines

    panels = [
        Panel(title, "documents", by_vbuckets(buckets, "documents", name))
        for title, name in (
            ("time to open, s", "open_s"),
            ("the node's memory, MiB", "memory_mib"),
            ("connect to first change, ms", "first_ms"),
            ("one reader: documents a second", "rate"),
            ("a mirror's round of 10,000 changes, s", "mirror_s"),
        )
    ]
    panels += [
        Panel("to all readers: MiB a second", "readers", by_vbuckets(many, "readers", "mib_per_s")),
        Panel("the node's peak memory, MiB", "readers", by_vbuckets(many, "readers", "peak_mib")),
    ]
    return picture([panel for panel in panels if panel.lines])


def table(buckets: list[dict[str, Any]], many: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| documents | vbuckets | open | memory | peak | first change | documents/s | mirror's round |",
        "|---:" * 8 + "|",
    ]
    for row in buckets:
        mirrored = f"{row['mirror_s']:.2f} s" if "mirror_s" in row else "not measured"
        lines.append(
            f"| {row['documents']:,} | {row['vbuckets']:,} | {row['open_s']:.2f} s |"
            f" {row['memory_mib']} MiB | {row['peak_mib']} MiB | {row['first_ms']:.0f} ms |"
            f" {row['rate']:,} | {mirrored} |"
        )
    lines += ["", "| readers | vbuckets | MiB/s to all | memory | peak |", "|---:" * 5 + "|"]
    for row in many:
        lines.append(
            f"| {row['readers']} | {row['vbuckets']:,} | {row['mib_per_s']} | {row['memory_mib']} MiB |"
            f" {row['peak_mib']} MiB |"
        )
    return lines


def write_markdown(page: Path, lines: list[str], svg: str) -> None:
    """Put table and plots into a page, between the two comments that mark their place."""
    drawn = page.with_name("growth.svg")
    drawn.write_text(svg)
    made_by = f"Made by `python bench/growth.py {shlex.join(sys.argv[1:])}`."
    text = "\n".join(["", made_by, "", f"![What it costs as it grows]({drawn.name})", "", *lines, ""])
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, behind = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page} has no place for it: {BEGIN} … {END}")
    page.write_text(before + begin + text + "\n" + end + behind)


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--docs", type=numbers, default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--vbuckets", type=numbers, default=[64, 1024])
    parser.add_argument("--readers", type=numbers, default=[1, 10, 100])
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--taken-mib", type=int, default=512)
    parser.add_argument("--mirror", type=numbers, default=[], help="with how many documents; needs Spark")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument(
        "--markdown", type=Path, help="put table and plots into this page, docs/benchmarks.md"
    )
    options = parser.parse_args()
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parents[1] / "src"))
    buckets: list[dict[str, Any]] = []
    many: list[dict[str, Any]] = []
    for_readers = sorted(options.docs)[len(options.docs) // 2]
    with tempfile.TemporaryDirectory() as name:
        for vbuckets in options.vbuckets:
            for docs in options.docs:
                directory = Path(tempfile.mkdtemp(dir=name))
                fill(directory, docs, options.size, vbuckets)
                row = measure_bucket(directory, docs, vbuckets, options.rounds)
                if docs in options.mirror:
                    row["mirror_s"] = round(mirror_round_s(docs, vbuckets, Path(name)), 3)
                buckets.append(row)
                print(row, flush=True)
                for readers in options.readers if docs == for_readers else []:
                    many.append(measure_readers(directory, vbuckets, readers, options.taken_mib))
                    print(many[-1], flush=True)
                shutil.rmtree(directory)
    if options.json:
        options.json.write_text(json.dumps({"buckets": buckets, "readers": many}, indent=2) + "\n")
    if options.markdown:
        write_markdown(options.markdown, table(buckets, many), plots(buckets, many))


if __name__ == "__main__":
    main()
