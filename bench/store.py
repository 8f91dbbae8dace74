"""The store, side by side with RocksDB on the same machine in the same run.

    python bench/store.py                       500,000 documents of 256 B in 1,024 vbuckets, 1 M updates
    python bench/store.py --docs 100000 --updates 200000

Updates come in batches of 1,000, each synced before the next begins, on keys drawn at random. Ours include
sealing and compaction, and end when no maintenance is left. RocksDB (rocksdict, its own defaults, the WAL
synced per batch) is measured in three layouts; its compaction runs beside the updates, and what is left of it
when they end is waited for, too. `bench/README.md` says which is the one to compare with:

- *same job*: get by key and scan by (vbucket, seqno). A key leads to its newest seqno, (vbucket, seqno)
  leads to the frame, and an update reads the first to remove the version that it replaces.
- *same job, index in memory*: the same, but what a key leads to is also kept in a dict, so nothing is read.
- *plain*: one put of key and value; no seqnos, no scan by seqno, no versions. Another job, for orientation.

Target: updates at least 2.5 times those of the same job.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import resource
import shutil
import struct
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from tailrace.store.bucket import Bucket
from tailrace.store.engine import Engine

TARGET = 2.5
LAYOUTS = ("same job", "same job, index in memory", "plain")
BATCH = 1_000
VALUES = 0xFFFF


class Maintenance:
    """Does a bucket's maintenance on other threads, as a node does."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._jobs: dict[Any, threading.Thread] = {}

    def poll(self) -> None:
        """Take over what is done and begin what is due."""
        for job, thread in list(self._jobs.items()):
            if not thread.is_alive():
                job.finish()
                del self._jobs[job]
        while (job := self._bucket.begin_maintenance()) is not None:
            self._jobs[job] = threading.Thread(target=job.run)
            self._jobs[job].start()

    def drain(self) -> None:
        self.poll()
        while self._jobs:
            next(iter(self._jobs.values())).join()
            self.poll()


def batches(keys: int, count: int, seed: int) -> Iterator[list[int]]:
    rng = random.Random(seed)
    for _ in range(0, count, BATCH):
        yield [rng.randrange(keys) for _ in range(BATCH)]


def loading(docs: int) -> Iterator[list[int]]:
    for start in range(0, docs, BATCH):
        yield list(range(start, min(start + BATCH, docs)))


def values(size: int) -> list[bytes]:
    """Values that no compression makes smaller."""
    rng = random.Random(1)
    return [rng.randbytes(size) for _ in range(VALUES + 1)]


def timed(what: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    start = time.perf_counter()
    result = what()
    return time.perf_counter() - start, result


class Ours:
    def __init__(self, directory: str, args: argparse.Namespace) -> None:
        self.directory = directory
        self.engine = Engine(directory)
        self.bucket = self.engine.create_bucket("default", args.vbuckets)
        self.keys = [b"\0key-%010d" % i for i in range(args.docs)]
        self._mask = args.vbuckets - 1
        self._place()
        self.values = values(args.size)

    def _place(self) -> None:
        self.homes = [self.bucket.vbuckets[zlib.crc32(key) >> 16 & self._mask] for key in self.keys]

    def write(self, every_batch: Iterator[list[int]]) -> None:
        maintenance = Maintenance(self.bucket)
        keys, homes, every_value = self.keys, self.homes, self.values
        for batch in every_batch:
            for i in batch:
                homes[i].set(keys[i], every_value[i & VALUES])
            self.bucket.flush()
            maintenance.poll()
        maintenance.drain()

    def scan(self) -> tuple[int, int]:
        """Everything, as a backfill reads it."""
        frames = size = 0
        for vbucket in self.bucket:
            after = 0
            while (snapshot := vbucket.snapshot_after(after)) is not None:
                while (chunk := snapshot.read()) is not None:
                    frames += len(chunk.offsets)
                    size += len(chunk.data)
                after = snapshot.end
        return frames, size

    def get(self, wanted: list[int]) -> None:
        keys, homes = self.keys, self.homes
        for i in wanted:
            homes[i].get(keys[i])

    def reopen(self) -> float:
        self.engine.close()
        seconds, self.engine = timed(lambda: Engine(self.directory))
        self.bucket = self.engine.buckets["default"]
        self._place()
        return seconds


class Rocks:
    def __init__(self, directory: str, args: argparse.Namespace, layout: str) -> None:
        from rocksdict import Options, Rdict, WriteOptions

        self.database = Rdict(directory, Options(raw_mode=True))
        self._options = WriteOptions()
        self._options.sync = True
        self._plain = layout == "plain"
        self._index: dict[bytes, bytes] | None = {} if "memory" in layout else None
        self._mask = args.vbuckets - 1
        self.keys = [b"\0key-%010d" % i for i in range(args.docs)]
        self.homes = [zlib.crc32(key) >> 16 & self._mask for key in self.keys]
        self.values = values(args.size)
        self._high = [0] * args.vbuckets

    def write(self, every_batch: Iterator[list[int]]) -> None:
        from rocksdict import WriteBatch

        pack, database, high, index = struct.Struct(">HQ").pack, self.database, self._high, self._index
        head = b"\x80\x57" + bytes(53)
        for batch in every_batch:
            changes = WriteBatch(raw_mode=True)
            if self._plain:
                for i in batch:
                    changes.put(self.keys[i], self.values[i & VALUES])
            else:
                for i in batch:
                    key, vbucket = self.keys[i], self.homes[i]
                    old = database.get(key) if index is None else index.get(key)
                    if old is not None:
                        changes.delete(old)
                    high[vbucket] += 1
                    place = b"\1" + pack(vbucket, high[vbucket])
                    if index is not None:
                        index[key] = place
                    changes.put(key, place)
                    changes.put(place, head + key + self.values[i & VALUES])
            database.write(changes, self._options)
        database.flush()
        work = ("rocksdb.compaction-pending", "rocksdb.num-running-compactions")
        while any(database.property_int_value(one) for one in work):
            time.sleep(0.01)

    def get(self, wanted: list[int]) -> None:
        if self._plain:
            for i in wanted:
                self.database.get(self.keys[i])
        else:
            for i in wanted:
                self.database.get(self.database.get(self.keys[i]))


def disk_bytes(directory: str) -> int:
    found = (os.path.join(at, name) for at, _, names in os.walk(directory) for name in names)
    return sum(os.path.getsize(path) for path in found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--docs", type=int, default=500_000)
    parser.add_argument("--updates", type=int, default=1_000_000)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--vbuckets", type=int, default=1024)
    parser.add_argument("--directory", help="where to put the stores; a temporary directory by default")
    parser.add_argument("--without-rocksdb", action="store_true")
    args = parser.parse_args()

    sys.setswitchinterval(0.000_5)  # as a node does
    root = tempfile.mkdtemp(dir=args.directory, prefix="tailrace-bench-")
    try:
        run(args, root)
    finally:
        shutil.rmtree(root)


def show(what: str, value: str, verdict: str = "") -> None:
    print(f"{what:<62}{value:>16}{verdict}", flush=True)


def run(args: argparse.Namespace, root: str) -> None:
    rng = random.Random(3)
    wanted = [rng.randrange(args.docs) for _ in range(min(args.docs, 200_000))]
    print(f"{args.docs:,} documents of {args.size} B, {args.vbuckets} vbuckets, {os.cpu_count()} cores")
    our_rate, our_cpu_s = measure_ours(args, os.path.join(root, "tailrace"), wanted)
    if args.without_rocksdb:
        return
    try:
        import rocksdict  # noqa: F401
    except ImportError:
        print("without RocksDB: rocksdict is not installed (pip install rocksdict)")
        return
    for layout in LAYOUTS:
        rate, cpu_s = measure_rocks(args, os.path.join(root, "rocksdb"), wanted, layout)
        share = our_rate / rate
        verdict = ""
        if layout == "same job":
            verdict = f"  target {TARGET}: {'ok' if share >= TARGET else 'MISSED'}"
        show(f"tailrace's updates / rocksdb's, {layout}", f"{share:.2f}", verdict)
        show("... by CPU time, which a busy machine falsifies less", f"{cpu_s / our_cpu_s:.2f}")


def measure_ours(args: argparse.Namespace, directory: str, wanted: list[int]) -> tuple[float, float]:
    ours = Ours(directory, args)
    seconds, _ = timed(lambda: ours.write(loading(args.docs)))
    show("tailrace: load, fsync per 1,000", f"{args.docs / seconds:,.0f}/s")
    seconds, (frames, size) = timed(ours.scan)
    show("tailrace: scan of distinct data", f"{frames / seconds:,.0f}/s")
    show("", f"{size / seconds / 1e9:.2f} GB/s")
    cpu_s = time.process_time()
    seconds, _ = timed(lambda: ours.write(batches(args.docs, args.updates, 5)))
    cpu_s = time.process_time() - cpu_s
    rate = args.updates / seconds
    show("tailrace: updates, fsync per 1,000, with compaction", f"{rate:,.0f}/s")
    show("tailrace: on disk", f"{disk_bytes(directory) / 1e6:,.0f} MB")
    seconds, _ = timed(lambda: ours.get(wanted))
    show("tailrace: gets", f"{len(wanted) / seconds:,.0f}/s")
    show("tailrace: open again", f"{ours.reopen() * 1000:,.0f} ms")
    seconds, _ = timed(ours.bucket.compact)
    show("tailrace: compaction of everything", f"{seconds:.1f} s")
    seconds, (frames, size) = timed(ours.scan)
    show("tailrace: scan after that", f"{frames / seconds:,.0f}/s")
    show("", f"{size / seconds / 1e9:.2f} GB/s")
    ours.engine.close()
    show("tailrace: largest RSS", f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024:,} MB")
    shutil.rmtree(directory)
    return rate, cpu_s


def measure_rocks(
    args: argparse.Namespace, directory: str, wanted: list[int], layout: str
) -> tuple[float, float]:
    name = f"rocksdb, {layout}"
    theirs = Rocks(directory, args, layout)
    seconds, _ = timed(lambda: theirs.write(loading(args.docs)))
    show(f"{name}: load, fsync per 1,000", f"{args.docs / seconds:,.0f}/s")
    cpu_s = time.process_time()
    seconds, _ = timed(lambda: theirs.write(batches(args.docs, args.updates, 5)))
    cpu_s = time.process_time() - cpu_s
    rate = args.updates / seconds
    show(f"{name}: updates, fsync per 1,000", f"{rate:,.0f}/s")
    show(f"{name}: on disk", f"{disk_bytes(directory) / 1e6:,.0f} MB")
    seconds, _ = timed(lambda: theirs.get(wanted))
    show(f"{name}: gets", f"{len(wanted) / seconds:,.0f}/s")
    theirs.database.close()
    shutil.rmtree(directory)
    return rate, cpu_s


if __name__ == "__main__":
    main()
