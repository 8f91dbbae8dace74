"""The mirror against what people would do without it, and against its promises.

    python bench/mirror.py [--parts first,rounds,merge,latency,repair,trickle,memory,read] [--docs N]
                           [--size BYTES] [--vbuckets N] [--changes N] [--rounds N] [--seconds S] [--merges N]
                           [--figures FILE] [--feed DIR]

A `tailrace serve` process holds the documents; Spark runs on this machine (`local[*]`). Each part can be
asked for alone; they come in this order, because the later ones change the documents.

- first: a mirror into a new table, against `spark.read.format("tailrace")...write.parquet` of the same
  bucket. Target: at least 0.6 of its rows a second; and 10 M documents take at most 11 times as long as 1 M.
- rounds: `--rounds` rounds of `--changes` (a twentieth of them deletions). Changes a second by the clock,
  from when the changes are in the bucket until they are committed, and the same including compaction; where
  a round spends its time, also as CPU of each process; bytes written to the table's folder (log, vectors and
  compaction included) per byte of changes. Targets: at most 6 with rounds of 10,000; into 10 M documents at
  least 0.7 of the changes a second into 1 M.
- merge: alternately a round of the mirror, and the same changes with delta-rs MERGE into a second table, fed
  by the same client in a process of its own, `--merges` times. Target: the mirror makes at least 3 times
  MERGE's changes a second with 1 M documents, 20 times with 10 M.
- latency: 200 writes a second while the mirror runs; from a write's answer to the commit that has its row.
  Target: p50 1 s, p99 3 s.
- repair: 1, 32 and all vbuckets lose their last changes; time until the table is right. Target: 1, 2 and 5 s.
- trickle: 200 updates a second for `--seconds`; the final size of the folder relative to the live data.
  Target: below 2.5.
- memory: many changes (`--memory-changes`); what the driver, its Java and the largest Python worker hold
  in the second and in the last third of them. Target: flat.
- read: the table as other engines read it (delta-rs' QueryBuilder, polars) against `scan`: the same rows.
  And the most that the processes held: no Python worker above 1 GiB.

`--figures FILE` keeps the figures of runs by number of documents, as JSON: a run with more documents is
compared with the one before. `--feed DIR` leaves what other engines need to do the same: `DIR/table`, the
Delta table as it was before the first MERGE, `DIR/round-000.parquet` and so on, the changed rows of each
round with a column `deleted`, and `DIR/figures.json` with the seconds of the mirror and of delta-rs for each.

Figures are taken on one machine in one run; the two sides of a comparison directly follow each other.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, QueryBuilder, write_deltalake

import tailrace
import tailrace.spark as ts
from stream import load, node
from tailrace.client.kv import KvClient
from tailrace.model import Position
from tailrace.spark.api import prepare_mirror
from tailrace.table.file_reading import scan
from tailrace.table.hashing import KeyHash
from tailrace.table.opening import open_table
from tailrace.table.rows import rows_of

FIRST_TARGET = 0.6
FIRST_GROWTH_TARGET = 1.1
"""As a multiple of the documents: ten times as many take at most eleven times as long."""
RATE_TARGET = 0.7
AMPLIFICATION_TARGET = 6.0
FOLDER_TARGET = 2.5
LATENCY_TARGET_S = (1.0, 3.0)
REPAIR_TARGET_S = {1: 1.0, 32: 2.0}
REPAIR_ALL_TARGET_S = 5.0
WORKER_TARGET_MB = 1024.0
WRITES_A_SECOND = 200
PATIENCE_S = 900.0


def said(part: str, text: str, *, ok: bool | None = None, target: str = "") -> None:
    verdict = "" if ok is None else f"; target {target}: {'ok' if ok else 'MISSED'}"
    print(f"{part:<8} {text}{verdict}", flush=True)


class Bench:
    """A loaded node, a session, and where things are."""

    def __init__(self, options: argparse.Namespace, spark: Any, port: int, directory: Path) -> None:
        self.options = options
        self.spark = spark
        self.url = f"couchbase://127.0.0.1:{port}"
        self.directory = directory
        self._client: KvClient | None = None
        self._used_at = 0.0
        self.table = str(directory / "mirror")
        self.peak = Peak()
        self.node_pid = node_pid(directory)
        self.figures: dict[str, float] = {}
        self._known = known_figures(options.figures)

    @property
    def client(self) -> KvClient:
        """A new client for writes and questions: a node closes connections that are idle for minutes."""
        if self._client is not None and time.monotonic() - self._used_at > 30.0:
            self._client.close()
            self._client = None
        if self._client is None:
            self._client = KvClient(self.url)
        self._used_at = time.monotonic()
        return self._client

    def load(self, docs: int, *more: str) -> int:
        """Overwrite documents, the same ones for the same seed; returns the number of writes."""
        command = [sys.executable, "-m", "tailrace", "load", self.url, "--docs", str(docs), *more]
        command += ["--size", str(self.options.size), "--json"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return int(json.loads(done.stdout)["writes"])

    def change(self, seed: int) -> None:
        """Rewrite random documents, and delete a twentieth of them."""
        rng = random.Random(seed)
        keys = [f"doc::{number:08d}" for number in rng.sample(range(self.options.docs), self.options.changes)]
        length = max(1, self.options.size - 20)
        lines = "".join(
            f'{{"key":"{key}","value":{{"n":{seed},"text":"{incompressible(rng, length)}"}}}}\n'
            for key in keys
        )
        command = [sys.executable, "-m", "tailrace", "load", self.url, "--from", "-"]
        subprocess.run(command, check=True, input=lines, stdout=subprocess.DEVNULL, text=True)
        for key in keys[::20]:
            self.client.delete(key)

    def figure(self, name: str, value: float) -> tuple[int, float] | None:
        """Keep a figure; returns that of the run with the next fewer documents, if there was one."""
        self.figures[name] = value
        smaller = [
            docs for docs, figures in self._known.items() if docs < self.options.docs and name in figures
        ]
        return (max(smaller), self._known[max(smaller)][name]) if smaller else None

    def save_figures(self) -> None:
        if self.options.figures is not None:
            own = {**self._known.get(self.options.docs, {}), **self.figures}
            self.options.figures.write_text(json.dumps({**self._known, self.options.docs: own}))

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def need_mirror(self) -> None:
        if not Path(self.table).exists():
            ts.mirror(self.spark, self.url, self.table, once=True).awaitTermination()

    @contextlib.contextmanager
    def running_mirror(self, **settings: Any) -> Iterator[Watch]:
        """A running mirror that has caught up."""
        self.need_mirror()
        watch = Watch(self)
        handle = ts.mirror(self.spark, self.url, self.table, on_progress=watch.note, **settings)
        watch.handle = handle
        try:
            watch.wait_caught_up(open_table(self.table).current.positions)
            yield watch
        finally:
            handle.stop()


class Stepped:
    """A mirror that does its rounds on demand, so that a round has all of the changes."""

    def __init__(self, bench: Bench) -> None:
        bench.need_mirror()
        self.commits: list[Any] = []
        self._bench = bench
        self._mirror = prepare_mirror(
            bench.spark, bench.url, bench.table, trigger_s=0.0, on_progress=self.commits.append
        )

    def __enter__(self) -> Stepped:
        self._mirror.prepare()
        self.catch_up()
        self.commits.clear()
        return self

    def __exit__(self, *_: object) -> None:
        self._mirror.close()

    def catch_up(self) -> tuple[float, float]:
        """Do rounds until the table has caught up; how long that took, without and with waiting for the
        compaction that was started, which otherwise runs beside the rounds.
        """
        high = self._bench.client.high_seqnos()
        began = time.perf_counter()
        while any(self._mirror.tables[0].current.position(v).seqno < seqno for v, seqno in high.items()):
            self._mirror.turn()
        committed = time.perf_counter() - began
        self._mirror.housekeeping.finish_step(wait=True)
        return committed, time.perf_counter() - began


class Watch:
    """Records when a running mirror committed what."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._changed = threading.Condition()
        self._positions: Mapping[int, Position] = {}
        self.commits: list[tuple[float, Any]] = []
        self.handle: Any = None

    def note(self, progress: Any) -> None:
        with self._changed:
            self._positions = dict(progress.positions)
            self.commits.append((time.perf_counter(), progress))
            self._changed.notify_all()

    def wait_caught_up(self, positions: Mapping[int, Position] | None = None) -> float:
        """Wait until the table has caught up with the bucket; when that was."""
        if positions:
            self._positions = dict(positions)
        high = {vbucket: seqno for vbucket, seqno in self._bench.client.high_seqnos().items() if seqno}
        ends_at = time.monotonic() + PATIENCE_S

        def there() -> bool:
            held = self._positions
            return all(vbucket in held and held[vbucket].seqno >= seqno for vbucket, seqno in high.items())

        with self._changed:
            while not self._changed.wait_for(there, 1.0):
                assert self.handle.isActive, f"the mirror failed: {self.handle.exception()}"
                assert time.monotonic() < ends_at, "the mirror did not catch up"
            return self.commits[-1][0] if self.commits else time.perf_counter()


def incompressible(rng: random.Random, length: int) -> str:
    """Text that Parquet can't compress, since compressible text makes any table look small."""
    return base64.b85encode(rng.randbytes(length * 4 // 5 + 4)).decode()[:length]


def known_figures(path: Path | None) -> dict[int, dict[str, float]]:
    if path is None or not path.exists():
        return {}
    return {int(docs): figures for docs, figures in json.loads(path.read_text()).items()}


class Peak(threading.Thread):
    """Samples the memory of the Python workers."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.workers_mb = 0.0
        self.driver_mb = 0.0
        self._stopped = threading.Event()
        self.start()

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        while not self._stopped.wait(0.2):
            held = python_holdings()
            self.driver_mb = max(self.driver_mb, held["driver"])
            self.workers_mb = max(self.workers_mb, held["largest Python worker"])


def folder_bytes(path: str) -> int:
    total = 0
    for place, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.path.getsize(os.path.join(place, name))
    return total


class Written:
    """Counts every byte that appears in a folder, even in files that are soon gone."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._sizes = self._look()

    def _look(self) -> dict[str, int]:
        sizes = {}
        for place, _, names in os.walk(self._path):
            for name in names:
                with contextlib.suppress(OSError):
                    path = os.path.join(place, name)
                    sizes[path] = os.path.getsize(path)
        return sizes

    def more(self) -> int:
        """Bytes of files that are new since the last look."""
        now = self._look()
        fresh = sum(size for path, size in now.items() if path not in self._sizes)
        self._sizes = {**self._sizes, **now}
        return fresh


# the parts


def first(bench: Bench) -> None:
    """A first load against Spark's own writing of the source's rows."""
    docs = bench.options.docs
    ratios, times = [], []
    for _ in range(bench.options.firsts):
        shutil.rmtree(bench.table, ignore_errors=True)
        began = time.perf_counter()
        ts.mirror(bench.spark, bench.url, bench.table, once=True).awaitTermination()
        ours = time.perf_counter() - began
        parquet = bench.directory / "parquet"
        shutil.rmtree(parquet, ignore_errors=True)
        began = time.perf_counter()
        source = bench.spark.read.format("tailrace").option("connectionString", bench.url).load()
        source.write.parquet(str(parquet))
        theirs = time.perf_counter() - began
        ratios.append(theirs / ours)
        said(
            "first",
            f"{docs:,} documents in {ours:.1f} s, {docs / ours:,.0f} rows/s; "
            f"read and write.parquet {theirs:.1f} s",
        )
        shutil.rmtree(parquet, ignore_errors=True)
        times.append(ours)
    before = bench.figure("first_s", statistics.median(times))
    if before is not None:
        smaller, took = before
        longer = statistics.median(times) / took
        limit = FIRST_GROWTH_TARGET * docs / smaller
        said(
            "first",
            f"{longer:.1f} times as long as {smaller:,} documents",
            ok=longer <= limit,
            target=f"at most {limit:.1f}",
        )
    share = statistics.median(ratios)
    said("first", f"share {share:.2f}", ok=share >= FIRST_TARGET, target=f"{FIRST_TARGET}")


def rounds(bench: Bench) -> None:
    """Rounds of changes, compaction included."""
    seconds: list[float] = []
    compacted: list[float] = []
    folder = 0
    with Stepped(bench) as mirror:
        written = Written(bench.table)
        used: dict[str, float] = {}
        for number in range(bench.options.rounds):
            bench.change(1_000 + number)
            before = cpu_seconds(bench.node_pid)
            until_commit, with_compaction = mirror.catch_up()
            seconds.append(until_commit)
            compacted.append(with_compaction)
            for name, spent in cpu_seconds(bench.node_pid).items():
                used[name] = used.get(name, 0.0) + spent - before.get(name, 0.0)
            folder += written.more()
        commits = [progress for progress in mirror.commits if progress.changes]
    changed = sum(progress.changes for progress in commits)
    rate = changed / sum(seconds)
    per_change = bench.options.size + 64  # key and metadata of a change on the wire
    amplification = folder / (changed * per_change)
    names = ("plan", "schedule", "read", "write", "commit", "maintain")
    phases = {name: statistics.median(made.seconds.get(name, 0.0) for made in commits) for name in names}
    said(
        "rounds",
        f"{changed:,} changes in {len(commits)} commits: {rate:,.0f} changes/s by the clock, "
        f"{changed / sum(compacted):,.0f} if every compaction is waited for",
    )
    said("rounds", "median ms: " + ", ".join(f"{name} {spent * 1e3:.0f}" for name, spent in phases.items()))
    in_ms = (f"{name} {spent / len(seconds) * 1e3:.0f}" for name, spent in used.items())
    said("rounds", "ms of CPU a round: " + ", ".join(in_ms))
    other_size = bench.figure("changes_per_s", rate)
    if other_size is not None:
        docs, other = other_size
        said(
            "rounds",
            f"{rate / other:.2f} of the changes/s into {docs:,} documents",
            ok=rate >= RATE_TARGET * other,
            target=f"{RATE_TARGET}",
        )
    said(
        "rounds",
        f"bytes written for a byte of changes {amplification:.2f} ({folder / 1e6:,.0f} MB)",
        ok=amplification <= AMPLIFICATION_TARGET,
        target=f"at most {AMPLIFICATION_TARGET}",
    )


def merge(bench: Bench) -> None:
    """What people do without the mirror: MERGE. Alternates with the mirror, on the same changes."""
    bench.need_mirror()
    merged = str(bench.directory / "merged")
    feed = bench.options.feed
    timings = []
    # in a process of its own: its memory must not count as the driver's
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(copy_table, bench.table, merged).result()
        if feed is not None:
            feed.mkdir(parents=True, exist_ok=True)
            shutil.copytree(merged, feed / "table")
        with Stepped(bench) as mirror:
            for number in range(bench.options.merges):
                held = bench.client.high_seqnos()
                start = {v: source_position(bench, v, seqno) for v, seqno in held.items() if seqno}
                bench.change(5_000 + number)
                ours, with_compaction = mirror.catch_up()
                path = None if feed is None else str(feed / f"round-{number:03d}.parquet")
                count, theirs = pool.submit(merge_new, bench.url, merged, start, path).result()
                pair = {"changes": count, "mirror_s": ours, "with_compaction_s": with_compaction}
                timings.append({**pair, "delta_rs_s": theirs})
    shutil.rmtree(merged, ignore_errors=True)
    if feed is not None:
        (feed / "figures.json").write_text(json.dumps(timings))
    times = statistics.median(pair["delta_rs_s"] / pair["mirror_s"] for pair in timings)
    ours, theirs = (
        statistics.median(pair["changes"] / pair[who] for pair in timings)
        for who in ("mirror_s", "delta_rs_s")
    )
    waited = sum(pair["delta_rs_s"] for pair in timings) / sum(pair["with_compaction_s"] for pair in timings)
    target = 20.0 if bench.options.docs >= 10_000_000 else 3.0
    said(
        "merge",
        f"the mirror {ours:,.0f} changes/s, delta-rs MERGE {theirs:,.0f}: {times:.1f} times, median of pairs "
        f"({waited:.1f} times if every compaction is waited for)",
        ok=times >= target,
        target=f"{target}",
    )


def copy_table(table: str, merged: str) -> None:
    """Copy the rows of a mirror into a plain Delta table."""
    held = open_table(table)
    masks = {file.path: held.mask(file) for file in held.files()}
    rows = scan(held.store, held.files(), masks, held.schema, key_hash=KeyHash(held.secret))
    write_deltalake(merged, pa.RecordBatchReader.from_batches(held.schema, rows))


def merge_new(url: str, merged: str, start: Mapping[int, Position], path: str | None) -> tuple[int, float]:
    """Read what is new and MERGE it; how many changes, and how long it took."""
    began = time.perf_counter()
    with tailrace.connect_sync(url) as source:
        changes = pa.Table.from_batches(list(source.batches(start=start, end="now")))
    rows = newest_rows(changes)
    merge_rows(merged, rows)
    seconds = time.perf_counter() - began
    if path is not None:
        pq.write_table(rows, path)
    return changes.num_rows, seconds


def source_position(bench: Bench, vbucket: int, seqno: int) -> Position:
    return Position.at(bench.client.failover_log(vbucket).newest.vb_uuid, seqno)


def newest_rows(changes: pa.Table) -> pa.Table:
    """Rows of a table, each document once, with a column that says which are deleted."""
    numbered = changes.append_column("at", pa.array(range(changes.num_rows)))
    last = numbered.group_by("key").aggregate([("at", "max")])
    return rows_of(numbered.take(last["at_max"]).drop_columns(["at"]), keep_deletes=True)


def merge_rows(table: str, rows: pa.Table) -> None:
    update = {name: f"source.{name}" for name in rows.column_names if name != "deleted"}
    (
        DeltaTable(table)
        .merge(rows, "target.key = source.key", source_alias="source", target_alias="target")
        .when_matched_delete("source.deleted")
        .when_matched_update(update)
        .when_not_matched_insert(update, "not source.deleted")
        .execute()
    )


def write_steadily(bench: Bench, seconds: float, note: Callable[[int, int], None]) -> int:
    """200 writes a second to random documents."""
    rng = random.Random(7)
    body = {"text": "x" * max(1, bench.options.size - 20)}
    began = time.perf_counter()
    count = 0
    while (passed := time.perf_counter() - began) < seconds:
        if count > passed * WRITES_A_SECOND:
            time.sleep(0.002)
            continue
        key = f"doc::{rng.randrange(bench.options.docs):08d}"
        stored = bench.client.set(key, {**body, "n": count})
        note(bench.client.vbucket_of(key), stored.seqno)
        count += 1
    return count


def latency(bench: Bench) -> None:
    """The time from a write to its row."""
    written: list[tuple[float, int, int]] = []
    with bench.running_mirror() as watch:
        write_steadily(
            bench,
            bench.options.latency_seconds,
            lambda vbucket, seqno: written.append((time.perf_counter(), vbucket, seqno)),
        )
        watch.wait_caught_up()
        commits = watch.commits
    waits = []
    for at, vbucket, seqno in written:
        seen = next(
            when
            for when, progress in commits
            if progress.positions.get(vbucket, Position.BEGINNING).seqno >= seqno
        )
        waits.append(seen - at)
    waits.sort()
    p50, p99 = waits[len(waits) // 2], waits[len(waits) * 99 // 100]
    said(
        "latency",
        f"{len(waits):,} writes into {bench.options.docs:,} documents: p50 {p50:.2f} s, p99 {p99:.2f} s",
        ok=p50 <= LATENCY_TARGET_S[0] and p99 <= LATENCY_TARGET_S[1],
        target="1 s and 3 s",
    )


def repair(bench: Bench) -> None:
    """The time from a loss of changes to a table without them."""
    count = bench.options.vbuckets
    with bench.running_mirror() as watch:
        for lost in sorted({1, min(32, count), count}):
            bench.load(4 * count, "--seed", str(lost))
            watch.wait_caught_up()
            time.sleep(1)
            commits = len(watch.commits)
            began = time.perf_counter()
            bench.client.rewind(range(lost), to_seqno=None, lose=3)
            back: set[int] = set()
            while len(back) < lost:
                assert watch.handle.isActive, f"the mirror failed: {watch.handle.exception()}"
                time.sleep(0.01)
                for _, progress in watch.commits[commits:]:
                    back |= set(progress.rolled_back)
            watch.wait_caught_up()
            seconds = watch.commits[-1][0] - began
            target = REPAIR_TARGET_S.get(lost, REPAIR_ALL_TARGET_S)
            said(
                "repair",
                f"{lost:,} vbuckets lose 3 changes each: right after {seconds:.2f} s",
                ok=seconds <= target,
                target=f"{target} s",
            )


def trickle(bench: Bench) -> None:
    """A few changes for a long time: does the folder stay small?"""
    with bench.running_mirror() as watch:
        sizes = []
        began = time.perf_counter()
        while (left := bench.options.seconds - (time.perf_counter() - began)) > 0:
            write_steadily(bench, min(30.0, left), lambda vbucket, seqno: None)
            sizes.append(folder_bytes(bench.table))
        watch.wait_caught_up()
        commits = len(watch.commits)
    live = sum(file.size * file.live_rows // max(1, file.rows) for file in open_table(bench.table).files())
    share = folder_bytes(bench.table) / live
    said("trickle", "folder in MB every 30 s: " + " ".join(f"{size / 1e6:.0f}" for size in sizes))
    said(
        "trickle",
        f"{commits} commits in {bench.options.seconds:.0f} s; the folder is {share:.2f} times the live data",
        ok=share <= FOLDER_TARGET,
        target=f"below {FOLDER_TARGET}",
    )


def memory(bench: Bench) -> None:
    """Does the memory of any process grow while many changes go through?"""
    samples: list[dict[str, float]] = []
    with bench.running_mirror() as watch:
        for number in range(max(9, bench.options.memory_changes // bench.options.changes)):
            bench.change(9_000 + number)
            watch.wait_caught_up()
            samples.append(holdings(bench))
    third = len(samples) // 3  # the first third is for warming up
    for name in samples[0]:
        before, after = (
            statistics.median(held.get(name, 0.0) for held in part)
            for part in (samples[third : 2 * third], samples[2 * third :])
        )
        said(
            "memory",
            f"{name}: {before:,.0f} MB, at the end {after:,.0f} MB",
            ok=after <= before * 1.1 + 10,
            target="flat",
        )


def holdings(bench: Bench) -> dict[str, float]:
    """Megabytes by process; for Java those in use after a collection."""
    jvm = bench.spark.sparkContext._jvm
    jvm.System.gc()
    runtime = jvm.Runtime.getRuntime()
    held = python_holdings()
    held["Java heap in use"] = (runtime.totalMemory() - runtime.freeMemory()) / 1e6
    return held


def cpu_seconds(node: int) -> dict[str, float]:
    """Seconds of CPU that the node, this process, its Java and the Python workers have used."""
    ticks = os.sysconf("SC_CLK_TCK")
    parents: dict[int, int] = {}
    spent: dict[int, tuple[bytes, float]] = {}
    for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            parents[pid] = int(fields[1])
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            spent[pid] = (command, (int(fields[11]) + int(fields[12])) / ticks)
    used = {"node": spent[node][1], "driver": time.process_time(), "Java": 0.0, "workers": 0.0}
    for pid, (command, seconds) in spent.items():
        above = pid
        while above in parents and above != os.getpid():
            above = parents[above]
        if above != os.getpid() or pid == os.getpid():
            continue
        if b"pyspark.daemon" in command:
            used["workers"] += seconds
        elif b"java" in command.partition(b"\0")[0]:
            used["Java"] += seconds
    return used


def node_pid(directory: Path) -> int:
    """The process that has this data directory."""
    wanted = str(directory / "data").encode()
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                command = (path / "cmdline").read_bytes().split(b"\0")
                if b"serve" in command and wanted in command:
                    return int(path.name)
    raise SystemExit("the node is not there")


def python_holdings() -> dict[str, float]:
    """Megabytes of the driver's Python and of the largest Python worker."""
    held = {"driver": 0.0, "largest Python worker": 0.0}
    for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            size = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
            if pid == os.getpid():
                held["driver"] = size
            elif b"pyspark.daemon" in command:
                held["largest Python worker"] = max(held["largest Python worker"], size)
    return held


def read(bench: Bench) -> None:
    """Reads the same rows with each engine."""
    import polars

    bench.need_mirror()
    table = open_table(bench.table)
    masks = {file.path: table.mask(file) for file in table.files()}
    names = ["vbucket", "key", "seqno", "cas"]
    ours = digest(
        scan(table.store, table.files(), masks, table.schema, key_hash=KeyHash(table.secret), columns=names)
    )
    query = QueryBuilder().register("t", DeltaTable(bench.table))
    theirs = digest(pa.table(query.execute(f"select {', '.join(names)} from t")).to_batches())
    polar = polars.scan_delta(bench.table).select(names).collect().to_arrow()
    others = {"delta-rs": theirs, "polars": digest(polar.to_batches())}
    for engine, counts in others.items():
        said("read", f"{engine}: {counts[0]:,} rows", ok=counts == ours, target=f"{ours[0]:,} rows, the same")
    masked = sum(len(mask) for mask in masks.values())
    said("read", f"{len(table.files())} files, {masked / max(1, masked + ours[0]):.0%} of their rows masked")


def digest(batches: Any) -> tuple[int, str]:
    """How many rows, and a hash of them that does not depend on their order."""
    count, total = 0, 0
    for batch in batches:
        columns = [batch.column(number).to_pylist() for number in range(batch.num_columns)]
        for row in zip(*columns, strict=True):
            count += 1
            total ^= int.from_bytes(hashlib.blake2b(repr(row).encode(), digest_size=8).digest())
    return count, f"{total:016x}"


PARTS: dict[str, Callable[[Bench], None]] = {
    "first": first,
    "rounds": rounds,
    "merge": merge,
    "latency": latency,
    "repair": repair,
    "trickle": trickle,
    "memory": memory,
    "read": read,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--docs", type=int, default=1_000_000)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--vbuckets", type=int, default=1024)
    parser.add_argument("--changes", type=int, default=10_000, help="of a round")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--firsts", type=int, default=2, help="first loads")
    parser.add_argument("--merges", type=int, default=3)
    parser.add_argument("--latency-seconds", type=float, default=60.0)
    parser.add_argument("--memory-changes", type=int, default=300_000, help="3,000,000 for the full run")
    parser.add_argument("--seconds", type=float, default=600.0, help="of the trickle")
    parser.add_argument("--figures", type=Path, help="figures of runs, as JSON")
    parser.add_argument("--feed", type=Path, help="leave the rounds of `merge` here")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"parts are {', '.join(PARTS)}")
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    settings = {"spark.ui.enabled": "false", "spark.log.level": "ERROR", "spark.driver.memory": "4g"}
    settings["spark.ui.showConsoleProgress"] = "false"
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as name:
        directory = Path(name)
        with node(directory, options.vbuckets) as port:
            load(port, options.docs, options.size)
            spark = ts.session("tailrace bench", **settings)
            bench = Bench(options, spark, port, directory)
            for part, run in PARTS.items():
                if part in parts:
                    run(bench)
                    bench.save_figures()
                if part == "memory":  # later parts run other engines in this process
                    bench.peak.stop()
            peak = bench.peak
            said(
                "memory",
                f"the largest Python worker held {peak.workers_mb:,.0f} MB",
                ok=peak.workers_mb <= WORKER_TARGET_MB,
                target="1 GiB",
            )
            said("memory", f"the driver's Python held {peak.driver_mb:,.0f} MB at the most")
            bench.close()
            spark.stop()


if __name__ == "__main__":
    main()
