"""A mirror's table with very many commits: how long it takes to open, and how large its log is.

    python bench/table_log.py [--commits 100000] [--files 67] [--cleaned]

Makes the log of a table as a mirror leaves it: a round each second, each with positions of 1,024 vbuckets and
new vectors for some of the files, and a checkpoint every 100. With ``--cleaned`` the log is what maintenance
leaves of it, otherwise every commit is still there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

import pyarrow as pa

from tailrace.clock import ManualClock
from tailrace.model import Position
from tailrace.table.contract import Commit, DataFile, NewFile
from tailrace.table.delta.actions import DomainMetadata
from tailrace.table.delta.log import commit_path
from tailrace.table.delta.table import DeltaMirrorTable

SCHEMA = pa.schema([("key", pa.string()), ("value", pa.string()), ("vbucket", pa.int32())])
VBUCKETS = 1024
TARGET_S = 2.0


def data_file(number: int) -> DataFile:
    stats = {
        "numRecords": 150_000,
        "minValues": {"key": f"key::{number:08d}", "vbucket": 0},
        "maxValues": {"key": f"key::{number + 999_999:08d}", "vbucket": 1023},
        "nullCount": {"key": 0, "vbucket": 0},
    }
    span = (1 << 64) // 1000
    low = number * span % (1 << 64)
    return DataFile(
        f"base-{number:032x}.parquet", 45_000_000, 150_000, "base", low, low + span - 1, 42_000_000,
        json.dumps(stats, separators=(",", ":")), 1_700_000_000_000,
    )  # fmt: skip


def make_table(path: Path, commits: int, files: int, *, cleaned: bool) -> None:
    """The log of the table; no data files, since nobody reads them here."""
    clock = ManualClock()
    table = DeltaMirrorTable.open_or_create(
        path, schema=SCHEMA, source={"bucket": "default"}, clock=clock, checkpoint_every=commits + 10
    )
    table.claim("bench")
    table.commit(
        Commit(
            "TAILRACE ROUND",
            positions={vb: Position.at((1 << 47) + vb, 1_000_000 + vb) for vb in range(VBUCKETS)},
            added=[NewFile(data_file(number)) for number in range(files)],
        )
    )
    state = table._state
    seqnos = state.domains["tailrace.seqnos"]
    first = state.version + 1
    adds = list(state.files.values())
    log = path / "_delta_log"
    newest_cut = commits - commits % 100 - 600
    for version in range(first, commits):
        clock.advance(1)
        if cleaned and version < newest_cut:
            continue
        touched = [adds[(version * 7 + place) % files] for place in range(min(files, 16))]
        actions: list[object] = []
        for add in touched:
            now_ms = clock.time_ns() // 1_000_000
            actions.append({"remove": add.removed(now_ms, data_change=True).to_json()})
            actions.append({"add": add.to_json()})
        info = {
            "timestamp": clock.time_ns() // 1_000_000,
            "operation": "TAILRACE ROUND",
            "operationParameters": {},
            "tailrace.run": "bench",
        }
        lines = [
            {"commitInfo": info},
            {"domainMetadata": DomainMetadata("tailrace.seqnos", seqnos).to_json()},
            *actions,
        ]
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        (log / f"{version:020d}.json").write_text(text)
        state.version, state.timestamp_ms = version, clock.time_ns() // 1_000_000
        if version % 100 == 0:
            table._log.write_checkpoint(state)
    if cleaned:
        for version in range(first):
            table.store.delete([commit_path(version)])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--commits", type=int, default=100_000)
    parser.add_argument("--files", type=int, default=67)
    parser.add_argument("--cleaned", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tailrace-log-"))
    try:
        began = time.perf_counter()
        make_table(folder / "t", options.commits, options.files, cleaned=options.cleaned)
        size = sum(entry.stat().st_size for entry in (folder / "t/_delta_log").iterdir())
        entries = sum(1 for _ in (folder / "t/_delta_log").iterdir())
        print(
            f"{entries:,} files of the log, {size / 1e6:,.1f} MB, made in {time.perf_counter() - began:.0f} s"
        )
        for attempt in ("first", "second"):
            wall, cpu = time.perf_counter(), time.process_time()
            table = DeltaMirrorTable.open(folder / "t")
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            assert table.version == options.commits - 1 and len(table.files()) == options.files
            print(f"opened at version {table.version:,} the {attempt} time: {wall:.2f} s, {cpu:.2f} s of CPU")
        print(f"target: {TARGET_S:.0f} s: {'reached' if wall < TARGET_S else 'MISSED'}")
        for name, act in (("refresh", table.refresh), ("list the files", table.files)):
            wall = time.perf_counter()
            act()
            print(f"{name}: {1000 * (time.perf_counter() - wall):.1f} ms")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
