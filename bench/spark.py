"""The Spark source and the mirror, side by side with what Spark and delta-rs do themselves.

    python bench/spark.py [--parts batch,stream,mirror,latency,repair,memory] [--docs N] [--size BYTES]
                          [--vbuckets N] [--rounds N] [--triggers N] [--changes N] [--memory-changes N]

A `tailrace serve` process holds the documents; Spark runs on this machine. Each part can be asked for alone.

- batch: a `read` of the bucket beside a scan of Parquet files with the same rows and columns, every column of
  every row, into Spark's noop sink. Target: at least 0.5 of the scan's rows a second, in the same round.
- stream: the same with `readStream` until everything has come, beside Spark's stream of the Parquet files.
  Both get the same limit for the rows of a micro-batch, a quarter of all (`--triggers`), because a batch
  costs Spark about the same whatever is in it; ours makes at least as many of them.
  Rows a second while batches run, waits for the node and decoding included. Target: at least 0.5. A second
  line has the whole query, with the processes that it starts: that part does not grow with the rows.
- mirror: a table of all documents, and batches of changes to it (a tenth of them deletions, a tenth
  of them new documents). The same changes go into a second table with delta-rs MERGE on the driver, fed by
  the same source. Batch times are Spark's own. Target: 1.3 times the changes a second.
- latency: a running mirror and single writes; time from a write's answer to the commit that has its row.
- repair: a running mirror, and 1, 32 and all vbuckets that lose their last changes. Time from the loss to the
  commit after which every vbucket is where the bucket is.
- memory: a running mirror and many changes; what the driver, its Java and the Python workers hold.

A figure is the median over the rounds; the two sides of a round follow each other at once. Two rounds before
the first are not counted: Java compiles what it runs often, on both sides.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder, write_deltalake

import tailrace.spark as ts
from stream import load, node
from tailrace.client.kv import KvClient
from tailrace.history import rollback_seqno
from tailrace.model import Position, format_positions
from tailrace.spark.rounds.progress import RoundProgress
from tailrace.table.opening import open_table
from tailrace.table.rows import rows_of

PARTS = ("batch", "stream", "mirror", "latency", "repair", "memory")
SHARE_TARGET = 0.5
MIRROR_TARGET = 1.3
PATIENCE_S = 600.0
WARM_UP_ROUNDS = 2
FILES_A_TRIGGER = os.cpu_count() or 2


class Bench:
    """A loaded node, a session, and where things lie."""

    def __init__(self, options: argparse.Namespace, spark: Any, port: int, directory: Path) -> None:
        self.options = options
        self.spark = spark
        self.url = f"couchbase://127.0.0.1:{port}"
        self.port = port
        self.directory = directory
        self.client = KvClient(self.url)
        self.mirror_table = str(directory / "mirror")

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

    def positions(self) -> dict[int, Position]:
        """Where the bucket is."""
        high = self.client.high_seqnos()
        return {v: Position.at(self.client.failover_log(v).newest.vb_uuid, s) for v, s in high.items() if s}

    def load(self, docs: int, *more: str) -> int:
        """Overwrite documents, the same for the same seed; how many writes that were."""
        command = [sys.executable, "-m", "tailrace", "load", self.url, "--docs", str(docs), *more]
        command += ["--size", str(self.options.size), "--json"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return int(json.loads(done.stdout)["writes"])

    def change(self, seed: int) -> None:
        """A batch of changes: overwrites, deletions and new documents."""
        count = self.options.changes
        self.load(count * 8 // 10, "--seed", str(seed), "--deletes", "12%")
        self.load(count // 10, "--seed", str(seed), "--prefix", f"new-{seed}::")

    # mirrors

    def mirror_once(self, table: str) -> Any:
        """Bring a table up to date; the query, ended."""
        query = ts.mirror(self.spark, self.url, table, once=True)
        query.awaitTermination()
        return query

    def need_mirror(self) -> None:
        """The table of everything, made once."""
        if not Path(self.mirror_table).exists():
            began = time.perf_counter()
            self.mirror_once(self.mirror_table)
            seconds = time.perf_counter() - began
            print(f"mirror   {self.options.docs:,} documents into a new table: {seconds:.1f} s", flush=True)

    @contextlib.contextmanager
    def running_mirror(self) -> Iterator[Watch]:
        """A mirror that runs, caught up."""
        self.need_mirror()
        watch = Watch(self.client)
        query = ts.mirror(self.spark, self.url, self.mirror_table, on_progress=watch.applied)
        watch.query = query
        try:
            watch.wait_caught_up(open_table(self.mirror_table).current.positions)
            yield watch
        finally:
            query.stop()


class Watch:
    """Knows when a running mirror committed what."""

    def __init__(self, client: KvClient) -> None:
        self._client = client
        self._changed = threading.Condition()
        self._positions: dict[int, Position] = {}
        self.commits: list[tuple[float, dict[int, Position]]] = []
        self.changes = 0
        self.query: Any = None

    def applied(self, what: RoundProgress) -> None:
        """The mirror made a commit."""
        with self._changed:
            self._positions = dict(what.positions)
            self.commits.append((time.perf_counter(), self._positions))
            self.changes += what.changes
            self._changed.notify_all()

    def wait_caught_up(self, positions: Mapping[int, Position] | None = None) -> float:
        """Until the table is where the bucket is; when that was."""
        if positions:
            self._positions = dict(positions)
        high = {vbucket: seqno for vbucket, seqno in self._client.high_seqnos().items() if seqno}
        logs = {vbucket: self._client.failover_log(vbucket) for vbucket in high}

        def there() -> bool:
            held = self._positions
            # a vbucket that went back and has no change since stands on the older branch, as the bucket does
            return all(
                vbucket in held
                and held[vbucket].seqno >= seqno
                and rollback_seqno(held[vbucket], logs[vbucket], high_seqno=max(seqno, held[vbucket].seqno))
                is None
                for vbucket, seqno in high.items()
            )

        ends_at = time.monotonic() + PATIENCE_S
        with self._changed:
            while not self._changed.wait_for(there, 1.0):
                assert self.query.isActive, f"the mirror failed: {self.query.exception()}"
                assert time.monotonic() < ends_at, "the mirror did not catch up"
            return self.commits[-1][0] if self.commits else time.perf_counter()


def timed(what: Callable[[], float | None]) -> tuple[float, float]:
    """The seconds that it says were its own, or all of them; and all of them."""
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
    """Both in turn. Each gives the seconds that count, the clock has all of them."""
    counted: list[tuple[float, float]] = []
    whole: list[tuple[float, float]] = []
    for _ in range(WARM_UP_ROUNDS + bench.options.rounds):
        both = [timed(ours), timed(theirs)]
        counted.append((both[0][0], both[1][0]))
        whole.append((both[0][1], both[1][1]))
    report(bench, what, rival, counted[WARM_UP_ROUNDS:])
    if whole != counted:
        report(bench, f"{what}+", rival, whole[WARM_UP_ROUNDS:])


def report(bench: Bench, what: str, rival: str, times: list[tuple[float, float]]) -> None:
    own, other = (bench.options.docs / statistics.median(one) for one in zip(*times, strict=True))
    share = statistics.median(b / a for a, b in times)
    print(
        f"{what:<8} tailrace {own:>9,.0f} rows/s, {rival} {other:>9,.0f} rows/s, "
        f"{verdict('share', share, SHARE_TARGET)}, best {max(b / a for a, b in times):.2f}, "
        f"load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def batch(bench: Bench) -> None:
    """`read` beside a Parquet scan."""
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
    """`readStream` beside a stream of Parquet files."""
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


def mirror(bench: Bench) -> None:
    """Batches of changes into a table of everything, beside delta-rs MERGE."""
    bench.need_mirror()
    merged = str(bench.directory / "merged")
    rows = QueryBuilder().register("mirror", DeltaTable(bench.mirror_table)).execute("select * from mirror")
    write_deltalake(merged, rows.read_all())
    rates: list[tuple[float, float]] = []
    for number in range(bench.options.rounds + 1):
        before = bench.positions()
        bench.change(number + 1)
        ours = round_rate(bench.mirror_once(bench.mirror_table))
        theirs = batch_rate(merge_once(bench, merged, before))
        rates.append((ours, theirs))
    rates = rates[1:]
    same = [live_rows(path) for path in (bench.mirror_table, merged)]
    assert same[0] == same[1], f"the two tables differ: {same}"
    own, other = (statistics.median(one) for one in zip(*rates, strict=True))
    share = statistics.median(a / b for a, b in rates)
    print(
        f"mirror   tailrace {own:>9,.0f} changes/s, MERGE on the driver {other:>9,.0f} changes/s, "
        f"{verdict('times', share, MIRROR_TARGET)}",
        flush=True,
    )


def live_rows(path: str) -> int:
    counted = QueryBuilder().register("rows", DeltaTable(path)).execute("select count(*) as n from rows")
    return int(counted.read_all()["n"][0].as_py())


def round_rate(handle: Any) -> float:
    """Changes a second, from the progress of a mirror's rounds."""
    worked = [one for one in handle.recentProgress if one["changes"]]
    return float(sum(one["changes"] for one in worked) / sum(sum(one["seconds"].values()) for one in worked))


def batch_rate(query: Any) -> float:
    """Changes a second, from the progress of a query's batches."""
    worked = [one for one in query.recentProgress if one.numInputRows]
    seconds = sum(one.durationMs["triggerExecution"] for one in worked) / 1000
    return float(sum(one.numInputRows for one in worked) / seconds)


def merge_once(bench: Bench, table: str, start: dict[int, Position]) -> Any:
    """What people do without the mirror: collect the batch, MERGE it."""

    def merge(frame: Any, _batch: int) -> None:
        changes = frame.toArrow()
        if not changes.num_rows:
            return
        changes = changes.append_column("at", pa.array(range(changes.num_rows)))
        last = changes.group_by("key").aggregate([("at", "max")])
        changes = changes.take(last["at_max"]).drop_columns(["at"])
        rows = rows_of(changes, keep_deletes=True)
        update = {name: f"source.{name}" for name in rows.column_names if name != "deleted"}
        (
            DeltaTable(table)
            .merge(rows, "target.key = source.key", source_alias="source", target_alias="target")
            .when_matched_delete("source.deleted")
            .when_matched_update(update)
            .when_not_matched_insert(update, "not source.deleted")
            .execute()
        )

    offsets = format_positions(start)
    frame = bench.changes(bench.spark.readStream, startingOffsets=offsets)
    checkpoint = tempfile.mkdtemp(dir=bench.directory)
    query = (
        frame.writeStream.foreachBatch(merge)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return query


def latency(bench: Bench) -> None:
    """From a write to its row."""
    rng = random.Random(7)
    written: list[tuple[float, int, int]] = []
    with bench.running_mirror() as watch:
        for number in range(bench.options.writes):
            key = f"doc::{rng.randrange(bench.options.docs):08d}"
            stored = bench.client.set(key, {"n": number})
            written.append((time.perf_counter(), bench.client.vbucket_of(key), stored.seqno))
            time.sleep(rng.uniform(0, 2 / bench.options.write_rate))
        watch.wait_caught_up()
        waits = [
            next(at for at, held in watch.commits if vbucket in held and held[vbucket].seqno >= seqno) - began
            for began, vbucket, seqno in written
        ]
    waits.sort()
    print(
        f"latency  {len(waits)} writes, {bench.options.write_rate:.0f} a second, into a table of "
        f"{bench.options.docs:,} rows: p50 {waits[len(waits) // 2] * 1000:,.0f} ms, "
        f"p99 {waits[len(waits) * 99 // 100] * 1000:,.0f} ms",
        flush=True,
    )


def repair(bench: Bench) -> None:
    """From a loss to the table without it."""
    count = bench.options.vbuckets
    with bench.running_mirror() as watch:
        for lost in sorted({1, min(32, count), count}):
            bench.load(10 * count, "--seed", str(lost))
            watch.wait_caught_up()
            began = time.perf_counter()
            bench.client.rewind(range(lost), to_seqno=None, lose=3)
            seconds = watch.wait_caught_up() - began
            print(
                f"repair   {lost:>5,} vbuckets lose 3 changes each: right after {seconds:.2f} s", flush=True
            )


def memory(bench: Bench) -> None:
    """What the processes hold while many changes go through."""
    total, step = bench.options.memory_changes, bench.options.changes
    samples: list[tuple[int, dict[str, float]]] = []
    with bench.running_mirror() as watch:
        written = 0
        while written < total:
            written += bench.load(step, "--seed", str(1_000 + written))
            if len(samples) * total < written * 10:
                watch.wait_caught_up()
                samples.append((written, holdings(bench)))
        watch.wait_caught_up()
        samples.append((written, holdings(bench)))
    third = len(samples) // 3  # the first of the three is for warming up
    for name in samples[0][1]:
        first, last = (
            statistics.median(held[name] for _, held in part)
            for part in (samples[third : 2 * third], samples[2 * third :])
        )
        print(
            f"memory   {name:<22} {first:>6,.0f} MB from {samples[third][0]:,} changes on, "
            f"{last:>6,.0f} MB from {samples[2 * third][0]:,} to {written:,}: "
            f"{'flat' if last <= first * 1.1 + 10 else 'GROWS'}",
            flush=True,
        )


def holdings(bench: Bench) -> dict[str, float]:
    """Megabytes by process; Java's are those in use after a collection."""
    jvm = bench.spark.sparkContext._jvm
    jvm.System.gc()
    runtime = jvm.Runtime.getRuntime()
    found = {
        "driver": resident_mb(os.getpid()),
        "Java heap in use": (runtime.totalMemory() - runtime.freeMemory()) / 1e6,
    }
    for pid in processes():
        if "pyspark.daemon" in command_line(pid):
            found["largest worker"] = max(found.get("largest worker", 0.0), resident_mb(pid))
    return found


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""


def resident_mb(pid: int) -> float:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return 0.0


RUN = {
    "batch": batch,
    "stream": stream,
    "mirror": mirror,
    "latency": latency,
    "repair": repair,
    "memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--docs", type=int, default=1_000_000)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--vbuckets", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--triggers", type=int, default=4, help="of the stream, into which the rows are cut")
    parser.add_argument("--changes", type=int, default=100_000, help="of a batch for the mirror")
    parser.add_argument("--writes", type=int, default=200, help="for latency")
    parser.add_argument("--write-rate", type=float, default=20.0, help="for latency, a second")
    parser.add_argument("--memory-changes", type=int, default=1_000_000, help="10,000,000 for the full run")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"parts are {', '.join(PARTS)}")
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
            for part in PARTS:  # in this order: the later ones change the documents
                if part in parts:
                    RUN[part](bench)
            bench.client.close()
            spark.stop()


if __name__ == "__main__":
    main()
