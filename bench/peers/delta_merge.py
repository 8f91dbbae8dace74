"""What people do with delta-spark against the mirror, fed by the same source, in one Spark session.

    python bench/peers/delta_merge.py [--docs 1000000] [--size 256] [--vbuckets 1024] [--changes 10000]
                                      [--rounds 3] [--reads 3] [--python PYTHON] [--jars FOLDER]

- *MERGE*: each batch is merged in `foreachBatch`. The table has every document once.
- *append plus view*: each batch is appended, as a sink of Kafka topics does, and a view has the newest change
  of every key. It takes changes fast, and every read pays for that; what a rollback takes back stays.

A `tailrace serve` process holds the documents. All tables are loaded from it; then, round by round, documents
are rewritten, and all sides bring their tables up to date, taking turns at going first. A figure is changes a
second of the time that the batch (Spark's `triggerExecution`) or the rounds of the mirror took, without the
start of a query; a ratio is the median of the rounds. At the end each table is read `--reads` times in turns,
every row of it, and all must have the same rows. Target: the mirror at least 3 times as fast as MERGE with
1 M documents, 20 times with 10 M (`--docs 10000000`).

There is no delta-spark for Spark 4.3, so all run on 4.2, in the environment and with the jars that `make
interop` makes below `build/`; without them the bench says so and ends.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent)]

PYTHON = ROOT / "build" / "interop" / "spark-4.2.1" / "bin" / "python"
JARS = ROOT / "build" / "interop" / "delta-spark-4.2" / "dependency"
COLUMNS = "key, value, vbucket, seqno, cas, rev, flags, expiry, datatype, event_time"
PLAIN = ("cast(key as string) as key", "cast(value as string) as value", *COLUMNS.split(", ")[2:])


def change(url: str, docs: int, count: int, size: int, seed: int) -> None:
    """Rewrite random documents."""
    rng = random.Random(seed)
    numbers = rng.sample(range(docs), min(count, docs))
    texts = [rng.randbytes(max(1, size // 2 - 10)).hex() for _ in numbers]
    lines = "".join(
        f'{{"key":"doc::{number:08d}","value":{{"n":{seed},"text":"{text}"}}}}\n'
        for number, text in zip(numbers, texts, strict=True)
    )
    command = [sys.executable, "-m", "tailrace", "load", url, "--from", "-"]
    subprocess.run(command, check=True, input=lines, stdout=subprocess.DEVNULL, text=True)


MIRROR, MERGE, APPEND = "mirror", "MERGE", "append plus view"


class Sides:
    """The tables, what brings each up to date, and how it is read."""

    def __init__(self, spark: Any, url: str, directory: Path) -> None:
        self.spark, self.url = spark, url
        self.directory = directory
        self.mirror, self.merged, self.appended = (
            str(directory / name) for name in ("mirror", "merged", "appended")
        )
        self.start = ""

    def first_load(self) -> None:
        """Load everything as a batch; the streams continue from the mirror's position."""
        import tailrace.spark as ts
        from tailrace.spark.source.offsets import to_offset
        from tailrace.table.opening import open_table

        ts.mirror(self.spark, self.url, self.mirror, once=True).awaitTermination()
        source = self.spark.read.format("tailrace").option("connectionString", self.url).load()
        source.selectExpr(*PLAIN).write.format("delta").save(self.merged)
        source.selectExpr("op", *PLAIN).write.format("delta").save(self.appended)
        self.start = json.dumps(to_offset(open_table(self.mirror).current.positions))

    def by_mirror(self) -> tuple[int, float]:
        """Changes, and the seconds of their rounds."""
        import tailrace.spark as ts

        run = ts.mirror(self.spark, self.url, self.mirror, once=True)
        run.awaitTermination()
        rounds = run.recentProgress
        changes = sum(progress["changes"] for progress in rounds)
        return changes, sum(sum(progress["seconds"].values()) for progress in rounds)

    def by_merge(self) -> tuple[int, float]:
        """Changes, and the seconds of their batches."""
        return self._caught_up(self._changes().writeStream.foreachBatch(self._merge), "merged")

    def by_append(self) -> tuple[int, float]:
        """As `by_merge`."""
        writing = self._changes().selectExpr("op", *PLAIN).writeStream.format("delta")
        return self._caught_up(writing.option("path", self.appended), "appended")

    def _changes(self) -> Any:
        changes = self.spark.readStream.format("tailrace").option("connectionString", self.url)
        return changes.option("startingOffsets", self.start).load()

    def _caught_up(self, writing: Any, name: str) -> tuple[int, float]:
        checkpoint = str(self.directory / f"checkpoint of {name}")
        query = writing.trigger(availableNow=True).option("checkpointLocation", checkpoint).start()
        query.awaitTermination()
        batches = [progress for progress in query.recentProgress if progress["numInputRows"]]
        rows = sum(progress["numInputRows"] for progress in batches)
        return rows, sum(progress["durationMs"]["triggerExecution"] for progress in batches) / 1000

    def _merge(self, frame: Any, _number: int) -> None:
        newest = frame.selectExpr("*", "row_number() over (partition by key order by seqno desc) as nth")
        newest.where("nth = 1").selectExpr("op", *PLAIN).createOrReplaceTempView("newest")
        values = ", ".join(f"n.{name}" for name in COLUMNS.split(", "))
        updates = ", ".join(f"t.{name} = n.{name}" for name in COLUMNS.split(", "))
        frame.sparkSession.sql(
            f"MERGE INTO delta.`{self.merged}` t USING newest n ON t.key = n.key "
            "WHEN MATCHED AND n.op <> 'mutation' THEN DELETE "
            f"WHEN MATCHED THEN UPDATE SET {updates} "
            f"WHEN NOT MATCHED AND n.op = 'mutation' THEN INSERT ({COLUMNS}) VALUES ({values})"
        )

    def read(self, name: str) -> tuple[tuple[int, int], float]:
        """How many rows a table has and a digest of all of them, and how long that took."""
        import tailrace.spark as ts

        began = time.perf_counter()
        if name == MIRROR:
            table = ts.table(self.spark, self.mirror)
        elif name == MERGE:
            table = self.spark.read.format("delta").load(self.merged)
        else:
            newest = "row_number() over (partition by key order by seqno desc) as nth"
            table = self.spark.read.format("delta").load(self.appended).selectExpr("*", newest)
            table = table.where("nth = 1 and op = 'mutation'")
        digest = "sum(cast(xxhash64(key, value, seqno) as decimal(38, 0))) as digest"
        (row,) = table.selectExpr("count(*) as rows", digest).collect()
        return (int(row["rows"]), int(row["digest"])), time.perf_counter() - began


def compared(what: str, figures: dict[str, list[float]], other: str) -> float:
    """The mirror's rate relative to another side's: the median of the rounds."""
    pairs = zip(figures[MIRROR], figures[other], strict=True)
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    print(f"the mirror {what} {ratio:.2f} times {other}", flush=True)
    return ratio


def inside(options: argparse.Namespace) -> None:
    """The part that runs in the environment with delta-spark."""
    from tailrace.spark.spark_session import session

    spark = session(
        "delta merge",
        **{
            "spark.jars": ",".join(str(jar) for jar in sorted(Path(options.jars).glob("*.jar"))),
            "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
            "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
            "spark.driver.memory": "4g",
            "spark.ui.enabled": "false",
            "spark.log.level": "ERROR",
            "spark.sql.shuffle.partitions": str(2 * (os.cpu_count() or 2)),
            "spark.databricks.delta.snapshotPartitions": "2",
        },
    )
    sides = Sides(spark, options.url, Path(options.directory))
    began = time.perf_counter()
    sides.first_load()
    print(f"all tables loaded in {time.perf_counter() - began:.0f} s", flush=True)
    turns = [(MERGE, sides.by_merge), (APPEND, sides.by_append), (MIRROR, sides.by_mirror)]
    rates: dict[str, list[float]] = {name: [] for name, _ in turns}
    for number in range(options.rounds):
        change(options.url, options.docs, options.changes, options.size, 100 + number)
        first = number % len(turns)
        for name, bring_up_to_date in turns[first:] + turns[:first]:
            changes, seconds = bring_up_to_date()
            rates[name].append(changes / seconds)
            print(
                f"  {name:<18}{changes:>9,} changes in {seconds:6.2f} s: {changes / seconds:>9,.0f}/s",
                flush=True,
            )
    reads: dict[str, list[float]] = {name: [] for name, _ in turns}
    contents = set()
    for number in range(options.reads):
        first = number % len(turns)
        for name, _ in turns[first:] + turns[:first]:
            content, seconds = sides.read(name)
            contents.add(content)
            reads[name].append(seconds)
            print(f"  {name:<18}{content[0]:>9,} rows read in {seconds:6.2f} s", flush=True)
    ratio = compared("makes changes/s", rates, MERGE)
    target = 20.0 if options.docs >= 10_000_000 else 3.0
    print(f"target {target}: {'ok' if ratio >= target else 'MISSED'}")
    compared("makes changes/s", rates, APPEND)
    compared("is read in seconds", reads, MERGE)
    compared("is read in seconds", reads, APPEND)
    assert len(contents) == 1, f"the tables differ: {contents}"
    print(
        json.dumps({"docs": options.docs, "ratio": round(ratio, 2), "changes_per_s": rates, "read_s": reads})
    )
    spark.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description="delta-spark's MERGE and append plus view beside the mirror")
    parser.add_argument("--docs", type=int, default=1_000_000)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--vbuckets", type=int, default=1024)
    parser.add_argument("--changes", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--reads", type=int, default=3, help="how often each table is read in the end")
    parser.add_argument("--python", default=str(PYTHON), help="a Python with Spark 4.2 and Tailrace")
    parser.add_argument("--jars", default=str(JARS), help="the folder with the jars of delta-spark")
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.url:
        inside(options)
        return
    for what in (options.python, options.jars):
        if not Path(what).exists():
            print(f"left out: there is no {what}; make interop makes it, or give --python and --jars")
            return
    from stream import load, node

    with tempfile.TemporaryDirectory() as folder, node(Path(folder), options.vbuckets) as port:
        load(port, options.docs, options.size)
        names = ("docs", "size", "changes", "rounds", "reads", "jars")
        given = [f"--{name}={getattr(options, name)}" for name in names]
        command = [options.python, str(Path(__file__)), *given]
        command += ["--url", f"couchbase://127.0.0.1:{port}", "--directory", folder]
        environment = os.environ | {"SPARK_LOCAL_IP": "127.0.0.1"}
        subprocess.run(command, check=True, env=environment)


if __name__ == "__main__":
    main()
