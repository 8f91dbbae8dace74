"""A script on an engine in this process: a kill is an exception that nothing catches, and the objects of that
life are left as they are."""

from __future__ import annotations

import contextlib
import errno
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from pyroaring import BitMap

from campaigns.bug import Tally
from chaos.change_log import check_change_log
from chaos.chaos_jobs import ChaosJobs, Killed
from chaos.script import TIDYING, Life, NotEqual, check_version, make_round
from chaos.tidying import tidy
from chaos.world import VBUCKETS, World
from spark.local_jobs import LocalJobs
from spark.naive import table_state
from tailrace.client.blocking import BlockingSource
from tailrace.clock import SYSTEM
from tailrace.spark.rounds import committing, housekeeping, mirror, planning, round_runner, task
from tailrace.spark.rounds.handle import MirrorHandle
from tailrace.spark.rounds.idle_sources import close_idle_sources
from tailrace.spark.rounds.setup import build_mirror, source_options
from tailrace.spark.rounds.verify import verify_table
from tailrace.table import compaction, sink
from tailrace.table.compaction import CompactionPolicy
from tailrace.table.contract import Commit, Fenced, StorageError, TableChanged
from tailrace.table.delta import cleaning, log
from tailrace.table.delta import table as delta_table
from tailrace.table.delta.table import DeltaMirrorTable
from tailrace.table.opening import TableOptions, open_table
from tailrace.table.store import StoredFile, TableStore

_PATIENCE_S = 20.0
"""A life in which nothing happened for this long, by its own clock, never ends."""

_LIFE_S = 240.0
"""In the machine's time: no life of a few rounds takes this long, however busy the machine is."""

EAGER = CompactionPolicy(tier_files=3, least_rows=12)
"""Tables of a few rows are worth a compaction."""

COMMITTED = "table.after-commit"
CHECKPOINT_EVERY = 7
STEP_TAKES_LONG = 0.6
"""How often a compaction that could be committed is not done yet: rounds and rollbacks come between."""


class Hours:
    """The system's clock, to which hours can be added; files age with it."""

    def __init__(self) -> None:
        self._added: list[tuple[int, int]] = [(0, 0)]
        """From which system time on how much is added; in nanoseconds."""

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


@contextlib.contextmanager
def files_age_with(clock: Hours) -> Iterator[None]:
    """Files of tables are as old as this clock says."""
    listed = TableStore.list

    def list_with_our_time(store: TableStore, *where: str) -> Iterator[StoredFile]:
        for file in listed(store, *where):
            yield replace(file, modified_ms=clock.at_ms(file.modified_ms))

    with mock.patch.object(TableStore, "list", list_with_our_time):
        yield


class Impatience(threading.Event):
    """What a mirror waits with: its clock advances immediately, and the node's threads get a moment."""

    def __init__(self, clock: Hours) -> None:
        super().__init__()
        self._clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        self._clock.add((timeout or 0.0) / 3600)
        return super().wait(0.002)


class Sleeper:
    """A life in a thread of its own, one of which runs at a time: it may stop at a place, like a process on a
    paused machine, and go on when the world has moved on.
    """

    _current = threading.local()

    def __init__(self, live: Callable[[], None]) -> None:
        self._live = live
        self._turn = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._is_over = self._has_slept = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def run(self) -> bool:
        """Begin; return whether it has ended. Raises what the life raised."""
        self._thread.start()
        return self._wait()

    def wake(self) -> None:
        """Go on, to the end."""
        self._turn.release()
        self._wait()

    def end(self) -> None:
        """End it: it no longer matters."""
        self._live = _die
        self._turn.release()
        self._thread.join(10)

    def _wait(self) -> bool:
        self._back.acquire()
        if self._is_over:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self._is_over

    def _run(self) -> None:
        self._current.sleeper = self
        try:
            self._live()
        except BaseException as error:  # noqa: BLE001 - raised where it was begun or woken
            self._error = error
        self._is_over = True
        self._back.release()

    @classmethod
    def fall_asleep(cls) -> None:
        """Stop here until woken."""
        self: Sleeper = cls._current.sleeper
        self._has_slept = True
        self._back.release()
        self._turn.acquire()
        if self._live is _die:
            raise Killed

    @classmethod
    def is_risen(cls) -> bool:
        """Whether this thread is one that was taken for dead."""
        sleeper: Sleeper | None = getattr(cls._current, "sleeper", None)
        return sleeper is not None and sleeper._has_slept


def _die() -> None:
    raise Killed


class Chaos:
    """One script, from its seed."""

    def __init__(self, seed: int, directory: Path) -> None:
        self._seed = seed
        self.rng = random.Random(seed)
        self.world = World(self.rng)
        self.directory = directory
        self.table = str(directory / "table")
        self.clock = Hours()
        self.restarts = self.woken = 0
        self.met: Counter[str] = Counter()
        """Crash points that this script came to."""
        self._met: Counter[str] = Counter()
        self._life: Life | None = None
        self.changes = str(directory / "changes") if self.rng.random() < 0.5 else None
        self._life_ends = 0.0
        self._asleep: list[Sleeper] = []
        """Drivers that were taken for dead, but are not."""
        self._is_damaged = False
        self._sources: list[BlockingSource] = []

    def run(self, rounds: int) -> None:
        """All of it; raises `NotEqual`, or whatever a mirror must not raise."""
        try:
            with self.world, self._in_our_hands():
                for _ in range(rounds):
                    self._round()
                if self._asleep:
                    self._wake()
                    self._compare()
        finally:
            for sleeper in self._asleep:
                sleeper.end()
            close_idle_sources()
            for source in self._sources:  # a process takes its connections along, a life in a thread does not
                with contextlib.suppress(Exception):
                    source.close()

    def tally(self) -> Tally:
        """What happened."""
        trace = self.world.trace
        kills = sum(line.startswith("killed at") for line in trace)
        faults = sum(not line.startswith(("-- ", "killed at")) for line in trace)
        return Tally(schedules=1, kills=kills, faults=faults)

    def _round(self) -> None:
        for life in make_round(self.rng):
            for accident in life.before:
                self.world.do(accident)
            self.clock.add(life.hours_before)
            self.world.trace.append(f"-- {life}")
            if life.damage and self._has_table():
                self._damage(life)
            self._live(life)
            if life.tidying is not None and self._has_table():
                self.world.trace.append(f"-- {life.tidying}")
                tidy(self.table, life.tidying)
        self._compare()

    def _has_table(self) -> bool:
        """Whether there is a table to tidy up."""
        return any(Path(self.table, "_delta_log").glob("*.json"))

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
        if self.changes is not None:
            purged = any(what in ("purge", "flush") for what in self.world.trace)
            check_change_log(self.changes, bucket, purged=purged)

    def _damage(self, life: Life) -> None:
        """Make rows wrong, as an earlier mirror with a bug would, until a repair reads the bucket again."""
        self._is_damaged = True
        table = open_table(self.table, TableOptions(clock=self.clock))
        for version in range(2):
            table.claim(f"a mirror with a bug, {version}")
            dead = {
                file.path: BitMap([self.rng.randrange(file.rows)])
                for file in table.files()
                if file.live_rows > 1
            }
            table.commit(Commit("TAILRACE ROUND", masked=dead))
        self._live(replace(life, once=True, killed_at=None, accidents=()), start_over=range(VBUCKETS))
        self._is_damaged = False
        check_version(self.world, self.table)

    def _live(self, life: Life, start_over: Iterable[int] = ()) -> None:
        """A life of the mirror, in a thread that may fall asleep in place of being killed."""
        self.restarts += 1
        self._met.clear()
        self._life = life
        self._life_ends = time.monotonic() + _LIFE_S
        sleeper = Sleeper(lambda: self._live_to_the_end(life, start_over))
        try:
            if not sleeper.run():
                self._asleep.append(sleeper)
        finally:
            self._life = None

    def _live_to_the_end(self, life: Life, start_over: Iterable[int]) -> None:
        woken = self.woken
        try:
            made = build_mirror(
                ChaosJobs(self.rng),
                self.world.node.url,
                self.table,
                once=life.once,
                changes=self.changes,
                options={"retryFor": "120", **life.options},
                policy=EAGER,
                clock=self.clock,
                in_background=False,
                start_over=start_over,
            )
            made.prepare()
            if life.once:
                made.run()
            else:
                self._run_on(made)
        except Killed:
            pass
        except (Fenced, TableChanged):  # a mirror that comes back finds the table taken over, or far ahead
            # ... and so may its owner, if the other one fell asleep before it claimed the first table: a
            # starting mirror takes over, however long its start took
            if not Sleeper.is_risen() and self.woken == woken:
                raise
        except (OSError, StorageError) as error:
            if "no space left" not in str(error).lower() and getattr(error, "errno", 0) != errno.ENOSPC:
                raise

    def _wake(self) -> None:
        """Those that were taken for dead go on where they were: the table is no longer theirs."""
        asleep, self._asleep = self._asleep, []
        for sleeper in asleep:
            self.woken += 1
            self.world.trace.append("a driver that was taken for dead goes on")
            sleeper.wake()

    def _run_on(self, running: mirror.Mirror) -> None:
        """Run until the table has caught up with the bucket."""
        patience = self.clock.monotonic() + _PATIENCE_S
        was_risen = is_last = False
        while True:
            before = running.tables[0].version
            try:
                running.turn()
            except TableChanged:  # the table was tidied up: `Mirror.run` begins the round again, too
                continue
            has_slept = Sleeper.is_risen() and not was_risen  # for hours, perhaps
            if running.tables[0].version != before or has_slept:
                was_risen |= has_slept
                patience = self.clock.monotonic() + _PATIENCE_S
            positions = running.tables[0].current.positions
            here = {vbucket: position.seqno for vbucket, position in positions.items() if position.seqno}
            if here == {vbucket: seqno for vbucket, seqno in self.world.seqnos().items() if seqno}:
                if is_last:
                    return
                # branches are asked for once a second, and another one may have reached the same seqnos
                running._planner._state, is_last = None, True
                continue
            is_last = False
            if self.clock.monotonic() > patience:
                raise NotEqual(f"the mirror stands at {here} and does not move")

    # standing between the steps

    @contextlib.contextmanager
    def _in_our_hands(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for module in (
                mirror,
                round_runner,
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
            enter = BlockingSource.__enter__

            def remember(source: BlockingSource) -> BlockingSource:
                self._sources.append(source)
                return enter(source)

            stack.enter_context(mock.patch.object(BlockingSource, "__enter__", remember))
            begin = MirrorHandle.__init__

            def begin_impatiently(handle: MirrorHandle, name: str) -> None:
                begin(handle, name)
                handle.stopping = Impatience(self.clock)

            stack.enter_context(mock.patch.object(MirrorHandle, "__init__", begin_impatiently))
            stack.enter_context(files_age_with(self.clock))
            made = DeltaMirrorTable.__init__

            def make(table: DeltaMirrorTable, *given: Any, **how: Any) -> None:
                made(table, *given, **how | {"checkpoint_every": CHECKPOINT_EVERY})

            stack.enter_context(mock.patch.object(DeltaMirrorTable, "__init__", make))
            finish = housekeeping.Housekeeping.finish_step

            def finish_later(keeper: housekeeping.Housekeeping, *, wait: bool = False) -> str:
                late = not wait and self.rng.random() < STEP_TAKES_LONG
                return "" if late else finish(keeper, wait=wait)

            stack.enter_context(mock.patch.object(housekeeping.Housekeeping, "finish_step", finish_later))
            stack.enter_context(mock.patch.object(planning, "_TASK_CHANGES", 25))  # several tasks a round
            stack.enter_context(mock.patch.object(housekeeping, "CLEAN_EVERY_S", 0.0))
            stack.enter_context(mock.patch.object(cleaning, "_EVERY_S", 0.0))
            yield

    def _at(self, place: str) -> None:
        """The mirror came to a crash point."""
        if self._life is None:
            return
        if place == COMMITTED and not self._is_damaged:
            check_version(self.world, self.table)
        if Sleeper.is_risen():
            return
        if time.monotonic() > self._life_ends:
            raise NotEqual(f"the mirror has not come to its end in {_LIFE_S:g} s")
        self._met[place] += 1
        self.met[place] += 1
        here = self._met[place]
        if self._asleep and self.rng.random() < 0.1:
            self._wake()
        for where, count, accident in self._life.accidents:
            if (where, count) != (place, here):
                continue
            if accident in TIDYING:
                if self._has_table():
                    self.world.trace.append(accident)
                    tidy(self.table, accident)
            else:
                self.world.do(accident)
        if (self._life.killed_at, self._life.count) == (place, here):
            self.world.trace.append(f"killed at {place}:{here}")
            if self._life.comes_back:
                Sleeper.fall_asleep()
                return
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
