"""The store, side by side with RocksDB on the same machine in the same run.

    python bench/store.py                       500,000 documents of 256 B in 1,024 vbuckets, 1 M updates
    python bench/store.py --docs 100000 --updates 200000

Updates of random keys come in batches of 1,000, each synced before the next begins. They are done in rounds,
in which each contender has its turn; a turn ends when no sealing, flushing or compaction is due. At the end
each is compacted fully, so that nothing superseded is left, and that time counts too: all begin with the same
state, and all end with the same. The batches of a turn are made before its clock starts, and the interpreter
is tuned as a node tunes it. `bench/README.md` says what each contender does:

- *tailrace*, as it is, except for the history that a node keeps to undo changes (a node has `--history 200`).
- *rocksdb, same job*: documents by key, with rev and CAS, and everything of a vbucket after a seqno, each
  document once. This is the one with a target: at least 2.5 times its updates.
- *rocksdb, same job, index in memory*: the same without reading: the newest versions are also in a dict.
- *rocksdb, plain*: a put of key and value; no seqnos, no revs. A different job, for orientation.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from tailrace.store.base import StoreSettings
from tailrace.store.bucket import EngineBucket
from tailrace.store.engine import Engine

TARGET = 2.5
LAYOUTS = ("same job", "same job, index in memory", "plain")
BATCH = 1_000
VALUES = 1_024


class Documents(NamedTuple):
    """A batch as it comes from clients: new bytes objects."""

    vbuckets: list[int]
    keys: list[bytes]
    values: list[bytes]


class Source:
    """Makes new batches for each turn, before its clock starts, so that no key has its hash cached."""

    def __init__(self, args: argparse.Namespace) -> None:
        rng = random.Random(1)
        self.docs = args.docs
        self._mask = args.vbuckets - 1
        self._values = [rng.randbytes(args.size) for _ in range(VALUES)]  # no compression makes them smaller

    def documents(self, numbers: list[int]) -> Documents:
        keys = [b"\0key-%010d" % number for number in numbers]
        mask, values = self._mask, self._values
        return Documents(
            [zlib.crc32(key) >> 16 & mask for key in keys],
            keys,
            [values[number % VALUES] for number in numbers],
        )

    def load(self) -> list[Documents]:
        starts = range(0, self.docs, BATCH)
        return [self.documents(list(range(start, min(start + BATCH, self.docs)))) for start in starts]

    def updates(self, count: int, seed: int) -> list[Documents]:
        rng = random.Random(seed)
        return [
            self.documents([rng.randrange(self.docs) for _ in range(BATCH)]) for _ in range(0, count, BATCH)
        ]


class Contender(Protocol):
    def write(self, batches: list[Documents]) -> None:
        """Write batches, each on disk before the next begins. At the end all maintenance that is due is done;
        what is in the log and in memory may stay there.
        """
        ...

    def compact(self) -> None:
        """Compact until nothing superseded is left."""
        ...

    def count(self) -> int:
        """How many documents there are, by reading all of them."""
        ...

    def get(self, documents: Documents) -> None: ...

    def close(self) -> None: ...


class Ours:
    def __init__(self, directory: str, args: argparse.Namespace) -> None:
        self._directory = directory
        self._settings = StoreSettings(history_changes=args.history)
        self._engine = Engine(directory, settings=self._settings)
        self._bucket: EngineBucket = self._engine.create_bucket("default", args.vbuckets)
        self._jobs: dict[Any, threading.Thread] = {}

    def write(self, batches: list[Documents]) -> None:
        vbuckets: Sequence[Any] = self._bucket.vbuckets
        for batch in batches:
            for vbucket, key, value in zip(*batch, strict=True):
                vbuckets[vbucket].put(key, value, 0, 0, 0)
            self._bucket.flush()
            self._maintain()
        while self._jobs:
            next(iter(self._jobs.values())).join()
            self._maintain()

    def _maintain(self) -> None:
        """Adopt finished jobs and start those due, on other threads, as a node does."""
        for job, thread in list(self._jobs.items()):
            if not thread.is_alive():
                job.finish()
                del self._jobs[job]
        while (job := self._bucket.begin_maintenance()) is not None:
            self._jobs[job] = threading.Thread(target=job.run)
            self._jobs[job].start()

    def compact(self) -> None:
        self._bucket.compact()

    def count(self) -> int:
        return self.scan()[0]

    def scan(self) -> tuple[int, int]:
        """Read everything as a backfill does: the number of frames and bytes."""
        frames = size = 0
        for vbucket in self._bucket:
            after = 0
            while (snapshot := vbucket.snapshot_after(after)) is not None:
                while (chunk := snapshot.read()) is not None:
                    frames += len(chunk.offsets)
                    size += len(chunk.data)
                after = snapshot.end
        return frames, size

    def get(self, documents: Documents) -> None:
        vbuckets: list[Any] = self._bucket.vbuckets
        for number, key in zip(documents.vbuckets, documents.keys, strict=True):
            vbuckets[number].get(key)

    def reopen(self) -> None:
        self._engine = Engine(self._directory, settings=self._settings)
        self._bucket = self._engine.buckets["default"]

    def close(self) -> None:
        self._engine.close()


class Rocks:
    """RocksDB with its defaults, its log synced for each batch."""

    # a mutation's header and extras: what a stream sends, with CAS, seqno, rev, flags and expiry
    _HEAD = struct.Struct(">HHBBHIIQQQIIIHB")
    _ENTRY = struct.Struct(">BHQQ")  # what a key leads to: 1, vbucket and seqno, which are a key too; rev
    _PLACE_BYTES = 11

    def __init__(self, directory: str, args: argparse.Namespace, layout: str) -> None:
        from rocksdict import Options, Rdict, WriteOptions

        self._database = Rdict(directory, Options(raw_mode=True))
        self._options = WriteOptions()
        self._options.sync = True
        self._plain = layout == "plain"
        self._index: dict[bytes, bytes] | None = {} if "memory" in layout else None
        self._high = [0] * args.vbuckets

    def write(self, batches: list[Documents]) -> None:
        from rocksdict import WriteBatch

        for batch in batches:
            changes = WriteBatch(raw_mode=True)
            if self._plain:
                for key, value in zip(batch.keys, batch.values, strict=True):
                    changes.put(key, value)
            else:
                self._change(changes, batch)
            self._database.write(changes, self._options)
        self._settle()

    def _change(self, changes: Any, batch: Documents) -> None:
        """Put the document's new frame at its new seqno, point the key there, and delete the old frame, which
        a scan must not meet.
        """
        head, entry_of, entry_at = self._HEAD.pack, self._ENTRY.pack, self._ENTRY.unpack
        put, delete, high = changes.put, changes.delete, self._high
        fresh: dict[bytes, bytes] = {} if self._index is None else self._index  # what the batch has so far
        read = self._database.get if self._index is None else (lambda _key: None)
        cas = time.time_ns()
        for vbucket, key, value in zip(*batch, strict=True):
            old = fresh.get(key) or read(key)
            rev = 1
            if old is not None:
                rev = entry_at(old)[3] + 1
                delete(old[: self._PLACE_BYTES])
            high[vbucket] = seqno = high[vbucket] + 1
            cas += 1
            fresh[key] = entry = entry_of(1, vbucket, seqno, rev)
            put(key, entry)
            body = 31 + len(key) + len(value)
            frame = head(0x8057, len(key), 31, 0, vbucket, body, 0, cas, seqno, rev, 0, 0, 0, 0, 0)
            put(entry[: self._PLACE_BYTES], frame + key + value)

    def _settle(self) -> None:
        due = ["mem-table-flush-pending", "num-running-flushes"]
        due += ["compaction-pending", "num-running-compactions"]
        while any(self._database.property_int_value(f"rocksdb.{property}") for property in due):
            time.sleep(0.001)

    def compact(self) -> None:
        self._database.compact_range(None, None)
        self._settle()

    def count(self) -> int:
        return sum(1 for _ in self._database.keys(from_key=b"\0" if self._plain else b"\1"))

    def get(self, documents: Documents) -> None:
        get = self._database.get
        if self._plain:
            for key in documents.keys:
                get(key)
        else:
            for key in documents.keys:
                get((get(key) or b"")[: self._PLACE_BYTES])

    def close(self) -> None:
        self._database.close()


@dataclass
class Turns:
    """What a contender has taken so far, in elapsed and in CPU time."""

    name: str
    contender: Contender
    directory: str
    loading_s: float = 0.0
    rounds_s: list[float] = field(default_factory=list)
    compacting_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self.rounds_s) + self.compacting_s

    def take(self, what: Callable[[], Any]) -> float:
        """Do a turn; how long it took."""
        gc.collect()
        cpu_s, start = processor_s(), time.perf_counter()
        what()
        self.cpu_s += processor_s() - cpu_s
        return time.perf_counter() - start


def processor_s() -> float:
    """CPU time of this process and of those that it started."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--docs", type=int, default=500_000)
    parser.add_argument("--updates", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--vbuckets", type=int, default=1024)
    parser.add_argument("--history", type=int, default=0, help="changes of a vbucket that stay undoable")
    parser.add_argument("--directory", help="where to put the stores; a temporary directory by default")
    parser.add_argument("--without-rocksdb", action="store_true")
    args = parser.parse_args()

    # As a node does, for all contenders: full collections find nothing.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    sys.setswitchinterval(0.000_5)
    root = tempfile.mkdtemp(dir=args.directory, prefix="tailrace-bench-")
    try:
        run(args, root)
    finally:
        shutil.rmtree(root)


def show(what: str, value: str, verdict: str = "") -> None:
    print(f"{what:<62}{value:>16}{verdict}", flush=True)


def layouts(args: argparse.Namespace) -> tuple[str, ...]:
    if args.without_rocksdb:
        return ()
    try:
        import rocksdict  # noqa: F401
    except ImportError:
        print("without RocksDB: rocksdict is not installed (pip install -e '.[bench]')")
        return ()
    return LAYOUTS


def run(args: argparse.Namespace, root: str) -> None:
    print(f"{args.docs:,} documents of {args.size} B, {args.vbuckets} vbuckets, {os.cpu_count()} cores")
    source = Source(args)
    directory = os.path.join(root, "tailrace")
    ours = Turns("tailrace", Ours(directory, args), directory)
    everybody = [ours]
    for layout in layouts(args):
        directory = os.path.join(root, layout.replace(" ", "-"))
        everybody.append(Turns(f"rocksdb, {layout}", Rocks(directory, args, layout), directory))
    for turns in everybody:
        contender = turns.contender
        documents = source.load()
        turns.loading_s = turns.take(partial(contender.write, documents))
        show(f"{turns.name}: load, fsync per 1,000", f"{args.docs / turns.loading_s:,.0f}/s")
        turns.cpu_s = 0.0
    count = -(-args.updates // args.rounds // BATCH) * BATCH
    for seed in range(args.rounds):
        for turns in everybody:
            contender, batches = turns.contender, source.updates(count, seed)
            took = turns.take(partial(contender.write, batches))
            turns.rounds_s.append(took)
    for turns in everybody:
        turns.compacting_s = turns.take(turns.contender.compact)
        if (held := turns.contender.count()) != args.docs:
            raise SystemExit(f"{turns.name} has {held:,} documents and not {args.docs:,}")

    updates = count * args.rounds
    for turns in everybody:
        show(f"{turns.name}: updates, compacted wholly", f"{updates / turns.seconds:,.0f}/s")
        show("... without the last compaction", f"{updates / sum(turns.rounds_s):,.0f}/s")
        show("... CPU time of an update", f"{turns.cpu_s / updates * 1e6:.1f} us")
        show("... on disk", f"{disk_bytes(turns.directory) / 1e6:,.0f} MB")
    for theirs in everybody[1:]:
        share = theirs.seconds / ours.seconds
        verdict = f"  target {TARGET}: {'ok' if share >= TARGET else 'MISSED'}"
        show(f"tailrace's updates / {theirs.name}", f"{share:.2f}", verdict if theirs is everybody[1] else "")
        rounds = sorted(b / a for a, b in zip(ours.rounds_s, theirs.rounds_s, strict=True))
        show("... round by round, without the last compaction", f"{rounds[0]:.2f} to {rounds[-1]:.2f}")
        show("... by CPU time, which a busy machine falsifies less", f"{theirs.cpu_s / ours.cpu_s:.2f}")
    rng = random.Random(3)
    wanted = source.documents([rng.randrange(args.docs) for _ in range(min(args.docs, 200_000))])
    for turns in everybody:
        seconds = turns.take(partial(turns.contender.get, wanted))
        show(f"{turns.name}: gets", f"{len(wanted.keys) / seconds:,.0f}/s")
        turns.contender.close()
    more_of_ours(ours)


def more_of_ours(turns: Turns) -> None:
    """Measurements without a contender."""
    ours = turns.contender
    assert isinstance(ours, Ours)
    show("tailrace: open again", f"{turns.take(ours.reopen) * 1000:,.0f} ms")
    start = time.perf_counter()
    frames, size = ours.scan()
    seconds = time.perf_counter() - start
    show("tailrace: scan", f"{frames / seconds:,.0f}/s")
    show("", f"{size / seconds / 1e9:.2f} GB/s")
    show("largest RSS of all", f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024:,} MB")
    ours.close()


def disk_bytes(directory: str) -> int:
    paths = (os.path.join(at, name) for at, _, names in os.walk(directory) for name in names)
    return sum(os.path.getsize(path) for path in paths)


if __name__ == "__main__":
    main()
