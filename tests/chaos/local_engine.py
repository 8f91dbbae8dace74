"""A script on an engine in this process: a kill is an exception that nobody catches, and the objects of
that life are left where they are."""

from __future__ import annotations

import contextlib
import errno
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from chaos.chaos_jobs import ChaosJobs, Killed
from chaos.script import TIDYING, Life, NotEqual, check_version, make_round
from chaos.tidying import tidy
from chaos.world import World
from spark.local_jobs import LocalJobs
from spark.naive import table_state
from tailrace.clock import SYSTEM
from tailrace.spark.rounds import committing, housekeeping, mirror, planning, task
from tailrace.spark.rounds.connections import close_idle_sources
from tailrace.spark.rounds.setup import build_mirror, source_options
from tailrace.spark.rounds.verify import verify_table
from tailrace.table import compaction, sink
from tailrace.table.compaction import CompactionPolicy
from tailrace.table.contract import StorageError, TableChanged
from tailrace.table.delta import cleaning, log
from tailrace.table.delta import table as delta_table
from tailrace.table.opening import TableOptions, open_table
from tailrace.table.store import StoredFile, TableStore

_PATIENCE_S = 45.0
"""A life in which nothing happened for so long never comes to its end."""

EAGER = CompactionPolicy(tier_files=3, least_rows=12)
"""Tables of a few rows are worth a compaction."""

COMMITTED = ("mirror.after-commit", "mirror.after-rollback", "mirror.after-compaction-commit")


class Hours:
    """The system's clock, to which hours can be added; files get older with it."""

    def __init__(self) -> None:
        self._added: list[tuple[int, int]] = [(0, 0)]
        """Since when, of the system's time, and how much; in nanoseconds."""

    def add(self, hours: float) -> None:
        if hours:
            self._added.append((SYSTEM.time_ns(), self._added[-1][1] + int(hours * 3600e9)))

    def at_ms(self, system_ms: int) -> int:
        """What this clock showed at a moment of the system's."""
        added = next(added for since, added in reversed(self._added) if since <= system_ms * 1_000_000)
        return system_ms + added // 1_000_000

    def time_ns(self) -> int:
        return SYSTEM.time_ns() + self._added[-1][1]

    def monotonic(self) -> float:
        return SYSTEM.monotonic() + self._added[-1][1] / 1e9


class Chaos:
    """One script, from its seed."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.rng = random.Random(seed)
        self.world = World(self.rng)
        self.directory = directory
        self.table = str(directory / "table")
        self.clock = Hours()
        self.restarts = 0
        self.met: Counter[str] = Counter()
        """Crash points that this script came to."""
        self._met: Counter[str] = Counter()
        self._life: Life | None = None

    def run(self, rounds: int) -> None:
        """All of it; raises `NotEqual`, or whatever a mirror must not raise."""
        try:
            with self.world, self._in_our_hands():
                for _ in range(rounds):
                    self._round()
        finally:
            close_idle_sources()

    def _round(self) -> None:
        for life in make_round(self.rng):
            for accident in life.before:
                self.world.do(accident)
            self.clock.add(life.hours_before)
            self.world.trace.append(f"-- {life}")
            self._live(life)
            if life.tidying is not None and Path(self.table).exists():
                self.world.trace.append(f"-- {life.tidying}")
                tidy(self.table, life.tidying)
        self._compare()

    def _compare(self) -> None:
        held = open_table(self.table, TableOptions(clock=self.clock))
        verdict = verify_table(LocalJobs(), source_options(self.world.node.url), held)
        check_version(self.world, self.table)
        bucket, rows = self.world.state(), table_state(self.table)
        if verdict.equal != (bucket == rows):
            raise NotEqual(f"verify says {verdict.equal}, the naive reader {bucket == rows}")
        if bucket != rows:
            raise NotEqual("; ".join(map(str, verdict.differences)))
        assert (verdict.documents, verdict.rows, verdict.behind) == (len(bucket), len(rows), 0)

    def _live(self, life: Life) -> None:
        self.restarts += 1
        self._met.clear()
        self._life = life
        try:
            made = build_mirror(
                ChaosJobs(self.rng),
                self.world.node.url,
                self.table,
                once=life.once,
                options={"retryFor": "120", **life.options},
                policy=EAGER,
                clock=self.clock,
                in_background=False,
            )
            made.prepare()
            if life.once:
                made.run()
            else:
                self._run_on(made)
        except Killed:
            pass
        except (OSError, StorageError) as error:
            if "no space left" not in str(error).lower() and getattr(error, "errno", 0) != errno.ENOSPC:
                raise
        finally:
            self._life = None

    def _run_on(self, running: mirror.Mirror) -> None:
        """Until the table has come to where the bucket is."""
        patience = time.monotonic() + _PATIENCE_S
        is_last = False
        while True:
            before = running.tables[0].version
            try:
                running.turn()
            except TableChanged:  # somebody tidied up: `Mirror.run` begins the round again, too
                continue
            if running.tables[0].version != before:
                patience = time.monotonic() + _PATIENCE_S
            positions = running.tables[0].current.positions
            here = {vbucket: position.seqno for vbucket, position in positions.items() if position.seqno}
            if here == {vbucket: seqno for vbucket, seqno in self.world.seqnos().items() if seqno}:
                if is_last:
                    return
                # branches are asked for once a second, and another one may have come to the same seqnos
                running._state, is_last = None, True
                continue
            is_last = False
            if time.monotonic() > patience:
                raise NotEqual(f"the mirror stands at {here} and does not move")

    # standing between the steps

    @contextlib.contextmanager
    def _in_our_hands(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for module in (
                mirror,
                committing,
                task,
                housekeeping,
                sink,
                compaction,
                delta_table,
                cleaning,
                log,
            ):
                if hasattr(module, "crash_point"):
                    stack.enter_context(mock.patch.object(module, "crash_point", self._at))
            for name in ("create", "put", "put_if_absent"):
                write = self._until_the_disk_is_full(getattr(TableStore, name))
                stack.enter_context(mock.patch.object(TableStore, name, write))
            listed = TableStore.list

            def list_with_our_time(store: TableStore, *where: str) -> Iterator[StoredFile]:
                for file in listed(store, *where):
                    yield replace(file, modified_ms=self.clock.at_ms(file.modified_ms))

            stack.enter_context(mock.patch.object(TableStore, "list", list_with_our_time))
            stack.enter_context(mock.patch.object(planning, "_TASK_CHANGES", 25))  # several tasks a round
            stack.enter_context(mock.patch.object(housekeeping, "CLEAN_EVERY_S", 0.0))
            stack.enter_context(mock.patch.object(cleaning, "_EVERY_S", 0.0))
            yield

    def _at(self, place: str) -> None:
        """The mirror came to a crash point."""
        if self._life is None:
            return
        self._met[place] += 1
        self.met[place] += 1
        here = self._met[place]
        if place in COMMITTED:
            check_version(self.world, self.table)
        for where, count, accident in self._life.accidents:
            if (where, count) != (place, here):
                continue
            if accident in TIDYING:
                self.world.trace.append(accident)
                tidy(self.table, accident)
            else:
                self.world.do(accident)
        if (self._life.killed_at, self._life.count) == (place, here):
            self.world.trace.append(f"killed at {place}:{here}")
            raise Killed

    def _until_the_disk_is_full(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def write_if_there_is_room(store: TableStore, path: str, *data: Any) -> Any:
            if self._life is not None and self._life.killed_at == "disk-full":
                self._met["disk-full"] += 1
                if self._met["disk-full"] >= 4 * self._life.count:
                    self.world.trace.append("the disk is full")
                    raise OSError(errno.ENOSPC, "no space left on device", path)
            return write(store, path, *data)

        return write_if_there_is_room
