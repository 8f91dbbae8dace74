"""The Spark source, side by side with Spark's own Parquet reader.

    python bench/spark.py [--parts batch,stream] [--docs N] [--size BYTES] [--vbuckets N] [--rounds N]
                          [--triggers N]

A `tailrace serve` process holds the documents; Spark runs on this machine. Each part can be asked for alone.

- batch: a `read` of the bucket against a scan of Parquet files with the same rows and columns, every column
  of every row, into Spark's noop sink. Target: at least 0.8 of the scan's rows a second, in the same round.
  A second line has each side's CPU time per million rows: Java's own, Spark's Python processes, the node.
- stream: the same with `readStream` until everything has come, against Spark's stream of the Parquet files.
  Both get the same limit for the rows of a micro-batch, a quarter of all (`--triggers`), because a batch
  costs Spark about the same whatever is in it; ours makes at least as many of them.
  Rows a second while batches run, waits for the node and decoding included. Target: at least 0.7. Another
  line has the whole query, with the processes that it starts: that part does not grow with the rows.
  Target: at least 0.5.

A figure is the median over the rounds; the two sides of a round directly follow each other. Two rounds before
the first are not counted: Java compiles what it runs often, on both sides.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tailrace.spark as ts
from stream import load, node

PARTS = ("batch", "stream")
SHARE_TARGETS = {"batch": 0.8, "stream": 0.7, "stream+": 0.5}
WARM_UP_ROUNDS = 2
FILES_A_TRIGGER = os.cpu_count() or 2


class Bench:
    """A loaded node, a session, and where things are."""

    def __init__(self, options: argparse.Namespace, spark: Any, port: int, directory: Path) -> None:
        self.options = options
        self.spark = spark
        self.url = f"couchbase://127.0.0.1:{port}"
        self.port = port
        self.directory = directory
        self._java = spark.sparkContext._gateway.proc.pid
        self._node = int(json.loads((directory / "ready.json").read_text())["pid"])

    def spent(self) -> Spent:
        """What both sides have used so far."""
        return spent(self._java, self._node)

    # what both sides read

    def changes(self, reader: Any, **more: str) -> Any:
        """The source."""
        return reader.format("tailrace").options(connectionString=self.url, **more).load()

    def parquet(self) -> str:
        """The rows of the bucket as Parquet files of one size, written by Spark; made once."""
        path = self.directory / "parquet"
        if not path.exists():
            rows = self.changes(self.spark.read)
            rows.repartition(FILES_A_TRIGGER * self.options.triggers).write.parquet(str(path))
        return str(path)


@dataclass(frozen=True)
class Spent:
    """CPU seconds of the processes involved."""

    java: float = 0.0
    python: float = 0.0
    """Of the processes that Java started, including those that have ended."""
    node: float = 0.0

    def since(self, before: Spent) -> Spent:
        return Spent(self.java - before.java, self.python - before.python, self.node - before.node)


def spent(java: int, node_pid: int) -> Spent:
    """CPU seconds so far. Only Linux tells: zeros elsewhere."""
    stats: dict[int, list[str]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            stats[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")

    def seconds(pid: int, first: int, last: int) -> float:
        return sum(map(int, stats[pid][first:last])) / tick if pid in stats else 0.0

    def descendants(of: int) -> Iterator[int]:
        for pid, fields in stats.items():
            if int(fields[1]) == of:
                yield pid
                yield from descendants(pid)

    # user and system time are in fields 14 and 15, those of children that were waited for after them
    python = seconds(java, 13, 15) + sum(seconds(pid, 11, 15) for pid in descendants(java))
    return Spent(seconds(java, 11, 13), python, seconds(node_pid, 11, 13))


def timed(what: Callable[[], float | None]) -> tuple[float, float]:
    """The seconds that the work itself reports, or all of them; and all of them."""
    gc.collect()
    began = time.perf_counter()
    own = what()
    seconds = time.perf_counter() - began
    return seconds if own is None else own, seconds


def verdict(name: str, figure: float, target: float) -> str:
    return f"{name} {figure:.2f}  target {target:.2f}: {'ok' if figure >= target else 'MISSED'}"


def side_by_side(
    bench: Bench, what: str, ours: Callable[[], float | None], rival: str, theirs: Callable[[], float | None]
) -> None:
    """Run both in turn. Each returns the seconds that count; the clock has all of them."""
    counted: list[tuple[float, float]] = []
    whole: list[tuple[float, float]] = []
    cpu: list[tuple[Spent, Spent]] = []
    for _ in range(WARM_UP_ROUNDS + bench.options.rounds):
        both = []
        moments = [bench.spent()]
        for side in (ours, theirs):
            both.append(timed(side))
            moments.append(bench.spent())
        cpu.append((moments[1].since(moments[0]), moments[2].since(moments[1])))
        counted.append((both[0][0], both[1][0]))
        whole.append((both[0][1], both[1][1]))
    report(bench, what, rival, counted[WARM_UP_ROUNDS:])
    for name, taken in zip(("tailrace", rival), zip(*cpu[WARM_UP_ROUNDS:], strict=True), strict=True):
        java, python, node_s = (
            statistics.median(getattr(one_round, kind) for one_round in taken) * 1e6 / bench.options.docs
            for kind in ("java", "python", "node")
        )
        times = f"Java {java:.2f} s, Python {python:.2f} s, node {node_s:.2f} s"
        print(f"{'':<8} {name}: CPU a million rows: {times}", flush=True)
    if whole != counted:
        report(bench, f"{what}+", rival, whole[WARM_UP_ROUNDS:])


def report(bench: Bench, what: str, rival: str, times: list[tuple[float, float]]) -> None:
    own, other = (bench.options.docs / statistics.median(column) for column in zip(*times, strict=True))
    share = statistics.median(b / a for a, b in times)
    print(
        f"{what:<8} tailrace {own:>9,.0f} rows/s, {rival} {other:>9,.0f} rows/s, "
        f"{verdict('share', share, SHARE_TARGETS[what])}, best {max(b / a for a, b in times):.2f}, "
        f"load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def batch(bench: Bench) -> None:
    """`read` against a Parquet scan."""
    path = bench.parquet()

    def noop(frame: Any) -> None:
        frame.write.format("noop").mode("overwrite").save()

    side_by_side(
        bench,
        "batch",
        lambda: noop(bench.changes(bench.spark.read)),
        "Parquet scan",
        lambda: noop(bench.spark.read.parquet(path)),
    )


def stream(bench: Bench) -> None:
    """`readStream` against a stream of Parquet files."""
    path = bench.parquet()
    schema = bench.spark.read.parquet(path).schema
    most_rows = -(-bench.options.docs // bench.options.triggers)
    runs = iter(range(1_000_000))

    def noop(frame: Any) -> float:
        checkpoint = bench.directory / f"checkpoint-{next(runs)}"
        writer = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        rows = sum(progress.numInputRows for progress in query.recentProgress)
        assert rows == bench.options.docs, f"{rows} rows came"
        milliseconds = sum(progress.durationMs["triggerExecution"] for progress in query.recentProgress)
        return float(milliseconds / 1000)

    side_by_side(
        bench,
        "stream",
        lambda: noop(
            bench.changes(
                bench.spark.readStream, startingOffsets="earliest", maxOffsetsPerTrigger=str(most_rows)
            )
        ),
        "Parquet stream",
        lambda: noop(
            bench.spark.readStream.schema(schema).option("maxFilesPerTrigger", FILES_A_TRIGGER).parquet(path)
        ),
    )


RUN = {
    "batch": batch,
    "stream": stream,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--docs", type=int, default=1_000_000)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--vbuckets", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--triggers", type=int, default=4, help="of the stream, into which the rows are cut")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"parts are {', '.join(PARTS)}")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled, too
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parent.parent / "src"))
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    settings = {"spark.ui.enabled": "false", "spark.log.level": "ERROR", "spark.driver.memory": "4g"}
    settings["spark.ui.showConsoleProgress"] = "false"
    settings["spark.sql.streaming.numRecentProgressUpdates"] = "1000"
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as name:
        directory = Path(name)
        with node(directory, options.vbuckets) as port:
            load(port, options.docs, options.size)
            spark = ts.session("tailrace bench", **settings)
            bench = Bench(options, spark, port, directory)
            for part in PARTS:
                if part in parts:
                    RUN[part](bench)
            spark.stop()


if __name__ == "__main__":
    main()
